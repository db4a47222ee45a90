"""Guards the order in which inputs run: one that comes before its beginning is there shares nothing."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.engine.tools import prompts, tiny, twin
from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.harness import scoring
from tokenrouter.evaluation.harness.scoring import Pair, score_pairs, scoring_options
from tokenrouter.kvcache.retention import RetentionOptions, SinkWindow
from tokenrouter.routers import AllHighRouter, RandomRouter, Router, RuleRouter

SHOTS = prompts(seed=3)[2]
QUESTIONS = [(*SHOTS[:40], *prompts(seed=4)[i][:20]) for i in range(6)]
PAIRS = [Pair(question, (5 + i, *prompts()[i][:4])) for question in QUESTIONS for i in range(4)]


def llm_with(router: Router, options: EngineOptions | None = None) -> LLM:
    """A two-path engine, with the options for scoring unless others are given."""
    chosen = scoring_options(EngineOptions(), router) if options is None else options
    return LLM(tiny(), router=router, executors=twin(), options=chosen)


def one_by_one(router: Router, pairs: Sequence[Pair]) -> list[float]:
    """Each pair by itself, from all logits."""
    llm, found = llm_with(router, EngineOptions()), []
    for context, continuation in pairs:
        rows: list[Tensor] = []
        ids = [*context, *continuation][:-1]
        llm.score([ids], sink=lambda _, __, logits_RV, rows=rows: rows.append(logits_RV.clone()))
        logp_TV = torch.cat(rows)[-len(continuation) :].log_softmax(dim=-1)
        found.append(sum(float(logp_TV[i, token]) for i, token in enumerate(continuation)))
    return found


@pytest.mark.parametrize("router", [AllHighRouter(), RandomRouter(0.5), RuleRouter()])
def test_scores_are_those_of_each_pair_alone(router: Router) -> None:
    """A choice that took another one's decisions, or a beginning of another question."""
    llm = llm_with(router)
    found = [score.logprob for score in score_pairs(llm, PAIRS)]
    assert found == pytest.approx(one_by_one(router, PAIRS), abs=1e-3)
    shared = llm.engine.stats.shared_tokens
    if isinstance(router, RuleRouter):
        assert (
            shared == 0
        )  # looks at the prompt's end, so that a beginning is another in another prompt
    else:
        # each of 24 inputs but the first has the examples, 18 have their question as well
        assert shared >= 23 * 40 + 18 * 8
    assert llm.engine.pool.free == llm.engine.pool.num_slots


def test_a_pool_that_holds_few_beginnings_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions cut into parts in the wrong place: beginnings are gone when their choices come."""
    router = RandomRouter(0.5)
    options = scoring_options(EngineOptions(num_kv_slots=260, max_num_seqs=4), router)
    llm = llm_with(router, options)
    found = [score.logprob for score in score_pairs(llm, PAIRS)]
    assert found == pytest.approx(one_by_one(router, PAIRS), abs=1e-3)
    assert llm.engine.stats.shared_tokens > 600


def test_waves_follow_what_they_need() -> None:
    ids = [(1,) * 20, (*(1,) * 16, 2, 3), (*(1,) * 16, 2, 4), (*(1,) * 16, 2, 5, 6), (7,) * 9]
    inputs = [scoring._Input(one, [(0, one[-1:])]) for one in ids]
    waves = scoring._waves(inputs, 8)
    assert [[inputs.index(one) for one in wave] for wave in waves] == [[0, 4], [1, 2, 3]]
    fine = scoring._waves(inputs, 1)
    assert [[inputs.index(one) for one in wave] for wave in fine] == [[0, 4], [1], [2, 3]]
    assert scoring._waves(inputs, None) == [inputs]


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        (Pair((), (5,)), "pair 0 needs a context"),
        (Pair((5,), ()), "pair 0 needs a context"),
        (Pair((5,), (5,) * 4097), "4097 tokens, and the model's length is 4096"),
        (Pair((5,), (999, 5)), "token ids must lie in"),
    ],
)
def test_pairs_that_cannot_be_scored_are_named(pair: Pair, says: str) -> None:
    """A sum over nothing is a perfect score."""
    llm = llm_with(AllHighRouter())
    with pytest.raises(ValueError, match=says):
        score_pairs(llm, [pair])
    assert not llm.engine.has_unfinished()


def test_what_evicts_is_left_as_it_is() -> None:
    """Sharing with a policy of another interval, or more requests than a step has tokens."""
    retained = EngineOptions(retention=RetentionOptions(policy=SinkWindow()))
    assert not scoring_options(retained, AllHighRouter()).prefix_sharing
    small = EngineOptions(max_num_seqs=4, max_num_batched_tokens=16)
    assert scoring_options(small, AllHighRouter()).max_num_seqs == 16
