"""Guards layer groups: layers that judge by their own attention, keep their own tokens and read nobody else's.

N tokens of a request, V vocabulary, G layer groups.
"""

from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.testing import assert_close

from tests.engine.retention_cases import SHIPPED, options, short
from tests.engine.tools import greedy, prompts, routed_logits, run_all, tiny, tokens
from tests.engine.watched import Watched, seen_mask
from tokenrouter import LLM, EngineOptions
from tokenrouter.kvcache.retention import (
    Entries,
    HeavyHitter,
    RetentionOptions,
    RetentionPolicy,
    SinkWindow,
)
from tokenrouter.scheduler.request import NEVER

POLICIES = {
    name: retention.policy
    for name, retention in SHIPPED.items()
    if {"attention", "key_norm"} & retention.policy.needs
}
"""Those whose groups see different things."""
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def make(policy: RetentionPolicy, groups: int, **changes: Any) -> LLM:
    """Decisions at every eighth token, from the attention of all four layers."""
    retention = short(policy, layers=4, groups=groups)
    return LLM(tiny(), options=options(retention, **changes))


CASES = {str(i): (prompts()[i], prompts(seed=5)[i][:30]) for i in range(7)}


@every_policy
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_each_layer_sees_what_its_group_kept(policy: RetentionPolicy, groups: int) -> None:
    """The slots, positions or evictions of another group; a statistic that is divided by all layers."""
    watched = Watched(make(policy, groups))
    watched.serve(CASES)
    group_of = [layer * groups // 4 for layer in range(4)]
    num_evicted = num_differing = 0
    for name, (prompt, forced) in CASES.items():
        ids = [*prompt, *forced]
        at_GN = watched.requests[name].evicted_at_GN
        assert at_GN is not None and len(at_GN) == groups
        masks = [seen_mask(len(ids), at_N.tolist()) for at_N in at_GN]

        def mask_of(layer: int, masks: list[Tensor] = masks) -> Tensor:
            return masks[group_of[layer]]

        dense_NV = routed_logits(ids, lambda t, layer: "high", lambda t: "high", mask_of)
        expected_RV = dense_NV[len(prompt) - 1 :]
        assert_close(watched.logits_of(name), expected_RV, rtol=1e-4, atol=1e-4)
        num_evicted += int((at_GN != NEVER).sum())
        num_differing += int((at_GN != at_GN[:1]).any(axis=0).sum())
    assert num_evicted > 100 * groups and num_differing > 30
    assert watched.llm.engine.stats.evicted_entries == num_evicted


@every_policy
def test_groups_survive_company_sharing_and_preemption(policy: RetentionPolicy) -> None:
    """A group that is left out when a prefix is shared, swapped or freed."""
    alone = Watched(make(policy, 2))
    for name, case in CASES.items():
        alone.run(name, *case)
    is_bounded = policy.max_kept(100) < 100
    memory = {"num_kv_slots": 116 if is_bounded else 122, "num_host_slots": 200}
    tight = Watched(make(policy, 2, max_num_seqs=6, prefix_sharing=True, **memory))
    twice = CASES | {f"{name} again": case for name, case in CASES.items()}
    tight.serve(twice)
    num_differing = 0
    for name in twice:
        original = name.removesuffix(" again")
        ours, theirs = (w.requests[n].evicted_at_GN for w, n in ((tight, name), (alone, original)))
        assert ours is not None and theirs is not None
        if (ours != theirs).any():  # scores that differ in the last bit may rank another entry last
            num_differing += 1
            continue
        assert_close(tight.logits_of(name), alone.logits_of(original), rtol=1e-4, atol=1e-4)
    assert num_differing <= 1
    stats = tight.llm.engine.stats
    assert stats.shared_tokens > 40 and stats.num_preemptions > 0


def test_groups_that_decide_alike_change_nothing() -> None:
    """More tables, and another result where every group keeps the same."""
    one, many = (make(SinkWindow(), groups) for groups in (1, 4))
    outputs = [[tokens(o) for o in llm.generate(prompts()[:8], greedy(30))] for llm in (one, many)]
    assert outputs[0] == outputs[1]
    assert many.engine.stats.evicted_entries == 4 * one.engine.stats.evicted_entries > 0


def test_groups_that_no_model_has_are_refused() -> None:
    """More groups than layers; a group whose attention nobody watches."""
    with pytest.raises(ValueError, match="groups=5 must be at most 4, the model's layers"):
        make(HeavyHitter(), 5)
    with pytest.raises(ValueError, match="groups must be at least 1"):
        make(HeavyHitter(), 0)
    retention = RetentionOptions(policy=HeavyHitter(), layers=[0, 1], groups=2)
    with pytest.raises(ValueError, match="observes no layer of group 1"):
        LLM(tiny(), options=EngineOptions(retention=retention))
    assert np.unique(RetentionOptions(policy=HeavyHitter(), groups=3).layer_groups(7)).tolist() == [
        0,
        1,
        2,
    ]


class Uneven(RetentionPolicy):
    """The first group keeps everything, the second what is guarded."""

    name = "uneven"

    def __init__(self) -> None:
        self.num_calls = 0

    def keep(self, entries: Entries, is_guarded_N: Tensor) -> Tensor:
        self.num_calls += 1
        return is_guarded_N | True if self.num_calls % 2 else is_guarded_N


def test_bytes_are_those_of_all_groups() -> None:
    """The fullest group's entries counted for all layers: nothing seems to be saved."""
    llm = make(Uneven(), 2, max_num_seqs=1)
    llm.engine.add_request("0", prompts()[2], greedy(8))
    whole = len(prompts()[2]) * llm.engine.kv_bytes_per_slot
    run_all(llm)
    assert llm.engine.stats.peak_full_bytes >= whole
    assert llm.engine.stats.peak_live_bytes < 0.75 * llm.engine.stats.peak_full_bytes
