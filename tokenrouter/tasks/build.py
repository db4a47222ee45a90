"""From a composed config to the library's objects."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tokenrouter import EngineOptions
from tokenrouter.models import LoadedModel, load_model, tiny_random
from tokenrouter.tasks import groups
from tokenrouter.workloads import calibration_documents, evaluation_documents, text_hash


def pretrained(
    name: str,
    dtype: str = "bfloat16",
    gguf_file: str | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Target of conf/model: a checkpoint by hub name, folder, GGUF file or package."""
    return load_model(name, dtype=dtype, gguf_file=gguf_file, max_model_len=max_model_len)


def tiny(name: str, dtype: str = "float32") -> LoadedModel:
    """Target of conf/model/tiny_random: ``name`` is a model family."""
    return tiny_random(name, dtype=dtype)


_kept: dict[str, LoadedModel] | None = None
"""By its config, inside ``models_kept`` the model that was loaded last; None outside."""


@contextmanager
def models_kept() -> Iterator[None]:
    """Inside, a model that was loaded last is not loaded again: for a process that runs jobs of one after the other."""
    global _kept
    _kept = {}
    try:
        yield
    finally:
        _kept = None


def load(cfg: DictConfig, dtype: str) -> LoadedModel:
    """The model of conf/model, in ``dtype``."""
    key = f"{OmegaConf.to_yaml(cfg.model, resolve=True)} {dtype}"
    if _kept and key in _kept:
        return _kept[key]
    if _kept:
        _kept.clear()
    model: LoadedModel = instantiate(cfg.model, dtype=dtype)
    if _kept is not None:
        _kept[key] = model
    return model


class Sides(NamedTuple):
    """Documents to set thresholds on, and those to evaluate and to cut prompts from."""

    calibration: list[str]
    evaluation: list[str]


def split_documents(documents: Sequence[str]) -> Sides:
    """Both sides of ``documents``; raises ValueError when there are too few for two."""
    return Sides(calibration_documents(documents), evaluation_documents(documents))


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One side of a text.

    Attributes:
        name: of its source.
        ids: its token ids, without special tokens.
        hash: of its documents, for provenance.
    """

    name: str
    ids: list[int]
    hash: str


def encode_text(name: str, documents: Sequence[str], tokenizer: Any) -> Text:
    """Encode documents in one piece."""
    ids = encoder(tokenizer)("\n\n".join(documents))
    return Text(name=name, ids=ids, hash=text_hash(documents))


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to ids without special tokens; raises ValueError where there is no tokenizer."""
    check_tokenizer(tokenizer)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError where there is none: every task reads text."""
    if tokenizer is None:
        raise ValueError(
            "this task needs text, and the model has no tokenizer: put its tokenizer files beside its weights, or "
            "use the Python interface with token ids"
        )


def engine_options(cfg: DictConfig) -> EngineOptions:
    """conf/scheduler and conf/kvcache, as the engine takes them; ``groups.ENGINE`` says which key is which option."""
    options: dict[str, Any] = {
        option: cfg[group][key]
        for group, keys in groups.ENGINE.items()
        for key, option in keys.items()
    }
    if OmegaConf.is_config(options["retention"]):
        options["retention"] = instantiate(options["retention"])
    return EngineOptions(seed=cfg.seed, **options)
