"""Guards retention in the engine: logits are those of a dense run where query q sees key k iff k <= q < evicted_at[k].

N tokens of a request, V vocabulary.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.faults import step_to_the_end
from tests.engine.retention_cases import (
    CONFIGS,
    INTERVAL,
    NOTHING,
    PLAIN,
    SHIPPED,
    config_options,
    every_policy,
    every_shipped,
    options,
    short,
    with_options,
)
from tests.engine.tools import greedy, prompts, routed_logits, tiny, tokens
from tests.engine.watched import Watched, dense_logits
from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import build_pool
from tokenrouter.kvcache.retention import (
    Entries,
    Full,
    HeavyHitter,
    RetentionOptions,
    RouteClass,
    SinkWindow,
)
from tokenrouter.scheduler.request import NEVER


def test_every_config_is_compared_with_a_dense_run() -> None:
    """A listing that finds no files, and proves nothing about any."""
    assert {*SHIPPED} | {*PLAIN} == {*CONFIGS} and {"full", "int8"} <= {*PLAIN}
    assert len(SHIPPED) >= 7


@every_policy
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_a_dense_run_with_the_same_gaps(
    retention: RetentionOptions, backend: str, family: str
) -> None:
    """RoPE at the number kept instead of the position, an entry read after it was evicted, a token written to the slot
    of an entry that is still there, a mask shifted by one."""
    assert (retention.groups, retention.compress) == (1, None), "this oracle has one float32 group"
    model = tiny(family)
    executors = build_pool("full", model, kernels=backend)
    watched = Watched(LLM(model, executors=executors, options=options(retention)))
    cases = {str(i): (p, prompts(seed=5)[i][:40]) for i, p in enumerate(prompts()[:7])}
    watched.serve(cases, wants_all_logits=True)
    num_evicted = 0
    for name, (prompt, forced) in cases.items():
        ids, evicted_at = [*prompt, *forced], watched.evicted_at(name)
        got_NV = watched.logits_of(name)
        assert len(got_NV) == len(ids)
        assert_close(got_NV, dense_logits(family, ids, evicted_at), rtol=1e-4, atol=1e-4)
        evicted = [(k, at) for k, at in enumerate(evicted_at) if at != NEVER]
        assert all(at % INTERVAL == 0 and at >= k + 3 for k, at in evicted)
        assert not [k for k, _ in evicted if k < 2], "a sink was evicted"
        num_evicted += len(evicted)
    assert num_evicted > 100
    assert watched.llm.engine.stats.evicted_entries == num_evicted


@pytest.mark.parametrize("config", PLAIN)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_logits_of_a_config_without_a_policy_are_those_of_a_dense_run(
    config: str, backend: str
) -> None:
    """An entry that is lost or rounded where nothing may be; int8 scales of another token, head or plane."""
    shipped = config_options(config)
    executors = build_pool("full", tiny(), kernels=backend)
    watched = Watched(LLM(tiny(), executors=executors, options=shipped))
    cases = {str(i): (p, prompts(seed=5)[i][:40]) for i, p in enumerate(prompts()[:7])}
    watched.serve(cases, wants_all_logits=True)
    is_int8, differences = shipped.kv_cache_dtype == "int8", []
    for name, (prompt, forced) in cases.items():
        ids, got_NV = [*prompt, *forced], watched.logits_of(name)
        assert watched.evicted_at(name) == [] and len(got_NV) == len(ids)
        exact_NV = dense_logits("llama", ids, [])
        if not is_int8:
            assert_close(got_NV, exact_NV, rtol=1e-4, atol=1e-4)
            continue
        rounded_NV = routed_logits(
            ids, lambda t, layer: "high", lambda t: "high", entries_are_int8=True
        )
        differences.append([float((got_NV - x_NV).abs().mean()) for x_NV in (rounded_NV, exact_NV)])
    assert watched.llm.engine.stats.evicted_entries == 0
    if is_int8:  # a last bit may flip a rounding, and does so rarely
        from_rounded, from_exact = np.mean(differences, axis=0)
        assert from_rounded < 0.1 * from_exact


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "tokens one by one": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "preempted": {"max_num_seqs": 8},
    "static": {"scheduler": "static_batch", "max_num_seqs": 6, "static_batch_size": 6},
}


@every_policy
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_is_evicted_whatever_happens_around(
    retention: RetentionOptions, setting: str
) -> None:
    """Decisions that depend on company, chunk sizes, or on whether a token ran in prefill, decode or a recompute."""
    changes = SETTINGS[setting]
    if setting == "preempted":
        is_small = retention.policy.max_kept(400) <= 50
        changes = changes | {"num_kv_slots": 40 if is_small else 122}
    first, second = (
        Watched(
            LLM(tiny(), executors=build_pool("full", tiny()), options=options(retention, **more))
        )
        for more in ({}, changes)
    )
    cases = {str(i): (p, prompts(seed=5)[i][:30]) for i, p in enumerate(prompts()[:8])}
    for watched in (first, second):
        watched.serve(cases, wants_all_logits=True)
    num_evicted = num_differing = 0
    for name in cases:
        ours, theirs = np.array(first.evicted_at(name)), np.array(second.evicted_at(name))
        num_evicted += int((ours != NEVER).sum())
        if (ours != theirs).any():  # scores that differ in the last bit may rank another entry last
            num_differing += int((ours != theirs).sum())
            continue
        assert_close(first.logits_of(name), second.logits_of(name), rtol=1e-4, atol=1e-4)
    assert num_evicted > 100 and num_differing <= 4
    if setting == "preempted":
        assert second.llm.engine.stats.num_preemptions > 0


@every_shipped
def test_evicting_nothing_is_bit_equal_to_full(retention: RetentionOptions) -> None:
    """Another order of sums, or positions read from the table, where nothing is missing."""
    idle = short(with_options(retention.policy, NOTHING))
    asked = {"max_num_seqs": 1, "max_num_batched_tokens": INTERVAL}
    results = []
    for kept in (None, short(Full()), idle):  # without retention such a step ends chunks alike
        watched = Watched(LLM(tiny(), options=options(kept, **asked)))
        cases = {str(i): (p, prompts(seed=5)[i][:30]) for i, p in enumerate(prompts()[:6])}
        watched.serve(cases, wants_all_logits=True)
        stats = watched.llm.engine.stats
        assert stats.evicted_entries == 0 and (kept is None or stats.retention_decisions > 20)
        results.append(torch.cat([watched.logits_of(name) for name in cases]))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_policy_that_raises_stops_no_request() -> None:
    """Tokens computed and never accepted: the request is then neither in decode nor in prefill, and never ends."""

    class Broken(SinkWindow):
        num_calls = 0

        def keep(self, entries: Entries, is_guarded_N: Tensor) -> Tensor:
            self.num_calls += 1
            if self.num_calls in (2, 5):
                raise RuntimeError("injected")
            return super().keep(entries, is_guarded_N)

    llm = LLM(tiny(), options=options(Broken()))
    for index in range(3):
        llm.engine.add_request(str(index), prompts()[index], greedy(20))
    last, failures = step_to_the_end(llm)
    num_tokens = {request_id: len(tokens(output)) for request_id, output in last.items()}
    assert failures == 2 and num_tokens == dict.fromkeys("012", 20)


def test_refusals() -> None:
    """A policy that judges entries by layers that it never looks at, or routes that the router does not have."""
    retention = RetentionOptions(policy=HeavyHitter(), layers=(7,))
    with pytest.raises(ValueError, match="layers of 0 to 3"):
        LLM(tiny(), options=EngineOptions(retention=retention))
    with pytest.raises(ValueError, match="classes names the routes fast"):
        LLM(tiny(), options=options(RouteClass(classes={"fast": "normal"})))
