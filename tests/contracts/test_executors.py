"""The contract of an executor, for every path of every config in conf/executor.

T tokens, E hidden size, O fused q, k, v outputs, A attention outputs, V vocabulary.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor
from torch.testing import assert_close

from tokenrouter.executors import Executor, ExecutorPool, PoolSpec, build_pool
from tokenrouter.models import LoadedModel, tiny_random

CONF = Path(__file__).resolve().parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "executor").glob("*.yaml"))
MODELS: dict[str, dict[str, Any]] = {
    "biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "tied head norms": {"family": "qwen3", "tie_word_embeddings": True},
    "bfloat16": {"family": "qwen2", "dtype": "bfloat16"},
    "reference kernels": {"family": "qwen3", "dtype": "bfloat16", "tie_word_embeddings": True},
}
SIZES = (1, 2, 3, 17, 64, 300)


@cache
def model(which: str) -> LoadedModel:
    return tiny_random(**MODELS[which])


def spec(name: str) -> PoolSpec:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = instantiate(compose(overrides=[f"+executor={name}"]).executor)
    assert isinstance(made, PoolSpec)
    return made


@cache
def pool(name: str, which: str) -> ExecutorPool:
    backend = "reference" if which == "reference kernels" else "auto"
    return build_pool(spec(name), model(which), kernels=backend)


def paths() -> list[tuple[str, str]]:
    """Every path of every config; one that several have, such as the plain high one, once."""
    found: dict[str, tuple[str, str]] = {}
    for name in ("full", *NAMES):
        made = spec(name)
        for path, factory in (("high", made.high), ("low", made.low)):
            if factory is not None:
                found.setdefault(repr(factory), (name, path))
    return list(found.values())


every_path = pytest.mark.parametrize(
    ("name", "path"), paths(), ids=["-".join(pair) for pair in paths()]
)
every_model = pytest.mark.parametrize("which", MODELS)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """An executor, its model, and inputs for as many tokens as ``SIZES`` asks for."""

    executor: Executor
    model: LoadedModel
    hidden_TE: Tensor
    heads_TA: Tensor

    @property
    def widths(self) -> tuple[int, int]:
        """O and V."""
        config = self.model.config
        return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, config.vocab_size

    def qkv(self, hidden_TE: Tensor, layer: int) -> Tensor:
        """The projection, written over NaN: what an executor leaves out shows."""
        out_TO = hidden_TE.new_full((hidden_TE.shape[0], self.widths[0]), float("nan"))
        self.executor.qkv(layer, hidden_TE, out_TO)
        return out_TO

    def run(self, method: str, rows: slice, layer: int = 1) -> Tensor:
        """What the method gives for some tokens: its result, or the new residual stream."""
        hidden_TE, heads_TA = self.hidden_TE[rows].clone(), self.heads_TA[rows].clone()
        if method == "qkv":
            return self.qkv(hidden_TE, layer)
        if method == "logits":
            return self.executor.logits(hidden_TE)
        self.executor.finish_layer(layer, heads_TA, hidden_TE)
        return hidden_TE


METHODS = ("qkv", "finish_layer", "logits")


def probe(name: str, path: str, which: str) -> Probe:
    loaded = model(which)
    generator = torch.Generator().manual_seed(0)
    config = loaded.config
    count = max(SIZES)
    hidden_TE = torch.randn(count, config.hidden_size, generator=generator)
    hidden_TE[::7] *= 50
    heads_TA = torch.randn(count, config.num_heads * config.head_dim, generator=generator)
    return Probe(
        executor=pool(name, which).executors[path],
        model=loaded,
        hidden_TE=hidden_TE.to(loaded.dtype),
        heads_TA=heads_TA.to(loaded.dtype),
    )


def test_every_config_makes_a_pool() -> None:
    """A config that no longer fits its class; ``full`` must stay the pool of one path."""
    assert {"full", "int8", "int8_shared"} <= set(NAMES)
    assert set(pool("full", "biases").executors) == {"high"}
    for name in ("int8", "int8_shared"):
        assert set(pool(name, "biases").executors) == {"high", "low"}
    for name in NAMES:
        assert "high" in pool(name, "biases").executors
        assert f"lm_head={spec(name).lm_head}" in pool(name, "biases").description


@every_path
@every_model
def test_shapes_and_dtypes(name: str, path: str, which: str) -> None:
    """A path that hands back float32 slows every operator after it; a swapped dimension."""
    p = probe(name, path, which)
    width, vocab_size = p.widths
    for count in (1, 5):
        rows = slice(0, count)
        expected = {
            "qkv": (count, width),
            "finish_layer": (count, p.model.config.hidden_size),
            "logits": (count, vocab_size),
        }
        for method, shape in expected.items():
            result = p.run(method, rows)
            assert result.shape == shape and result.dtype == p.model.dtype, method
            assert result.isfinite().all(), method
    assert p.executor.name
    assert len(p.executor.packed_weights) == 4 * p.model.config.num_layers + 1


@every_path
@every_model
def test_what_is_modified(name: str, path: str, which: str) -> None:
    """qkv and logits that scale the residual stream in place; a layer that forgets to add to it."""
    p = probe(name, path, which)
    hidden_TE, heads_TA = p.hidden_TE[:6].clone(), p.heads_TA[:6].clone()
    p.qkv(hidden_TE, 0)
    p.executor.logits(hidden_TE)
    assert torch.equal(hidden_TE, p.hidden_TE[:6])
    p.executor.finish_layer(0, torch.zeros_like(heads_TA), hidden_TE)
    mlp_alone_TE = hidden_TE.clone()
    assert (mlp_alone_TE != p.hidden_TE[:6]).any(dim=-1).all()
    hidden_TE.copy_(p.hidden_TE[:6])
    p.executor.finish_layer(0, heads_TA, hidden_TE)
    assert torch.equal(heads_TA, p.heads_TA[:6])
    assert (hidden_TE != mlp_alone_TE).any(dim=-1).all()


@every_path
@every_model
def test_the_next_layers_projection(name: str, path: str, which: str) -> None:
    """Another layer's norm or weights, head norms left out, or the stream as it was before the MLP."""
    p = probe(name, path, which)
    for layer, rows in product((0, p.model.config.num_layers - 2), (slice(0, 1), slice(3, 40))):
        hidden_TE = p.hidden_TE[rows].clone()
        got_TO = hidden_TE.new_full((len(hidden_TE), p.widths[0]), float("nan"))
        p.executor.finish_layer(layer, p.heads_TA[rows], hidden_TE, got_TO)
        assert torch.equal(hidden_TE, p.run("finish_layer", rows, layer))
        assert torch.equal(got_TO, p.qkv(hidden_TE, layer + 1))


@every_path
def test_the_last_layer_has_no_next(name: str, path: str) -> None:
    """Weights of layer 0 or of none taken for a layer that does not exist."""
    p = probe(name, path, "biases")
    out_TO = torch.zeros(2, p.widths[0])
    with pytest.raises(ValueError, match="no next layer"):
        p.executor.finish_layer(
            p.model.config.num_layers - 1, p.heads_TA[:2], p.hidden_TE[:2].clone(), out_TO
        )


@every_path
@every_model
def test_a_slice_is_worked_on_in_place_and_alone(name: str, path: str, which: str) -> None:
    """An executor that writes beyond its slice, or to a copy of it."""
    p = probe(name, path, which)
    hidden_TE = p.hidden_TE[:9].clone()
    p.executor.finish_layer(2, p.heads_TA[3:7], hidden_TE[3:7])
    assert torch.equal(hidden_TE[:3], p.hidden_TE[:3])
    assert torch.equal(hidden_TE[7:], p.hidden_TE[7:9])
    assert_close(hidden_TE[3:7], p.run("finish_layer", slice(3, 7), layer=2))


@every_path
@every_model
@pytest.mark.parametrize("method", METHODS)
def test_no_token_sees_another(name: str, path: str, which: str, method: str) -> None:
    """Per-tensor scales, statistics over the batch: a token's result changes with its company."""
    p = probe(name, path, which)
    half = p.model.dtype == torch.bfloat16
    tolerance = {"rtol": 2**-6, "atol": 2**-4} if half else {"rtol": 1e-5, "atol": 1e-4}
    alone = torch.cat([p.run(method, slice(t, t + 1)) for t in range(3)])
    for size in SIZES[2:]:
        together = p.run(method, slice(0, size))[:3]
        assert_close(together, alone, **tolerance, msg=f"{size} tokens")


@every_path
@every_model
def test_no_tokens(name: str, path: str, which: str) -> None:
    """A slice without tokens, as a route that nobody takes would give."""
    p = probe(name, path, which)
    width, vocab_size = p.widths
    assert p.run("qkv", slice(0, 0)).shape == (0, width)
    assert p.run("logits", slice(0, 0)).shape == (0, vocab_size)
    assert p.run("finish_layer", slice(0, 0)).shape == (0, p.model.config.hidden_size)


@every_path
@every_model
def test_is_the_same_layer_as_the_high_path(name: str, path: str, which: str) -> None:
    """A path that computes another layer's weights, or drops a bias or a head norm."""
    low, high = probe(name, path, which), probe("full", "high", which)
    least = 0.98 if low.executor.name == "int4" else 0.99  # 4 bits lose 8 % in each linear
    for one in (low, high):
        one.hidden_TE[20:40] *= 1e-3  # here the norm's eps decides
    for method, layer, rows in product(METHODS, (0, -1), (slice(0, 20), slice(20, 40))):
        number = layer % low.model.config.num_layers
        base_TE = 0 if method in ("qkv", "logits") else low.hidden_TE[rows].float()
        ours = low.run(method, rows, number).float() - base_TE
        theirs = high.run(method, rows, number).float() - base_TE
        similarity = torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
        ratio = ours.norm() / theirs.norm()
        assert similarity > least and 0.97 < ratio < 1.03, f"{method} of layer {number}"


@every_path
def test_the_model_stays_as_it_was(name: str, path: str) -> None:
    """Weights are shared by all paths and engines: packing must not scale or round them in place."""
    fresh = tiny_random(**MODELS["biases"])
    untouched = tiny_random(**MODELS["biases"])
    made = build_pool(spec(name), fresh)
    config = fresh.config
    hidden_TE = torch.randn(4, config.hidden_size)
    heads_TA = torch.randn(4, config.num_heads * config.head_dim)
    for layer in range(config.num_layers):
        out_TO = torch.empty(4, config.qkv_size)
        made.executors[path].qkv(layer, hidden_TE, out_TO)
        made.executors[path].finish_layer(layer, heads_TA, hidden_TE)
    made.executors[path].logits(hidden_TE)
    for ours, theirs in zip(fresh.weights.layers, untouched.weights.layers, strict=True):
        for field in type(ours).__slots__:
            before, after = getattr(theirs, field), getattr(ours, field)
            assert (before is None and after is None) or torch.equal(before, after), field
    assert torch.equal(fresh.weights.embed_VE, untouched.weights.embed_VE)
    assert torch.equal(fresh.weights.lm_head_VE, untouched.weights.lm_head_VE)
