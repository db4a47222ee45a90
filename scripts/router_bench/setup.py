"""Everything that is built before anything is measured: texts, both paths in float32, trained routers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tokenrouter.evaluation.held_out import HeldOutWindows
from tokenrouter.executors import POOLS
from tokenrouter.features import TokenTypeTable
from tokenrouter.kernels import select
from tokenrouter.models import LoadedModel
from tokenrouter.routers import (
    LearnedRouter,
    LinearRouter,
    MLPRouter,
    Router,
    RuleRouter,
    TreesRouter,
)
from tokenrouter.routers.artifact import PRETRAINED, Kind, read_artifact
from tokenrouter.routers.budget import Budget
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.low_path import low_path
from tokenrouter.types import Phase
from tokenrouter.workloads import calibration_documents, evaluation_documents, windows

from .sizes import Sizes

CONF = Path(__file__).resolve().parents[2] / "conf"
TEXTS = tuple(sorted(path.stem for path in (CONF / "data").glob("*.yaml")))
LOCAL_TEXTS = ("wikitext2", "code_python", "c4_web")
PLAIN, SMOOTH = "int8", "int8_smooth"
EXECUTORS = (PLAIN, SMOOTH)
TOKENS_ONLY = "mlp_tokens"
"""The mlp, all layers of a token on one path."""
LEARNED = {"mlp": MLPRouter, "linear": LinearRouter, "trees": TreesRouter}
COMPARED = ("rule", "entropy", *LEARNED, TOKENS_ONLY)
Trained = Mapping[str, Mapping[str, Path]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Held-out text.

    Attributes:
        name: of its source.
        windows: token ids, of equal length, each a prompt.
        held_out: the side on which thresholds are set.
    """

    name: str
    windows: list[list[int]]
    held_out: HeldOutWindows


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is measured.

    Attributes:
        model: in float32.
        executor: whose low path the routers are judged on.
        decoders: of both low paths, by executor.
        trained: files of trained routers by executor and kind; there is an mlp for ``executor``.
        texts: to measure KL on.
        phases: in which windows are run.
        compared: which routers are judged, of ``COMPARED``; the mlp always is.
        layer_order: layers by what the mlp's training labels say that they need, the neediest first; None where it is
            unknown.
    """

    sizes: Sizes
    model: LoadedModel
    types: TokenTypeTable
    executor: str
    decoders: Mapping[str, DifferentiableDecoder]
    trained: Trained
    texts: Sequence[Text]
    phases: Sequence[Phase] = tuple(Phase)
    compared: Sequence[str] = COMPARED
    layer_order: Sequence[int] | None = None

    def learned(
        self, kind: str, executor: str, share: float, *, layer_groups: bool = True
    ) -> LearnedRouter:
        """A trained router without thresholds; raises ValueError where it was trained for another model."""
        path = str(self.trained[executor][kind])
        budget = Budget(high_frac=share)
        router: LearnedRouter = LEARNED[kind](path=path, budget=budget, layer_groups=layer_groups)
        router.use_for(model=self.model.name, model_hash=self.model.model_hash, low=executor)
        router.use_kernels(select(dtype=self.model.dtype))
        return router

    def scored(self, share: float) -> dict[str, Router]:
        """Rule, all trained routers, and the mlp where all layers of a token go one way; without thresholds."""
        found: dict[str, Router] = {"rule": RuleRouter(budget=Budget(high_frac=share))}
        for kind in self.trained[self.executor]:
            found[kind] = router = self.learned(kind, self.executor, share)
            if kind == "mlp" and router.layer_groups is not None:
                tokens = self.learned(kind, self.executor, share, layer_groups=False)
                found[TOKENS_ONLY] = tokens
        return {name: found[name] for name in found if name in {"mlp", *self.compared}}


def build(
    model: LoadedModel,
    sizes: Sizes,
    *,
    executor: str,
    texts: Sequence[str],
    data_dir: str | None,
    routers: Path | None = None,
    phases: Sequence[Phase] = tuple(Phase),
    compared: Sequence[str] | None = None,
) -> Bench:
    """Reads the texts and packs both low paths.

    Args:
        model: in float32.
        sizes: how much is run.
        executor: whose low path the routers are judged on.
        texts: names of ``conf/data``.
        data_dir: folder of local sets.
        routers: folder of trained routers; None: those that come with the package.
        phases: in which windows are run.
        compared: which routers are judged beside the mlp; None: all.

    Raises:
        ValueError: a text is missing or too short, or there is no mlp for the executor.
    """
    trained = trained_in(routers or PRETRAINED)
    if "mlp" not in trained.get(executor, {}):
        raise ValueError(
            f"no trained mlp for executor {executor} in {routers or 'the package'}: train one with `python run.py "
            f"task=train_router executor={executor}`, and give its folder with --routers"
        )
    return Bench(
        sizes=sizes,
        model=model,
        types=TokenTypeTable.from_tokenizer(model.tokenizer, model.config.vocab_size),
        executor=executor,
        decoders={
            name: DifferentiableDecoder(model, low_path(POOLS[name], model)) for name in EXECUTORS
        },
        trained=trained,
        texts=[load_text(name, data_dir, model.tokenizer, sizes) for name in texts],
        phases=tuple(phases),
        compared=COMPARED if compared is None else tuple(compared),
        layer_order=trained_order(trained[executor]["mlp"]),
    )


def trained_order(path: Path) -> list[int] | None:
    """Layers by the need that a trained mlp's labels found, the neediest first; None: its file does not say."""
    need = read_artifact(path, "mlp").about.get("layer_need")
    if need is None:
        return None
    order: list[int] = torch.tensor(need).argsort(descending=True, stable=True).tolist()
    return order


def trained_in(folder: Path) -> dict[str, dict[str, Path]]:
    """The trained routers of a folder, by the executor whose low path they were trained for and by kind.

    Raises:
        ValueError: a damaged file, or two routers of one kind for one executor.
    """
    found: dict[str, dict[str, Path]] = {}
    for kind in get_args(Kind):
        for path in sorted(folder.glob(f"*_{kind}.json")):
            executor = read_artifact(path, kind).trained_for.executor
            of_executor = found.setdefault(executor, {})
            if kind in of_executor:
                raise ValueError(
                    f"{folder} has two routers of kind {kind} for executor {executor} ({of_executor[kind].name}, "
                    f"{path.name}): leave one"
                )
            of_executor[kind] = path
    return found


def load_text(name: str, data_dir: str | None, tokenizer: Any, sizes: Sizes) -> Text:
    """Windows of the evaluation side, spread evenly, shorter ones where either side of the text is short.

    Raises:
        ValueError: the text is missing, or has fewer tokens than windows.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    config = OmegaConf.load(CONF / "data" / f"{name}.yaml")
    documents = instantiate(
        OmegaConf.create({"paths": {"data_dir": data_dir}, "data": config}).data
    ).documents()
    evaluated = list(encode("\n\n".join(evaluation_documents(documents))))
    calibrated = list(encode("\n\n".join(calibration_documents(documents))))
    length = min(sizes.window_tokens, len(evaluated) // sizes.windows, len(calibrated))
    return Text(
        name=name,
        windows=windows(evaluated, length, sizes.windows),
        held_out=HeldOutWindows(
            text_ids=calibrated, window_tokens=length, decode_tokens=length - 1
        ),
    )
