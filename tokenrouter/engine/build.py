"""Puts an engine together from a model, a router and a pool. The defaults are the library's."""

from dataclasses import dataclass
from typing import Literal, get_args

from tokenrouter.engine import costs
from tokenrouter.engine.decider import Decider
from tokenrouter.engine.decision_log import DecisionRecorder
from tokenrouter.engine.dispatcher import Dispatcher, DispatchMode
from tokenrouter.engine.engine import EngineParts, LLMEngine
from tokenrouter.engine.executable import ExecutableRoutes, executable_routes
from tokenrouter.engine.live import LiveRequests
from tokenrouter.engine.observation import ObserveOptions, Observer
from tokenrouter.engine.runner import Runner
from tokenrouter.engine.sampler import Sampler
from tokenrouter.engine.stats import EngineStats
from tokenrouter.engine.step import ForwardBuilder
from tokenrouter.executors import ExecutorPool
from tokenrouter.features import FeatureExtractor, TokenTypeTable
from tokenrouter.kvcache import KVArena, KVPool
from tokenrouter.models import Decoder, LoadedModel
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import FCFSScheduler, Scheduler, StaticBatchScheduler

SchedulerName = Literal["fcfs", "static_batch"]
DEFAULT_KV_BYTES = 1 << 30
DEFAULT_STATIC_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an engine schedules, dispatches and stores.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step, decode and prefill chunks together; also the largest chunk.
        num_kv_slots: tokens that the KV pool holds; None: enough for every running request at full length, up to 1 GiB,
            and at least one request at full length.
        scheduler: fcfs (continuous batching), or static_batch (whole requests in, whole requests out).
        static_batch_size: requests of a static batch; None: 8, or ``max_num_seqs`` where that is lower.
        dispatch: mixed, queued or auto; see the dispatcher.
        min_batch: queued and auto: so many decode tokens run without waiting for more.
        max_wait_steps: queued and auto: the most steps that a decode token waits for company.
        seed: of the random stream shared by requests without a seed of their own.
        log_decisions: keep every decision for decisions.parquet.
        observe: attention statistics, which ``LLMEngine.attention_received`` hands out; None: none are taken.

    Raises:
        ValueError: an option outside its range, or two that contradict each other. All that can be known without the
            model is checked here, so that a mistake shows before it is loaded.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    num_kv_slots: int | None = None
    scheduler: SchedulerName = "fcfs"
    static_batch_size: int | None = None
    dispatch: DispatchMode = "auto"
    min_batch: int = 4
    max_wait_steps: int = 4
    seed: int = 0
    log_decisions: bool = False
    observe: ObserveOptions | None = None

    def __post_init__(self) -> None:
        for name, choices in (("scheduler", SchedulerName), ("dispatch", DispatchMode)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise ValueError(
                    f"unknown {name} {value!r}; choose one of: {', '.join(get_args(choices))}"
                )
        lowest = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "num_kv_slots": 1,
            "static_batch_size": 1,
            "min_batch": 1,
            "max_wait_steps": 0,
        }
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs "
                f"{self.max_num_seqs}: every running request decodes one token per step"
            )
        if self.static_batch_size is not None and self.static_batch_size > self.max_num_seqs:
            raise ValueError(
                f"static_batch_size {self.static_batch_size} must be at most max_num_seqs {self.max_num_seqs}, the "
                "requests that run at once: lower it, raise max_num_seqs, or leave it null to follow max_num_seqs"
            )


def build_engine(
    model: LoadedModel,
    router: Router,
    pool: ExecutorPool,
    token_types: TokenTypeTable,
    options: EngineOptions,
) -> LLMEngine:
    """An engine for ``model``; executors and weights may be shared with other engines, KV is its own.

    Args:
        model: loaded.
        router: ready to decide: checked and calibrated.
        pool: executors built for ``model``.
        token_types: of the model's vocabulary.
        options: checked by themselves.
    """
    routes = executable_routes(router, model.config.num_layers, pool.executors)
    layer_groups = _layer_groups(model.config.num_layers)
    kv_pool, arena = _memory(model, options, num_groups=max(layer_groups) + 1)
    observer = Observer(options.observe, model.config.num_layers) if options.observe else None
    return LLMEngine(
        EngineParts(
            router=router,
            route_table=routes.table,
            decider=Decider(
                router,
                FeatureExtractor(router.features, token_types),
                routes.executed_of,
                routes.table.names,
            ),
            scheduler=_scheduler(kv_pool, options),
            dispatcher=_dispatcher(routes, model, pool, options),
            runner=Runner(
                Decoder(model, pool.kernels, layer_groups),
                pool,
                arena,
                ForwardBuilder(routes.table, model.config.num_layers, kv_pool),
                heads=[name if pool.lm_head == "low" else "high" for name in routes.executors],
                observer=observer,
            ),
            observer=observer,
            sampler=Sampler(model.config.vocab_size, options.seed, pool.kernels),
            pool=kv_pool,
            arena=arena,
            live=LiveRequests(model.tokenizer, model.config, routes.executed_of),
            stats=EngineStats(route_names=routes.table.names),
            recorder=DecisionRecorder() if options.log_decisions else None,
        )
    )


def _dispatcher(
    routes: ExecutableRoutes, model: LoadedModel, pool: ExecutorPool, options: EngineOptions
) -> Dispatcher:
    """With one executor in use, or one set of weights, ``auto`` has nothing to weigh, and nothing is measured."""
    weighs = options.dispatch == "auto" and len(routes.used) > 1 and not pool.shares_weights
    used = {name: pool.executors[name] for name in sorted(routes.used)}
    return Dispatcher(
        routes.table,
        routes.executors,
        mode="mixed" if options.dispatch == "auto" and not weighs else options.dispatch,
        min_batch=options.min_batch,
        max_wait_steps=options.max_wait_steps,
        costs=costs.measure(used, model) if weighs else None,
    )


def _layer_groups(num_layers: int) -> tuple[int, ...]:
    """Per layer, the number of its group, 0 upwards: layers of a group keep the same tokens, in the same slots."""
    return (0,) * num_layers


def _memory(
    model: LoadedModel, options: EngineOptions, *, num_groups: int
) -> tuple[KVPool, KVArena]:
    config = model.config
    slot_bytes = config.num_layers * config.kv_planes * config.head_dim * model.dtype.itemsize
    wanted = options.max_num_seqs * config.max_model_len
    num_slots = options.num_kv_slots or max(
        min(wanted, DEFAULT_KV_BYTES // slot_bytes), config.max_model_len
    )
    pool = KVPool(
        num_slots=num_slots,
        max_rows=options.max_num_seqs,
        max_len=config.max_model_len,
        num_groups=num_groups,
    )
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
    return StaticBatchScheduler(
        pool=pool,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        batch_size=options.static_batch_size or min(DEFAULT_STATIC_BATCH, seqs),
    )
