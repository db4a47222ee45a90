"""The systems of a bisection: everything off, then schedule, precision, attention, memory switched on, one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokenrouter import LLM, EngineOptions
from tokenrouter.engine.decision_log import DecisionRecorder
from tokenrouter.evaluation.progress import Tick
from tokenrouter.evaluation.systems import without_memory
from tokenrouter.evaluation.throughput import Repeat, run_requests
from tokenrouter.executors import ExecutorPool
from tokenrouter.routers import AllHighRouter, Router
from tokenrouter.scheduler import Request
from tokenrouter.workloads import RequestSpec

Dimension = Literal["schedule", "precision", "attention", "memory"]
CANDIDATES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What one step of the bisection runs.

    Attributes:
        dimension: that it switches on, beside those of the systems before it; None: everything is off.
        setting: what is on in that dimension, for people.
        router, options, pool: of its engine.
        is_used: the configuration uses the dimension; where it does not, this system equals the one before.
        is_lossless: what it switches on must not change an output, but for near-ties.
    """

    dimension: Dimension | None
    setting: str
    router: Router
    options: EngineOptions
    pool: ExecutorPool
    is_used: bool = True
    is_lossless: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What a system made of the requests.

    Attributes:
        llm: its engine.
        repeat: its pass; outputs hold the ``CANDIDATES`` most likely tokens of each step.
        decisions: every decision of the pass.
        evicted_at: by request id, int32 per position, the smallest over layer groups: queries from that position of the
            request on do not see the entry. Requests that ran in a single step are left out; nothing of theirs was
            evicted before their last token.
    """

    llm: LLM
    repeat: Repeat
    decisions: DecisionRecorder
    evicted_at: dict[str, NDArray[np.int32]]


def make_systems(
    router: Router, pool: ExecutorPool, options: EngineOptions, requests: Sequence[RequestSpec]
) -> tuple[System, ...]:
    """Everything off, and the systems that switch on schedule, precision, attention and memory.

    Memory comes last, because a retention policy may go by the routes that the router gives.

    Args:
        router: of the whole configuration, as the next two.
        pool: its executors.
        options: its engine's.
        requests: that all systems will serve.
    """
    logged = replace(options, log_decisions=True)
    plain = replace(without_memory(logged, requests), num_host_slots=0)
    alone = _one_at_a_time(plain, requests)
    has_low = len(pool.executors) > 1
    dense = replace(pool, low_attention=None)
    is_routed = has_low and not isinstance(router, AllHighRouter)
    precision = f"router {router.name} on {dense.description}"
    return (
        System(
            dimension=None,
            setting="all high, nothing evicted, one request at a time",
            router=AllHighRouter(),
            options=alone,
            pool=dense,
        ),
        System(
            dimension="schedule",
            setting=_schedule(options),
            router=AllHighRouter(),
            options=plain,
            pool=dense,
            is_used=plain != alone,
            is_lossless=True,
        ),
        System(
            dimension="precision",
            setting=precision if has_low else f"{precision}, which has a single path",
            router=router,
            options=plain,
            pool=dense,
            is_used=is_routed,
        ),
        System(
            dimension="attention",
            setting=f"low tokens see {pool.low_attention or 'everything'}",
            router=router,
            options=plain,
            pool=pool,
            is_used=is_routed and pool.low_attention is not None,
        ),
        System(
            dimension="memory",
            setting=_memory(options),
            router=router,
            options=logged,
            pool=pool,
            is_used=_has_memory(options),
            is_lossless=not _has_memory(replace(options, num_host_slots=0, prefix_sharing=False)),
        ),
    )


def serve(llm: LLM, requests: Sequence[RequestSpec], tick: Tick) -> Served:
    """One pass of ``llm``, which logs decisions and is new.

    Args:
        llm: the engine of a System.
        requests: greedy.
        tick: called after each step with the tokens that it did.

    Raises:
        ValueError: the engine refused a request.
    """
    seen: dict[str, Request] = {}

    def watch(*, count: int) -> None:
        seen.update((request.request_id, request) for request in llm.engine.scheduler.running)
        tick(count=count)

    asked = [replace(r, params=replace(r.params, logprobs=CANDIDATES)) for r in requests]
    repeat = run_requests(llm, asked, watch)
    decisions = llm.engine.decisions
    assert decisions is not None, "a bisection's engines log their decisions"
    evicted_at = {
        request_id: request.evicted_at_GN.min(axis=0)
        for request_id, request in seen.items()
        if request.evicted_at_GN is not None
    }
    return Served(llm=llm, repeat=repeat, decisions=decisions, evicted_at=evicted_at)


def _one_at_a_time(options: EngineOptions, requests: Sequence[RequestSpec]) -> EngineOptions:
    """In the order of arrival, each prompt in one piece."""
    alone = replace(
        options,
        scheduler="fcfs",
        max_num_seqs=1,
        max_num_batched_tokens=max(len(request.prompt_ids) for request in requests),
        static_batch_size=None,
        phase_order="mixed",
        max_prefill_tokens=None,
        max_decode_tokens=None,
        max_num_waiting=None,
        dispatch="mixed",
    )
    return alone.without_ignored()


def _schedule(options: EngineOptions) -> str:
    return (
        f"{options.scheduler}, phase order {options.phase_order}, dispatch {options.dispatch}, up to "
        f"{options.max_num_seqs} requests and {options.max_num_batched_tokens:,} tokens in a step"
    )


def _has_memory(options: EngineOptions) -> bool:
    return (
        options.retention is not None
        or options.kv_cache_dtype != "auto"
        or options.num_host_slots > 0
        or options.prefix_sharing
    )


def _memory(options: EngineOptions) -> str:
    parts = []
    if options.retention is not None:
        parts.append(f"retention {options.retention.policy.name}")
        if options.retention.compress is not None:
            parts.append(f"compress {options.retention.compress}")
    if options.kv_cache_dtype != "auto":
        parts.append(f"entries in {options.kv_cache_dtype}")
    if options.num_host_slots:
        parts.append(f"{options.num_host_slots:,} entries outside the pool")
    if options.prefix_sharing:
        parts.append("prefixes shared")
    return ", ".join(parts) or "nothing evicted, entries in the model's dtype"
