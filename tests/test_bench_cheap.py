"""Guards the benchmark of cheap decisions: KL of other routes than those that would run, hit rates and costs of others.

N tokens of a window.
"""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.cheap_bench import app
from scripts.cheap_bench.cost import decode_prompts, measure_shared, serving
from scripts.cheap_bench.quality import answered, measure_quality
from scripts.cheap_bench.report import ALL, cost_rows, quality_rows
from scripts.cheap_bench.ways import BATCHES, EACH, INTERVALS, QUICK, Sizes, ways
from scripts.router_bench.setup import Bench, build
from tests.router_bench_cases import write_router
from tokenrouter.executors.calibration import Calibration
from tokenrouter.models import tiny_random
from tokenrouter.routers import Budget, RuleRouter

SMALL = replace(QUICK, quality=replace(QUICK.quality, windows=2))
NAMES = (
    *(f"interval_{{}}_{n}" for n in INTERVALS),
    *("cached_{}", "cached_exact_{}"),
    *(f"batched_{{}}_{n}" for n in BATCHES),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of trained routers; calibrations of the smoothed path are kept there, too."""
    found = tmp_path_factory.mktemp("routers")
    write_router(found, tiny_random(), "int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "_folder", lambda _: found)
        yield found


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    model, texts = tiny_random(), ("python_docs",)
    return build(model, SMALL.quality, executor="int8", texts=texts, data_dir=None, routers=folder)


@pytest.fixture(scope="module")
def printed(folder: Path) -> list[str]:
    """What the script prints with ``--quick`` on a tiny model, in lines."""
    shown = io.StringIO()
    given = ["--quick", "--texts", "python_docs", "--routers", str(folder)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr("sys.argv", ["bench_cheap.py", *given, "--json", str(folder / "out")])
        patch.setattr(app, "load_model", lambda name, dtype: tiny_random(dtype=dtype))
        app.main("")
    return shown.getvalue().splitlines()


def test_every_key_that_others_read_is_there_and_is_a_number(
    printed: list[str], folder: Path
) -> None:
    """A number that is missing or null, or that another way of asking has."""
    result: dict[str, Any] = json.loads(printed[-1])
    parts = ("kl", "us", "decode_1_us", "prefill_us", "small_chunks_us")
    for key in (n.format(f"{part}_vs_each_token") for n in NAMES for part in parts):
        assert isinstance(result[key], float) and result[key] > 0, key
    for key in ("cache_hit_frac_shared_prompt", "cache_hit_frac_shared_prompt_and_prefix_sharing"):
        assert 0.0 < result[key] < 1.0, key
    for exact in ("interval_{}_1", "cached_exact_{}", *(f"batched_{{}}_{n}" for n in BATCHES)):
        assert result[exact.format("kl_vs_each_token")] == 1.0
    assert json.loads((folder / "out").read_text()) == result and result["quick"]
    decided = {(row["phase"], row["way"]): row["decided_frac"] for row in result["costs"]}
    for phase in ("decode", "decode_1"):
        assert [decided[phase, f"interval_{n}"] for n in INTERVALS] == [1 / n for n in INTERVALS]
    hits = {(r["phase"], r["way"]): r.get("cache_hit_frac") for r in result["costs"]}
    assert hits["decode_1", "cached_exact"] == 0.0, "warm from the same request among others"
    first_words = [line.split()[0] for line in printed if line and not line.startswith("{")]
    assert all(first_words.count(name) == 6 for name in ("interval_8", "batched_64"))


def test_an_interval_repeats_the_route_of_the_last_multiple(bench: Bench) -> None:
    """KL of a router that decides each token, under the name of one that does not."""
    ids = bench.texts[0].windows[0]
    routers = ways(RuleRouter)
    answers = {a.router: a for a in answered(routers, ids, bench.types, seed=1)}
    each_N = answers[EACH].is_low_LN[0]
    for every in INTERVALS:
        decider_N = torch.arange(len(ids)) // every * every
        assert torch.equal(answers[f"interval_{every}"].is_low_LN[0], each_N[decider_N])
    assert not torch.equal(answers["interval_8"].is_low_LN[0], each_N)
    assert torch.equal(answers["batched_64"].is_low_LN[0], each_N)
    assert bool(answers["all_low"].is_low_LN.all())


def test_equal_routings_have_one_kl_and_others_their_own(bench: Bench) -> None:
    """Routings that were run once and given back in another order."""
    found = measure_quality(bench, bench.texts[0])
    assert torch.equal(found["batched_256"].kl_W, found[EACH].kl_W)
    assert bool((found["all_low"].kl_W > found[EACH].kl_W).all())
    assert float(found["all_low"].high_frac_W.max()) == 0.0
    assert found[EACH].hit_frac is None and found["cached"].hit_frac is not None
    rows = {(row["text"], row["way"]): row for row in quality_rows({"a": found, "b": found})}
    assert rows[ALL, "random"]["kl_mean_nats"]["value"] == pytest.approx(
        rows["a", "random"]["kl_mean_nats"]["value"]
    )
    assert rows["b", EACH]["kl_vs_each_token"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_hits_and_shared_tokens_are_told_apart(bench: Bench) -> None:
    """Tokens that prefix sharing spared, counted for the cache; a cache that was warm from the engine before."""
    found = measure_shared(serving(bench, SMALL))
    plain, shared = found["plain"], found["shared"]
    assert plain[EACH]["asked_frac"] == 1.0 and "cache_hit_frac" not in plain[EACH]
    assert plain["cached"]["asked_frac"] == pytest.approx(1 - plain["cached"]["cache_hit_frac"])
    assert shared[EACH]["shared_tokens"] > 0 == plain[EACH]["shared_tokens"]
    assert shared["cached"]["asked_frac"] == pytest.approx(plain["cached"]["asked_frac"])
    assert shared["cached"]["cache_hit_frac"] < plain["cached"]["cache_hit_frac"]


def test_requests_decode_at_all_residues() -> None:
    """Requests in lockstep, where an interval asks about all of them in one step of eight and looks cheap."""
    sizes = Sizes()
    prompts = decode_prompts(range(10_000), sizes)
    residues = [len(prompt) % 8 for prompt in prompts]
    assert len(prompts) == 32 and {residues.count(r) for r in range(8)} == {4}
    assert len({tuple(prompt) for prompt in prompts}) == 32


def test_ratios_are_over_each_token_turn_by_turn() -> None:
    """A ratio of medians, or upside down."""

    def turns(*us: float) -> list[dict[str, Any]]:
        return [{"us_per_token": value, "decided_frac": 0.5} for value in us]

    _, row = cost_rows({"decode": {EACH: turns(1, 4, 2), "x": turns(4, 8, 2)}})
    assert (row["us_per_token"], row["us_vs_each_token"], row["decided_frac"]) == (4, 2, 0.5)
    assert row["us_vs_each_token_range"] == pytest.approx([1.2, 3.6])


def test_every_way_has_its_own_router() -> None:
    """Thresholds of one way that another one sets anew."""
    routers = ways(lambda: RuleRouter(budget=Budget(high_frac=0.1)))
    inner = [getattr(router, "inner", router) for router in routers.values()]
    assert len({id(router) for router in inner}) == len(routers)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--windows", "1"], "--windows must be at least 2"),
        (["--turns", "0"], "--turns must be at least 1"),
        (["--texts", "python_docs", "python_docs"], "--texts names a text twice"),
        (["--routers", "no/such"], "--routers no/such: there is no such folder"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["--json", "no/such/out.json"], "there is no folder no/such"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    """They came up after minutes of loading."""
    monkeypatch.setattr("sys.argv", ["bench_cheap.py", *given])
    with pytest.raises(SystemExit):
        app.parse_arguments("")
    assert says in capsys.readouterr().err
