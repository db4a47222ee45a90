"""Guards against bars that stand still for a whole system, and totals that are never reached."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.evaluation import quality, systems, throughput
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.quality import QualitySettings, measure_quality
from tokenrouter.evaluation.systems import SystemsBuilder
from tokenrouter.evaluation.throughput import measure_throughput
from tokenrouter.executors import ExecutorPool
from tokenrouter.models import LoadedModel
from tokenrouter.routers import AllHighRouter, RequestLevelRouter, Router, RuleRouter
from tokenrouter.workloads import RequestSpec

Moves = list[tuple[str, int]]
REQUESTS = [
    RequestSpec(
        prompt_ids=tuple(3 + (5 * i + n) % 250 for i in range(n)),
        params=SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    )
    for n in (5, 40, 90)
]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], tuple[list[int], Moves]]:
    """Replaces a module's bar; returns the totals and the moves that it will see."""

    def install(module: Any) -> tuple[list[int], Moves]:
        totals: list[int] = []
        moves: Moves = []

        @contextmanager
        def recording(_: str, total: int, *, unit: str) -> Iterator[Any]:
            totals.append(total)
            yield lambda what="", count=1: moves.append((what, count))

        monkeypatch.setattr(module, "progress", recording)
        return totals, moves

    return install


def test_quality_moves_with_every_chunk_and_every_decode_token(
    model: LoadedModel, record: Callable[[Any], tuple[list[int], Moves]]
) -> None:
    """Forced decode, the longest part, moved once per system."""
    totals, moves = record(quality)
    settings = QualitySettings(window_tokens=40, num_windows=2, decode_tokens=8, decode_windows=2)
    windows = [[3 + (7 * i + w) % 250 for i in range(40)] for w in range(2)]
    llm = LLM(model, options=EngineOptions(max_num_seqs=8, max_num_batched_tokens=16))
    measure_quality(LLM(model), {"run": llm}, windows, settings)
    assert totals == [sum(count for _, count in moves)]
    assert len([what for what, _ in moves if what == "run, decode"]) >= 2 * 8
    assert len([what for what, _ in moves if what == "run, window 1"]) == 3


def test_throughput_moves_with_every_step(
    model: LoadedModel, record: Callable[[Any], tuple[list[int], Moves]]
) -> None:
    totals, moves = record(throughput)
    served = measure_throughput({"a": LLM(model), "b": LLM(model)}, REQUESTS, num_repeats=2)
    assert totals == [sum(count for _, count in moves)] and all(count > 0 for _, count in moves)
    steps = sum(len(repeat.steps) for result in served.values() for repeat in result.repeats)
    assert len(moves) == steps


@pytest.mark.parametrize(
    "router",
    [RuleRouter(), AllHighRouter(), RequestLevelRouter(high_frac=0.3)],
    ids=lambda router: str(router.name),
)
def test_the_warm_up_reaches_its_end(
    model: LoadedModel,
    int8_pool: ExecutorPool,
    router: Router,
    record: Callable[[Any], tuple[list[int], Moves]],
) -> None:
    totals, moves = record(systems)
    SystemsBuilder(
        model=model,
        pool=int8_pool,
        options=EngineOptions(),
        requests=REQUESTS,
        calibration_ids=[],
    ).build(router)
    assert totals == [sum(count for _, count in moves)]


def test_without_a_terminal_about_ten_lines_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), progress("stage", 1000, unit="tokens") as advance:
        for _ in range(25):
            advance("part", 40)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "stage: 1,000 tokens" and lines[-1] == "stage: 1,000/1,000 part"
    assert len(lines) == 11
