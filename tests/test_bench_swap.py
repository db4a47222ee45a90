"""Guards the swap benchmark: keys that others read, engines that differ in more than the tier, no pressure at all."""

import io
import json
import math
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import pytest

from scripts.swap_bench import app
from scripts.swap_bench.copies import Copied, copies, format_copied
from scripts.swap_bench.release import Moment, as_values, format_release
from scripts.swap_bench.serving import Served, format_served, serve
from scripts.swap_bench.setup import (
    ALWAYS,
    BY_COST,
    FORMS,
    NEVER,
    QUICK,
    VARIANTS,
    Bench,
    Load,
    Sizes,
    build,
)
from tokenrouter.evaluation.throughput import Throughput
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.telemetry import Spread

LOAD = QUICK.loads[0]


def tiny(name: str, *, dtype: str) -> LoadedModel:
    assert name == app.MODEL
    return tiny_random(dtype=dtype)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return build(tiny_random(dtype="bfloat16"), QUICK, repeats=2, data_dir=None)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the script prints with ``--quick`` on a tiny model, in lines."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr("sys.argv", ["bench_swap.py", "--quick", "--repeats", "2"])
        patch.delenv("TOKENROUTER_DATA_DIR", raising=False)
        patch.setattr(app, "load_model", tiny)
        app.main("")
    return shown.getvalue().splitlines()


@pytest.fixture(scope="module")
def result(printed: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed[-1])
    return found


def test_every_key_that_others_read_is_there(result: dict[str, Any]) -> None:
    facts = {"kernels", "sizes", "repeats", "quick", "provenance"}
    assert set(result) == {"smallest", "served", "one_request", "release"} | facts
    cells = [(load.context, form) for load in QUICK.loads for form in FORMS]
    assert [(s["load"]["context"], s["form"]) for s in result["served"]] == cells
    assert [(c["num_entries"], c["form"]) for c in result["one_request"]] == cells
    assert result["quick"] and result["repeats"] == 2
    medians = [s["by_cost_vs_fixed"]["median"] for s in result["served"]]
    assert result["smallest"] == min(medians) > 0.0


def test_every_engine_is_under_pressure_and_does_as_it_is_called(result: dict[str, Any]) -> None:
    """A comparison in which nothing was preempted, or in which `always` recomputed."""
    for served in result["served"]:
        engines = served["engines"]
        assert list(engines) == list(VARIANTS)
        for found in engines.values():
            assert found["preemptions"] == found["swaps_out"] + found["recomputes"] > 0
        assert engines[NEVER]["swaps_out"] == engines[NEVER]["copy_s"] == 0
        assert engines[NEVER]["recomputed_tokens"] > 0
        assert engines[ALWAYS]["recomputes"] == engines[ALWAYS]["recomputed_tokens"] == 0
        assert engines[ALWAYS]["swaps_in"] == engines[ALWAYS]["preemptions"]
        assert engines[ALWAYS]["copy_s"] > 0.0 and engines[ALWAYS]["host_peak_bytes"] > 0


def test_memory_goes_down_before_the_run_is_over(result: dict[str, Any]) -> None:
    """A table that ends before the patience of the engine does."""
    steps = result["release"]["steps"]
    assert steps[-1]["compactions"] >= 1 and result["release"]["freed_bytes"] > 0
    first = next(i for i, moment in enumerate(steps) if moment["compactions"])
    assert steps[first]["allocated_bytes"] < steps[first - 1]["allocated_bytes"] / 2
    assert steps[first]["running"] == 1 and steps[-1]["running"] == 0


def test_every_table_is_printed(printed: list[str], result: dict[str, Any]) -> None:
    rows = [line.split()[0] for line in printed if line and not line.startswith(" ")]
    assert [name for name in rows if name in VARIANTS] == list(VARIANTS) * len(result["served"])
    assert len([line for line in printed if "the better of the two others." in line]) == 4
    assert any("slots were given back" in line for line in printed)


def test_engines_differ_in_the_host_tier_only(bench: Bench) -> None:
    """Another number of slots or seats, or a choice that was set where it should be the library's."""
    for form in FORMS:
        systems = bench.systems(LOAD, form)
        hosts = {name: llm.engine.scheduler.host for name, llm in systems.items()}
        assert hosts[NEVER] is None and hosts[ALWAYS] is not None and hosts[BY_COST] is not None
        assert hosts[ALWAYS].recompute_s == math.inf > hosts[BY_COST].recompute_s > 0.0
        assert hosts[ALWAYS].num_slots >= LOAD.num_requests * (LOAD.context + LOAD.output_max)
        for llm in systems.values():
            assert llm.pool is bench.pool and llm.engine.pool.num_slots == LOAD.num_slots
            assert llm.engine.scheduler.limits.max_num_seqs == LOAD.num_requests
            is_int8 = llm.engine.kv_bytes_per_slot == llm.engine.int8_bytes_per_slot
            assert is_int8 is (form == "int8")


@pytest.mark.parametrize("load", [*Sizes().loads, *QUICK.loads])
def test_a_load_does_not_fit(load: Load) -> None:
    """Slots for everything that the first requests generate: nobody would be preempted."""
    assert load.num_requests > load.num_fitting
    assert load.num_fitting * load.output_min > load.slack


def test_the_full_loads_have_the_contexts_that_the_claim_names() -> None:
    assert [load.context for load in Sizes().loads] == [128, 1500]


def test_by_cost_is_held_against_the_better_of_the_others(bench: Bench) -> None:
    """A ratio to whichever looks best, or of medians instead of pass by pass."""
    measured = serve(bench, LOAD, "bf16")

    def taking(name: str, *walls: float) -> Throughput:
        repeats = measured.passes[name].repeats
        return Throughput(
            repeats=tuple(replace(r, wall_s=w) for r, w in zip(repeats, walls, strict=True))
        )

    passes = {
        NEVER: taking(NEVER, 4.0, 4.0),
        ALWAYS: taking(ALWAYS, 2.0, 3.0),
        BY_COST: taking(BY_COST, 1.0, 3.0),
    }
    served = Served(load=LOAD, form="bf16", passes=passes)
    assert served.better_fixed == ALWAYS
    assert served.by_cost_vs(ALWAYS) == Spread(median=1.5, min=1.0, max=2.0)
    assert served.as_values()["by_cost_vs_fixed"]["median"] == 1.5
    assert "1.500 [1.000, 2.000] times the output tok/s of always" in format_served(served)


@pytest.mark.parametrize(
    ("swap_ms", "estimated_ms", "says"),
    [(1.0, 1.0, "swap"), (9.0, 1.0, "swap (the other is"), (1.0, 9.0, "recompute (the other is")],
)
def test_a_wrong_choice_is_said(swap_ms: float, estimated_ms: float, says: str) -> None:
    """An estimate that leads to the dearer way, and a table that shows the estimate alone."""
    copied = Copied(
        num_entries=7,
        form="bf16",
        swap_ms=Spread(median=swap_ms, min=swap_ms, max=swap_ms),
        recompute_ms=Spread(median=4.0, min=4.0, max=4.0),
        estimated_swap_ms=estimated_ms,
        estimated_recompute_ms=4.0,
    )
    assert says in format_copied(copied) and copied.is_right is (says == "swap")
    assert copied.as_values()["is_right"] is copied.is_right


@pytest.mark.parametrize("form", list(FORMS))
def test_one_request_is_copied_whole(
    bench: Bench, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the entries, or a row that already had room, so that nothing was copied back."""
    from scripts.swap_bench import copies as module

    made: list[Any] = []
    tier = module.HostTier

    def keep(*args: Any) -> Any:
        made.append(tier(*args))
        return made[-1]

    monkeypatch.setattr(module, "HostTier", keep)
    found = copies(bench, LOAD, form)
    counts = made[0].counts
    assert counts.num_out == counts.num_in == bench.repeats + 1
    assert counts.peak_entries == found.num_entries == LOAD.context
    assert counts.peak_bytes > 0 and found.swap_ms.min > 0.0 and found.recompute_ms.min > 0.0


def test_what_was_freed_is_counted_from_the_peak() -> None:
    """The first line, before anything is allocated, taken for the peak."""
    values = [(0, 100), (90, 190), (60, 170), (5, 80)]
    moments = [
        Moment(
            step=i,
            running=1,
            live_bytes=0,
            allocated_bytes=a,
            process_bytes=p,
            compactions=0,
        )
        for i, (a, p) in enumerate(values)
    ]
    found = as_values(moments)
    assert (found["freed_bytes"], found["process_smaller_by_bytes"]) == (85, 110)
    assert len(found["steps"]) == 4 and format_release(moments).count("\n") == 7


def test_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong number that came up after the model was loaded."""
    monkeypatch.setenv("TOKENROUTER_DATA_DIR", "sets")
    monkeypatch.setattr("sys.argv", ["bench_swap.py"])
    chosen = app.parse_arguments("")
    assert (chosen.repeats, chosen.quick, chosen.data_dir) == (3, False, "sets")
    monkeypatch.setattr("sys.argv", ["bench_swap.py", "--repeats", "0"])
    with pytest.raises(SystemExit):
        app.parse_arguments("")
    assert "--repeats must be at least 1, got 0" in capsys.readouterr().err
