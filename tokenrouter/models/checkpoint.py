"""What transformers loads, and what it would pass over in silence."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tokenrouter.models import config as model_config
from tokenrouter.models.source import VOCABULARIES, Source


def tokenizer(source: Source) -> Any:
    """The tokenizer of a checkpoint. For a GGUF file AutoTokenizer would read the file once more to find this class.

    Returns:
        A transformers tokenizer; None, with a warning, for a local folder without one. There transformers refuses some
        families and invents a tokenizer of one token for others.

    Raises:
        ValueError: a folder's tokenizer files hold no vocabulary, or do not load; or a GGUF file or hub name whose
            tokenizer does not.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if source.gguf_file:
        with clear_errors(source):
            return PreTrainedTokenizerFast.from_pretrained(source.place, gguf_file=source.gguf_file)
    if not source.is_folder:
        with clear_errors(source):
            return AutoTokenizer.from_pretrained(source.place, trust_remote_code=False)
    files = source.tokenizer_files()
    if not files:
        warnings.warn(
            f"model {source.name!r} has no tokenizer files ({VOCABULARIES}): it takes token ids and gives token ids, "
            "but no text prompts, chats or stop strings, and no router that needs the types of tokens",
            stacklevel=3,
        )
        return None
    if not source.has_vocabulary():
        raise ValueError(_tokenizer_error(source, files, f"no vocabulary is there: {VOCABULARIES}"))
    try:
        return AutoTokenizer.from_pretrained(source.place, trust_remote_code=False)
    except ImportError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(_tokenizer_error(source, files, what)) from error


def _tokenizer_error(source: Source, files: list[str], what: str) -> str:
    return (
        f"cannot load model {source.name!r}: its tokenizer files ({', '.join(files)}) do not load: {what}. Copy the "
        "tokenizer's files again, or remove these to use the model with token ids alone"
    )


def generation_config(source: Source) -> Any:
    """The transformers generation config of a folder or hub name; None where there is none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source.place)
    except OSError:  # most checkpoints that are no chat models have none
        return None


def hf_model(source: Source, hf_config: Any, dtype: torch.dtype) -> Any:
    """The transformers model in ``dtype``, in evaluation mode, GGUF files dequantised. One progress bar on a terminal.

    Args:
        source: where it lies.
        hf_config: its config; transformers reads none then.
        dtype: of all weights.

    Raises:
        ValueError: a tensor is missing, has another shape, or is one that the config has no use for.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    options: dict[str, Any] = {}
    if source.gguf_file:
        dense = GgufConfig(dequantize=True)
        options = {"gguf_file": source.gguf_file, "quantization_config": dense}
    with _one_bar(bool(source.gguf_file)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.place,
            config=hf_config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    model, info = loaded
    _check_loading(info)
    if source.gguf_file:  # transformers still marks it as quantised
        vars(model.config).pop("quantization_config", None)
    return model.eval()


def _check_loading(info: Mapping[str, Any]) -> None:
    """Refuses what transformers passes over: it fills with random numbers, and leaves tensors out."""
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise ValueError(
            f"tensor {name} of the checkpoint has shape {tuple(stored)}; its config asks for {tuple(wanted)}"
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"the checkpoint has no tensor {', '.join(missing[:5])}")
    unused = sorted(key for key in info["unexpected_keys"] if key.startswith(("model.", "lm_head")))
    if unused:  # e.g. biases that the config does not switch on
        raise ValueError(
            f"the checkpoint has tensor {', '.join(unused[:5])}, which its config has no use for"
        )


@contextmanager
def _one_bar(is_gguf: bool) -> Iterator[None]:
    """One bar on a terminal and none elsewhere, where bars fill logs with half lines.

    For a GGUF file transformers shows two: that of dequantisation takes the time and stays, but it heeds no setting.
    """
    from transformers import modeling_gguf_pytorch_utils as hf_gguf
    from transformers.utils import logging as hf_logging

    was_enabled = hf_logging.is_progress_bar_enabled()
    if is_gguf or not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    names = vars(hf_gguf)
    bar = names["tqdm"]
    names["tqdm"] = partial(bar, disable=None if was_enabled else True)
    try:
        yield
    finally:
        names["tqdm"] = bar
        if was_enabled:
            hf_logging.enable_progress_bar()


@contextmanager
def clear_errors(source: Source) -> Iterator[None]:
    """Turns the many errors of a failed load into one ValueError that names the source and what is supported."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        where = (
            f"corrupt or unsupported GGUF file {source.gguf_file!r}: "
            if source.gguf_file
            else "not found, unreadable or unsupported: "
        )
        raise ValueError(
            f"cannot load model {source.name!r}: {where}{what} "
            f"(supported architectures: {', '.join(model_config.SUPPORTED)})"
        ) from error
