"""From a composed config to the library's objects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter import EngineOptions
from tokenrouter.models import LoadedModel, load_model, tiny_random
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


def load(cfg: DictConfig, dtype: str) -> LoadedModel:
    """The model of conf/model, in ``dtype``."""
    model: LoadedModel = instantiate(cfg.model, dtype=dtype)
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
    """conf/scheduler and conf/kvcache, as the engine takes them."""
    scheduler = cfg.scheduler
    return EngineOptions(
        scheduler=scheduler.policy,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        static_batch_size=scheduler.static_batch_size,
        phase_order=scheduler.phase_order,
        max_prefill_tokens=scheduler.max_prefill_tokens,
        max_decode_tokens=scheduler.max_decode_tokens,
        max_phase_wait_steps=scheduler.max_phase_wait_steps,
        max_overtaken=scheduler.max_overtaken,
        max_num_waiting=scheduler.max_num_waiting,
        dispatch=scheduler.dispatch,
        min_batch=scheduler.min_batch,
        max_wait_steps=scheduler.max_wait_steps,
        num_kv_slots=cfg.kvcache.num_slots,
        num_host_slots=cfg.kvcache.num_host_slots,
        kv_cache_dtype=cfg.kvcache.dtype,
        retention=instantiate(cfg.kvcache.retention),
        seed=cfg.seed,
        log_decisions=cfg.log_decisions,
    )
