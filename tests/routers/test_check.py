"""Guards against declarations that nobody reads: a feature or a decision point that does not exist."""

from dataclasses import replace

import pytest

from tokenrouter import LLM
from tokenrouter.features import FEATURES, registry
from tokenrouter.routers import (
    CompositeRouter,
    IntervalRouter,
    RandomRouter,
    RequestLevelRouter,
)
from tokenrouter.types import Phase


class DecodeOnly(RandomRouter):
    phases = frozenset({Phase.DECODE})


@pytest.fixture(autouse=True)
def decode_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature of generated tokens only, as those from the previous token's logits will be."""
    spec = replace(FEATURES["repeats"], name="doubt", phases=frozenset({Phase.DECODE}))
    monkeypatch.setattr(registry, "FEATURES", {**FEATURES, "doubt": spec})


def test_a_feature_must_exist_in_every_phase_of_the_router() -> None:
    """Values made up for prompts, in a router that declared nothing wrong in its own eyes."""
    router = RandomRouter()
    router.features = ("doubt",)
    with pytest.raises(ValueError, match=r"router random asks for doubt.*in prefill and decode at"):
        router.check()
    with pytest.raises(ValueError, match=r"router random asks for doubt.*features there: position"):
        LLM("no-such-model", router=router)  # refused before a model is looked for
    decodes = DecodeOnly()
    decodes.features = ("doubt", "position")
    decodes.check()


def test_what_a_router_says_it_can_do_without_is_not_refused() -> None:
    """A learned router whose decode head looks at more than its prefill head, and wrappers that do not know of it."""
    router = RandomRouter()
    router.features, router.optional = ("position", "doubt"), frozenset({"doubt"})
    level = RequestLevelRouter(router, high_frac=0.5)
    for around in (router, IntervalRouter(router), CompositeRouter(precision=router), level):
        assert around.optional == {"doubt"}
        around.check()
    router.features = ("gone",)
    with pytest.raises(ValueError, match="no feature gone"):
        router.check()


def test_a_request_level_router_needs_its_features_in_prefill() -> None:
    """It is asked at admission, when there are only prompt tokens."""
    inner = RandomRouter()
    inner.features = ("doubt",)
    with pytest.raises(
        ValueError, match=r"router request_level asks for doubt.*exist in prefill at"
    ):
        RequestLevelRouter(inner, high_frac=0.5).check()
    with pytest.raises(ValueError, match="inner router 'random' does not decide prompt tokens"):
        RequestLevelRouter(DecodeOnly(), high_frac=0.5)


def test_a_decision_point_must_exist() -> None:
    """A router that is asked at another time than it was made for."""

    class Late(RandomRouter):
        decision_point = "after_draft"  # type: ignore[assignment]

    with pytest.raises(
        ValueError,
        match="random has the decision point 'after_draft'; decision points: pre_forward",
    ):
        Late().check()
