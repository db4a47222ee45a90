"""Guards what is drawn: the sampler against a reference that handles one row with plain loops.

The reference takes the steps in the order that vLLM documents.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.draws import Drawer, sample
from tokenrouter.engine.sampler import Sampler
from tokenrouter.kernels import select
from tokenrouter.sampling_params import SamplingParams

NO_EOS: frozenset[int] = frozenset()


def reference_probs(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: frozenset[int] = NO_EOS,
) -> list[float]:
    x = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in {*eos, *params.stop_ids}:
            x[token] = -math.inf
    for token in range(len(x)):
        if token in prompt or token in output:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.greedy:
        return [float(i == order[0]) for i in range(len(x))]
    mass = [math.exp((v - x[order[0]]) / params.temperature) for v in x]
    kept = [i for i in order if mass[i] >= params.min_p and mass[i] > 0]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, seen, nucleus = sum(mass[i] for i in kept), 0.0, []
    for i in kept:
        if params.top_p < 1 and seen >= params.top_p * total and nucleus:
            break
        nucleus.append(i)
        seen += mass[i]
    total = sum(mass[i] for i in nucleus)
    return [mass[i] / total if i in nucleus else 0.0 for i in range(len(x))]


def draw_many(logits: Tensor, params: SamplingParams, num: int, **options: Any) -> Tensor:
    """Relative frequency of each token over ``num`` unseeded draws."""
    state = Drawer(params, options.get("prompt", ()))
    for token in options.get("output", ()):
        state.advance(token)
    sampler = Sampler(len(logits), options.get("seed", 0), options.get("kernels"))
    ids = sample(sampler, logits.expand(num, -1), [state] * num, options.get("eos", NO_EOS)).ids_B
    return torch.bincount(ids, minlength=len(logits)) / num


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 12},
        {"top_k": 500},
        {"top_p": 0.8},
        {"top_p": 0.8, "top_k": 3, "temperature": 1.5},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_p": 0.9, "top_k": 5},
        {"repetition_penalty": 1.5, "top_p": 0.95},
        {"frequency_penalty": 0.7, "presence_penalty": -0.5},
        {"logit_bias": {0: 2.0, 7: -100.0}},
        {"min_tokens": 4, "stop_token_ids": [3]},
    ],
)
def test_frequencies_are_the_reference_distribution(options: dict[str, Any], backend: str) -> None:
    """Any step left out, or in the wrong order, gives another distribution."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    prompt, output, eos = [2, 4, 4], [4, 5, 5], frozenset({1})
    params, num = SamplingParams(**options), 20_000
    expected = torch.tensor(reference_probs(logits.tolist(), params, prompt, output, eos))
    kernels = select(backend)
    found = draw_many(logits, params, num, prompt=prompt, output=output, eos=eos, kernels=kernels)
    assert not (found > 0)[expected == 0].any()
    sigma = (expected * (1 - expected) / num).sqrt()
    assert ((found - expected).abs() <= 4.5 * sigma + 1e-9).all(), (found, expected)


def chi_square_z(counts_V: Tensor, probs_V: Tensor) -> float:
    """Standard score of the chi-square statistic; the 50 likeliest tokens one by one, the others in groups of 20."""
    order_V = probs_V.argsort(descending=True)
    group_V = (
        torch.arange(len(order_V)).clamp(max=50)
        + (torch.arange(len(order_V)) - 50).clamp(min=0) // 20
    )
    expected = torch.zeros(int(group_V[-1]) + 1, dtype=torch.float64)
    found = expected.clone()
    expected.index_add_(0, group_V, probs_V[order_V].double() * counts_V.sum())
    found.index_add_(0, group_V, counts_V[order_V].double())
    kept = expected >= 5
    freedom = int(kept.sum()) - 1
    statistic = float(((found - expected) ** 2 / expected)[kept].sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.7}, {"top_p": 0.7}])
def test_chi_square_over_a_vocabulary(options: dict[str, Any], backend: str) -> None:
    """A share of tokens that is a little off, which no single frequency shows; numbers that repeat or crowd."""
    logits = (torch.randn(1000, generator=torch.Generator().manual_seed(5)) * 2).bfloat16()
    params, counts_V = SamplingParams(**options), torch.zeros(1000)
    sampler, state = Sampler(1000, 1, select(backend)), Drawer(params, [1])
    for _ in range(10):
        drawn = sample(sampler, logits.expand(2000, -1), [state] * 2000, NO_EOS).ids_B
        counts_V += torch.bincount(drawn, minlength=1000)
    probs_V = torch.tensor(reference_probs(logits.tolist(), params))
    assert not counts_V[probs_V == 0].any()
    assert abs(chi_square_z(counts_V[probs_V > 0], probs_V[probs_V > 0])) < 4


def test_chi_square_over_neighbouring_seeds() -> None:
    """One number a step: streams of seeds 0, 1, 2 .. that start alike give everyone the same first token."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(6))
    states = [Drawer(SamplingParams(seed=seed), [1]) for seed in range(4000)]
    sampler, probs_V = Sampler(40, seed=0), logits.softmax(dim=-1)
    for _ in range(3):
        ids_B = sample(sampler, logits.expand(4000, -1), states, NO_EOS).ids_B
        assert abs(chi_square_z(torch.bincount(ids_B, minlength=40), probs_V)) < 4
        pairs = torch.bincount(ids_B[:-1] * 40 + ids_B[1:], minlength=1600)
        assert abs(chi_square_z(pairs, torch.outer(probs_V, probs_V).flatten())) < 4
        for state, token in zip(states, ids_B.tolist(), strict=True):
            state.advance(token)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_drawn_tokens_equal_the_reference(data: st.DataObject) -> None:
    """Ties at the cut, a wide nucleus, top_p taken before top_k; parameters lost or a neighbour's.

    One draw at the middle of each kept token's share, by the order of probability.
    """
    seed = data.draw(st.integers(0, 10_000))
    vocab = data.draw(st.sampled_from([5, 64, 300]))
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2
    if data.draw(st.booleans()):
        logits = logits.round()  # many ties
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.3, 1.0, 3.0])),
        top_k=data.draw(st.sampled_from([-1, 0, 1, 2, 7, 100, vocab, 2**70])),
        top_p=data.draw(st.sampled_from([0.999, 0.9, 0.5, 1e-4])),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.3])),
    )
    near = (params.min_p - (logits.double() - logits.max()).div(params.temperature).exp()).abs()
    assume(near.min() > 1e-6)
    expected = reference_probs(logits.tolist(), params)
    order = sorted((i for i, p in enumerate(expected) if p > 1e-5), key=lambda i: (-logits[i], i))
    ups = list(accumulate((expected[i] for i in order), initial=0.0))
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(ups)], dtype=torch.float64)
    sampler = Sampler(vocab, 0, select(data.draw(st.sampled_from(["reference", "native"]))))
    states = [Drawer(params, [1]), Drawer(SamplingParams(top_k=1), [1])] * len(order)
    uniform_B = middles.repeat_interleave(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_uniform", lambda *_: uniform_B)
        ids_B = sample(sampler, logits.expand(len(states), -1), states, NO_EOS).ids_B
    assert ids_B.tolist() == [i for kept in order for i in (kept, order[0])]


def test_near_ties_at_a_low_temperature() -> None:
    """Dividing first rounds the difference away: a unit of float32 is 1 at 1000 / 1e-4."""
    logits = torch.tensor([1000.0, 1000.0 - 2**-14])
    params, num = SamplingParams(temperature=1e-4), 20_000
    expected = reference_probs(logits.tolist(), params)
    assert draw_many(logits, params, num)[0] == pytest.approx(expected[0], abs=0.015)
