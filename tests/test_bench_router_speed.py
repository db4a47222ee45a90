"""Guards what the benchmark of routers says of throughput: shares it was not measured at, rivals that are slower."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from scripts.router_bench.equal_speed import Point, compared, kl_at, overall
from scripts.router_bench.measures import Measured
from scripts.router_bench.routings import Key
from scripts.router_bench.setup import Bench
from scripts.router_bench.sizes import QUICK
from scripts.router_bench.throughput import measure_speeds
from tests.router_bench_cases import SPEEDS, at, tiny_bench, tiny_routers
from tokenrouter.routers import LayerwiseRouter, Router
from tokenrouter.types import Phase


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tiny_routers(tmp_path_factory.mktemp("routers"))
    return tiny_bench(folder, tmp_path_factory.mktemp("cache"))


def test_throughput_is_read_at_the_share_that_was_measured() -> None:
    """Tokens per second averaged in place of times, the spread turned around, an oracle without any number."""
    for share, time in ((0.2, 0.8), (0.125, 0.7)):
        expected = [1 / turn for turn in at(time)]
        assert SPEEDS.vs_all_high("mlp", share) == pytest.approx(expected)
    assert SPEEDS.vs_all_high("mlp", 0.6)[1] == pytest.approx(1 / 0.9)
    assert SPEEDS.vs_all_high("oracle", 0.05) == SPEEDS.vs_all_high("random", 0.05)
    assert SPEEDS.vs_all_high("all_low", 0.0) == pytest.approx([1.6, 2.0, 1 / 0.45])


def test_speeds_are_measured_with_the_share_that_they_stand_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that runs all high, as with thresholds of another text; layers that are not the map's."""
    served: dict[str, Router] = {}

    def keep(llms: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        served.update({name: llm.router for name, llm in llms.items()})
        return {name: partial(float, 2.0 if name == "all_high" else 1.0) for name in llms}

    monkeypatch.setattr("tokenrouter.evaluation.ratios.prefill_runs", keep)
    speeds = measure_speeds(bench, [2, 0, 1, 3], Phase.PREFILL, dtype="float32")
    num_tokens = QUICK.chunk_tokens
    assert speeds.all_high_tok_s.median == num_tokens / 2
    names = {"all_low", "layerwise", "random", "rule", "mlp"}
    assert set(speeds.times) == names
    assert [share for share, _ in speeds.times["mlp"]] == [3 / num_tokens, 13 / num_tokens]
    assert speeds.times["layerwise"][1][0] == 0.25
    assert all(turns == [0.5] for times in speeds.times.values() for _, turns in times)
    fixed = served["layerwise 0.25"]
    assert isinstance(fixed, LayerwiseRouter) and fixed.high_layers == (2,)


def test_decode_is_measured_with_the_share_that_was_decoded(bench: Bench) -> None:
    """A share of the prompt's, prompts that count as decode, and a map of layers that is said to go by tokens."""
    speeds = measure_speeds(bench, [2, 0, 1, 3], Phase.DECODE, dtype="float32")
    assert set(speeds.times) == {"all_low", "layerwise", "random", "rule", "mlp"}
    assert speeds.times["all_low"][0][0] == 0.0
    assert [share for share, _ in speeds.times["layerwise"]] == [0.25, 0.25]
    for name in ("random", "rule", "mlp"):
        shares = [share for share, _ in speeds.times[name]]
        assert shares == sorted(shares) and 0 <= shares[0] <= shares[-1] <= 1
    few, many = (share for share, _ in speeds.times["random"])
    assert 0 < few < 0.12 < many < 0.35, "counted, so not to the digit what was asked for"
    assert (few, many) != QUICK.shares
    assert all(len(turns) == QUICK.turns for times in speeds.times.values() for _, turns in times)


def test_so_many_requests_decode_as_were_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a rate of one request that is 32 requests' time."""
    seen: list[int] = []

    def decode_turns(
        llms: dict[str, Any], prompts: list[list[int]], *_: Any, **__: Any
    ) -> dict[str, list[float]]:
        seen.extend(len(prompt) for prompt in prompts)
        return {name: [0.5] for name in llms}

    monkeypatch.setattr("tokenrouter.evaluation.ratios.decode_turns", decode_turns)
    monkeypatch.setattr("scripts.router_bench.throughput._decoded_share", lambda llm, asked: asked)
    few = replace(bench, sizes=replace(bench.sizes, decode_batch=3))
    speeds = measure_speeds(few, [2, 0, 1, 3], Phase.DECODE, dtype="float32")
    assert seen == [QUICK.context] * 3
    assert speeds.all_high_tok_s.median == 3 / 0.5


def test_another_router_is_compared_where_it_is_as_fast() -> None:
    """KL at an equal share, which hides what a decision costs; a point read off the wrong neighbours."""

    def point(speeds: list[float], kls: list[float]) -> Point:
        return Point(torch.tensor(speeds).double(), torch.tensor(kls).double())

    curve = [point([2, 1.0], [8, 4]), point([1, 2.0], [0, 0]), point([1.5, 3.0], [2, 1])]
    for own, kls in (([1.75, 1.5], [5, 2]), ([1.25, 3.0], [1, 1]), ([9, 9.0], [8, 1])):
        assert kl_at(curve, torch.tensor(own))[0] == kls[0]
        assert kl_at(curve, torch.tensor(own))[1] == kls[1]

    def measured(kl: float, share: float) -> Measured:
        share_W = torch.tensor([share] * 2)
        return Measured(
            kl_WN=torch.tensor([[kl], [kl]]),
            high_frac_W=share_W,
            auroc_W=share_W,
            recall_W=share_W,
        )

    found: dict[Key, Measured] = {
        (Phase.PREFILL, "all_low", "exact", 0.0): measured(8.0, 0.0),
        (Phase.PREFILL, "mlp", "rank", 0.05): measured(3.0, 0.05),
        (Phase.DECODE, "mlp", "rank", 0.05): measured(9.0, 0.05),
        (Phase.PREFILL, "rule", "rank", 0.05): measured(6.0, 0.05),
        (Phase.PREFILL, "rule", "rank", 0.2): measured(2.0, 0.2),
    }
    steady = {
        name: [(share, [turns[1]] * 3) for share, turns in times]
        for name, times in SPEEDS.times.items()
    } | {"mlp": [(0.05, [0.7] * 3), (0.2, [0.9] * 3)]}
    [row] = compared(found, replace(SPEEDS, times=steady), "rule", Phase.PREFILL)
    speed = 1 / 0.7
    rule = 2 + 4 * (speed - 1 / 0.8) / (1 / 0.6 - 1 / 0.8)
    assert row["tok_s_vs_all_high"] == pytest.approx(speed)
    assert row["kl_ratio"]["value"] == pytest.approx(3 / rule) and row["mlp_is"] == "better"
    unsteady = steady | {"mlp": [(0.05, [0.7, 0.6, 0.95]), (0.2, [0.9] * 3)]}
    [row] = compared(found, replace(SPEEDS, times=unsteady), "rule", Phase.PREFILL)
    assert row["mlp_is"] == "tie" and row["kl_ratio"]["low"] < 1 < row["kl_ratio"]["high"]
    assert overall(["better", "better"]) == "better"
    assert overall(["better", "tie"]) == "tie"
    assert overall(["better", "tie", "worse"]) == "worse"
