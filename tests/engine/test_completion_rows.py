"""Guards what running completions ask for, row by row: nothing stays of a row's former owner."""

import gc
from dataclasses import replace
from weakref import ref

import numpy as np
import pytest

from tests.engine.tools import greedy, plain_llm, prompts, run_all, tiny, twin
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.engine.completion_rows import CompletionRows
from tokenrouter.routers import RandomRouter

EOS = sorted(tiny().config.eos_token_ids)
MANY = tuple(range(10, 300))
NEVER_STOPS = 350


def running(llm: LLM, params: SamplingParams) -> tuple[CompletionRows, list[int]]:
    """The rows of an engine in which a request that nobody watches runs, and the ids that make it be looked at."""
    goes_on = replace(params, logit_bias={NEVER_STOPS: 100.0})
    llm.engine.add_request("x", prompts()[3], goes_on, stream=False)
    llm.engine.step()
    (request,) = llm.engine.scheduler.running
    rows, ids_C = llm.engine._parts.live._rows, np.arange(tiny().config.vocab_size)
    row_C = np.full(len(ids_C), request.row)
    found = rows.to_visit(llm.engine.scheduler.tokens, row_C, ids_C).tolist()
    llm.engine.abort("x", silent=True)
    return rows, found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ignore_eos": True}, []),
        ({}, EOS),
        ({"stop_token_ids": [5, 383], "ignore_eos": True}, [5, 383]),
        ({"stop_token_ids": MANY}, sorted({*MANY, *EOS})),
        ({"stop_token_ids": [5], "min_tokens": 3}, []),
    ],
)
def test_only_ids_that_may_end_a_completion_are_looked_at(
    options: dict[str, object], expected: list[int]
) -> None:
    """Stop ids of the row's former owner, an EOS that is ignored, or one that is missed."""
    llm = plain_llm(EngineOptions(max_num_seqs=1))
    for before in (SamplingParams(stop_token_ids=MANY, min_tokens=1), SamplingParams()):
        running(llm, before)
        assert running(llm, SamplingParams(**options))[1] == expected  # type: ignore[arg-type]


def test_many_stop_ids_leave_nothing_behind() -> None:
    """One request's many stop ids make every later step compare as many of them in every row."""
    llm = plain_llm()

    def size_bytes(rows: CompletionRows) -> int:
        return sum(part.nbytes for part in vars(rows).values() if isinstance(part, np.ndarray))

    before_bytes = size_bytes(running(llm, greedy())[0])
    assert size_bytes(running(llm, greedy(stop_token_ids=MANY))[0]) == before_bytes


def test_an_ended_request_is_forgotten() -> None:
    """Whoever remembers the owners of rows keeps the last step's requests, with their sinks, alive."""
    options = EngineOptions(log_decisions=True)
    llm = LLM(tiny(), router=RandomRouter(0.5), executors=twin(), options=options)
    llm.engine.add_request("x", prompts()[3], greedy(3))
    request = ref(llm.engine.scheduler.waiting[0])
    run_all(llm)
    gc.collect()
    assert request() is None
