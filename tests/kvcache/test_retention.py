"""Guards retention policies by hand-made entries: what is kept, in which numbers, and what statistics mean.

N entries of one request, oldest first.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenrouter.kvcache import retention
from tokenrouter.kvcache.retention import (
    CLASSES,
    Entries,
    EntryStatistics,
    Full,
    HeavyHitter,
    KeyNorm,
    Learned,
    ObservationWindow,
    Random,
    RetentionOptions,
    RetentionPolicy,
    RouteClass,
    ScoredPolicy,
    SinkWindow,
    Threshold,
)

SCORED = [HeavyHitter, KeyNorm, Learned, ObservationWindow, Random, RouteClass, SinkWindow]
NORMAL = CLASSES.index("normal")


def entries(num: int, num_seen: int | None = None, **fields: Tensor) -> Entries:
    """Entries that differ in everything; ``fields`` replace what a test is about."""
    generator = torch.Generator().manual_seed(num)

    def some() -> Tensor:
        return torch.rand(num, generator=generator)

    made = Entries(
        positions_N=torch.arange(num),
        num_seen=num if num_seen is None else num_seen,
        last_N=some(),
        mean_N=some(),
        key_norm_N=some(),
        draw_N=some(),
        class_N=torch.full((num,), NORMAL),
        ids_S=torch.randint(0, 50, (num if num_seen is None else num_seen,), generator=generator),
        depth=0.5,
    )
    return replace(made, **fields)


def nothing(num: int) -> Tensor:
    return torch.zeros(num, dtype=torch.bool)


def test_every_policy_is_exported_and_named_apart() -> None:
    """A policy that no config can name, or two under one name in a table."""
    found = [
        value
        for value in vars(retention).values()
        if isinstance(value, type)
        and issubclass(value, RetentionPolicy)
        and value not in (RetentionPolicy, ScoredPolicy)
    ]
    assert set(found) == {*SCORED, Full, Threshold}
    assert len({policy.name for policy in found}) == len(found)


@pytest.mark.parametrize("policy", SCORED, ids=lambda p: p.name)
@given(
    num=st.integers(1, 60),
    more=st.integers(0, 200),
    evicted_frac=st.floats(0, 0.99),
    max_entries=st.none() | st.integers(1, 80),
    guarded=st.sets(st.integers(0, 59)),
)
def test_budgets(
    policy: type[ScoredPolicy],
    num: int,
    more: int,
    evicted_frac: float,
    max_entries: int | None,
    guarded: set[int],
) -> None:
    """One too many or too few, a guarded entry that goes while an unguarded one stays."""
    made = policy(evicted_frac=evicted_frac, max_entries=max_entries)
    guarded_N = nothing(num)
    guarded_N[[g for g in guarded if g < num]] = True
    kept_N = made.keep(entries(num, num + more), guarded_N)
    allowed = made.max_kept(num + more)
    assert allowed <= (num + more if max_entries is None else max_entries)
    assert allowed >= (1 - evicted_frac) * (num + more) - 1e-6 or allowed == max_entries
    assert int(kept_N.sum()) == min(num, allowed)
    if int(guarded_N.sum()) <= allowed:
        assert bool(kept_N[guarded_N].all())


@pytest.mark.parametrize(
    ("policy", "field", "descending"),
    [
        (HeavyHitter(), "mean_N", True),
        (ObservationWindow(pool_size=1), "last_N", True),
        (KeyNorm(), "key_norm_N", False),
        (Random(), "draw_N", True),
        (SinkWindow(), "positions_N", True),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_what_a_policy_looks_at(policy: ScoredPolicy, field: str, descending: bool) -> None:
    """The wrong signal, or the wrong end of it."""
    given_N = entries(40)
    best = getattr(given_N, field).argsort(descending=descending)[:20]
    kept_N = policy.keep(given_N, nothing(40))
    assert sorted(best.tolist()) == kept_N.nonzero().flatten().tolist()


def test_of_equals_the_newer_stays() -> None:
    """An order that depends on the sort: a recompute would evict others."""
    kept_N = HeavyHitter().keep(entries(10, mean_N=torch.ones(10)), nothing(10))
    assert kept_N.tolist() == [False] * 5 + [True] * 5


def test_neighbours_share_what_the_window_looks_at() -> None:
    """A pool that shifts: the token before the one looked at goes with the crowd."""
    last_N = torch.zeros(20)
    last_N[7] = 1
    kept_N = ObservationWindow(evicted_frac=0.75, pool_size=5).keep(
        entries(20, last_N=last_N), nothing(20)
    )
    assert kept_N.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_the_newest_have_a_share_of_the_budget() -> None:
    """A share of the entries instead of the budget, or one that comes on top of it."""
    mean_N = torch.linspace(1, 0, 40)  # scores alone would keep the oldest
    for recent_frac, newest in ((0.0, 0), (0.5, 10), (0.8, 16), (1.0, 20)):
        policy = HeavyHitter(evicted_frac=0.5, recent_frac=recent_frac)
        kept_N = policy.keep(entries(40, mean_N=mean_N.clone()), nothing(40))
        expected = [*range(20 - newest), *range(40 - newest, 40)]
        assert kept_N.nonzero().flatten().tolist() == expected


def test_old_windows_fade() -> None:
    """A decay of the weights alone: the mean then shrinks with every window."""
    statistics, positions_N = EntryStatistics(decay=0.5), torch.arange(2)
    for weights in (torch.tensor([4.0, 0.0]), torch.tensor([0.0, 4.0])):
        statistics.add(weights.numpy())
        last_N, mean_N = statistics.close_window(positions_N, 10, 14)
        assert torch.equal(last_N, weights / 4)
    assert torch.allclose(mean_N, torch.tensor([2.0 / 6, 4.0 / 6]))


def test_thresholds_and_their_units() -> None:
    """0.01 means one in a hundred entries or a weight; they differ by the length of the request."""
    mean_N = torch.tensor([0.5, 0.2, 0.1, 0.02, 0.18])
    relative = Threshold(threshold=0.6, unit="relative").keep(entries(5, mean_N=mean_N), nothing(5))
    weight = Threshold(threshold=0.15, unit="weight").keep(entries(5, mean_N=mean_N), nothing(5))
    assert relative.tolist() == [True, True, False, False, True]
    assert weight.tolist() == [True, True, False, False, True]
    assert Threshold().max_kept(100) == 100


def test_classes_go_in_their_order() -> None:
    """A protected token that goes before one that may be dropped first."""
    class_N = torch.tensor([CLASSES.index(c) for c in ("drop_first", "normal", "compress") * 4])
    kept_N = RouteClass(evicted_frac=0.5).keep(entries(12, class_N=class_N), nothing(12))
    assert class_N[~kept_N].tolist().count(CLASSES.index("drop_first")) == 4
    assert NORMAL not in class_N[~kept_N].tolist()
    assert kept_N.tolist()[2::3] == [False, False, True, True]


def test_statistics_are_means_over_the_queries_that_could_see_an_entry() -> None:
    """A young entry judged by queries before it, a window in two pieces counted as two, totals of evicted entries."""
    statistics, positions_N = EntryStatistics(), torch.arange(8)
    statistics.add(np.array([2.0, 1.0, 0.5, 0.5], np.float32))
    statistics.add(np.array([1.0, 0.0, 0.0, 0.0, 2.0, 1.0], np.float32))
    last_N, mean_N = statistics.close_window(positions_N[:6], 1, 6)
    queries_N = torch.tensor([5.0, 5, 4, 3, 2, 1])
    expected_N = torch.tensor([3.0, 1.0, 0.5, 0.5, 2.0, 1.0]) / queries_N
    assert torch.equal(last_N, expected_N) and torch.equal(mean_N, expected_N)
    statistics.keep(torch.tensor([True, False, True, False, True, True]))
    left_N = torch.tensor([0, 2, 4, 5, 6, 7])
    statistics.add(np.array([0.5, 0.5, 0.0, 0.0, 0.5, 0.5], np.float32))
    last_N, mean_N = statistics.close_window(left_N, 6, 8)
    assert torch.equal(last_N, torch.tensor([0.25, 0.25, 0, 0, 0.25, 0.5]))
    assert torch.equal(mean_N, torch.tensor([3.5 / 7, 1 / 6, 2 / 4, 1 / 3, 0.25, 0.5]))


def test_a_window_that_nobody_reported_is_zero() -> None:
    """An entry that no query could see yet, judged by 0 / 0."""
    statistics = EntryStatistics()
    last_N, mean_N = statistics.close_window(torch.arange(3), 3, 3)
    assert torch.equal(last_N, torch.zeros(3)) and torch.equal(mean_N, torch.zeros(3))


def test_observed_layers() -> None:
    """Layers at one end only, or one twice; half a layer, which no forward ever reports."""
    options = RetentionOptions(policy=Full())
    assert options.observed_layers(30) == (3, 11, 18, 26)
    assert options.observed_layers(4) == (0, 1, 2, 3)
    assert replace(options, layers=9).observed_layers(3) == (0, 1, 2)
    assert replace(options, layers=(2, 0)).observed_layers(3) == (2, 0)
    for wrong in ((3,), (0, 3), (1, 1)):
        with pytest.raises(ValueError, match="must name different layers of 0 to 2"):
            replace(options, layers=wrong).observed_layers(3)
    for never in ((-1,), (), (0.5,), (True,), (float("nan"),), ("1",), "all", None, {1}):
        with pytest.raises(ValueError, match="layers"):
            replace(options, layers=never)  # type: ignore[arg-type]


@given(num_tokens=st.integers(1, 900), interval=st.integers(1, 90), frac=st.floats(0, 0.95))
def test_most_live_slots(num_tokens: int, interval: int, frac: float) -> None:
    """Admission that promises less than a request comes to hold, or its whole length though half of it goes."""
    options = RetentionOptions(policy=SinkWindow(evicted_frac=frac), interval=interval, window=1)
    kept = peak = 0
    for seen in range(1, num_tokens + 1):
        kept += 1
        peak = max(peak, kept)
        if seen % interval == 0 and seen < num_tokens:
            guarded = min(seen, options.sinks + options.recent)
            kept = min(kept, max(options.policy.max_kept(seen), guarded))
    assert peak <= options.max_live(num_tokens) <= num_tokens


def test_refusals() -> None:
    """Options that would evict nothing, everything, or never act, found out at the end of a run."""
    policy = HeavyHitter()
    for options, message in (
        ({"interval": 0}, "interval must be at least 1, got 0"),
        ({"interval": 8.5}, "interval must be an integer"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": 129}, "window=129 must be at most interval=128"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"sinks": 2**63}, "sinks must be at most 9007199254740992, got 9223372036854775808"),
        ({"sinks": 1.5}, "sinks must be an integer of at least 0, got 1.5"),
        ({"recent": 0}, "recent must be at least 1, got 0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"layers": True}, "layers must be an integer"),
        ({"layers": 2.0}, "layers must be an integer"),
        ({"decay": 0.0}, "decay=0.0 must be a number over 0"),
    ):
        with pytest.raises(ValueError, match=message):
            RetentionOptions(policy=policy, **options)  # type: ignore[arg-type]
    for make, message in (
        (lambda: HeavyHitter(evicted_frac=1.0), "must be a number of 0 to below 1"),
        (lambda: HeavyHitter(max_entries=0), "max_entries must be at least 1, got 0"),
        (lambda: HeavyHitter(max_entries=1.5), "max_entries must be an integer"),  # type: ignore[arg-type]
        (lambda: Threshold(threshold=float("nan")), "must be a number over 0"),
        (lambda: Threshold(threshold=float("inf")), "must be a number over 0"),
        (lambda: HeavyHitter(recent_frac=1.1), "recent_frac=1.1 must be a number of 0 to 1"),
        (lambda: Threshold(threshold=0), "must be a number over 0"),
        (lambda: Threshold(unit="share"), "must be 'weight' or 'relative'"),  # type: ignore[arg-type]
        (lambda: ObservationWindow(pool_size=4), "must be odd"),
        (lambda: RouteClass(classes={"low": "gone"}), "is no retention class"),  # type: ignore[dict-item]
    ):
        with pytest.raises(ValueError, match=message):
            make()
