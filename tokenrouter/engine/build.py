"""Puts an engine together from a model, a router and a pool. The defaults are the library's."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokenrouter.engine import costs
from tokenrouter.engine.decider import Decider
from tokenrouter.engine.decision_log import DecisionRecorder
from tokenrouter.engine.dispatcher import Dispatcher, DispatchMode
from tokenrouter.engine.engine import EngineParts, LLMEngine
from tokenrouter.engine.live import LiveRequests
from tokenrouter.engine.runner import Runner
from tokenrouter.engine.sampler import Sampler
from tokenrouter.engine.stats import EngineStats
from tokenrouter.engine.step import ForwardBuilder, IntArray
from tokenrouter.executors import ExecutorPool
from tokenrouter.features import FeatureExtractor, TokenTypeTable
from tokenrouter.kvcache import KVArena, KVPool
from tokenrouter.models import Decoder, LoadedModel
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import FCFSScheduler, Scheduler, StaticBatchScheduler
from tokenrouter.types import Route, RouteTable

SchedulerName = Literal["fcfs", "static_batch"]
DEFAULT_KV_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an engine schedules, dispatches and stores.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step, decode and prefill chunks together; also the largest chunk.
        num_kv_slots: tokens that the KV pool holds; None: enough for every running request at full length, up to 1 GiB,
            and at least one request at full length.
        scheduler: fcfs, or static_batch with ``static_batch_size`` requests.
        dispatch: mixed, queued or auto; ``min_batch`` and ``max_wait_steps`` are the queues' bounds.
        seed: of the random stream shared by requests without a seed of their own.
        log_decisions: keep every decision for decisions.parquet.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    num_kv_slots: int | None = None
    scheduler: SchedulerName = "fcfs"
    static_batch_size: int = 8
    dispatch: DispatchMode = "auto"
    min_batch: int = 4
    max_wait_steps: int = 4
    seed: int = 0
    log_decisions: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_kv_slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def build_engine(
    model: LoadedModel,
    router: Router,
    pool: ExecutorPool,
    token_types: TokenTypeTable,
    options: EngineOptions,
) -> LLMEngine:
    """An engine for ``model``; executors and weights may be shared with other engines, KV is its own."""
    table = router.routes(model.config.num_layers)
    executed_of = _executed_of(table, router, pool)
    kv_pool, arena = _memory(model, options)
    main = [_main_executor(table.routes[executed]) for executed in executed_of]
    dispatch = options.dispatch
    if dispatch == "auto" and len(pool.executors) == 1:
        dispatch = "mixed"  # nothing to weigh
    return LLMEngine(
        EngineParts(
            router=router,
            decider=Decider(
                router, FeatureExtractor(router.features, token_types), executed_of, table.names
            ),
            scheduler=_scheduler(kv_pool, options),
            dispatcher=Dispatcher(
                table,
                main,
                mode=dispatch,
                min_batch=options.min_batch,
                max_wait_steps=options.max_wait_steps,
                costs=costs.measure(pool.executors, model) if dispatch == "auto" else None,
            ),
            runner=Runner(
                Decoder(model, pool.kernels),
                pool,
                arena,
                ForwardBuilder(table, model.config.num_layers, kv_pool),
                heads=[name if pool.lm_head == "low" else "high" for name in main],
            ),
            sampler=Sampler(model.config.vocab_size, options.seed),
            pool=kv_pool,
            arena=arena,
            live=LiveRequests(model.tokenizer, model.config, executed_of),
            stats=EngineStats(route_names=table.names),
            recorder=DecisionRecorder() if options.log_decisions else None,
        )
    )


def _executed_of(table: RouteTable, router: Router, pool: ExecutorPool) -> IntArray:
    """Requested route to executed route: a route whose executors the pool lacks runs as the first one that it has."""
    possible = [route.executors <= set(pool.executors) for route in table.routes]
    if not any(possible):
        needed = sorted(set().union(*(route.executors for route in table.routes)))
        raise ValueError(
            f"router {router.name} needs executors {needed}; the pool has {sorted(pool.executors)}"
        )
    fallback = possible.index(True)
    return np.array([route if ok else fallback for route, ok in enumerate(possible)], np.int64)


def _main_executor(route: Route) -> str:
    """The executor that runs most of a route's layers."""
    layers: dict[str, int] = {}
    for span in route.spans:
        layers[span.executor] = layers.get(span.executor, 0) + span.stop - span.start
    return max(layers, key=lambda name: layers[name])


def _memory(model: LoadedModel, options: EngineOptions) -> tuple[KVPool, KVArena]:
    config = model.config
    slot_bytes = config.num_layers * config.kv_planes * config.head_dim * model.dtype.itemsize
    wanted = options.max_num_seqs * config.max_model_len
    num_slots = options.num_kv_slots or max(
        min(wanted, DEFAULT_KV_BYTES // slot_bytes), config.max_model_len
    )
    pool = KVPool(num_slots=num_slots, max_rows=options.max_num_seqs, max_len=config.max_model_len)
    arena = KVArena(
        num_layers=config.num_layers,
        num_slots=num_slots,
        kv_planes=config.kv_planes,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )
    return pool, arena


def _scheduler(pool: KVPool, options: EngineOptions) -> Scheduler:
    tokens, seqs = options.max_num_batched_tokens, options.max_num_seqs
    if options.scheduler == "fcfs":
        return FCFSScheduler(pool=pool, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    if options.scheduler == "static_batch":
        return StaticBatchScheduler(
            pool=pool,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            batch_size=options.static_batch_size,
        )
    raise ValueError(f"unknown scheduler {options.scheduler!r}; choose one of: fcfs, static_batch")
