"""Guards what is done to logits before the draw, and the log-probabilities that are reported."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.draws import Drawer, sample
from tokenrouter.engine.logits import TokenCounts, penalise_, top_logprobs
from tokenrouter.engine.sampler import Sampler
from tokenrouter.sampling_params import SamplingParams


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 29), max_size=40),
    st.lists(st.integers(0, 29), max_size=60),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-0.5, 0.0, 0.8]),
    st.sampled_from([-2.0, 0.0, 1.1]),
)
def test_penalties_equal_a_loop(
    prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> None:
    """Counts that miss a token, count the prompt, or forget to grow."""
    logits_PV = torch.randn(3, 30, generator=torch.Generator().manual_seed(len(output)))
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    expected = logits_PV.clone()
    for token in range(30):
        value = float(expected[1, token])
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token) + presence * (token in output)
        expected[1, token] = value
    penalise_(logits_PV, [(1, params, counts)])
    torch.testing.assert_close(logits_PV, expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1000), st.sampled_from([0, 1, 5, 40, 99]), st.booleans())
def test_top_logprobs_equal_a_sort(seed: int, k: int, ties: bool) -> None:
    """Ranks from 0, ranks among the k only, ties in any order, chunks that lose rows."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(130, 40, generator=generator) * 3
    if ties:
        logits_TV = logits_TV.round()
    ids_T = torch.randint(40, (130,), generator=generator)
    found = top_logprobs(logits_TV, ids_T, k)
    assert len(found) == 130
    for t in range(0, 130, 13):
        row = logits_TV[t].double().log_softmax(dim=-1).tolist()
        order = sorted(range(40), key=lambda i: (-logits_TV[t, i].item(), i))
        token = int(ids_T[t])
        assert list(found[t]) == list(dict.fromkeys([token, *order[:k]]))
        for candidate, entry in found[t].items():
            assert entry.rank == order.index(candidate) + 1
            assert entry.logprob == pytest.approx(row[candidate], abs=1e-5)


def test_logprobs_are_the_models_own() -> None:
    """vLLM reports log-probabilities before bias, penalties and temperature; only where asked."""
    logits_BV = torch.tensor([[1.0, 2.0, 3.0]] * 4)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {0: 50.0}, "logprobs": 0},
        {"temperature": 0.0},
        {"temperature": 0.01, "repetition_penalty": 100.0, "logprobs": 1},
    ]
    states = [Drawer(SamplingParams(**o), [1, 2]) for o in options]
    ids_B, logprobs = sample(Sampler(3, seed=0), logits_BV, states, frozenset())
    assert ids_B.tolist() == [2, 0, 2, 0]
    raw = logits_BV[0].log_softmax(dim=-1).tolist()
    assert logprobs[2] is None
    found = [
        {i: (pytest.approx(entry.logprob), entry.rank) for i, entry in row.items()}
        for row in logprobs
        if row is not None
    ]
    assert found == [
        {2: (raw[2], 1), 1: (raw[1], 2)},
        {0: (raw[0], 3)},
        {0: (raw[0], 3), 2: (raw[2], 1)},
    ]


def test_top_logprobs_of_a_broken_row() -> None:
    """NaN in a prompt's logits would be reported as numbers."""
    logits_TV = torch.zeros(70, 5)
    logits_TV[66, 1] = math.nan
    with pytest.raises(RuntimeError, match="row 66"):
        top_logprobs(logits_TV, torch.zeros(70, dtype=torch.int64), 2)
