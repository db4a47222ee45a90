"""Guards the decoder against transformers: every family, every option, whole prompts, chunks and decode.

T tokens of a sequence, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import build_pool
from tokenrouter.models import LoadedModel
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one query head per key head": ("llama", {"num_key_value_heads": 4}),
    "llama one key head": ("llama", {"num_key_value_heads": 1}),
    "llama wide heads": ("llama", {"head_dim": 24}),
    "llama eps and theta": (
        "llama",
        {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "llama linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama odd vocabulary": ("llama", {"vocab_size": 389}),
    "llama has no window": ("llama", {"sliding_window": 20}),
    "llama yarn of DeepSeek's kind": (
        "llama",
        {"rope_parameters": {**YARN, "factor": 64.0, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "llama yarn": ("llama", {"rope_parameters": {**YARN, "factor": 64.0}}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 37}),
    "mistral tied": ("mistral", {"tie_word_embeddings": True}),
    "mistral full and wide heads": ("mistral", {"num_key_value_heads": 4, "head_dim": 32}),
    "mistral window in every layer": (
        "mistral",
        {"sliding_window": 37, "use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    ),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window of the upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2},
    ),
    "qwen2 window in chosen layers": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen2 window switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 20}),
    "qwen2 yarn": (
        "qwen2",
        {"rope_parameters": {**YARN, "factor": 64.0, "attention_factor": 0.9, "beta_fast": 16.0}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen3 one key head": ("qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
    "qwen3 tied, heads wider than the model": (
        "qwen3",
        {"tie_word_embeddings": True, "num_attention_heads": 6, "head_dim": 32},
    ),
    "qwen3 window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
}


def sequences(lengths: Sequence[int], vocab_size: int = 384) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def scored(
    model: LoadedModel,
    ids: list[list[int]],
    *,
    chunk: int,
    prefill_len: int | None,
    backend: str = "auto",
) -> list[Tensor]:
    """Logits [T, V] per sequence from the serving path; rows that were not handed over are NaN."""
    llm = LLM(
        model,
        executors=build_pool("full", model, kernels=backend),
        options=EngineOptions(max_num_batched_tokens=chunk, max_num_seqs=8),
    )
    got = [torch.full((len(one), model.config.vocab_size), float("nan")) for one in ids]

    def sink(index: int, start: int, logits_TV: Tensor) -> None:
        got[index][start : start + len(logits_TV)] = logits_TV

    llm.score(ids, sink=sink, prefill_len=prefill_len)
    llm.engine.pool.check_integrity()
    return got


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_logits_equal_those_of_transformers(backend: str, name: str) -> None:
    """An option of a family that is read wrongly, or not at all; chunks or decode at a wrong position."""
    family, options = CASES[name]
    hf_model = tiny_hf(family, **options)
    model = from_hf_model(hf_model, ByteTokenizer(), name=name)
    ids = sequences([1, 7, 130])
    with torch.inference_mode():
        expected = [hf_model(torch.tensor([one])).logits[0] for one in ids]
    prefill = scored(model, ids, chunk=512, prefill_len=None, backend=backend)
    chunked = scored(model, ids, chunk=48, prefill_len=None, backend=backend)
    decoded = scored(model, ids[1:], chunk=512, prefill_len=3, backend=backend)
    for want, whole, parts in zip(expected, prefill, chunked, strict=True):
        assert_close(whole, want, rtol=0, atol=1e-4)
        assert_close(parts, want, rtol=0, atol=1e-4)
    for want, one_by_one in zip(expected[1:], decoded, strict=True):
        assert one_by_one[:2].isnan().all(), "positions before the prompt's last were handed over"
        assert_close(one_by_one[2:], want[2:], rtol=0, atol=1e-4)


def test_the_yardstick_sees_each_option() -> None:
    """Guards the guard: an option that changed nothing in the tiny model would prove nothing."""
    ids = torch.tensor(sequences([130]))
    same = {
        "llama tied",
        "mistral tied",
        "qwen2 tied",
        "llama odd vocabulary",
    }  # other shapes, or tied
    same |= {"qwen2 window switched off", "llama dynamic", "llama has no window"}
    with torch.inference_mode():
        plain = {f: tiny_hf(f)(ids).logits for f in ("llama", "mistral", "qwen2", "qwen3")}
        for name in set(CASES) - set(plain) - same:
            family, options = CASES[name]
            difference = (tiny_hf(family, **options)(ids).logits - plain[family]).abs().max()
            assert difference > 1e-2, name


def test_a_shorter_limit_changes_no_logits() -> None:
    """RoPE tables or windows that depend on the limit instead of on the checkpoint."""
    for name in ("llama yarn", "llama dynamic", "mistral window"):
        family, options = CASES[name]
        hf_model = tiny_hf(family, **options)
        ids = sequences([60])
        with torch.inference_mode():
            expected = hf_model(torch.tensor(ids)).logits[0]
        short = from_hf_model(hf_model, ByteTokenizer(), name=name, max_model_len=60)
        (got,) = scored(short, ids, chunk=512, prefill_len=None)
        assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama tied", "qwen3 biases"])
def test_rounding_to_bfloat16_keeps_the_original(name: str) -> None:
    """A cast in place, a tie that is lost (twice the memory), biases or tables left in float32."""
    family, options = CASES[name]
    hf_model = tiny_hf(family, **options)
    model = from_hf_model(hf_model, ByteTokenizer(), name=name)
    ids = sequences([40])
    (before,) = scored(model, ids, chunk=512, prefill_len=None)
    half = model.astype("bfloat16")
    (rounded,) = scored(half, ids, chunk=512, prefill_len=None)
    (after,) = scored(model, ids, chunk=512, prefill_len=None)
    assert torch.equal(before, after)
    tied = options.get("tie_word_embeddings", False)
    assert (half.weights.lm_head_VE is half.weights.embed_VE) == tied
    assert model.astype("float32") is model
    assert half.weights.layers[0].qkv_OE.dtype == half.weights.cos_ND.dtype == torch.bfloat16
    with torch.inference_mode():
        expected = hf_model.to(torch.bfloat16)(torch.tensor(ids)).logits[0].float()
    drift = (expected - before).abs().mean()
    assert 0 < (rounded - before).abs().mean() < 2 * drift
