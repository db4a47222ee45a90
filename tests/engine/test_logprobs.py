"""Guards log-probabilities and forced decoding against transformers' logits.

T tokens of a sequence, V vocabulary.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.tools import alone, greedy, plain_llm, prompts, run_all, tiny_pair, tokens
from tokenrouter import EngineOptions, SamplingParams
from tokenrouter.outputs import Logprob


def reference(ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities [T, V] by transformers."""
    _, hf_model = tiny_pair()
    with torch.inference_mode():
        logits_TV: Tensor = hf_model(torch.tensor([ids])).logits[0]
    return logits_TV.log_softmax(-1)


def check_entry(entry: dict[int, Logprob] | None, token: int, logprobs_V: Tensor, k: int) -> None:
    """The token itself and the k best, with values and ranks as in ``logprobs_V``."""
    assert entry is not None
    assert next(iter(entry)) == token
    order = logprobs_V.argsort(descending=True).tolist()
    assert set(entry) >= set(order[:k]) and len(entry) <= k + 1
    for token_id, value in entry.items():
        assert value.logprob == pytest.approx(float(logprobs_V[token_id]), abs=1e-3)
        assert abs(value.rank - (order.index(token_id) + 1)) <= 1  # two may tie in float32
        assert isinstance(value.decoded_token, str)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 4, "max_num_batched_tokens": 9},
        {"num_kv_slots": 110, "max_num_batched_tokens": 64},
    ],
    ids=["plain", "small chunks", "preempted"],
)
def test_logprobs_and_prompt_logprobs(options: dict[str, Any]) -> None:
    """Values of the neighbouring position; doubled or missing after a chunk's end or a recompute."""
    llm = plain_llm(EngineOptions(**options))
    asked = prompts()[:10]
    params = greedy(8, logprobs=3, prompt_logprobs=2)
    outputs = llm.generate(asked, params)
    assert (llm.engine.stats.num_preemptions > 0) == ("num_kv_slots" in options)
    for prompt, expected, output in zip(asked, alone(), outputs, strict=False):
        assert tokens(output) == expected[:8]
        logprobs_TV = reference((*prompt, *expected))
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            entry = output.prompt_logprobs[position]
            check_entry(entry, prompt[position], logprobs_TV[position - 1], 2)
        (one,) = output.outputs
        assert one.logprobs is not None and len(one.logprobs) == 8
        for index, entry in enumerate(one.logprobs):
            check_entry(entry, expected[index], logprobs_TV[len(prompt) - 1 + index], 3)
        total = sum(e[t].logprob for e, t in zip(one.logprobs, one.token_ids, strict=True))
        assert one.cumulative_logprob == pytest.approx(total)


def test_logprobs_are_off_by_default_and_zero_means_the_token_itself() -> None:
    """0 taken for off."""
    (output,) = plain_llm().generate([prompts()[3]], greedy(3))
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None
    (output,) = plain_llm().generate([prompts()[3]], greedy(3, logprobs=0, prompt_logprobs=0))
    assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
    assert [list(e) for e in output.outputs[0].logprobs] == [[t] for t in alone()[3][:3]]
    assert [list(e or ()) for e in output.prompt_logprobs[1:]] == [[t] for t in prompts()[3][1:]]


def test_prompt_logprobs_of_several_completions() -> None:
    """Taken once per completion, or of the wrong one."""
    params = SamplingParams(n=2, seed=0, max_tokens=3, prompt_logprobs=1, logprobs=1)
    (output,) = plain_llm().generate([prompts()[3]], params)
    logprobs_TV = reference(prompts()[3])
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompts()[3])
    for position in range(1, len(prompts()[3])):
        entry = output.prompt_logprobs[position]
        check_entry(entry, prompts()[3][position], logprobs_TV[position - 1], 1)
    assert [len(one.logprobs or ()) for one in output.outputs] == [3, 3]


def test_logprobs_are_the_models_own() -> None:
    """Taken after temperature, bias or penalties."""
    params = SamplingParams(
        temperature=2.0, top_k=1, logit_bias={7: 100.0}, logprobs=0, max_tokens=2, seed=0
    )
    (output,) = plain_llm().generate([prompts()[3]], params)
    assert tokens(output) == (7, 7)
    expected_TV = reference((*prompts()[3], 7, 7))
    assert output.outputs[0].logprobs is not None
    got = [entry[7].logprob for entry in output.outputs[0].logprobs]
    want = expected_TV[len(prompts()[3]) - 1 :, 7][:2]
    assert_close(torch.tensor(got), want, rtol=0, atol=1e-3)


SETTINGS = {
    "plain": {},
    "small chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 9},
    "preempted": {"num_kv_slots": 110, "max_num_batched_tokens": 64},
    "static": {"scheduler": "static_batch"},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("prefill_len", [None, 1, 2])
def test_forced_decoding_equals_prefill_and_transformers(
    prefill_len: int | None, options: dict[str, Any]
) -> None:
    """Logits of the wrong position, a position handed over twice after a recompute, or not at all."""
    llm = plain_llm(EngineOptions(**options))
    asked = [list(p) for p in prompts()[1:9]]
    got: list[list[tuple[int, Tensor]]] = [[] for _ in asked]

    def sink(index: int, start: int, logits_TV: Tensor) -> None:
        assert logits_TV.dtype == torch.float32
        got[index] += [(start + i, row.clone()) for i, row in enumerate(logits_TV)]

    llm.score(asked, sink=sink, prefill_len=prefill_len)
    for ids, rows in zip(asked, got, strict=True):
        first = 0 if prefill_len is None else prefill_len - 1
        assert [position for position, _ in rows] == list(range(first, len(ids)))
        logprobs_TV = torch.stack([row for _, row in rows]).log_softmax(-1)
        assert_close(logprobs_TV, reference(tuple(ids))[first:], rtol=0, atol=1e-3)
    stats = llm.engine.stats
    assert llm.engine.pool.free == llm.engine.pool.num_slots
    if "num_kv_slots" not in options:
        total = sum(map(len, asked))
        prefill = total if prefill_len is None else prefill_len * len(asked)
        assert (stats.prefill_tokens, stats.decode_tokens) == (prefill, total - prefill)


def test_positions_come_once_though_the_prompt_is_recomputed() -> None:
    """An evaluation that counts the tokens of preempted requests twice."""
    llm = plain_llm(EngineOptions(num_kv_slots=85, max_num_batched_tokens=16, max_num_seqs=4))
    seen: list[int] = []
    llm.engine.add_request("old", prompts()[0], greedy(70))
    for _ in range(3):
        llm.engine.step()
    llm.engine.add_request(
        "scored",
        list(prompts()[2])[:80],
        SamplingParams(),
        forced_ids=[],
        logits_sink=lambda start, x_TV: seen.extend(range(start, start + len(x_TV))),
        wants_all_logits=True,
    )
    last = run_all(llm)
    metrics = last["scored"].outputs[0].metrics
    assert metrics is not None and metrics.num_preemptions > 0
    assert tokens(last["old"])[:12] == alone()[0]
    assert seen == list(range(80))


def test_score_leaves_nothing_behind_when_a_sequence_is_refused() -> None:
    """The sequences before the bad one run in the next call, into a sink that is gone."""
    llm = plain_llm(EngineOptions(num_kv_slots=50))
    calls: list[int] = []
    for bad in ([5] * 51, [], [5, 999]):
        with pytest.raises(ValueError, match=r"exceed|must lie in|token ids"):
            llm.score([[5, 6, 7], bad], sink=lambda *_: calls.append(1))
        assert not llm.engine.has_unfinished()
    with pytest.raises(ValueError, match=r"prefill_len 4 must lie in 1 \.\. 3"):
        llm.score([[5, 6, 7, 8], [5, 6, 7]], sink=lambda *_: calls.append(1), prefill_len=4)
    assert not llm.engine.has_unfinished() and not calls
    assert llm.engine.pool.free == 50


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({}, {"wants_all_logits": True}, "wants_all_logits=True needs a logits_sink"),
        ({}, {"logits_sink": print}, "without forced_ids gets logits only with wants_all_logits"),
        (
            {"prompt_logprobs": 1},
            {"logits_sink": print, "wants_all_logits": True},
            "prompt_logprobs=1 cannot be combined",
        ),
        (
            {"prompt_logprobs": 1},
            {"logits_sink": print, "forced_ids": [6]},
            "prompt_logprobs=1 cannot be combined",
        ),
    ],
)
def test_a_sink_that_would_get_nothing_is_refused(
    params: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """One of two sinks won silently, and a sink without forced ids was never called."""
    llm = plain_llm()
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request("a", [5], SamplingParams(**params), **options)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ([10, 384], r"0 \.\. 383, got 10 \.\. 384"),
        ([-1, 10], r"0 \.\. 383, got -1 \.\. 10"),
        ([10, 1.5], "forced_ids must be a list of token ids, got 1.5"),
    ],
)
def test_bad_forced_ids_are_refused_and_the_others_go_on(forced: Any, message: str) -> None:
    """Forced ids were not checked: the step that fed one failed, and with it every request."""
    llm = plain_llm()
    llm.engine.add_request("good", prompts()[3], greedy())
    llm.engine.step()
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request("bad", [5, 6], greedy(), forced_ids=forced)
    assert tokens(run_all(llm)["good"]) == alone()[3]
    with pytest.raises(ValueError, match=message):
        llm.score([[5, 6, *forced]], sink=lambda *_: None, prefill_len=2)
    assert not llm.engine.has_unfinished()
