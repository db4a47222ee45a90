"""Guards the smoothed low path: better than the plain one in the same products, and no other path knows of it.

T tokens, E hidden size, A attention outputs, O fused q, k, v outputs.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor

from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.quality import QualitySettings, measure_quality
from tokenrouter.executors import ExecutorPool, PoolSpec, build_pool
from tokenrouter.executors.base import Executor
from tokenrouter.executors.calibration import Calibration
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.executors.int8_smooth import Int8SmoothExecutor
from tokenrouter.executors.packing import PackedModel
from tokenrouter.executors.smoothing import Smoothing
from tokenrouter.kernels import KernelSet, select
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.workloads import PythonDocs, evaluation_documents, windows

CONF = Path(__file__).resolve().parents[2] / "conf"
BACKENDS = ["native", "reference"]


@pytest.fixture(scope="module", params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return select(request.param)


@pytest.fixture(scope="module")
def smoothing(tmp_path_factory: pytest.TempPathFactory) -> Smoothing:
    folder = tmp_path_factory.mktemp("calibration")
    return Smoothing(calibration=Calibration(num_tokens=256, cache_dir=str(folder)))


@cache
def outlying(dtype: str = "float32") -> LoadedModel:
    """A model whose norms make a few channels of every linear's input fifty times as large as the others."""
    model = tiny_random("llama", num_hidden_layers=2)
    layers = []
    for layer in model.weights.layers:
        large_E, large_J = torch.ones(64), torch.ones(320)
        large_E[::16], large_J[160::40] = 50.0, 50.0
        layers.append(
            replace(
                layer,
                input_norm_E=layer.input_norm_E * large_E,
                qkv_OE=layer.qkv_OE / large_E,
                post_norm_E=layer.post_norm_E * large_E,
                gate_up_JE=layer.gate_up_JE / large_E * large_J[:, None],
                down_EI=layer.down_EI / large_J[160:],
            )
        )
    changed = replace(model.weights, layers=tuple(layers))
    return replace(model, weights=changed, model_hash="outlying").astype(dtype)


def pool(model: LoadedModel, kernels: KernelSet, smoothing: Smoothing) -> ExecutorPool:
    spec = PoolSpec(low=lambda packed: Int8SmoothExecutor(packed, smoothing))
    return build_pool(spec, model, kernels=kernels)


def results(executor: Executor, model: LoadedModel) -> dict[str, Tensor]:
    """What every operator gives for the same rows, layer by layer."""
    generator, config = torch.Generator().manual_seed(0), model.config
    hidden_TE = torch.randn(40, config.hidden_size, generator=generator).to(model.dtype)
    heads_TA = torch.randn(40, config.num_heads * config.head_dim, generator=generator)
    found = {"logits": executor.logits(hidden_TE)}
    for layer in range(config.num_layers):
        out_TO = hidden_TE.new_full((40, config.qkv_size), float("nan"))
        executor.qkv(layer, hidden_TE, out_TO)
        after_TE = hidden_TE.clone()
        executor.finish_layer(layer, heads_TA.to(model.dtype), after_TE)
        found |= {f"qkv {layer}": out_TO, f"rest {layer}": after_TE - hidden_TE}
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outlying_channels_cost_less(kernels: KernelSet, smoothing: Smoothing, dtype: str) -> None:
    """Scales that are not folded, or into one side only: the path would be as far off as the plain one, or wrong."""
    model = outlying(dtype)
    packed = PackedModel(model, kernels)
    paths = FullExecutor(packed), Int8Executor(packed), Int8SmoothExecutor(packed, smoothing)
    exact, plain, smooth = (results(path, model) for path in paths)
    for name in ("qkv 0", "qkv 1", "rest 0", "rest 1"):
        error, plain_error = (
            float((low[name] - exact[name]).float().norm()) for low in (smooth, plain)
        )
        assert 0 < error < 0.6 * plain_error, name
    assert torch.equal(smooth["logits"], plain["logits"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_high_path_is_bit_equal_with_and_without(
    kernels: KernelSet, smoothing: Smoothing, dtype: str
) -> None:
    """Norms or weights that the two paths share after all."""
    model = outlying(dtype)
    with_low = results(pool(model, kernels, smoothing).executors["high"], model)
    alone = results(build_pool("full", model, kernels=kernels).executors["high"], model)
    assert all(torch.equal(with_low[name], expected) for name, expected in alone.items())


def test_cached_statistics_give_the_same_weights(
    kernels: KernelSet, smoothing: Smoothing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run of the same model on other weights than the first: results that do not repeat."""
    model = outlying("bfloat16")
    asked = replace(smoothing, calibration=replace(smoothing.calibration, cache_dir=str(tmp_path)))
    first = pool(model, kernels, asked).executors["low"]
    monkeypatch.setattr("tokenrouter.executors.calibration.input_maxima", None)
    second = pool(model, kernels, asked).executors["low"]
    for one, other in zip(first.packed_weights, second.packed_weights, strict=True):
        assert torch.equal(one, other)
    once, again = results(first, model), results(second, model)
    assert all(torch.equal(again[name], expected) for name, expected in once.items())


def test_runs_the_plain_paths_operators(kernels: KernelSet, smoothing: Smoothing) -> None:
    """A slower path: unfused operators, wider weights, or weights of two formats."""
    model = outlying("bfloat16")
    packed = PackedModel(model, kernels)
    plain, smooth = Int8Executor(packed), Int8SmoothExecutor(packed, smoothing)
    assert [type(tail) for tail in smooth._tails] == [type(tail) for tail in plain._tails]
    for ours, theirs in zip(smooth.packed_weights, plain.packed_weights, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert smooth.product is plain.product


def test_equal_smoothing_is_packed_once(kernels: KernelSet, smoothing: Smoothing) -> None:
    """Two paths of a pool on equal smoothed weights, and twice the memory."""
    packed = PackedModel(outlying(), kernels)
    first = Int8SmoothExecutor(packed, smoothing)
    second = Int8SmoothExecutor(packed, replace(smoothing))
    other = Int8SmoothExecutor(packed, replace(smoothing, alpha=0.4))
    assert first.packed_weights[0] is second.packed_weights[0]
    assert first.packed_weights[0] is not other.packed_weights[0]


def test_the_version_names_the_calibration(smoothing: Smoothing) -> None:
    """Results of two calibrations under one name: nobody can tell on which path a router was trained."""
    model = outlying()
    versions = [
        pool(model, select("reference"), asked).executors["low"].version
        for asked in (
            smoothing,
            replace(smoothing, alpha=0.4),
            replace(smoothing, down_alpha=0.5),
            replace(smoothing, calibration=replace(smoothing.calibration, num_tokens=512)),
        )
    ]
    assert len(set(versions)) == 4
    assert all(version.startswith("int8_smooth-") and len(version) == 22 for version in versions)
    made = pool(model, select("reference"), smoothing)
    assert made.description == f"high=full, low={versions[0]}, lm_head=high"
    assert [made.executors[path].name for path in ("high", "low")] == ["full", "int8_smooth"]


def test_the_named_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM(..., executors="int8_smooth")` that builds the plain path, or does not run."""
    select(
        "auto", dtype=torch.float32
    )  # its library lies in the user's cache too: not to be built again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llm = LLM(tiny_random("llama"), router="all_low", executors="int8_smooth")
    assert isinstance(llm.pool.executors["low"], Int8SmoothExecutor)
    output = llm.generate([5, 6, 7])
    assert output[0].outputs[0].token_ids


def test_the_config_takes_the_text_of_the_run() -> None:
    """A data group that never reaches the calibration, or options that the class calls otherwise."""
    text = "executor.low.smoothing.calibration.text=${data}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = [
            "executor=int8_smooth",
            "data=wikitext2",
            text,
            "executor.low.smoothing.alpha=0.4",
        ]
        spec = instantiate(compose("config", overrides=overrides).executor)
    smoothing = spec.low.keywords["smoothing"]
    assert smoothing.calibration.text.name == "wikitext2" and smoothing.alpha == 0.4
    with initialize_config_dir(str(CONF), version_base="1.3"):
        spec = instantiate(compose("config", overrides=["executor=int8_smooth"]).executor)
    assert spec.low.keywords["smoothing"] == Smoothing()


@pytest.mark.slow
def test_less_than_half_of_the_plain_paths_divergence(
    smollm2_fp32: LoadedModel, tmp_path: Path
) -> None:
    """On the default model, in bfloat16 and on text that was not calibrated on: at most 0.45 of the plain path's KL."""
    model = smollm2_fp32.astype("bfloat16")
    docs = "\n\n".join(evaluation_documents(PythonDocs().documents()))
    texts = windows(model.tokenizer.encode(docs, add_special_tokens=False), 512, 4)
    options = EngineOptions(max_num_seqs=1, num_kv_slots=520)
    smoothing = Smoothing(calibration=Calibration(cache_dir=str(tmp_path)))
    packed = PackedModel(model, select("auto", dtype=model.dtype))
    lows: dict[str, Any] = {
        "plain": Int8Executor(packed),
        "smooth": Int8SmoothExecutor(packed, smoothing),
    }
    high = FullExecutor(packed)

    def llm(low: Executor) -> LLM:
        made = ExecutorPool(
            executors={"high": high, "low": low}, lm_head="high", kernels=packed.kernels
        )
        return LLM(model, router="all_low", executors=made, options=options)

    settings = QualitySettings(window_tokens=512, num_windows=4, decode_tokens=0, decode_windows=0)
    found = measure_quality(
        LLM(smollm2_fp32, options=options),
        {name: llm(low) for name, low in lows.items()},
        texts,
        settings,
    ).systems
    plain, smooth = (found[name].prefill.kl_mean_nats for name in ("plain", "smooth"))
    assert 0 < smooth <= 0.45 * plain
