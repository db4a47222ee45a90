"""The contract of a scheduling policy, for every config in conf/scheduler."""

from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tools import NearTies, alone, greedy, plain_llm, prompts, run_all, tokens
from tests.scheduler.simulation import Simulation
from tokenrouter import LLM, EngineOptions, RequestOutput
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.scheduler import POLICIES, PhaseOrder

CONF = Path(__file__).resolve().parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "scheduler").glob("*.yaml"))
PHASE_ORDERS = get_args(PhaseOrder)
every_policy = pytest.mark.parametrize("name", NAMES)


@cache
def options(name: str) -> dict[str, Any]:
    """The engine's options of a config."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        values = dict(compose(overrides=[f"+scheduler={name}"]).scheduler)
    return {"scheduler": values.pop("policy"), **values}


@cache
def model() -> LoadedModel:
    return tiny_random("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32)


def llm(name: str, **changed: Any) -> LLM:
    return LLM(model(), options=EngineOptions(**{**options(name), **changed}))


loads = st.fixed_dictionaries(
    {
        "requests": st.lists(
            st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=10
        ),
        "slots": st.integers(42, 130),
        "seats": st.integers(1, 6),
        "more_tokens": st.integers(0, 30),
        "put_off": st.lists(st.booleans(), min_size=8, max_size=40),
        "aborted": st.sets(st.integers(0, 9), max_size=3),
        "late": st.integers(0, 9),
        "phase_order": st.sampled_from(PHASE_ORDERS),
        "max_prefill_tokens": st.sampled_from([None, 1, 4]),
        "max_decode_tokens": st.sampled_from([None, 1, 2]),
        "max_phase_wait_steps": st.integers(0, 4),
        "max_overtaken": st.integers(0, 4),
        "cut_every": st.sampled_from([None, 1, 5]),
    }
)


def test_every_config_is_an_engines_options() -> None:
    """A key in a config that the engine does not have, or a policy that it does not know."""
    assert set(NAMES) == set(POLICIES)
    for name in NAMES:
        assert llm(name).options.scheduler == options(name)["scheduler"]


@every_policy
@settings(max_examples=60, deadline=None)
@given(load=loads)
def test_any_load_is_worked_off(name: str, load: dict[str, Any]) -> None:
    """Over the budget; a chunk without slots; a request that never runs; slots lost in a preemption."""
    seats, tokens = load["seats"], load["seats"] + load["more_tokens"]
    engine = llm(
        name,
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        num_kv_slots=load["slots"],
        static_batch_size=1 + seats // 2,
        max_prefill_tokens=min(load["max_prefill_tokens"] or tokens, tokens),
        max_decode_tokens=min(load["max_decode_tokens"] or seats, seats),
        **{key: load[key] for key in ("phase_order", "max_phase_wait_steps", "max_overtaken")},
    ).engine
    engine.scheduler.cut_every = load["cut_every"]
    sim = Simulation(engine.scheduler)
    put_off = iter(load["put_off"] * 200)
    early, late = load["requests"][: load["late"]], load["requests"][load["late"] :]
    for prompt_len, num_output in early:
        sim.add(prompt_len, num_output, priority=num_output % 3)
    for index in range(3):
        sim.step(lambda _: next(put_off))
        if index in load["aborted"] and index < len(sim.requests):
            sim.abort(sim.requests[index])
    for prompt_len, num_output in late:
        sim.add(prompt_len, num_output, priority=prompt_len % 3)
    sim.run(lambda _: next(put_off))
    for one in sim.requests:
        assert one.finished
        assert one.num_tokens == one.max_total or int(one.request_id) in load["aborted"]


@every_policy
@pytest.mark.parametrize("phase_order", PHASE_ORDERS)
@pytest.mark.parametrize("cut_every", [None, 7])
def test_outputs_do_not_depend_on_the_policy(
    name: str, phase_order: PhaseOrder, cut_every: int | None
) -> None:
    """A policy that changes what is computed and not only when."""
    tight = plain_llm(
        EngineOptions(
            **{
                **options(name),
                "phase_order": phase_order,
                "max_num_seqs": 6,
                "max_num_batched_tokens": 40,
                "max_prefill_tokens": 30,
                "max_decode_tokens": 3,
                "max_phase_wait_steps": 2,
                "max_overtaken": 3,
                "max_num_waiting": 12,
                "num_kv_slots": 140,
                "static_batch_size": 4,
            }
        )
    )
    tight.engine.scheduler.cut_every = cut_every
    outputs = tight.generate(prompts()[:20], greedy(), priority=[i % 3 for i in range(20)])
    ties = NearTies(plain_llm(EngineOptions(max_num_seqs=1)))
    for prompt, expected, output in zip(prompts(), alone(), outputs, strict=False):
        ties.same(prompt, expected, tokens(output))
    assert ties.count <= 1
    assert tight.engine.stats.num_preemptions > 0, "the pool was never short: too little was tested"
    assert tight.engine.pool.free == 140


@every_policy
def test_requests_that_come_and_go_meanwhile(name: str) -> None:
    """A request that is aborted in the queue, or running, takes its company along or leaves slots behind."""
    served = plain_llm(
        EngineOptions(
            **{
                **options(name),
                "max_num_seqs": 4,
                "max_num_batched_tokens": 24,
                "num_kv_slots": 130,
                "static_batch_size": 3,
                "max_overtaken": 2,
            }
        )
    )
    finals: dict[str, RequestOutput] = {}
    for index in range(16):
        served.engine.add_request(str(index), prompts()[index], greedy(), priority=index % 4)
        finals |= {one.request_id: one for one in served.engine.step() if one.finished}
        if index in (5, 11):
            served.engine.abort(str(index - 3), silent=True)
            served.engine.abort(str(index), silent=True)
    finals |= run_all(served)
    assert set(finals) == {str(index) for index in range(16)} - {"2", "5", "8", "11"}
    ties = NearTies(plain_llm(EngineOptions(max_num_seqs=1)))
    for request_id, output in finals.items():
        ties.same(prompts()[int(request_id)], alone()[int(request_id)], tokens(output))
    assert ties.count <= 1
