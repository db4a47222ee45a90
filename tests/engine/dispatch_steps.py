"""Steps of chunks whose routes, waits and lengths are chosen, for the dispatcher's tests."""

from collections.abc import Sequence

import numpy as np

from tokenrouter import SamplingParams
from tokenrouter.engine.costs import SIZES, CostModel
from tokenrouter.engine.dispatcher import Work
from tokenrouter.engine.step import PackedStep, pack
from tokenrouter.features import TokenHistory
from tokenrouter.scheduler import Request, StepPlan, TokenRows
from tokenrouter.types import Route, RouteTable

NUM_LAYERS = 4
CHEAP_LOW = CostModel(seconds={"high": (1.0,) * 4, "low": (0.5,) * 4})
PROPORTIONAL = CostModel(seconds={name: tuple(map(float, SIZES)) for name in ("high", "low")})


def table(*waits: int | None) -> RouteTable:
    names = ("high", "low", "third")
    return RouteTable(
        routes=tuple(
            Route.uniform(name, "high" if i == 0 else "low", NUM_LAYERS, max_wait_steps=wait)
            for i, (name, wait) in enumerate(zip(names, waits, strict=False))
        )
    )


def request(num_computed: int, num_tokens: int, prompt_len: int, waited: int = 0) -> Request:
    made = Request(
        request_id="x",
        params=SamplingParams(),
        history=TokenHistory([5] * num_tokens, 100),
        prompt_len=prompt_len,
        max_total=100,
        arrival_s=0.0,
    )
    made.num_computed, made.waited_steps = num_computed, waited
    return made


def step_of(chunks: Sequence[tuple[bool, int, int]]) -> tuple[PackedStep, np.ndarray]:
    """Chunks as (decoding, route, waited steps): a prompt chunk has three tokens of that route."""
    made = tuple(
        request(10, 11, 6, waited) if decoding else request(0, 3, 3)
        for decoding, _, waited in chunks
    )
    tokens = TokenRows(len(made), 100)
    for row, one in enumerate(made):
        tokens.enter(one, row)
    plan = StepPlan(
        requests=made,
        row_C=np.arange(len(made)),
        start_C=np.array([one.num_computed for one in made]),
        length_C=np.array([1 if decoding else 3 for decoding, _, _ in chunks]),
    )
    executed = np.repeat([route for _, route, _ in chunks], plan.length_C).astype(np.int64)
    return pack(plan, tokens), executed


def last(step: PackedStep, left: Sequence[int]) -> None:
    """Gives each chunk's request so many steps that are left to it."""
    num_tokens_C = step.tokens.history.length_R[step.row_C]
    step.state_C["max_total"] = num_tokens_C + left[: len(num_tokens_C)]


def numbers(work: Work) -> tuple[list[list[int]], list[int]]:
    """The chunks of each forward, and those that wait."""
    return [of.tolist() for of in work.forwards], work.deferred.tolist()
