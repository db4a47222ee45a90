"""Guards what features are told of an engine: values of the right token, wherever its request has been in between.

N tokens of a request, V vocabulary, S signals.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.faults import failing, step_to_the_end
from tests.engine.recorder import Recorder, recording
from tests.engine.tools import greedy, prompts, run_all, tiny, tiny_pair, twin
from tokenrouter import LLM, EngineOptions, RequestOutput, SamplingParams
from tokenrouter.features import Signals, sequence_batch
from tokenrouter.features.signals import ATTENTION_SIGNALS, LOGIT_SIGNALS
from tokenrouter.routers import EntropyRouter

ASKED = prompts()[:10]


def dense(ids: Sequence[int], prompt_len: int) -> Tensor:
    """``[N, S]``: what transformers' logits say of each token behind the prompt."""
    with torch.inference_mode():
        logits_NV = tiny_pair()[1](torch.tensor([list(ids)])).logits[0, prompt_len - 1 : -1]
    p_NV = logits_NV.double().softmax(-1)
    best_N2 = p_NV.sort(descending=True).values[:, :2]
    own_N = p_NV[torch.arange(len(p_NV)), torch.tensor(ids[prompt_len:])]
    columns = {
        "entropy": -(p_NV * p_NV.log()).sum(-1),
        "margin": best_N2[:, 0] - best_N2[:, 1],
        "top1": best_N2[:, 0],
        "surprise": -own_N.log(),
    }
    return torch.stack([columns[name] for name in LOGIT_SIGNALS], -1).float()


def check(router: Recorder, outputs: Sequence[RequestOutput]) -> int:
    """Compares every decode token that ran with the dense model; returns how many there were."""
    num_checked = 0
    for output in outputs:
        prompt = output.prompt_token_ids
        for completion in output.outputs:
            ids = [*prompt, *completion.token_ids[:-1]]  # the last one never runs
            if len(ids) > len(prompt):
                got_NS = router.values_of(ids, len(prompt))
                assert_close(got_NS, dense(ids, len(prompt)), rtol=1e-3, atol=1e-4)
                num_checked += len(got_NS)
    return num_checked


SETTINGS: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "preempted": {"num_kv_slots": 130, "max_num_batched_tokens": 64},
    "preempted, small chunks": {
        "num_kv_slots": 130,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
    },
    "swapped": {"num_kv_slots": 130, "num_host_slots": 300, "max_num_batched_tokens": 64},
    "few rows": {"max_num_seqs": 3},
    "decode takes turns": {"max_decode_tokens": 2},
    "static batch": {"scheduler": "static_batch", "static_batch_size": 4},
    "prefixes shared": {"prefix_sharing": True, "prefix_block": 8},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_each_token_is_shown_what_its_logits_said(options: dict[str, Any]) -> None:
    """Another row's numbers, those of an earlier owner or an earlier token, or numbers lost in a preemption."""
    llm, router = recording(**options)
    outputs = llm.generate(ASKED, greedy(12)) + llm.generate(ASKED, greedy(12))
    assert check(router, outputs) == 2 * 11 * len(ASKED)
    assert all(len(seen) == 2 for seen in router.seen.values()), "each token is decided once"
    stats = llm.engine.stats
    assert (stats.num_preemptions > 0) == ("num_kv_slots" in options)
    assert (stats.shared_tokens > 0) == ("prefix_sharing" in options)


def test_completions_of_one_prompt_have_their_own_numbers() -> None:
    """One completion's uncertainty for all of them; numbers of scaled or penalised logits."""
    llm, router = recording(num_kv_slots=200)
    params = SamplingParams(
        n=4, temperature=3.0, top_k=20, seed=1, max_tokens=9, ignore_eos=True, repetition_penalty=2
    )
    outputs = llm.generate(ASKED[3:5], params)
    assert check(router, outputs) == 2 * 4 * 8
    assert len({completion.token_ids for completion in outputs[0].outputs}) > 1


def test_forced_tokens_have_their_own_surprise() -> None:
    """The surprise of the token that would have been drawn; a forced request that is told nothing."""
    llm, router = recording(num_kv_slots=130, max_num_batched_tokens=64)
    sequences = [list(p) for p in prompts(seed=3) if len(p) > 20][:8]
    llm.score(sequences, sink=lambda *_: None, prefill_len=12)
    assert llm.engine.stats.num_preemptions > 0
    for ids in sequences:
        assert_close(router.values_of(ids, 12), dense(ids, 12), rtol=1e-3, atol=1e-4)


def test_aborts_leave_nothing_to_the_next() -> None:
    """A recycled row whose new request reads the aborted one's numbers."""
    llm, router = recording(max_num_seqs=2)
    last: dict[str, RequestOutput] = {}
    for turn in range(6):
        llm.engine.add_request(f"{turn}", ASKED[turn + 3], greedy(9))
        for _ in range(turn % 3 + 1):
            last |= {output.request_id: output for output in llm.engine.step()}
        if turn % 2:
            llm.engine.abort(f"{turn}")
    last |= run_all(llm)
    assert check(router, list(last.values())) > 3 * 8, "aborted ones too"


@pytest.mark.parametrize("part", ["runner.run", "live.sample"])
def test_a_step_that_is_tried_again(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers written by a step that counts as not done, or lost by it."""
    llm, router = recording()
    for index, prompt in enumerate(ASKED):
        llm.engine.add_request(str(index), prompt, greedy(9))
    owner, name = part.split(".")
    target = getattr(llm.engine._parts, owner)
    monkeypatch.setattr(target, name, failing(getattr(target, name), at=range(3, 1000, 3)))
    last, num_failed = step_to_the_end(llm)
    assert num_failed > 2
    assert check(router, list(last.values())) == 8 * len(ASKED)


def test_what_is_not_known_is_refused() -> None:
    """Zeros, or another token's numbers, where nothing was written."""
    signals = Signals(3, LLM(tiny()).token_types)
    batch = sequence_batch([5, 6, 7], prompt_len=1, row=2).select(torch.tensor([2]))
    with pytest.raises(ValueError, match="entropy is not known for the token at position 2"):
        signals.row_value("entropy", batch)
    value_1 = torch.tensor([1.5])
    signals.write(torch.tensor([2]), torch.tensor([1]), {"entropy": value_1})
    with pytest.raises(ValueError, match="entropy is not known for the token at position 2"):
        signals.row_value("entropy", batch)
    signals.write(torch.tensor([2]), torch.tensor([2]), {"entropy": value_1})
    assert torch.equal(signals.row_value("entropy", batch), value_1)
    with pytest.raises(ValueError, match="surprise is not known"):
        signals.row_value("surprise", batch)
    with pytest.raises(ValueError, match="queue_depth is not known before the engine's first step"):
        signals.load("queue_depth", batch)


def test_nothing_is_computed_unless_asked_for() -> None:
    """A softmax over the vocabulary in every step of a router that looks at token types."""
    assert LLM(tiny(), router="rule").engine._parts.feed is None
    llm, _ = recording(features=("surprise",))
    llm.generate(ASKED[:2], greedy(4))
    values_RS = llm.engine.signals.values_RS
    assert values_RS.isfinite().any(0).tolist() == [
        name == "surprise" for name in (*LOGIT_SIGNALS, *ATTENTION_SIGNALS)
    ]


def test_load_is_that_of_the_step() -> None:
    """The load of the step before, or of the end of the step."""
    llm, router = recording(("queue_depth", "pool_use"), max_num_seqs=2, num_kv_slots=200)
    seen: list[tuple[float, float]] = []
    for index, prompt in enumerate(ASKED[3:8]):
        llm.engine.add_request(str(index), prompt, greedy(4))
    plan = llm.engine.scheduler.schedule

    def watched() -> Any:
        found = plan()
        seen.append((len(llm.engine.scheduler.waiting), llm.engine.pool.used / 200))
        return found

    llm.engine.scheduler.schedule = watched  # type: ignore[method-assign]
    run_all(llm)
    told = {tuple(value) for values in router.seen.values() for value in values}
    assert len(told) > 3
    for depth, use in told:
        assert any(depth == d and abs(use - u) < 1e-6 for d, u in seen), (depth, use)
    assert {0.0, 1.0, 3.0} <= {depth for depth, _ in told}


def test_measured_errors_reach_the_router() -> None:
    """A table that is fed and never read; zeros before anything was measured."""
    llm, router = recording(("error_history",))
    with pytest.raises(
        ValueError, match=r"no measurements yet: call engine\.signals\.record_error"
    ):
        llm.generate(ASKED[3:5], greedy(4))
    ids = torch.arange(384)
    llm.engine.signals.record_error(ids, ids / 100)
    (output,) = llm.generate(ASKED[3:4], greedy(4))
    fed = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    got_N = router.values_of(fed, len(output.prompt_token_ids))[:, 0]
    batch = sequence_batch(fed[-3:])
    assert_close(got_N, llm.engine.signals.mean_error(batch))
    with pytest.raises(ValueError, match=r"errors must be finite and not negative, got -1\.0"):
        llm.engine.signals.record_error(torch.tensor([1]), torch.tensor([-1.0]))


@pytest.mark.parametrize(
    ("features", "why"), [(("error_history",), "history"), (("queue_depth",), "load")]
)
def test_what_may_change_is_not_shared(
    features: tuple[str, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Decisions of another moment, taken over with another request's prompt."""
    llm, _ = recording(features, prefix_sharing=True, prefix_block=8)
    assert f"prefix_sharing has no effect: router recorder depends on {why}" in caplog.text
    llm.engine.signals.record_error(torch.tensor([5]), torch.tensor([0.5]))
    for _ in range(2):
        llm.generate([ASKED[2]], greedy(3))
    assert llm.engine.stats.shared_tokens == 0


def test_a_prompt_is_shared_by_a_router_of_logits() -> None:
    """Prompts refused to others for what concerns generated tokens alone; decisions changed by sharing."""
    outputs = []
    for sharing in (False, True):
        options = EngineOptions(prefix_sharing=sharing)
        llm = LLM(tiny(), router=EntropyRouter(5.2), executors=twin(), options=options)
        outputs.append([llm.generate([ASKED[2]], greedy(12))[0].outputs[0] for _ in range(2)])
        assert (llm.engine.stats.shared_tokens > 0) == sharing
    alone, shared = outputs
    assert [o.routes for o in alone] == [o.routes for o in shared]
    assert [o.token_ids for o in alone] == [o.token_ids for o in shared]
    assert set(alone[0].routes) == {0, 1, -1}
