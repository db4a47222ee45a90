"""Shows one text token by token: the route of each, its score and the reason, as a page and as a picture."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter import LLM, SamplingParams
from tokenrouter.checks import check_count
from tokenrouter.evaluation.explain import Explanation, draw, gather, html_page, watched
from tokenrouter.evaluation.progress import progress
from tokenrouter.executors import PoolSpec, build_pool
from tokenrouter.kernels import select
from tokenrouter.tasks import build
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.decisions import write_log
from tokenrouter.telemetry import collect_provenance
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels import LabelMaker
from tokenrouter.training.low_path import low_path

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainOptions:
    """``explain`` of conf/task/explain.

    Attributes:
        text_file: a UTF-8 file with the text; None: ``prompt``.
        prompt_tokens: so many tokens of the text are the prompt, the others are fed one by one; None: all are.
        max_tokens: generated behind the text, greedily.
        labels: whether labels are made too.

    Raises:
        ValueError: a number out of range, or ``prompt_tokens`` together with ``max_tokens``.
    """

    text_file: str | None = None
    prompt_tokens: int | None = None
    max_tokens: int = 0
    labels: bool = False

    def __post_init__(self) -> None:
        check_count("explain.max_tokens", self.max_tokens, 0)
        if self.prompt_tokens is not None:
            check_count("explain.prompt_tokens", self.prompt_tokens, 1)
        if type(self.labels) is not bool:
            raise ValueError(
                f"explain.labels={self.labels!r} must be true or false; which labels is labels=fisher or another"
            )
        if self.prompt_tokens is not None and self.max_tokens:
            raise ValueError(
                f"explain.prompt_tokens={self.prompt_tokens} feeds the given text in decode and explain.max_tokens="
                f"{self.max_tokens} generates one: set one of them"
            )


def run(job: Job) -> None:
    """``task=explain``."""
    cfg = job.cfg
    options: ExplainOptions = instantiate(cfg.explain, _convert_="object")
    text = _text(cfg, options)
    router, spec = instantiate(cfg.router), instantiate(cfg.executor)
    engine_options = replace(build.engine_options(cfg), log_decisions=True)
    with progress("set-up", 3, unit="stages") as advance:
        labeller = _Labeller(cfg, spec) if options.labels else None
        advance("labels")
        model = build.load(cfg, cfg.model.dtype)
        build.check_tokenizer(model.tokenizer)
        advance("model")
        pool = build_pool(spec, model, kernels=cfg.kernels.backend)
        llm = LLM(model, router=router, executors=pool, options=engine_options)
        advance("engine")
    provenance = collect_provenance(
        seed=cfg.seed,
        model=model.name,
        model_hash=model.model_hash,
        extra={"executors": llm.pool.description},
    )
    job.folder.write_json("provenance.json", provenance.as_dict())
    prompt = _ids(llm, text, chat=cfg.chat)
    with watched(llm.router) as seen:
        ids = _serve(llm, prompt, options)
    explanation = gather(
        llm,
        ids,
        seen,
        labels=labeller.labels(ids) if labeller is not None else {},
        facts={
            "model": model.name,
            "router": llm.router.version,
            "executors": llm.pool.description,
        },
    )
    if cfg.log_decisions:
        write_log(llm, job.folder.path)
    _write(job, explanation)


def _text(cfg: DictConfig, options: ExplainOptions) -> str:
    """The text to explain.

    Raises:
        ValueError: none, two, or a file that is not there or no UTF-8 text.
    """
    if (cfg.prompt is None) == (options.text_file is None):
        given = "neither" if cfg.prompt is None else "both"
        raise ValueError(
            f'task=explain needs one text and got {given}: give prompt="..." or explain.text_file=<path>'
        )
    if options.text_file is None:
        return str(cfg.prompt)
    path = Path(options.text_file)
    if not path.is_file():
        raise ValueError(f"explain.text_file={path} is no file: give the path of a text")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"explain.text_file={path} is no UTF-8 text ({error}): convert it, e.g. with iconv"
        ) from None


def _ids(llm: LLM, text: str, *, chat: bool) -> list[int]:
    """The text's token ids.

    Raises:
        ValueError: an empty text, one longer than the model's length, or no chat template.
    """
    if chat:
        ids = llm.render_chat([{"role": "user", "content": text}])[0]
    else:
        ids = list(llm.tokenizer.encode(text))
    if not ids:
        raise ValueError("the text is empty and there is nothing to explain: give some")
    if len(ids) > (limit := llm.model.config.max_model_len):
        raise ValueError(
            f"the text has {len(ids)} tokens and the model's length is {limit}: shorten the text"
        )
    return ids


def _serve(llm: LLM, ids: list[int], options: ExplainOptions) -> list[int]:
    """Runs the text, and what is generated behind it, as one request; returns all its ids.

    Raises:
        ValueError: the engine refuses it, or the prompt is longer than the text.
    """
    if options.max_tokens:
        params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
        [output] = llm.generate([ids], params)
        return [*ids, *output.outputs[0].token_ids]
    if options.prompt_tokens is not None and options.prompt_tokens > len(ids):
        raise ValueError(
            f"explain.prompt_tokens={options.prompt_tokens} is more than the text's {len(ids)} tokens: lower it"
        )
    split = options.prompt_tokens or len(ids)
    llm.score([ids], sink=lambda *_: None, prefill_len=split)
    return ids


class _Labeller:
    """Labels of a text by ``conf/labels``, on a float32 copy of the model."""

    def __init__(self, cfg: DictConfig, spec: PoolSpec) -> None:
        """Loads it; raises ValueError where the executor has no low path that labels know."""
        self._maker: LabelMaker = instantiate(cfg.labels, _convert_="object")
        model = build.load(cfg, "float32")
        kernels = select(cfg.kernels.backend, dtype=torch.float32)
        self._decoder = DifferentiableDecoder(model, low_path(spec, model), kernels)
        self._seed = int(cfg.seed)

    def labels(self, ids: Sequence[int]) -> Mapping[str, Sequence[float]]:
        """By name, one per token: precision labels summed over layers, retention labels per horizon."""
        label_NC = self._maker(self._decoder, torch.tensor(ids, dtype=torch.int64), self._seed)
        if self._maker.kind == "precision":
            return {self._maker.name: label_NC.sum(dim=1).tolist()}
        columns = self._maker.columns(self._decoder.config)
        return {
            f"{self._maker.name} {column}": label_NC[:, index].tolist()
            for index, column in enumerate(columns)
        }


def _write(job: Job, explanation: Explanation) -> None:
    """The page, the picture and a summary, and where they are."""
    page = job.folder.write_text("explain.html", html_page(explanation))
    picture = draw(explanation, job.folder.path / "explain.png")
    counts = explanation.counts()
    shares = explanation.label_shares()
    job.folder.write_json(
        "explained.json", {"tokens": len(explanation.tokens), "routes": counts, "labels": shares}
    )
    job.run.log_images([picture])
    total = max(sum(counts.values()), 1)
    routes = ", ".join(f"{name} {count / total:.1%}" for name, count in counts.items())
    print(f"\n{len(explanation.tokens)} tokens; routes: {routes}")
    print(f"page:    {page}\npicture: {picture}")
