"""A tiny model with a tokenizer that both sides can use, and requests as the harness makes them."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tokenrouter.models import LoadedModel
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import tiny_hf

CONTEXT = "Question: Which of these is a planet that people can walk on?\nAnswer:"
PAIRS = [
    *((CONTEXT, f" {choice}") for choice in ("the Moon", "the Earth", "the Sun", "E")),
    *((context, " is round.") for context in ("It says that the ball", "It says that the cube")),
    (CONTEXT, " the Earth"),  # the same again
    ("", "Once upon a time"),
    ("A trailing blank ", "goes to the continuation"),
    *(("Is the sky blue? Say yes or no:", f" {answer}") for answer in ("y", "n")),
]
LONG = "The quick brown fox jumps over the lazy dog; naïve café. " * 12


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with a beginning and an end."""
    specials = ["<s>", "</s>"]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*specials, *symbols])}
    bare = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>")
    made.pad_token = "</s>"
    return made


@cache
def tiny_pair(max_model_len: int = 256) -> tuple[LoadedModel, Any]:
    """The tiny model in float32, and as transformers runs it."""
    hf_model = tiny_hf(
        "llama", max_position_embeddings=max_model_len, eos_token_id=1, bos_token_id=0
    )
    return from_hf_model(hf_model, byte_tokenizer(), name="tiny_bytes"), hf_model


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Instances of the harness."""
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=index)
        for index, one in enumerate(arguments)
    ]
