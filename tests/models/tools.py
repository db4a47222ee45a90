"""Tiny checkpoints on disk, as users have them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tokenrouter import LLM
from tokenrouter.models import LoadedModel
from tokenrouter.models.tiny import tiny_hf


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and two special tokens."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def save_model(folder: Path, family: str = "llama", **options: Any) -> Any:
    """A tiny checkpoint as users have them; returns the transformers model."""
    hf_model = tiny_hf(family, **options)
    hf_model.save_pretrained(folder)
    save_tokenizer(folder)
    return hf_model


def change_config(folder: Path, **values: Any) -> None:
    """Overwrites entries of the checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def logits(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence from the serving path."""
    parts: list[torch.Tensor] = []
    LLM(model).score([ids], sink=lambda _, __, logits_TV: parts.append(logits_TV.clone()))
    return torch.cat(parts)
