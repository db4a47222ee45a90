"""Budgets: thresholds per phase, and the share that they let through on text not seen before."""

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from tokenrouter.features import TokenTypeTable, sequence_batch
from tokenrouter.routers import HIGH, Budget, RuleRouter, Thresholds
from tokenrouter.types import Phase, RouteInput

LENGTHS = (30, 80, 200, 500, 1000)


@pytest.fixture(scope="module")
def halves(smollm2_tokenizer: Any) -> list[list[RouteInput]]:
    """Two sets of passages of the language reference, half of each passage as decode."""
    table = TokenTypeTable.from_tokenizer(smollm2_tokenizer, len(smollm2_tokenizer))
    extractor = RuleRouter().extractor(table)
    ids = smollm2_tokenizer("\n".join(topics.values()))["input_ids"]
    parts: list[list[RouteInput]] = [[], []]
    start, number = 0, 0
    while start + max(LENGTHS) <= len(ids):
        length = LENGTHS[number // 2 % len(LENGTHS)]
        batch = sequence_batch(ids[start : start + length], prompt_len=length // 2)
        parts[number % 2].append(extractor.extract(batch))
        start, number = start + length, number + 1
    return parts


@pytest.mark.parametrize("high_frac", [0.05, 0.1, 0.2, 0.5])
def test_share_holds_on_other_text(halves: list[list[RouteInput]], high_frac: float) -> None:
    """Guards "at 10 % high": within one point, in each phase, on text not calibrated on."""
    router = RuleRouter(budget=Budget(high_frac=high_frac))
    router.calibrate(halves[0])
    for part, tolerance in ((halves[0], 0.001), (halves[1], 0.01)):
        high_T = torch.cat([router.route(inputs).route_T == HIGH for inputs in part])
        phase_T = torch.cat([inputs.phase_T for inputs in part])
        for phase in Phase:
            share = high_T[phase_T == phase].float().mean().item()
            assert abs(share - high_frac) <= tolerance, (phase, share)


def test_thresholds_are_per_phase_and_readable() -> None:
    """Guards against one threshold for both, which gives decode another share than prefill."""
    thresholds = Thresholds()
    assert thresholds.values == {}
    score_T = torch.arange(100.0)
    thresholds.calibrate(0.1, {Phase.PREFILL: score_T, Phase.DECODE: score_T + 1000})
    assert thresholds.values == {Phase.PREFILL: 89.5, Phase.DECODE: 1089.5}
    phase_T = torch.tensor([Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE])
    over_T = thresholds.is_over(torch.tensor([89.0, 90.0, 1089.0, 1090.0]), phase_T)
    assert over_T.tolist() == [False, True, False, True]


def test_no_and_all() -> None:
    """Guards the ends: scores beyond those calibrated on must not slip past."""
    thresholds = Thresholds()
    score_T, phase_T = torch.tensor([-1e30, 0.0, 1e30]), torch.zeros(3, dtype=torch.int64)
    for high_frac in (0.0, 1.0):
        thresholds.calibrate(high_frac, {Phase.PREFILL: torch.arange(3.0)})
        assert thresholds.is_over(score_T, phase_T).tolist() == [high_frac == 1.0] * 3


def test_too_few_scores_are_refused() -> None:
    """Guards against a 1 % budget calibrated on ten tokens."""
    with pytest.raises(
        ValueError, match=r"10 decode tokens are too few .* 0.01: give at least 101"
    ):
        Thresholds().calibrate(0.01, {Phase.DECODE: torch.arange(10.0)})


@pytest.mark.parametrize("high_frac", [-0.01, 1.01])
def test_impossible_budgets_are_refused(high_frac: float) -> None:
    """Guards against percentages."""
    with pytest.raises(ValueError, match=r"budget\.high_frac=.* is outside 0 to 1"):
        Budget(high_frac=high_frac)
    with pytest.raises(ValueError, match="outside 0 to 1"):
        Thresholds().calibrate(high_frac, {})
