"""What deciding costs in an engine, and what a cache is asked where prompts begin alike."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.prefix_bench.setup import PLAIN, SHARED, make_requests
from scripts.router_bench.setup import Bench
from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.metrics import serving_sections
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.ratios import DecodeBatch, prefill_s
from tokenrouter.evaluation.throughput import make_repeat, run_requests
from tokenrouter.executors import ExecutorPool, build_pool
from tokenrouter.models import LoadedModel
from tokenrouter.routers import Router

from .ways import EACH, INTERVALS, SHARE, Sizes, cached, ways

Numbers = dict[str, Any]
"""Keys as in the section ``router`` of metrics.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What engines are made of.

    Attributes:
        model: in the dtype that is served.
        ids: of text, enough for every prompt.
        make: a new mlp without thresholds, which an engine sets on the default text.
    """

    sizes: Sizes
    model: LoadedModel
    pool: ExecutorPool
    ids: Sequence[int]
    make: Callable[[], Router]

    def llm(self, router: Router, **options: int | bool) -> LLM:
        """A new engine, in which no forward waits for costs to be measured."""
        given: dict[str, Any] = {"dispatch": "mixed", **options}
        return LLM(self.model, router=router, executors=self.pool, options=EngineOptions(**given))


def serving(bench: Bench, sizes: Sizes, dtype: str = "bfloat16") -> Serving:
    """Engines for the bench's executor and mlp, and the tokens of its first text.

    Args:
        bench: of routers.
        sizes: how much is run.
        dtype: of the high path.
    """
    model = bench.model.astype(dtype)
    own = [token for window in bench.texts[0].windows for token in window]
    shared = sizes.shared.common_tokens + sizes.shared.requests * sizes.shared.own_tokens
    wanted = max(sizes.context + 2 * sizes.decode_requests, sizes.prompt_tokens, shared)
    return Serving(
        sizes=sizes,
        model=model,
        pool=build_pool(bench.executor, model),
        ids=own * -(-wanted // len(own)),
        make=partial(bench.learned, "mlp", bench.executor, SHARE),
    )


def measure_costs(served: Serving) -> dict[str, dict[str, list[Numbers]]]:
    """By phase (decode, decode_1, prefill, small_chunks) and way of asking, the numbers of every turn."""
    routers, chunk = ways(served.make), served.sizes.small_chunk
    return {
        "decode": _decode(served, routers, served.sizes.decode_requests),
        "decode_1": _decode(served, routers, 1),
        "prefill": _prefill(served, routers, "prefill"),
        "small_chunks": _prefill(
            served, routers, "small chunks", max_num_batched_tokens=chunk, max_num_seqs=1
        ),
    }


def measure_shared(served: Serving) -> dict[str, dict[str, Numbers]]:
    """Requests that begin alike, by engine (plain, shared) and way of asking.

    Beside the section's keys ``shared_tokens``, and ``asked_frac``: of all tokens, computed or shared, those that the
    mlp was asked about.
    """
    requests = make_requests(served.ids, served.sizes.shared)
    routers = {EACH: served.make(), **cached(served.make)}
    found: dict[str, dict[str, Numbers]] = {PLAIN: {}, SHARED: {}}
    for system, of in found.items():
        for name, router in routers.items():
            llm = served.llm(router, prefix_sharing=system == SHARED, max_num_seqs=len(requests))
            run_requests(llm, requests)
            of[name] = {**_numbers(llm), **_asked(llm)}
    return found


def _decode(
    served: Serving, routers: Mapping[str, Router], num_requests: int
) -> dict[str, list[Numbers]]:
    llms = {name: served.llm(router) for name, router in routers.items()}
    for router in routers.values():
        router.forget()
    prompts = decode_prompts(served.ids, served.sizes)[:num_requests]
    with ExitStack() as stack:
        batches = {
            name: stack.enter_context(DecodeBatch(llm, prompts, num_steps=max(INTERVALS)))
            for name, llm in llms.items()
        }

        def run(name: str) -> None:
            batches[name].stretch_s()

        return _take_turns(llms, run, served.sizes.decode_turns, f"decode of {num_requests}")


def decode_prompts(ids: Sequence[int], sizes: Sizes) -> list[list[int]]:
    """Prompts whose lengths differ, so that in each step the same share of requests is at a multiple of an interval."""
    period = max(INTERVALS)
    return [
        list(ids[row : row + sizes.context + row % period]) for row in range(sizes.decode_requests)
    ]


def _prefill(
    served: Serving, routers: Mapping[str, Router], title: str, **options: int
) -> dict[str, list[Numbers]]:
    llms = {name: served.llm(router, **options) for name, router in routers.items()}
    prompt = served.ids[: served.sizes.prompt_tokens]

    def run(name: str) -> None:
        llms[name].router.forget()
        prefill_s(llms[name], prompt)

    return _take_turns(llms, run, served.sizes.turns, title)


def _take_turns(
    llms: Mapping[str, LLM], run: Callable[[str], None], turns: int, title: str
) -> dict[str, list[Numbers]]:
    found: dict[str, list[Numbers]] = {name: [] for name in llms}
    with progress(title, (turns + 1) * len(llms), unit="runs") as advance:
        for turn in range(turns + 1):
            for name, llm in llms.items():
                llm.engine.stats.reset()
                run(name)
                if turn:
                    found[name].append(_numbers(llm))
                advance(name)
    return found


def _numbers(llm: LLM) -> Numbers:
    """Since the last reset of the engine's counters."""
    router: Numbers = serving_sections(llm, [make_repeat(llm, (), 1.0)])["router"]
    del router["version"]
    return router


def _asked(llm: LLM) -> Numbers:
    stats = llm.engine.stats
    hits = stats.route_cache.hits if stats.route_cache is not None else 0
    computed = stats.decided_tokens + stats.reused_tokens
    return {
        "shared_tokens": stats.shared_tokens,
        "asked_frac": (stats.decided_tokens - hits) / (computed + stats.shared_tokens),
    }
