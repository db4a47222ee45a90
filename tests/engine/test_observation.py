"""Guards attention statistics: what the engine reports is what transformers' attention weights sum up to.

N entries of a request. There is one layer group, number 0.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.tools import greedy, tiny_pair, tokens
from tokenrouter import LLM, EngineOptions, ObserveOptions, SamplingParams
from tokenrouter.executors import build_pool
from tokenrouter.routers import RandomRouter

PROMPTS = [list(range(3, 25)), [7], list(range(40, 49))]


def expected(
    family: str, ids: Sequence[int], num_queries: int, layers: Sequence[int] = range(4)
) -> Tensor:
    """``[N]``: weights of the last queries, summed, mean over heads and ``layers``."""
    hf_model = tiny_pair(family)[1]
    hf_model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = hf_model(torch.tensor([list(ids)]), output_attentions=True)
    finally:
        hf_model.set_attn_implementation("sdpa")
    chosen = [out.attentions[layer] for layer in layers]
    return torch.stack([layer[0].mean(0)[-num_queries:].sum(0) for layer in chosen]).mean(0)


def observed(family: str = "llama", backend: str = "auto", **options: object) -> LLM:
    model = tiny_pair(family)[0]
    executors = build_pool("full", model, kernels=backend)
    return LLM(model, executors=executors, options=EngineOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_decode_reports_what_every_token_received(family: str, backend: str) -> None:
    """Sums over the wrong heads or requests, entries of another request, a layer that reports another's weights."""
    llm = observed(family, backend, observe=ObserveOptions())
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(index), prompt, greedy(6))
    histories: dict[str, list[int]] = {str(i): list(p) for i, p in enumerate(PROMPTS)}
    num_checked = 0
    while llm.engine.has_unfinished():
        outputs = llm.engine.step()
        for request_id, found in llm.engine.attention_received.items():
            ids = histories[request_id]
            assert_close(found[0], expected(family, ids, 1), rtol=1e-4, atol=1e-5)
            assert_close(found[0].sum(), torch.tensor(1.0))
            num_checked += 1
        for output in outputs:
            prompt = PROMPTS[int(output.request_id)]
            histories[output.request_id] = [*prompt, *output.outputs[0].token_ids]
    assert num_checked >= 15


@pytest.mark.parametrize("chunk", [3, 5, 64])
def test_prefill_reports_the_last_queries_of_a_chunk(chunk: int) -> None:
    """Queries of an earlier chunk counted again, or layers that were not asked for."""
    options = ObserveOptions(decode=False, prefill_layers=(0, 2), prefill_queries=4)
    llm = observed(observe=options, max_num_seqs=1, max_num_batched_tokens=chunk)
    prompt, done, num_checked = PROMPTS[0], 0, 0
    llm.engine.add_request("a", prompt, greedy(3))
    while llm.engine.has_unfinished():
        before = done
        llm.engine.step()
        done = min(done + chunk, len(prompt))
        found = llm.engine.attention_received
        if done - before < 2:
            assert found == {}
            continue
        whole_N = expected("llama", prompt[:done], min(4, done - before), (0, 2))
        assert_close(found["a"][0], whole_N, rtol=1e-4, atol=1e-5)
        num_checked += 1
    chunks = range(0, len(prompt), chunk)
    assert num_checked == sum(len(prompt[at : at + chunk]) > 1 for at in chunks)


def test_mixed_steps_report_each_request_by_its_own_options() -> None:
    """A decoding request summed over 5 queries, or a chunk's last query reported in every layer."""
    options = ObserveOptions(prefill_layers=(1,), prefill_queries=5)
    llm = observed(observe=options, max_num_seqs=2, max_num_batched_tokens=12)
    llm.engine.add_request("first", PROMPTS[2], greedy(8))
    llm.engine.step()
    llm.engine.add_request("second", PROMPTS[0], greedy(2))
    llm.engine.step()
    found = llm.engine.attention_received
    assert set(found) == {"first", "second"}
    assert len(found["first"][0]) == len(PROMPTS[2]) + 1
    assert_close(found["first"][0].sum(), torch.tensor(1.0))
    assert_close(found["second"][0].sum(), torch.tensor(5.0))
    done = len(found["second"][0])
    expected_N = expected("llama", PROMPTS[0][:done], 5, (1,))
    assert_close(found["second"][0], expected_N, rtol=1e-4, atol=1e-5)


def test_queued_forwards_of_one_step_all_report() -> None:
    """The report of the step's first forward overwritten by its second."""
    model = tiny_pair()[0]
    llm = LLM(
        model,
        router=RandomRouter(0.5),
        executors=build_pool("int8", model),
        options=EngineOptions(observe=ObserveOptions(), dispatch="queued", min_batch=1),
    )
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(index), prompt, greedy(12))
    sizes = set()
    while llm.engine.has_unfinished():
        llm.engine.step()
        sizes.add(len(llm.engine.attention_received))
    assert max(sizes) == len(PROMPTS)


def test_statistics_change_no_output() -> None:
    """Another path through attention where they are taken."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options = ObserveOptions(prefill_layers=(0, 3), prefill_queries=64)
    plain, watched = (
        observed(observe=observe).generate(PROMPTS, params) for observe in (None, options)
    )
    assert [tokens(o) for o in plain] == [tokens(o) for o in watched]
    assert observed().engine.attention_received == {}


def test_refusals() -> None:
    """A layer that silently never reports."""
    with pytest.raises(ValueError, match="layer 4; the model has layers 0 to 3"):
        observed(observe=ObserveOptions(prefill_layers=(1, 4)))
    with pytest.raises(ValueError, match="negative layer"):
        ObserveOptions(prefill_layers=(-1,))
    with pytest.raises(ValueError, match="prefill_queries must be at least 1"):
        ObserveOptions(prefill_queries=0)
    with pytest.raises(ValueError, match="nothing is observed"):
        ObserveOptions(decode=False)
