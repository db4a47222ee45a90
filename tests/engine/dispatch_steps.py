"""Steps of chunks whose routes, waits and lengths are chosen, for the dispatcher's tests."""

from collections.abc import Sequence

import numpy as np

from tokenrouter import SamplingParams
from tokenrouter.engine.costs import SIZES, CostModel
from tokenrouter.engine.step import PackedStep, pack
from tokenrouter.features import TokenHistory
from tokenrouter.scheduler import Chunk, Request, StepPlan, TokenRows
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
    made = []
    for decoding, _, waited in chunks:
        one = request(10, 11, 6, waited) if decoding else request(0, 3, 3)
        made.append(Chunk(request=one, start=one.num_computed, length=1 if decoding else 3))
    tokens = TokenRows(len(made), 100)
    for row, chunk in enumerate(made):
        tokens.enter(chunk.request, row)
    lengths = [chunk.length for chunk in made]
    executed = np.repeat([route for _, route, _ in chunks], lengths).astype(np.int64)
    return pack(StepPlan(chunks=tuple(made)), tokens), executed
