"""Guards against shifted positions, a wrong next token, and decode rows that are prefill rows."""

import numpy as np
import pytest
import torch

from tokenrouter import LLM
from tokenrouter.evaluation.quality import (
    Quality,
    QualitySettings,
    measure_quality,
    request_level_quality,
)
from tokenrouter.evaluation.request_level import prompt_shares
from tokenrouter.executors import ExecutorPool
from tokenrouter.models import LoadedModel
from tokenrouter.models.tiny import tiny_hf
from tokenrouter.routers import RequestLevelRouter, RuleRouter

LENGTH, DECODE = 40, 8
SETTINGS = QualitySettings(
    window_tokens=LENGTH, num_windows=2, decode_tokens=DECODE, decode_windows=2
)
NEWLINE = 13  # byte 10, shifted by three
WINDOWS = [[3 + (7 * i + 11 * w) % 250 for i in range(LENGTH)] for w in range(2)]
WINDOWS[1][5:20] = [NEWLINE] * 15  # in need of the high path, by the rules


def _measure(model: LoadedModel, systems: dict[str, LLM]) -> dict[str, Quality]:
    return measure_quality(LLM(model), systems, WINDOWS, SETTINGS).systems


def test_the_reference_against_itself_is_zero_in_both_phases(model: LoadedModel) -> None:
    found = _measure(model, {"same": LLM(model)})["same"]
    assert found.decode is not None
    assert abs(found.prefill.kl_mean_nats) < 1e-6 and abs(found.decode.kl_mean_nats) < 1e-6
    assert found.prefill.top1_agreement_frac == found.decode.top1_agreement_frac == 1.0
    assert found.high_frac == found.decode_high_frac == 1.0
    assert found.routes["high"] == {"prefill_token_frac": 1.0, "decode_token_frac": 1.0}


def test_every_token_is_compared_once_and_decode_takes_the_last(model: LoadedModel) -> None:
    found = _measure(model, {"same": LLM(model)})["same"]
    assert found.decode is not None
    assert found.prefill.position.tolist() == [*range(LENGTH)] * 2
    for window in range(2):
        rows = found.decode.position[found.decode.window == window]
        assert sorted(rows.tolist()) == list(range(LENGTH - DECODE, LENGTH))


def test_perplexity_is_that_of_transformers(model: LoadedModel) -> None:
    report = measure_quality(LLM(model), {"run": LLM(model)}, WINDOWS, SETTINGS)
    with torch.inference_mode():
        ids = torch.tensor(WINDOWS)
        loss = float(tiny_hf()(input_ids=ids, labels=ids).loss)
    assert report.reference.ppl == pytest.approx(np.exp(loss), rel=1e-3)
    assert report.systems["run"].prefill.ppl == pytest.approx(np.exp(loss), rel=1e-3)


def test_decode_differs_from_the_reference_as_prefill_does(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    """Forced decode runs the same arithmetic as forced prefill: so does its KL, token by token."""
    low = _measure(model, {"low": LLM(model, router="all_low", executors=int8_pool)})["low"]
    assert low.decode is not None and low.prefill.kl_mean_nats > 1e-5 and low.high_frac == 0.0
    for window in range(2):
        order = np.argsort(low.decode.position[low.decode.window == window])
        decoded = low.decode.kl_nats[low.decode.window == window][order]
        tail = low.prefill.kl_nats[low.prefill.window == window][-DECODE:]
        np.testing.assert_allclose(decoded, tail, rtol=0.02, atol=1e-6)


def test_request_level_by_mixing_equals_a_real_run(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    router = RequestLevelRouter(inner=RuleRouter(first_positions=0, prompt_end=0), high_frac=0.5)
    router.threshold = 0.2
    real = LLM(model, router=router, executors=int8_pool)
    shares = prompt_shares(router, real.token_types, WINDOWS)
    found = _measure(
        model,
        {
            "high": LLM(model, executors=int8_pool),
            "low": LLM(model, router="all_low", executors=int8_pool),
            "request_level": real,
        },
    )
    assert shares[0] < 0.1 and shares[1] > 0.3 and found["request_level"].high_frac == 0.5
    mixed = request_level_quality(found["high"], found["low"], shares, 0.5)
    assert mixed.decode is not None and found["request_level"].decode is not None
    assert mixed.decode_high_frac == found["request_level"].decode_high_frac == 0.5
    assert mixed.routes == found["request_level"].routes
    for mine, theirs in (
        (mixed.prefill, found["request_level"].prefill),
        (mixed.decode, found["request_level"].decode),
    ):
        assert mine.kl_mean_nats == pytest.approx(theirs.kl_mean_nats, rel=1e-3)
        assert mine.ppl == pytest.approx(theirs.ppl, rel=1e-5)
        assert mine.top1_agreement_frac == pytest.approx(theirs.top1_agreement_frac)


def test_request_level_meets_any_share_with_few_windows(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    systems = {
        "high": LLM(model, executors=int8_pool),
        "low": LLM(model, router="all_low", executors=int8_pool),
    }
    found = _measure(model, systems)
    kl = [
        request_level_quality(found["high"], found["low"], [0.1, 0.2], share).prefill.kl_mean_nats
        for share in (0.0, 0.1, 0.6, 1.0)
    ]
    assert kl[0] == pytest.approx(found["low"].prefill.kl_mean_nats)
    assert kl[3] == pytest.approx(found["high"].prefill.kl_mean_nats)
    assert kl == sorted(kl, reverse=True) and len(set(kl)) == 4


def test_request_level_meets_the_share_in_decode_where_fewer_windows_decode(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    """Shares were met over all windows, so the few that decode were all high, or all low."""
    settings = QualitySettings(
        window_tokens=LENGTH, num_windows=2, decode_tokens=DECODE, decode_windows=1
    )
    systems = {
        "high": LLM(model, executors=int8_pool),
        "low": LLM(model, router="all_low", executors=int8_pool),
    }
    found = measure_quality(LLM(model), systems, WINDOWS, settings).systems
    high, low = found["high"].decode, found["low"].decode
    mixed = request_level_quality(found["high"], found["low"], [0.1, 0.2], 0.5).decode
    assert high is not None and low is not None and mixed is not None
    expected = (high.kl_mean_nats + low.kl_mean_nats) / 2
    assert mixed.kl_mean_nats == pytest.approx(expected) != high.kl_mean_nats


def test_routes_are_counted_in_each_phase_by_itself(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    """The share of decode was not measured: a router that is low there stood at prefill's share."""
    llm = LLM(model, router=RuleRouter(first_positions=8, prompt_end=0), executors=int8_pool)
    windows = [[150 + i for i in range(LENGTH)]] * 2  # ids without newlines: the first 8 go high
    found = measure_quality(LLM(model), {"rule": llm}, windows, SETTINGS).systems["rule"]
    assert found.high_frac == pytest.approx(8 / LENGTH) and found.decode_high_frac == 0.0
    assert found.routes["high"] == {"prefill_token_frac": 8 / LENGTH, "decode_token_frac": 0.0}
    assert found.routes["low"]["prefill_token_frac"] == pytest.approx(1 - 8 / LENGTH)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window_tokens": 1}, "window_tokens >= 2"),
        ({"num_windows": 0}, "num_windows >= 1"),
        ({"decode_tokens": 40}, r"decode_tokens must be in 0\.\.39"),
        ({"decode_windows": 3}, r"decode_windows must be in 0\.\.2"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, int], words: str) -> None:
    values = {"window_tokens": 40, "num_windows": 2, "decode_tokens": 8, "decode_windows": 2}
    with pytest.raises(ValueError, match=words):
        QualitySettings(**(values | changes))


def test_without_decode_that_phase_is_absent(model: LoadedModel) -> None:
    settings = QualitySettings(
        window_tokens=LENGTH, num_windows=2, decode_tokens=0, decode_windows=2
    )
    report = measure_quality(LLM(model), {"same": LLM(model)}, WINDOWS, settings)
    same = report.systems["same"]
    assert same.decode is None and same.decode_high_frac is None
    assert same.routes["high"] == {"prefill_token_frac": 1.0}
