"""Guards the decision log and its counters: every token once, whatever happens to the step that decided it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.faults import failing, step_to_the_end
from tests.engine.tools import greedy, plain_llm, prompts, routes, run_all, tiny, tokens, twin
from tokenrouter import LLM, EngineOptions, RequestOutput, SamplingParams
from tokenrouter.engine.decider import UNASKED
from tokenrouter.routers import LayerwiseRouter, RandomRouter, RequestLevelRouter, Router
from tokenrouter.types import Phase, RouteInput, RoutingDecision

CALIBRATION = [list(p) for p in prompts() if len(p) > 5]
ASKED = prompts()[:14]


def logging(router: Router | str, **options: Any) -> LLM:
    """An engine with the log on, on two paths."""
    return LLM(
        tiny(),
        router=router,
        executors=twin(),
        options=EngineOptions(log_decisions=True, **options),
        calibration_ids=CALIBRATION,
    )


def rows(llm: LLM) -> dict[tuple[str, int], dict[str, Any]]:
    """The log by request and position; a token in two rows is an error."""
    log = llm.engine.decisions
    assert log is not None
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for block in log.blocks:
        for row in zip(*block.values(), strict=True):
            one = dict(zip(block, row, strict=True))
            key = log.request_ids[one["request_index"]], int(one["position"])
            assert key not in found, "decided twice"
            found[key] = one | {"reason": log.reasons[one["reason"]]}
    return found


def check_all_logged(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    """Every token that ran is in the log once, with its route, and was counted once."""
    logged, stats = rows(llm), llm.engine.stats
    expected = {
        (output.request_id, position): route
        for output in outputs
        for position, route in enumerate(routes(output))
        if route >= 0
    }
    assert {key: row["executed"] for key, row in logged.items()} == expected
    assert stats.decided_tokens == len(expected)
    assert stats.decided_tokens + stats.reused_tokens == int(stats.executed_tokens.sum())
    assert stats.router_s > 0


def test_a_request_level_decision_is_logged_and_counted_for_every_token() -> None:
    """An empty log, and microseconds per token over no token."""
    llm = logging("request_level")
    router = llm.router
    assert isinstance(router, RequestLevelRouter)
    outputs = llm.generate(ASKED, greedy(6))
    check_all_logged(llm, outputs)
    assert llm.engine.stats.reused_tokens == 0
    by_request: dict[str, set[tuple[Any, ...]]] = {}
    for (request_id, _), row in rows(llm).items():
        answer = row["requested"], float(row["score"]), row["reason"]
        by_request.setdefault(request_id, set()).add(answer)
    assert all(len(answers) == 1 for answers in by_request.values())
    assert {row["phase"] for row in rows(llm).values()} == set(Phase)
    for ((route, score, reason),) in by_request.values():
        assert reason.startswith("few" if route else "many")
        assert (score < router.threshold) == bool(route)
    assert len({route for ((route, _, _),) in by_request.values()}) == 2


def test_request_level_decisions_survive_preemption() -> None:
    """Recompute that counts and logs a request's tokens again."""
    llm = logging("request_level", num_kv_slots=130, max_num_batched_tokens=64)
    outputs = llm.generate(ASKED, greedy(12))
    assert llm.engine.stats.num_preemptions > 0
    assert llm.engine.stats.reused_tokens > 0
    check_all_logged(llm, outputs)


def test_completions_of_one_prompt_ask_a_request_level_router_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Features and router over the same prompt n times; completions of one prompt on two paths."""
    llm = logging("request_level")
    calls: list[int] = []
    real = llm.router.route

    def counted(inputs: RouteInput) -> RoutingDecision:
        calls.append(len(inputs))
        return real(inputs)

    monkeypatch.setattr(llm.router, "route", counted)
    params = SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=1)
    (output,) = llm.generate([ASKED[4]], params)
    assert calls == [len(ASKED[4])]
    taken = {route for one in output.outputs for route in one.routes[:-1]}
    assert len(output.outputs) == 3 and len(taken) == 1
    assert llm.engine.stats.decided_tokens == 3 * (len(ASKED[4]) + 3)


@pytest.mark.parametrize("dispatch", ["mixed", "queued"])
@pytest.mark.parametrize("router", ["random", "request_level"])
def test_a_step_that_fails_and_is_tried_again_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, router: str, dispatch: str
) -> None:
    """Decisions recorded after the forward: those of a failed step were lost, log and counters alike."""
    made = RandomRouter(0.5) if router == "random" else router
    llm = logging(made, dispatch=dispatch, num_kv_slots=150, max_num_batched_tokens=40)
    runner = llm.engine._parts.runner
    monkeypatch.setattr(runner, "run", failing(runner.run, at=range(1, 1000, 2)))
    for index, prompt in enumerate(ASKED):
        llm.engine.add_request(str(index), prompt, greedy(6))
    last, failures = step_to_the_end(llm)
    assert failures > 10
    check_all_logged(llm, [last[str(index)] for index in range(len(ASKED))])


def test_a_failed_step_is_no_step_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deferred token whose wait grows with every failure, until it runs alone."""
    llm = logging(RandomRouter(0.5), dispatch="queued", min_batch=50, max_wait_steps=3)
    for index, prompt in enumerate(ASKED[:6]):
        llm.engine.add_request(str(index), prompt, greedy(12))
    while not any(r.waited_steps for r in llm.engine.scheduler.running):
        llm.engine.step()
    before = [r.waited_steps for r in llm.engine.scheduler.running]

    def fails(*_: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._parts.runner, "run", fails)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="injected"):
                llm.engine.step()
    assert [r.waited_steps for r in llm.engine.scheduler.running] == before
    run_all(llm)


def test_reused_tokens_are_never_negative() -> None:
    """A token that is decided in one step and runs in a later one was counted as decided, and not yet as run."""
    llm = logging(RandomRouter(0.5), dispatch="queued", min_batch=50, max_wait_steps=3)
    for index, prompt in enumerate(ASKED):
        llm.engine.add_request(str(index), prompt, greedy(12))
    waited = 0

    def check() -> None:
        nonlocal waited
        stats = llm.engine.stats
        assert stats.reused_tokens == 0, "nothing was preempted"
        waited += stats.decided_tokens > int(stats.executed_tokens.sum())
        stats.reset()

    run_all(llm, check)
    assert waited, "no token was deferred: nothing was tested"


def test_an_aborted_request_shows_the_routes_that_ran() -> None:
    """After a preemption, tokens that never ran (deferred, or unreached) were shown with a route."""
    llm = logging(
        RandomRouter(0.5),
        dispatch="queued",
        min_batch=50,
        max_wait_steps=4,
        num_kv_slots=110,
        max_num_batched_tokens=24,
        max_num_seqs=8,
    )
    for index, prompt in enumerate(ASKED):
        llm.engine.add_request(str(index), prompt, greedy(12))
    ran: dict[str, int] = {}
    checked = 0
    while llm.engine.has_unfinished():
        llm.engine.step()
        for one in llm.engine.scheduler.running:
            ran[one.request_id] = max(ran.get(one.request_id, 0), one.num_computed)
        victim = next((r for r in llm.engine.scheduler.waiting if r.num_preemptions), None)
        if victim is not None:
            llm.engine.abort(victim.request_id)
            outputs = {output.request_id: output for output in llm.engine.step()}
            is_fed_N = np.array(routes(outputs[victim.request_id])) >= 0
            assert is_fed_N.tolist() == [i < ran[victim.request_id] for i in range(len(is_fed_N))]
            checked += 1
    assert checked, "nothing was preempted: nothing was tested"


def test_a_degraded_decision_keeps_both_names() -> None:
    """A log that says only what ran, or only what was asked for."""
    llm = plain_llm(EngineOptions(log_decisions=True), router=LayerwiseRouter(high_layers=[0]))
    with pytest.warns(UserWarning, match="run on 'high'"):
        llm.generate(ASKED[:3], greedy(4))
    names = llm.engine.stats.route_names
    taken = {(names[r["requested"]], names[r["executed"]]) for r in rows(llm).values()}
    assert taken == {("layerwise", "high")}


class DecodeOnly(RandomRouter):
    """Decides generated tokens only, and keeps what it was asked about."""

    phases = frozenset({Phase.DECODE})

    def __init__(self, high_frac: float) -> None:
        super().__init__(high_frac)
        self.asked: list[int] = []
        self.answers: list[torch.Tensor] = []

    def route(self, inputs: RouteInput) -> RoutingDecision:
        self.asked += inputs.phase_T.tolist()
        answer = super().route(inputs)
        self.answers.append(answer.route_T)
        return answer


def test_phases_that_a_router_does_not_decide_take_the_first_route_and_say_so() -> None:
    """A decode-only router that is asked about prompts, or whose answer is overwritten or logged as its reason."""
    router = DecodeOnly(0.0)
    llm = logging(router, max_num_batched_tokens=40)
    outputs = llm.generate(ASKED[:5], greedy(5))
    for prompt, output in zip(ASKED[:5], outputs, strict=True):
        assert routes(output) == (0,) * len(prompt) + (1,) * 4 + (-1,)
    assert set(router.asked) == {Phase.DECODE} and len(router.asked) == 20
    assert all((answer_T == 1).all() for answer_T in router.answers)
    check_all_logged(llm, outputs)
    for row in rows(llm).values():
        assert (
            (row["reason"] == UNASKED) == (row["phase"] == Phase.PREFILL) == np.isnan(row["score"])
        )


def test_the_log_changes_nothing() -> None:
    """A log that is paid for with other tokens."""
    silent = LLM(tiny(), router=RandomRouter(0.5), executors=twin())
    expected = silent.generate(ASKED, greedy(6))
    assert [tokens(o) for o in logging(RandomRouter(0.5)).generate(ASKED, greedy(6))] == [
        tokens(o) for o in expected
    ]
    assert silent.engine.decisions is None
