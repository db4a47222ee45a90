"""The entropy router: what counts as unsure, and the share that a budget lets through."""

from typing import Any

import pytest
import torch

from tests.engine.tools import greedy, prompts, routes, tiny, twin
from tokenrouter import LLM
from tokenrouter.features import Signals, TokenTypeTable, sequence_batch
from tokenrouter.routers import HIGH, Budget, EntropyRouter
from tokenrouter.types import Phase, RouteInput

TABLE = TokenTypeTable.from_texts([None, " a"])
VALUES = {
    "entropy": [0.5, 2.0, 3.0],
    "margin": [0.75, 0.5, 0.125],
    "top1": [0.875, 0.5, 0.25],
    "surprise": [0.25, 1.0, 5.0],
}


def see(router: EntropyRouter) -> RouteInput:
    """Three decode tokens of three rows, the least sure last."""
    signals, one = Signals(3, TABLE), torch.arange(3)
    signals.write(one, one + 1, {k: torch.tensor(v) for k, v in VALUES.items()})
    batch = sequence_batch([1, 1, 1, 1], prompt_len=1).select(one + 1)
    batch.row_T[:] = one
    return router.extractor(TABLE, signals).extract(batch)


@pytest.mark.parametrize(
    ("options", "high", "scores"),
    [
        ({}, [1, 2], VALUES["entropy"]),
        ({"threshold": 2.5}, [2], VALUES["entropy"]),
        ({"threshold": 0.0}, [0, 1, 2], VALUES["entropy"]),
        ({"threshold": float("inf")}, [], VALUES["entropy"]),
        ({"measure": "margin", "threshold": 0.5}, [1, 2], [0.25, 0.5, 0.875]),
        ({"measure": "top1", "threshold": 0.6}, [2], [0.125, 0.5, 0.75]),
        ({"measure": "surprise", "threshold": 1.5}, [2], VALUES["surprise"]),
    ],
)
def test_the_unsure_go_high(options: dict[str, Any], high: list[int], scores: list[float]) -> None:
    """Guards against a threshold that is not reached but passed, and a margin read the wrong way round."""
    router = EntropyRouter(**options)
    decision = router.route(see(router))
    assert (decision.route_T == HIGH).nonzero().flatten().tolist() == high
    assert decision.score_T.tolist() == scores
    said = [decision.reasons[reason] for reason in decision.reason_T.tolist()]
    assert said == ["unsure" if token in high else "sure" for token in range(3)]


def test_what_it_declares() -> None:
    """Guards against prompts shared, or chunks decided, by logits that do not exist in them."""
    router = EntropyRouter(measure="top1")
    router.check()
    assert router.features == ("top1",) and router.phases == {Phase.DECODE}
    assert router.depends_on == {"tokens", "logits"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "entropie"}, "measure='entropie'; measures: entropy, margin, top1, surprise"),
        ({"threshold": -1.0}, r"threshold=-1\.0 must be a number, 0 \(all high\) or more"),
        ({"threshold": float("nan")}, "threshold=nan must be a number"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Guards against a threshold that nothing reaches, or everything does, without a word."""
    with pytest.raises(ValueError, match=message):
        EntropyRouter(**options)


def test_a_budget_is_met_on_served_tokens() -> None:
    """Guards against a threshold set on prefill or zeros: the share that is asked for must come out where it serves."""
    texts = [list(p) for p in prompts(seed=9) if len(p) > 30]
    router = EntropyRouter(budget=Budget(high_frac=0.3))
    llm = LLM(tiny(), router=router, executors=twin(), calibration_ids=texts)
    assert not router.needs_calibration and llm.engine.stats.decode_tokens == 0
    llm.score(texts, sink=lambda *_: None, prefill_len=10)
    requested_PR = llm.engine.stats.requested_tokens
    share = requested_PR[Phase.DECODE, HIGH] / requested_PR[Phase.DECODE].sum()
    assert 0.2 < share < 0.4
    assert requested_PR[Phase.PREFILL, 1] == 0, "prompt tokens take route 0"


def test_calibration_shows_what_serving_shows() -> None:
    """Guards against thresholds on other numbers than those that tokens are judged by."""
    texts = [list(p) for p in prompts(seed=9) if len(p) > 30][:9]
    router = EntropyRouter(budget=Budget(high_frac=0.5))
    shown: list[float] = []
    calibrate = router.calibrate

    def watched(inputs: Any) -> None:
        shown.extend(value for part in inputs for value in router.score(part).tolist())
        calibrate(inputs)

    router.calibrate = watched  # type: ignore[method-assign]
    llm = LLM(tiny(), router=router, calibration_ids=texts)
    assert len(shown) == sum(
        len(ids) - max(1, len(ids) * (1 + i % 8) // 9) for i, ids in enumerate(texts)
    )
    with torch.inference_mode():
        first = texts[0]
        rows: list[torch.Tensor] = []
        llm.score([first], sink=lambda _, __, logits_RV: rows.append(logits_RV.clone()))
    p_NV = torch.cat(rows).softmax(-1)
    expected_N = torch.special.entr(p_NV).sum(-1)[max(1, len(first) // 9) - 1 : -1]
    for value in expected_N.tolist():
        assert min(abs(value - other) for other in shown) < 1e-3


def test_without_low_it_still_serves() -> None:
    """Guards against a refusal of the default pool: everything is high there, with a warning."""
    llm = LLM(tiny(), router=EntropyRouter(threshold=5.2))
    with pytest.warns(UserWarning, match="router entropy asks for route 'low'"):
        (output,) = llm.generate([prompts()[2]], greedy(8))
    assert set(routes(output)) == {0, -1}
