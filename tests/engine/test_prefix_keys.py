"""Guards who shares prefixes with whom: what a prompt's entries depend on beside its ids must be in the key."""

from typing import Any

import pytest

from tests.engine.prefix_tools import BASE, cold, warm
from tests.engine.tools import greedy, prompts, run_all, tokens
from tests.engine.watched import Watched, assert_same
from tokenrouter import EngineOptions
from tokenrouter.kvcache.retention import RetentionOptions, SinkWindow
from tokenrouter.routers import RandomRouter, RequestLevelRouter, RuleRouter


class Unsteady(RandomRouter):
    """Says that it looks at something that is not in the prompt."""

    depends = "history"

    @property
    def depends_on(self) -> Any:
        return frozenset({"tokens", self.depends})


@pytest.mark.parametrize("depends", ["history", "load", "random"])
def test_routers_whose_decisions_may_differ_do_not_share(
    depends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A decision of another moment taken for one's own; silence about an option without effect."""
    router = Unsteady(0.5)
    router.depends = depends
    llm = warm(None, router)
    assert f"prefix_sharing has no effect: router random depends on {depends}" in caplog.text
    llm.generate([BASE[:40], BASE[:40]], greedy(2))
    llm.generate([BASE[:40]], greedy(2))
    assert llm.engine.stats.shared_tokens == 0 and llm.engine.pool.cached == 0


class OfLength(RandomRouter):
    """Its answer depends on how long the prompt is."""

    features = ("distance_to_prompt_end",)

    @property
    def depends_on(self) -> Any:
        return frozenset({"tokens", "prompt_length"})

    def route(self, inputs: Any) -> Any:
        answer = super().route(inputs)
        is_high_T = inputs.feature("distance_to_prompt_end") % 3 == 0
        return type(answer)(
            route_T=(~is_high_T).long(),
            score_T=answer.score_T,
            reason_T=answer.reason_T,
            reasons=answer.reasons,
        )


def test_decisions_that_look_at_the_prompts_length_are_shared_at_that_length_only() -> None:
    """The end of a short prompt, high in its own request, taken over into the middle of a long one."""
    first, second = (Watched(make(None, OfLength(0.5))) for make in (warm, cold))
    forced = prompts(seed=5)[4][:10]
    for name, length, shared in (("a", 60, 0), ("b", 60, 56), ("c", 80, 0), ("d", 80, 72)):
        assert first.run(name, BASE[:length], forced) == shared
        second.run(name, BASE[:length], forced)
        assert_same(first, second, name)


def test_requests_on_different_paths_do_not_share() -> None:
    """Entries of a request that ran low, read by one that runs high."""
    router = RequestLevelRouter(RandomRouter(0.5), high_frac=0.5)
    llm, lonely = (make(None, router) for make in (warm, cold))
    first, second = Watched(llm), Watched(lonely)
    prompts_of = {str(i): (*BASE[:32], *prompts()[i + 3][:20]) for i in range(12)}
    for name, prompt in prompts_of.items():
        first.run(name, prompt, prompt[:10])
        second.run(name, prompt, prompt[:10])
        assert_same(first, second, name)
    chosen = {int(r.requested_N[0]) for r in first.requests.values()}
    assert chosen == {0, 1} and llm.engine.stats.shared_tokens >= 10 * 32 - 64


def test_another_router_version_starts_anew() -> None:
    """Entries that were computed on routes which the router would not choose any more; a prompt whose decisions are of
    two versions, left to others."""
    router = RandomRouter(0.5)
    llm = warm(None, router, max_num_batched_tokens=16, max_num_seqs=4)
    (before,) = llm.generate([BASE[:40]], greedy(5))
    router.seed = 1
    watched = Watched(llm)
    assert watched.run("new", BASE[:40], BASE[:5]) == 0
    assert watched.run("new again", BASE[:40], BASE[:5]) == 32
    expected = Watched(cold(None, RandomRouter(0.5, seed=1)))
    expected.run("new", BASE[:40], BASE[:5])
    assert_same(watched, expected, "new")
    assert_same(watched, expected, "new again", "new")
    router.seed = 2
    watched.add("mixed", BASE[:40], BASE[:5])
    llm.engine.step()
    router.seed = 3
    run_all(llm)
    assert watched.run("after", BASE[:40], BASE[:5]) == 0
    assert len(tokens(before)) == 5


def test_logits_of_every_position_are_computed() -> None:
    """prompt_logprobs with holes where the prompt was cached."""
    llm = warm(None)
    params = greedy(2, prompt_logprobs=0)
    (first,), (again,) = (llm.generate([BASE[:40]], params) for _ in range(2))
    assert llm.engine.stats.shared_tokens == 0
    assert first.prompt_logprobs == again.prompt_logprobs
    assert again.prompt_logprobs is not None and None not in again.prompt_logprobs[1:]
    llm.generate([BASE[:40]], greedy(2))
    assert llm.engine.stats.shared_tokens == 32


def test_the_rule_router_shares_among_prompts_of_one_length() -> None:
    """The default rule looks at the distance to the prompt's end: what depends on it must be in the key."""
    llm = warm(None, RuleRouter())
    for prompt in (BASE[:70], BASE[:70], BASE[:66]):
        llm.generate([prompt], greedy(2))
    looks = "prompt_length" in llm.router.depends_on
    assert llm.engine.stats.shared_tokens == (64 if looks else 128)


def test_what_cannot_work_together_is_refused() -> None:
    """Entries rewritten in int8 under the eyes of others."""
    retention = RetentionOptions(policy=SinkWindow(), compress="old")
    with pytest.raises(
        ValueError, match=r"retention\.compress rewrites entries that prefix_sharing"
    ):
        EngineOptions(retention=retention, prefix_sharing=True)
    with pytest.raises(ValueError, match="prefix_block"):
        EngineOptions(prefix_block=0)
