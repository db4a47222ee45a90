"""Guards W4A8: products with the dequantised codes, the same bits in any batch, and an engine that serves it.

T tokens, E hidden size, O fused q, k, v outputs.
"""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tokenrouter import LLM, SamplingParams
from tokenrouter.executors import PoolSpec, build_pool
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int4 import Int4Executor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.executors.packing import PackedModel
from tokenrouter.kernels import KernelSet, ReferenceKernels, select
from tokenrouter.kernels.int4_matmul.reference import GROUP, quantize_weight
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.routers import AllLowRouter, LayerwiseRouter, RandomRouter, RuleRouter

TOLERANCE = {"float32": 2**-16, "bfloat16": 2**-6}
SIZES = (1, 2, 3, 7, 31, 32, 33, 64, 65, 300)


@pytest.fixture(scope="module", params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return select(request.param)


@pytest.fixture(scope="module", params=list(TOLERANCE))
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    """Neither width is whole groups: 84 = 2 * 32 + 20."""
    return tiny_random(
        "qwen2", dtype=request.param, num_hidden_layers=2, hidden_size=84, intermediate_size=101
    )


def hidden(model: LoadedModel, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, model.config.hidden_size, generator=generator).to(model.dtype)


def dequantised(weight_NK: Tensor) -> Tensor:
    """The weights that the codes stand for, in double, from the format's definition."""
    codes, num_inputs = quantize_weight(weight_NK), weight_NK.shape[1]
    step_NK, offset_NK = (
        part_NG.double().repeat_interleave(GROUP, 1) for part_NG in (codes.step_NG, codes.offset_NG)
    )
    value_NK = codes.code_NC.double() * step_NK + offset_NK
    return value_NK[:, :num_inputs] * codes.scale_N.double()[:, None]


def rounded(kernels: KernelSet, x_TK: Tensor) -> Tensor:
    rows = kernels.quantize_rows(x_TK)
    return rows.q_TK.double() * rows.scale_T1.double()


def test_is_a_product_with_dequantised_weights(loaded: LoadedModel, kernels: KernelSet) -> None:
    """Activations of 16 bits, another layer's weights, a group or its offset misplaced where K is no whole group."""
    executor, config = Int4Executor(PackedModel(loaded, kernels)), loaded.config
    hidden_TE, weights = hidden(loaded, 33), loaded.weights
    tolerance = TOLERANCE[str(loaded.dtype)[6:]]
    for number, layer in enumerate(weights.layers):
        normed_TE = kernels.rms_norm(hidden_TE, layer.input_norm_E, config.rms_norm_eps)
        expected_TO = rounded(kernels, normed_TE) @ dequantised(layer.qkv_OE).t()
        assert layer.qkv_bias_O is not None
        expected_TO += layer.qkv_bias_O.double()
        out_TO = hidden_TE.new_full((33, config.qkv_size), float("nan"))
        executor.qkv(number, hidden_TE, out_TO)
        atol = tolerance * float(expected_TO.abs().max())
        assert_close(out_TO.double(), expected_TO, rtol=tolerance, atol=atol)
    normed_TE = kernels.rms_norm(hidden_TE, weights.final_norm_E, config.rms_norm_eps)
    expected_TV = rounded(kernels, normed_TE) @ dequantised(weights.lm_head_VE).t()
    atol = tolerance * float(expected_TV.abs().max())
    logits_TV = executor.logits(hidden_TE)
    assert_close(logits_TV.double(), expected_TV, rtol=tolerance, atol=atol)


def test_a_token_has_the_same_bits_in_any_batch(loaded: LoadedModel, kernels: KernelSet) -> None:
    """Another kernel, or another order of sums, for another number of rows."""
    executor, config = Int4Executor(PackedModel(loaded, kernels)), loaded.config
    hidden_TE = hidden(loaded, max(SIZES))
    heads_TA = hidden_TE.repeat(1, 9)[:, : config.num_heads * config.head_dim].contiguous()

    def run(rows: slice) -> Tensor:
        result_TE = hidden_TE[rows].clone()
        next_TO = hidden_TE.new_empty(len(result_TE), config.qkv_size)
        executor.finish_layer(0, heads_TA[rows], result_TE, next_TO)
        return torch.cat((result_TE, next_TO, executor.logits(result_TE)), 1)

    alone = torch.cat([run(slice(t, t + 1)) for t in range(7)])
    for size in SIZES:
        assert torch.equal(run(slice(0, size))[:7], alone[:size]), f"{size} tokens"


def test_streams_half_of_int8(kernels: KernelSet) -> None:
    """Codes that are kept as int8 next to the claim; 4 bits and two bytes for 32."""
    model = tiny_random("llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1)

    def streamed(executor: Int8Executor | Int4Executor) -> int:
        return sum(w.numel() * w.element_size() for w in executor.packed_weights)

    packed = PackedModel(model, kernels)
    int8, int4 = streamed(Int8Executor(packed)), streamed(Int4Executor(packed))
    assert 0.49 * int8 < int4 < 0.57 * int8


def test_loses_more_than_int8_and_little(kernels: KernelSet) -> None:
    """An int4 path that runs int8, or one whose groups are off by one."""
    model = tiny_random("llama")
    packed, hidden_TE, errors = PackedModel(model, kernels), hidden(model, 50), {}
    expected_TE = hidden_TE.clone()
    heads_TA = torch.randn(50, model.config.num_heads * model.config.head_dim)
    FullExecutor(packed).finish_layer(0, heads_TA, expected_TE)
    for executor in (Int8Executor(packed), Int4Executor(packed)):
        got_TE = hidden_TE.clone()
        executor.finish_layer(0, heads_TA, got_TE)
        errors[executor.name] = float(
            (got_TE - expected_TE).norm() / (expected_TE - hidden_TE).norm()
        )
    assert 3 * errors["int8"] < errors["int4"] < 0.2


def served(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def test_greedy_tokens_are_the_references_in_any_company() -> None:
    """Kernels that part ways with the reference, or with themselves in a larger batch; the head of 4 bits too."""
    model, prompts = tiny_random("llama", num_hidden_layers=2), [[5, 9, 12, 77, 30, 41], [7, 8]]
    spec, found = PoolSpec(low=Int4Executor, lm_head="low"), []
    for kernels in (select("native"), ReferenceKernels()):
        pool = build_pool(spec, model, kernels=kernels)
        found.append(served(LLM(model, router=AllLowRouter(), executors=pool), prompts))
    native, reference = found
    assert native == reference and all(len(ids) == 6 for ids in native)
    alone = LLM(model, router=AllLowRouter(), executors=build_pool(spec, model))
    assert served(alone, prompts[:1]) == native[:1]


def test_routers_that_are_not_trained_run_on_it() -> None:
    """A pool that the engine does not know how to route to."""
    model = tiny_random("llama", num_hidden_layers=2)
    pool, routers = build_pool("int4", model), [RandomRouter(0.5), RuleRouter(first_positions=2)]
    for router in (*routers, LayerwiseRouter(high_layers=(1,))):
        llm = LLM(model, router=router, executors=pool)
        assert [len(ids) for ids in served(llm, [[5, 9, 12, 77, 30, 41], [7, 8]])] == [6, 6]
        stats = llm.engine.stats
        others = [index for index, name in enumerate(stats.route_names) if name != "high"]
        assert stats.executed_tokens[:, others].sum() > 0, router.name
