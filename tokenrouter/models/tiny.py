"""Tiny models with random weights, one per family, for tests and debugging."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from tokenrouter.models import identity
from tokenrouter.models.loader import LoadedModel, from_hf_model, parse_dtype

_SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


class ByteTokenizer:
    """Bytes as tokens (id = byte + 3) after unknown, beginning and end: just enough of a tokenizer for a tiny model."""

    eos_token_id = 2
    all_special_ids = (0, 1, 2)
    chat_template = None
    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})

    def __len__(self) -> int:
        return 259

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """UTF-8 bytes, shifted by three."""
        return [byte + 3 for byte in text.encode()]

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """The inverse; ids beyond the bytes wrap around, special ids vanish or show as a name."""
        names = {0: b"<unk>", 1: b"<s>", 2: b"</s>"}
        data = b"".join(
            (b"" if skip_special_tokens else names[int(i)])
            if int(i) < 3
            else bytes([(int(i) - 3) % 256])
            for i in ids
        )
        return data.decode(errors="replace")

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The text of each id."""
        return self.decode([ids]) if isinstance(ids, int) else [self.decode([i]) for i in ids]


def tiny_random(
    family: str = "llama", *, dtype: str | torch.dtype = "float32", seed: int = 0, **options: Any
) -> LoadedModel:
    """A four-layer model of ``family`` with seeded random weights.

    Args:
        family: llama, mistral, qwen2 or qwen3.
        dtype: bfloat16, float16 or float32. Weights are drawn in float32 and rounded to it.
        seed: of the weights. torch's own generator is left as it was.
        options: override the transformers config.

    Raises:
        ValueError: another family, or an option that the decoder does not have.
    """
    hf_model = tiny_hf(family, dtype=dtype, seed=seed, **options)
    model_hash = identity.hash_recipe(hf_model.config, seed=seed)
    return from_hf_model(hf_model, ByteTokenizer(), name=f"tiny_{family}", model_hash=model_hash)


def tiny_hf(
    family: str = "llama", *, dtype: str | torch.dtype = "float32", seed: int = 0, **options: Any
) -> Any:
    """The same model as transformers builds it: the yardstick in tests. Arguments and errors as in ``tiny_random``."""
    import transformers as hf

    classes: dict[str, tuple[Any, Any]] = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
    }
    if family not in classes:
        raise ValueError(f"no tiny model of family {family!r}; families: {', '.join(classes)}")
    make_config, make_model = classes[family]
    config = make_config(**{**_SHAPE, "head_dim": 16, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(config).eval()
        for name, parameter in model.named_parameters():
            # Larger than initialisation, so that logits are far from uniform and a wrong term shows.
            scale, shift = (0.1, 1.0) if "norm" in name else (0.15, 0.0)
            torch.nn.init.normal_(parameter, shift, scale)
        if config.tie_word_embeddings:
            model.tie_weights()
    return model.to(parse_dtype(dtype))
