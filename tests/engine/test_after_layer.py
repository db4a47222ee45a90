"""Guards decisions that are taken when a token's first layers have run."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.engine.faults import failing, step_to_the_end
from tests.engine.late import LateRouter
from tests.engine.tools import greedy, plain_llm, prompts, run_all, tiny, tiny_pair, tokens, twin
from tokenrouter import LLM, EngineOptions
from tokenrouter.models import Decoder
from tokenrouter.routers import (
    BatchedRouter,
    CompositeRouter,
    IntervalRouter,
    RequestLevelRouter,
    RuleRouter,
)
from tokenrouter.types import RouteInput, RouteTable, RoutingDecision

HIDDEN = ("hidden_rms", "hidden_crest", "hidden_kurtosis")


def late_llm(router: LateRouter | None = None, **options: Any) -> LLM:
    return LLM(
        tiny(), router=router or LateRouter(), executors=twin(), options=EngineOptions(**options)
    )


@pytest.mark.parametrize("after_layer", [1, 3])
def test_features_are_those_of_the_hidden_states_of_transformers(after_layer: int) -> None:
    """States of another layer, of another token's row, or touched by the low path that tokens took before."""
    seen: dict[tuple[int, int], torch.Tensor] = {}

    class Spy(LateRouter):
        features = HIDDEN

        def route(self, inputs: RouteInput) -> RoutingDecision:
            assert inputs.names == HIDDEN
            keys = zip(inputs.row_T.tolist(), inputs.positions_T.tolist(), strict=True)
            seen.update(zip(keys, inputs.values_TF.unbind(), strict=True))
            return super().route(inputs)

    ids = prompts()[2]
    llm = late_llm(Spy(after_layer), max_num_seqs=4, max_num_batched_tokens=24)
    output = llm.generate([ids], greedy(9))[0]
    assert {0, 1} <= set(output.outputs[0].routes)
    whole = torch.tensor([[*ids, *tokens(output)[:-1]]])
    hf_model = tiny_pair()[1]
    hidden_TE = hf_model(whole, output_hidden_states=True).hidden_states[after_layer][0]
    square_T = hidden_TE.square().mean(-1)
    expected_TF = torch.stack(
        [
            square_T.sqrt(),
            hidden_TE.abs().amax(-1) / square_T.sqrt(),
            hidden_TE.pow(4).mean(-1) / square_T.square(),
        ],
        dim=1,
    )
    got_TF = torch.stack([seen[0, position] for position in range(whole.shape[1])])
    assert_close(got_TF, expected_TF.detach(), rtol=1e-4, atol=1e-4)


def test_what_never_goes_low_is_all_high() -> None:
    """A forward in two parts that computes something else than one in one part."""
    cases = prompts()[:8]
    expected = plain_llm().generate(cases, greedy(8))
    got = late_llm(LateRouter(least_crest=0.0)).generate(cases, greedy(8))
    assert [tokens(a) for a in got] == [tokens(b) for b in expected]
    assert [a.outputs[0].routes for a in got] == [b.outputs[0].routes for b in expected]


def test_a_step_that_fails_behind_the_decision_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decisions taken twice, layers of the first part skipped, or their times lost."""
    cases = prompts()[:5]
    expected = [tokens(output) for output in late_llm().generate(cases, greedy(6))]
    llm = late_llm()
    for number, ids in enumerate(cases):
        llm.engine.add_request(str(number), list(ids), greedy(6))
    monkeypatch.setattr(Decoder, "forward", failing(Decoder.forward, at=range(5, 1000, 5)))
    last, num_failed = step_to_the_end(llm)
    assert num_failed >= 2
    assert [tokens(last[str(number)]) for number in range(len(cases))] == expected
    num_tokens = sum(len(ids) + 5 for ids in cases)
    assert llm.engine.stats.decided_tokens == num_tokens
    assert 0 < llm.engine.stats.attention_s < llm.engine.stats.executor_s


def test_interval_and_composite_ask_when_their_part_does() -> None:
    """A wrapper that asks before the forward for what is known after it."""
    for router in (IntervalRouter(LateRouter(), every=3), CompositeRouter(precision=LateRouter())):
        router.check()
        assert router.after_layer == 1 and router.decision_point == "after_layer_k"
        llm = LLM(tiny(), router=router, executors=twin())
        llm.engine.add_request("0", list(prompts()[2]), greedy(4))
        run_all(llm)
        assert (llm.engine.stats.executed_tokens.sum(0) > 0).sum() == 2


class Unalike(LateRouter):
    """Its routes differ in the first layer."""

    def routes(self, num_layers: int) -> RouteTable:
        high, low = (router.routes(num_layers).routes for router in (super(), RuleRouter()))
        return RouteTable(routes=(high[0], low[1]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LateRouter(after_layer=4), "after layer 4, and the model has 4.*at most 3"),
        (lambda: LateRouter(after_layer=-1), "after_layer=-1 is below 0"),
        (Unalike, "its routes high, low differ before it"),
        (lambda: BatchedRouter(LateRouter()), "batched is asked about tokens ahead of their chunk"),
        (
            lambda: RequestLevelRouter(LateRouter(), high_frac=0.5),
            "exist in prefill at pre_forward",
        ),
        (lambda: LateRouter(after_layer=0), "hidden_crest, which does not exist.*at pre_forward"),
        (
            lambda: CompositeRouter(precision=LateRouter(), retention=LateRouter(2)),
            "after the same layer, got late: after 1 and late: after 2",
        ),
    ],
)
def test_what_cannot_be_decided_there_is_refused(make: Any, message: str) -> None:
    """A feature of a forward that has not run, or a route that was needed before it was chosen."""
    with pytest.raises(ValueError, match=message):
        LLM(tiny(), router=make(), executors=twin())


def test_queues_have_no_effect_and_that_is_said() -> None:
    """An option that is silently something else."""
    with pytest.warns(
        UserWarning, match="dispatch=queued has no effect: router late decides after"
    ):
        late_llm(dispatch="queued")
