"""Guards requests that evict against what was before and beside them: the same request gives and loses the same."""

from typing import Any

import pytest

from tests.engine.retention_cases import every_policy, options
from tests.engine.tools import greedy, prompts, run_all, tiny, tokens
from tests.engine.watched import Watched, assert_same
from tokenrouter import LLM, SamplingParams
from tokenrouter.kvcache.retention import RetentionOptions

PARAMS = {
    "greedy": greedy(40),
    "sampled": SamplingParams(temperature=0.9, seed=11, max_tokens=40, ignore_eos=True),
}
PROMPT = prompts()[2]


def make(retention: RetentionOptions, **changes: Any) -> Watched:
    return Watched(LLM(tiny(), options=options(retention, **changes)))


def given(watched: Watched, name: str, params: SamplingParams, num_beside: int = 0) -> Any:
    """Output, and when which entry was evicted, of one request behind ``num_beside`` others."""
    for index in range(3, 3 + num_beside):
        watched.ask(f"{name}, beside {index}", prompts()[index], greedy(30 + index))
    watched.ask(name, PROMPT, params)
    return tokens(run_all(watched.llm)[name]), watched.evicted_at(name)


@every_policy
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_same_request_gives_the_same_output_and_loses_the_same_entries(
    retention: RetentionOptions, params: SamplingParams
) -> None:
    """A decision that depends on what ran before, on company, on the chunk size, or on a recompute."""
    engine = make(retention)
    expected = given(engine, "first", params)
    assert engine.num_evicted("first") > 20
    assert given(engine, "twice in one engine", params) == expected
    assert given(engine, "beside others", params, num_beside=4) == expected
    small = make(retention, max_num_batched_tokens=5, max_num_seqs=2)
    assert given(small, "other chunks", params, num_beside=1) == expected
    # Room for this request and little more, and it came last: it is the one to give way.
    slots = max(60, retention.max_live(len(PROMPT) + 40) + 20)
    tight = make(retention, num_kv_slots=slots, max_num_seqs=8)
    assert given(tight, "preempted", params, num_beside=6) == expected
    assert tight.requests["preempted"].num_preemptions > 0
    assert tight.llm.engine.stats.reused_tokens > 0, "nothing was computed again"


@every_policy
def test_no_state_leaks_from_the_request_before_in_the_same_row_and_slots(
    retention: RetentionOptions,
) -> None:
    """State leaking between requests: evictions, statistics, draws or positions of the one that had the row before."""
    used, fresh = (make(retention, max_num_seqs=1, num_kv_slots=124) for _ in range(2))
    case = prompts(seed=5)[2], prompts(seed=5)[4][:30]
    slots: dict[str, set[int]] = {}
    table, rows = used.llm.engine.pool.tables[0], set()

    def note(name: str) -> None:
        for request in used.llm.engine.scheduler.running:
            row = request.row
            rows.add(row)
            slots.setdefault(name, set()).update(
                table.slots_RN[row, : table.num_kept_R[row]].tolist()
            )

    for name, former in (("former", prompts()[2]), ("other", prompts()[4])):
        used.serve({name: (former, prompts(seed=5)[3][:30])}, lambda name=name: note(name))
    used.serve({"again": case}, lambda: note("again"))
    fresh.serve({"again": case})
    assert len(rows) == 1 and slots["again"] & slots["former"] & slots["other"]
    assert used.num_evicted("former") > 20
    assert assert_same(used, fresh, "again") > 20
