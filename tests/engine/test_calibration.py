"""Guards the tokens that thresholds are set on: of the right phases, for the inner router too."""

import pytest

from tests.engine.tools import greedy, prompts, routes, tiny, twin
from tokenrouter import LLM
from tokenrouter.engine.calibration import calibrate, calibrate_on_requests
from tokenrouter.features import TokenTypeTable
from tokenrouter.routers import Budget, RandomRouter, RequestLevelRouter, Router, RuleRouter
from tokenrouter.types import Phase, RouteInput

TEXTS = [list(p) for p in prompts(longest=200, seed=5) if len(p) > 20]
PROMPTS = [p for p in prompts() if len(p) > 10]
TYPES = TokenTypeTable.from_tokenizer(tiny().tokenizer, tiny().config.vocab_size)


def budgeted() -> RequestLevelRouter:
    return RequestLevelRouter(RuleRouter(budget=Budget(high_frac=0.2)), high_frac=0.5)


def test_request_level_on_requests_calibrates_an_inner_budget() -> None:
    """An inner router with a budget had no threshold when the requests' shares were computed."""
    router = budgeted()
    assert router.needs_calibration
    weights = [len(p) + 8 for p in PROMPTS]
    calibrate_on_requests(router, TYPES, PROMPTS, weights, sequences=TEXTS)
    assert not router.needs_calibration and not router.inner.needs_calibration
    llm = LLM(tiny(), router=router, executors=twin())
    outputs = llm.generate(PROMPTS, greedy(8))
    high = [weight for weight, o in zip(weights, outputs, strict=True) if routes(o)[0] == 0]
    assert sum(high) / sum(weights) == pytest.approx(0.5, abs=0.1)


def test_an_inner_router_that_is_calibrated_stays_as_it_is() -> None:
    """The baseline shares its inner router with the run: other thresholds would be another router."""
    router = budgeted()
    calibrate(router.inner, TYPES, None, TEXTS)
    version = router.inner.version
    calibrate_on_requests(router, TYPES, PROMPTS, [len(p) for p in PROMPTS], sequences=TEXTS[:9])
    assert router.inner.version == version


def test_request_level_with_an_inner_budget_calibrates_on_text() -> None:
    """The same from the front door, where there are no requests yet."""
    router = budgeted()
    llm = LLM(tiny(), router=router, executors=twin(), calibration_ids=PROMPTS)
    assert not router.needs_calibration
    assert {routes(o)[0] for o in llm.generate(PROMPTS, greedy(3))} == {0, 1}


def test_a_threshold_alone_does_not_make_request_level_ready() -> None:
    """Shares from elsewhere, and an inner router that raises at the first request."""
    router = budgeted()
    router.calibrate_requests([0.1, 0.2], [1, 1])
    assert router.threshold is not None and router.needs_calibration


class Listens(RandomRouter):
    """Keeps what it is calibrated on."""

    needs_calibration = True  # type: ignore[assignment]

    def calibrate(self, inputs: list[RouteInput]) -> None:  # type: ignore[override]
        self.heard = inputs


@pytest.mark.parametrize("phases", [{Phase.PREFILL}, {Phase.DECODE}, set(Phase)])
def test_only_tokens_of_the_routers_phases_are_given(phases: set[Phase]) -> None:
    """A threshold that counts tokens which the router never decides."""
    router: Router = Listens()
    router.phases = frozenset(phases)  # type: ignore[misc]
    calibrate(router, TYPES, None, TEXTS)
    assert len(router.heard) == len(TEXTS)
    assert {phase for part in router.heard for phase in part.phase_T.tolist()} == phases
    num_tokens = sum(len(part) for part in router.heard)
    assert (num_tokens == sum(map(len, TEXTS))) == (phases == set(Phase))


def test_a_router_that_needs_none_is_left_alone() -> None:
    """Text that is read and encoded for nothing, and refused where there is no tokenizer."""
    router = Listens()
    router.needs_calibration = False  # type: ignore[assignment]
    calibrate(router, TYPES, None, None)
    assert not hasattr(router, "heard")
    with pytest.raises(ValueError, match="default text needs a tokenizer"):
        calibrate(Listens(), TYPES, None, None)
