"""Guards layer groups: layers that judge by their own attention, keep their own tokens and read nobody else's.

N tokens of a request, V vocabulary, G layer groups.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.tools import greedy, prompts, routed_logits, run_all, tiny, tokens
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.kvcache.retention import (
    Entries,
    HeavyHitter,
    KeyNorm,
    ObservationWindow,
    RetentionOptions,
    RetentionPolicy,
    SinkWindow,
)
from tokenrouter.scheduler import Request
from tokenrouter.scheduler.request import NEVER

POLICIES: list[RetentionPolicy] = [HeavyHitter(), ObservationWindow(pool_size=3), KeyNorm()]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)


def make(policy: RetentionPolicy, groups: int, **options: Any) -> LLM:
    """Decisions at every eighth token, from the attention of all four layers."""
    retention = RetentionOptions(
        policy=policy, interval=8, window=4, layers=4, groups=groups, sinks=2, recent=3
    )
    asked = {"max_num_batched_tokens": 64, "retention": retention} | options
    return LLM(tiny(), options=EngineOptions(**asked))


def serve(llm: LLM, cases: dict[str, tuple[Sequence[int], Sequence[int]]]) -> dict[str, Request]:
    """Runs forced requests; each keeps its logits from the prompt's last token on in ``rows``."""
    found: dict[str, Request] = {}
    for name, (prompt, forced) in cases.items():
        llm.engine.add_request(
            name, prompt, SamplingParams(), forced_ids=forced, logits_sink=sink_of(name, llm)
        )
        found |= {r.request_id: r for r in llm.engine.scheduler.waiting if r.request_id == name}
    run_all(llm)
    return found


ROWS: dict[tuple[int, str], list[Tensor]] = {}


def sink_of(name: str, llm: LLM) -> Callable[[int, Tensor], None]:
    rows = ROWS[id(llm), name] = []
    return lambda _, logits_RV: rows.append(logits_RV.clone())


def logits(llm: LLM, name: str) -> Tensor:
    return torch.cat(ROWS[id(llm), name])


CASES = {str(i): (prompts()[i], prompts(seed=5)[i][:30]) for i in range(7)}


@every_policy
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_each_layer_sees_what_its_group_kept(policy: RetentionPolicy, groups: int) -> None:
    """The slots, positions or evictions of another group; a statistic that is divided by all layers."""
    llm = make(policy, groups)
    requests = serve(llm, CASES)
    group_of = [layer * groups // 4 for layer in range(4)]
    num_evicted = num_differing = 0
    for name, (prompt, forced) in CASES.items():
        ids = [*prompt, *forced]
        evicted_at_GN = requests[name].evicted_at_GN
        assert evicted_at_GN is not None and len(evicted_at_GN) == groups
        query_N1, key_1N = torch.arange(len(ids))[:, None], torch.arange(len(ids))

        def mask_of(
            layer: int, at_GN: Any = evicted_at_GN, q: Any = query_N1, k: Any = key_1N
        ) -> Tensor:
            at_N = torch.from_numpy(at_GN[group_of[layer]])[: len(k)]
            return (k <= q) & (q < at_N)

        dense_NV = routed_logits(ids, lambda t, layer: "high", lambda t: "high", mask_of)
        assert_close(logits(llm, name), dense_NV[len(prompt) - 1 :], rtol=1e-4, atol=1e-4)
        num_evicted += int((evicted_at_GN != NEVER).sum())
        num_differing += int((evicted_at_GN != evicted_at_GN[:1]).any(axis=0).sum())
    assert num_evicted > 100 * groups and num_differing > 30
    assert llm.engine.stats.evicted_entries == num_evicted


@every_policy
def test_groups_survive_company_sharing_and_preemption(policy: RetentionPolicy) -> None:
    """A group that is left out when a prefix is shared, swapped or freed."""
    alone = make(policy, 2)
    expected = {name: serve(alone, {name: case})[name] for name, case in CASES.items()}
    tight = make(
        policy,
        2,
        num_kv_slots=110,
        max_num_seqs=6,
        num_host_slots=200,
        prefix_sharing=True,
    )
    twice = CASES | {f"{name} again": case for name, case in CASES.items()}
    num_differing = 0
    for name, request in serve(tight, twice).items():
        original = name.removesuffix(" again")
        ours, theirs = request.evicted_at_GN, expected[original].evicted_at_GN
        assert ours is not None and theirs is not None
        if (ours != theirs).any():  # scores that differ in the last bit may rank another entry last
            num_differing += 1
            continue
        assert_close(logits(tight, name), logits(alone, original), rtol=1e-4, atol=1e-4)
    assert num_differing <= 1
    assert tight.engine.stats.shared_tokens > 40 and tight.engine.stats.num_preemptions > 0


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
        return torch.ones_like(is_guarded_N) if self.num_calls % 2 else is_guarded_N


def test_bytes_are_those_of_all_groups() -> None:
    """The fullest group's entries counted for all layers: nothing seems to be saved."""
    llm = make(Uneven(), 2, max_num_seqs=1)
    llm.engine.add_request("0", prompts()[2], greedy(8))
    whole = len(prompts()[2]) * llm.engine.kv_bytes_per_slot
    run_all(llm)
    assert llm.engine.stats.peak_full_bytes >= whole
    assert llm.engine.stats.peak_live_bytes < 0.75 * llm.engine.stats.peak_full_bytes
