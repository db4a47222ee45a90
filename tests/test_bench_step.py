"""Guards the benchmark of a step: parts that are counted twice or not at all, an engine that stays wrapped."""

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from scripts.step_bench import app
from scripts.step_bench.measures import QUICK, SAMPLING, Sizes, as_values, build, format_turns
from scripts.step_bench.parts import PARTS, StepTimer
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.engine import engine as step_module
from tokenrouter.kvcache.retention import RetentionOptions, SinkWindow
from tokenrouter.models import Decoder, LoadedModel, tiny_random


def tiny(name: str, *, dtype: str) -> LoadedModel:
    assert name == app.MODEL
    return tiny_random(dtype=dtype)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the script prints with ``--quick`` on a tiny model, in lines."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr("sys.argv", ["bench_step.py", "--quick", "--repeats", "2"])
        patch.setattr(app, "load_model", tiny)
        app.main("")
    return shown.getvalue().splitlines()


def test_every_key_that_others_read_is_there(printed: list[str]) -> None:
    result: dict[str, Any] = json.loads(printed[-1])
    claims = {f"step_{name}_{what}" for name in SAMPLING for what in ("ms", "overhead_frac")}
    facts = {"parts_us", "sizes", "repeats", "router", "executor", "kernels", "quick", "provenance"}
    assert set(result) == claims | facts
    assert result["quick"] and result["repeats"] == 2 and result["provenance"]["model_hash"]
    assert (result["router"], result["executor"]) == ("rule", "int8_shared")
    for name in SAMPLING:
        parts = result["parts_us"][name]
        assert list(parts) == [*PARTS, "step", "overhead"]
        for key in ("schedule", "pack", "decide", "dispatch", "build", "forward", "logits"):
            assert 0.0 < parts[key]["min"] <= parts[key]["median"] <= parts[key]["max"], key
        assert parts["sample"]["min"] > 0.0 and parts["accept"]["min"] > 0.0
        assert 0.0 < result[f"step_{name}_overhead_frac"] < 1.0
    assert [line.split()[0] for line in printed[-len(PARTS) - 3 : -1]] == [
        *PARTS,
        "overhead",
        "step",
    ]


def test_parts_add_up_to_the_step_and_none_is_counted_twice() -> None:
    """A wrapped function that calls another one leaves a negative rest."""
    llm = build(tiny_random(), QUICK, router="rule", executor="int8")["greedy"]
    for step in StepTimer(llm).steps(6):
        assert sum(step[part] for part in PARTS) == pytest.approx(step["step"])
        assert all(step[part] >= 0.0 for part in PARTS), step


def test_what_retires_entries_and_requests_is_seen() -> None:
    """A part that stays at zero because nobody watches who does it."""
    retention = RetentionOptions(policy=SinkWindow(evicted_frac=0.5), interval=4, recent=1, sinks=0)
    llm = LLM(tiny_random(), options=EngineOptions(retention=retention))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm.engine.add_request("a", [5, 6, 7], params)
    steps = StepTimer(llm).steps(6)
    assert all(step["retire"] > 0.0 for step in steps)
    assert not llm.engine.has_unfinished() and llm.engine.stats.evicted_entries > 0
    plain = LLM(tiny_random())
    plain.engine.add_request("a", [5, 6, 7], params)
    assert [step["retire"] > 0.0 for step in StepTimer(plain).steps(6)] == [False] * 5 + [True]


def test_engines_are_left_as_they_were() -> None:
    """Every turn wrapped the wrapped functions of the last one, and other engines were timed as well."""
    llm = build(tiny_random(), QUICK, router="all_high", executor="full")["sampled"]
    parts = llm.engine._parts
    before = step_module.pack, Decoder.forward
    StepTimer(llm).steps(1)
    assert (step_module.pack, Decoder.forward) == before
    executor = llm.pool.executors["high"]
    for owner in (parts.scheduler, parts.decider, parts.dispatcher, parts.runner, parts.live):
        assert not {"schedule", "finish", "decide", "dispatch", "run", "sample"} & set(vars(owner))
    assert "logits" not in vars(executor)


def test_requests_decode_and_differ_in_how_they_are_sampled_only() -> None:
    """Steps of prompts among those of decode, or two greedy engines."""
    llms = build(tiny_random(), QUICK, router="rule", executor="int8_shared")
    for name, llm in llms.items():
        requests = llm.engine.scheduler.running
        assert len(requests) == QUICK.batch and llm.engine.stats.prefill_tokens == 48
        params = SamplingParams(**SAMPLING[name])
        assert {(r.params.temperature, r.params.top_p) for r in requests} == {
            (params.temperature, params.top_p)
        }
        assert all(r.num_computed >= r.prompt_len for r in requests)
    assert llms["greedy"].pool is llms["sampled"].pool


def test_overhead_is_what_is_neither_forward_nor_logits() -> None:
    """A ratio of other turns, or of medians that belong to different steps."""
    turn = dict.fromkeys(PARTS, 0.001) | {"forward": 0.006, "logits": 0.002, "step": 0.017}
    slow = {key: 2 * value for key, value in turn.items()}
    values = as_values({"greedy": [turn, slow, turn]})
    assert values["step_greedy_ms"] == pytest.approx(17.0)
    assert values["step_greedy_overhead_frac"] == pytest.approx(9 / 17)
    assert values["parts_us"]["greedy"]["overhead"]["max"] == pytest.approx(18_000)
    lines = format_turns({"greedy": [turn, slow, turn]}).splitlines()
    assert len({len(line) for line in lines}) == 1 and "6,000 [6,000, 12,000]" in lines[6]


def test_too_many_requests_and_too_long_prompts_are_refused() -> None:
    """Requests that wait for a seat, so that prompts run between decode steps."""
    model = tiny_random()
    with pytest.raises(ValueError, match="batch 33 must be at most 32"):
        build(model, Sizes(batch=33, context=4), router="all_high", executor="full")
    with pytest.raises(ValueError, match="context 99999999 is longer than the text allows"):
        build(model, Sizes(context=99999999), router="all_high", executor="full")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--router", "mlpp"], "no router 'mlpp'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    """They came up after the model was loaded."""
    monkeypatch.setattr("sys.argv", ["bench_step.py", *given])
    with pytest.raises(SystemExit):
        app.parse_arguments("")
    assert says in capsys.readouterr().err


def test_arguments_reach_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_step.py", "--batch", "8", "--context", "64"])
    assert app.parse_arguments("").sizes == Sizes(batch=8, context=64)
