"""Guards against arrivals of another rate or burstiness, and mixtures with other shares than they say."""

from collections import Counter
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

import pytest

from tokenrouter.workloads import (
    DEFAULT_PROMPTS,
    GammaRequests,
    PoissonRequests,
    RequestKind,
    SeedMix,
    UniformRequests,
)
from tokenrouter.workloads.prompts import CODE_PROMPTS
from tokenrouter.workloads.synthetic import gamma_arrivals, quotas

RANGES = {"prompt_min": 5, "prompt_max": 90, "output_min": 2, "output_max": 9}
TEXT = range(300, 5300)


def _encode(text: str) -> list[int]:
    return list(text.encode())


def _gamma(**changes: Any) -> GammaRequests:
    return GammaRequests(
        **({"num_requests": 40, "rate_requests_s": 2.0, "cv": 3.0} | RANGES | changes)
    )


def _kind(name: str, share: float, **changes: Any) -> RequestKind:
    return RequestKind(**({"name": name, "share": share} | RANGES | changes))


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_burstiness(cv: float) -> None:
    """Shape and scale of the distribution the wrong way round: the mean gap is right at a cv of 1 only."""
    arrivals = gamma_arrivals(40_000, 5.0, cv, seed=0)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert len(arrivals) == 40_000 and arrivals[0] == 0.0
    assert mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.06)


def test_poisson_is_gamma_with_a_cv_of_one() -> None:
    poisson = PoissonRequests(num_requests=40, rate_requests_s=2.0, **RANGES)
    assert poisson.build(_encode, TEXT) == _gamma(cv=1.0).build(_encode, TEXT)


def test_burstiness_changes_times_alone() -> None:
    """Lengths drawn from the same stream as the gaps: two runs would differ in their work, too."""
    smooth, bursty = (_gamma(cv=cv).build(_encode, TEXT).requests for cv in (0.5, 3.0))
    assert [r.prompt_ids for r in smooth] == [r.prompt_ids for r in bursty]
    assert [r.params for r in smooth] == [r.params for r in bursty]
    assert [r.arrival_s for r in smooth] != [r.arrival_s for r in bursty]


def test_lengths_stay_in_their_ranges_and_reach_both_ends() -> None:
    built = _gamma(num_requests=600).build(_encode, TEXT)
    prompts = {len(r.prompt_ids) for r in built.requests}
    outputs = {r.max_output_tokens for r in built.requests}
    assert (min(prompts), max(prompts)) == (5, 90) and outputs == set(range(2, 10))


def test_prompts_open_with_our_own_and_go_on_with_the_text() -> None:
    long = _gamma(prompt_min=400, prompt_max=400).build(_encode, TEXT).requests
    for index, request in enumerate(long):
        opening = _encode(DEFAULT_PROMPTS[index % len(DEFAULT_PROMPTS)])
        assert list(request.prompt_ids[: len(opening)]) == opening
        tail = request.prompt_ids[len(opening) :]
        assert all(later - earlier == 1 for earlier, later in pairwise(tail))


def test_uniform_requests_are_equal_and_arrive_at_once() -> None:
    uniform = UniformRequests(num_requests=6, prompt_tokens=50, output_tokens=7)
    built = uniform.build(_encode, TEXT)
    assert {(len(r.prompt_ids), r.max_output_tokens, r.arrival_s) for r in built.requests} == {
        (50, 7, 0.0)
    }
    assert built.is_uniform and len({r.prompt_ids for r in built.requests}) == 6


def test_a_gap_spreads_them_and_is_not_uniform_any_more() -> None:
    options = {"num_requests": 4, "prompt_tokens": 50, "output_tokens": 7, "gap_s": 0.5}
    built = UniformRequests(**options, rate_scale=4.0).build(_encode, TEXT)
    assert [r.arrival_s for r in built.requests] == [0.0, 0.125, 0.25, 0.375]
    assert not built.is_uniform


def test_a_rate_without_effect_warns() -> None:
    with pytest.warns(UserWarning, match=r"rate_scale=2\.0 has no effect.*workload\.gap_s"):
        UniformRequests(num_requests=2, prompt_tokens=5, output_tokens=7, rate_scale=2.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_mixture_has_its_shares_in_another_order_for_each_seed(seed: int) -> None:
    """Kinds drawn one by one: one seed has three documents, another none."""
    kinds = [
        _kind("a", 3.0, prompt_min=1, prompt_max=9),
        _kind("b", 1.0, prompt_min=20, prompt_max=29),
        _kind("c", 1.0, prompt_min=40, prompt_max=49),
    ]
    options = {"num_requests": 21, "rate_requests_s": 2.0, "kinds": kinds}
    built = SeedMix(**options, seed=seed).build(_encode, TEXT)
    order = ["abc"[len(r.prompt_ids) // 20] for r in built.requests]
    assert Counter(order) == {"a": 13, "b": 4, "c": 4} and order != sorted(order)
    other = SeedMix(**options, seed=seed + 1).build(_encode, TEXT)
    assert order != ["abc"[len(r.prompt_ids) // 20] for r in other.requests]


def test_code_opens_with_code_and_documents_with_the_text() -> None:
    kinds = [_kind("code", 1.0, opening="code", prompt_min=90)]
    code = SeedMix(num_requests=9, rate_requests_s=1.0, kinds=kinds).build(_encode, TEXT)
    starts = [bytes(i for i in r.prompt_ids if i < 256).decode() for r in code.requests]
    assert all(any(c.startswith(s) or s == c for c in CODE_PROMPTS) for s in starts)
    assert 4 <= len(CODE_PROMPTS) < len(DEFAULT_PROMPTS)
    plain = SeedMix(num_requests=9, rate_requests_s=1.0, kinds=[_kind("doc", 1.0)])
    assert all(min(r.prompt_ids) >= 300 for r in plain.build(_encode, TEXT).requests)


def test_quotas_sum_up_and_follow_the_shares() -> None:
    assert quotas([0.6, 0.2, 0.2], 20) == [12, 4, 4]
    assert quotas([1, 1, 1], 7) == [3, 2, 2] and quotas([0.9, 0.05, 0.05], 3) == [3, 0, 0]
    assert all(sum(quotas([0.61, 0.24, 0.15], n)) == n for n in range(60))


@pytest.mark.parametrize(
    "make",
    [
        lambda: _gamma(cv=0.0),
        lambda: _gamma(rate_requests_s=-1.0),
        lambda: _gamma(prompt_min=0),
        lambda: _gamma(output_min=10),
        lambda: UniformRequests(num_requests=2, prompt_tokens=0, output_tokens=1),
        lambda: UniformRequests(num_requests=2, prompt_tokens=1, output_tokens=1, gap_s=-0.1),
        lambda: SeedMix(num_requests=2, rate_requests_s=1.0, kinds=[]),
        lambda: SeedMix(num_requests=2, rate_requests_s=0.0, kinds=[_kind("a", 1.0)]),
        lambda: _kind("a", 0.0),
        lambda: _kind("a", 1.0, opening="poem"),
    ],
)
def test_impossible_options_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^workload\."):
        make()
