"""Guards against a wrong KL: reversed arguments, lost rows at chunk borders, cancellation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.evaluation import divergence
from tokenrouter.evaluation.divergence import TokenScores, compare_rows, mix, position_buckets


def _naive_kl(reference: np.ndarray, run: np.ndarray) -> np.ndarray:
    """KL(reference || run) by its definition, in float64."""
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (reference, run))
    result: np.ndarray = (p * np.log(p / q)).sum(-1)
    return result


def _logits(rows: int, seed: int, vocab: int = 23) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def _scores(kl: list[float], window: list[int], nll: list[float] | None = None) -> TokenScores:
    count = len(kl)
    return TokenScores(
        window=np.array(window),
        position=np.arange(count),
        kl_nats=np.array(kl),
        nll_nats=np.array(nll if nll is not None else [1.0] * count),
        agrees=np.ones(count, dtype=bool),
        weight=np.ones(count),
    )


def test_kl_is_reference_to_run_over_the_full_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "MAX_ROWS", 4)
    reference, run = _logits(11, 0), _logits(11, 1)
    found = compare_rows(torch.log_softmax(reference, -1), run, torch.zeros(11, dtype=torch.int64))
    expected = _naive_kl(reference.double().numpy(), run.double().numpy())
    np.testing.assert_allclose(found.kl_T.numpy(), expected, rtol=1e-4)
    assert not np.allclose(expected, _naive_kl(run.double().numpy(), reference.double().numpy()))


def test_tiny_differences_are_not_lost_in_rounding() -> None:
    reference = _logits(8, 0, vocab=5000)
    run = reference + 0.01 * _logits(8, 1, vocab=5000)
    found = compare_rows(torch.log_softmax(reference, -1), run, torch.zeros(8, dtype=torch.int64))
    expected = _naive_kl(reference.double().numpy(), run.double().numpy())
    np.testing.assert_allclose(found.kl_T.numpy(), expected, rtol=0.02)


def test_nll_is_of_the_next_token_and_nan_without_one() -> None:
    run = _logits(3, 0)
    found = compare_rows(torch.log_softmax(run, -1), run, torch.tensor([5, 0, -1]))
    expected = torch.nn.functional.cross_entropy(run[:2], torch.tensor([5, 0]), reduction="none")
    torch.testing.assert_close(found.nll_T[:2], expected)
    assert found.nll_T[2].isnan() and bool(found.agree_T.all())


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_every_position_is_in_exactly_one_bucket(positions: list[int]) -> None:
    masks = dict(position_buckets(np.array(positions)))
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()


def test_bucket_edges_are_half_open() -> None:
    masks = position_buckets(np.array([0, 1, 15, 16, 2047, 2048]))
    assert {name: mask.nonzero()[0].tolist() for name, mask in masks} == {
        "0_1": [0],
        "1_16": [1, 2],
        "16_256": [3],
        "1024_2048": [4],
        "2048_up": [5],
    }


def test_perplexity_leaves_out_tokens_without_successor() -> None:
    scores = _scores([0.0] * 3, [0, 0, 0], nll=[1.0, 3.0, float("nan")])
    assert scores.ppl == pytest.approx(np.exp(2.0))


def test_standard_error_is_over_windows_not_tokens() -> None:
    scores = _scores([1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1])
    assert scores.kl_stderr_nats == pytest.approx(1.0)
    assert _scores([1.0, 2.0], [0, 0]).kl_stderr_nats is None


def test_mixing_takes_whole_windows_and_a_part_of_one() -> None:
    high, low = _scores([0.0] * 4, [0, 0, 1, 1]), _scores([1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1])
    assert mix(high, low, [1.0, 0.0]).kl_mean_nats == pytest.approx(1.5)
    assert mix(high, low, [1.0, 0.5]).kl_mean_nats == pytest.approx(0.75)
    assert mix(high, low, [0.0, 0.0]).kl_mean_nats == low.kl_mean_nats
