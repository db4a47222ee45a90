"""The contract of a scheduling policy, for every config in conf/scheduler."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.simulation import Simulation
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.models import LoadedModel, tiny_random

CONF = Path(__file__).resolve().parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "scheduler").glob("*.yaml"))
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
    }
)


def test_every_config_is_an_engines_options() -> None:
    """A key in a config that the engine does not have, or a policy that it does not know."""
    assert {"fcfs", "static_batch"} <= set(NAMES)
    for name in NAMES:
        assert llm(name).options.scheduler == options(name)["scheduler"]


@every_policy
@settings(max_examples=60, deadline=None)
@given(load=loads)
def test_any_load_is_worked_off(name: str, load: dict[str, Any]) -> None:
    """Over the budget; a chunk without slots; a request that never runs; slots lost in a preemption."""
    engine = llm(
        name,
        max_num_seqs=load["seats"],
        max_num_batched_tokens=load["seats"] + load["more_tokens"],
        num_kv_slots=load["slots"],
        static_batch_size=1 + load["seats"] // 2,
    ).engine
    sim = Simulation(engine.scheduler)
    put_off = iter(load["put_off"] * 200)
    early, late = load["requests"][: load["late"]], load["requests"][load["late"] :]
    for prompt_len, num_output in early:
        sim.add(prompt_len, num_output)
    for index in range(3):
        sim.step(lambda _: next(put_off))
        if index in load["aborted"] and index < len(sim.requests):
            sim.abort(sim.requests[index])
    for prompt_len, num_output in late:
        sim.add(prompt_len, num_output)
    sim.run(lambda _: next(put_off))
    for one in sim.requests:
        assert one.finished
        assert one.num_tokens == one.max_total or int(one.request_id) in load["aborted"]


@every_policy
def test_outputs_do_not_depend_on_the_policy(name: str) -> None:
    """A policy that changes what is computed and not only when."""
    prompts = [[5 + i] * (1 + 3 * i) for i in range(9)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = LLM(model(), options=EngineOptions(max_num_seqs=1))
    expected = [alone.generate([p], params)[0].outputs[0].token_ids for p in prompts]
    tight = llm(
        name, max_num_seqs=4, max_num_batched_tokens=9, num_kv_slots=32, static_batch_size=3
    )
    outputs = tight.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert tight.engine.pool.free == 32
