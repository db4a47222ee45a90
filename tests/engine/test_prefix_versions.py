"""Guards prefix sharing against changes of the router between steps, and against layer groups that keep differently.

N entries of a request.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.prefix_tools import BASE, cold, warm
from tests.engine.tools import greedy, prompts, run_all, tiny, twin
from tests.engine.watched import Watched, assert_same
from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.throughput import RequestSpec, run_requests
from tokenrouter.kvcache.retention import Entries, RetentionOptions, RetentionPolicy
from tokenrouter.routers import RandomRouter


def test_a_router_that_is_back_at_its_first_version_shares_nothing_of_the_other() -> None:
    """Decisions of a version that held for one step only, kept under the version before and after: a block that three
    steps computed was compared at its end alone."""
    router = RandomRouter(0.5)
    watched = Watched(warm(None, router, max_num_batched_tokens=3, max_num_seqs=2))
    watched.add("mixed", BASE[:40], BASE[:5])
    for seed in (0, 7, 0):
        router.seed = seed
        watched.llm.engine.step()
    run_all(watched.llm)
    expected = Watched(cold(None, RandomRouter(0.5)))
    for one in (watched, expected):
        one.run("after", BASE[:40], BASE[:5])
    assert_same(watched, expected, "after")


def test_decisions_of_a_step_that_failed_are_not_kept_under_a_later_version() -> None:
    """A request whose tokens were decided, whose forward raised and that was then preempted: it had not run, took the
    key of the next version and kept decisions of the old one."""
    router = RandomRouter(0.5)
    order = {"phase_order": "prefill_first", "max_phase_wait_steps": 1}
    watched = Watched(warm(None, router, num_kv_slots=60, max_num_seqs=2, **order))
    engine = watched.llm.engine
    watched.add("old", BASE[60:79], BASE[:12])
    for _ in range(2):
        engine.step()
    prompt = BASE[: 60 - engine.pool.used]
    watched.add("decided", prompt, BASE[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._parts.runner, "run", _raises)
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
    engine.step()
    request = watched.requests["decided"]
    assert request.num_preemptions == 1 and request.num_run == 0 and request.requested_N[0] >= 0
    router.seed = 7
    run_all(watched.llm)
    expected = Watched(cold(None, RandomRouter(0.5, seed=7)))
    for one in (watched, expected):
        one.run("after", prompt, BASE[:5])
    assert_same(watched, expected, "after")


def _raises(*_: Any) -> Any:
    raise RuntimeError("injected")


class Lopsided(RetentionPolicy):
    """Keeps everything in every other layer group, and what is guarded in the others."""

    name = "lopsided"
    needs = frozenset()

    def __init__(self) -> None:
        self._calls = 0

    def keep(self, entries: Entries, is_guarded_N: Tensor) -> Tensor:
        self._calls += 1
        return torch.ones_like(is_guarded_N) if self._calls % 2 else is_guarded_N


def test_a_prefix_is_counted_in_the_group_where_it_fits_least() -> None:
    """Entries of one layer group and idle slots of another, which are never true together: a request was admitted that
    did not fit, the step raised, and the request was lost."""
    retention = RetentionOptions(policy=Lopsided(), interval=32, sinks=0, recent=2, groups=2)
    options = EngineOptions(
        num_kv_slots=60, max_num_batched_tokens=64, retention=retention, prefix_sharing=True
    )
    watched = Watched(LLM(tiny(), executors=twin(), options=options))
    watched.run("first", BASE[:33], BASE[:1])
    watched.add("beside", BASE[40:60], BASE[:8])
    watched.llm.engine.step()
    watched.add("again", BASE[:48], BASE[:2])
    run_all(watched.llm)
    assert len(watched.logits["again"]) == 3


def test_passes_share_nothing_with_passes_before() -> None:
    """A pass over prompts that the warm-up or the pass before has cached to their ends: it measures no prefill."""
    options = EngineOptions(prefix_sharing=True, prefix_block=8)
    llm = LLM(tiny(), executors=twin(), options=options)
    requests = [RequestSpec(prompt_ids=p, params=greedy(4)) for p in prompts(seed=3)[:12]]
    first, second = (run_requests(llm, requests) for _ in range(2))
    assert first.stats.shared_tokens == second.stats.shared_tokens
