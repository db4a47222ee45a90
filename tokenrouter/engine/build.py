"""Puts an engine together from a model, a router and a pool. The defaults are the library's."""

import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple

from tokenrouter.engine import costs
from tokenrouter.engine.decider import Decider
from tokenrouter.engine.decision_log import DecisionRecorder
from tokenrouter.engine.dispatcher import Dispatcher
from tokenrouter.engine.engine import EngineParts, LLMEngine
from tokenrouter.engine.executable import ExecutableRoutes, executable_routes
from tokenrouter.engine.live import LiveRequests
from tokenrouter.engine.observation import Observer
from tokenrouter.engine.options import EngineOptions
from tokenrouter.engine.prefix_key import ALIKE, UNSHAREABLE, is_shareable, prefix_key
from tokenrouter.engine.retainer import Retainer, bounds_live
from tokenrouter.engine.runner import Runner
from tokenrouter.engine.sampler import Sampler
from tokenrouter.engine.signals import SignalFeed, check_observed
from tokenrouter.engine.stats import EngineStats
from tokenrouter.engine.step import ForwardBuilder
from tokenrouter.executors import ExecutorPool
from tokenrouter.features import FeatureExtractor, Signals, TokenTypeTable, needs_signals
from tokenrouter.kvcache import Compactor, HostTier, KVArena, KVPool, PrefixCache
from tokenrouter.kvcache.host import SwapCounts
from tokenrouter.kvcache.retention import RetentionOptions
from tokenrouter.models import Decoder, LoadedModel
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import POLICIES, PrefixSharing, Scheduler, StaticBatchScheduler
from tokenrouter.types import RouteTable

log = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 1 << 30
DEFAULT_STATIC_BATCH = 8


class _Memory(NamedTuple):
    """What holds KV entries, and what moves, shares, watches and evicts them."""

    layer_groups: tuple[int, ...]
    pool: KVPool
    arena: KVArena
    host: HostTier | None
    sharing: PrefixSharing | None
    observer: Observer | None
    retainer: Retainer | None


def build_engine(
    model: LoadedModel,
    router: Router,
    pool: ExecutorPool,
    token_types: TokenTypeTable,
    options: EngineOptions,
) -> LLMEngine:
    """An engine for ``model``; executors and weights may be shared with other engines, KV is its own.

    Options that have no effect are warned of.

    Args:
        model: loaded.
        router: ready to decide: checked and calibrated.
        pool: executors built for ``model``.
        token_types: of the model's vocabulary.
        options: checked by themselves.

    Raises:
        ValueError: a feature of the router looks at attention that ``options`` do not observe; a route cannot be
            built.
    """
    check_observed(router.features, options.observe, model.config.num_layers, router.name)
    _warn_of_ignored(options)
    routes = executable_routes(router, model.config.num_layers, pool.executors)
    memory = _memory(model, router, pool, options, routes)
    scheduler = _scheduler(memory, options)
    signals = Signals(options.max_num_seqs, token_types)
    extractor = FeatureExtractor(router.features, token_types, signals, router.optional)
    return LLMEngine(
        EngineParts(
            router=router,
            route_table=routes.table,
            decider=Decider(router, extractor, routes.executed_of, routes.table.names),
            signals=signals,
            feed=_feed(router, signals, scheduler, memory.observer),
            scheduler=scheduler,
            dispatcher=_dispatcher(routes, model, pool, options),
            runner=_runner(routes, model, pool, memory),
            observer=memory.observer,
            retainer=memory.retainer,
            sharing=memory.sharing,
            sampler=Sampler(model.config.vocab_size, options.seed, pool.kernels),
            pool=memory.pool,
            arena=memory.arena,
            compactor=Compactor(memory.pool, memory.arena, memory.layer_groups),
            live=LiveRequests(
                model.tokenizer, model.config, routes.executed_of, token_types.is_special_V.numpy()
            ),
            stats=EngineStats(
                route_names=routes.table.names,
                swaps=memory.host.counts if memory.host else SwapCounts(),
                route_cache=router.cache_counts,
            ),
            recorder=DecisionRecorder() if options.log_decisions else None,
        )
    )


def _feed(
    router: Router, signals: Signals, scheduler: Scheduler, observer: Observer | None
) -> SignalFeed | None:
    if not needs_signals(router.features):
        return None
    return SignalFeed(signals, router.features, scheduler, observer)


def slots_for(retention: RetentionOptions | None, table: RouteTable) -> Callable[[int], int]:
    """The most KV slots that a request of so many tokens holds at once, in any layer group.

    Args:
        retention: its policy may bound them; None: a token has a slot until its request ends.
        table: of the routes; protected tokens stay beside any budget.

    Raises:
        ValueError: the policy names only routes that the table does not have.
    """
    if retention is not None and bounds_live(retention, table):
        return retention.max_live
    return int


def _warn_of_ignored(options: EngineOptions) -> None:
    """By the warnings module, which says the same only once however many engines are built."""
    if ignored := options.ignored():
        names = "; ".join(f"{name} ({why})" for name, why in ignored.items())
        warnings.warn(
            f"options without effect: {names}. Leave them at their defaults, or change what they depend on",
            stacklevel=4,
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


def _runner(
    routes: ExecutableRoutes, model: LoadedModel, pool: ExecutorPool, memory: _Memory
) -> Runner:
    return Runner(
        Decoder(model, pool.kernels, memory.layer_groups),
        pool,
        memory.arena,
        ForwardBuilder(routes.table, model.config.num_layers, memory.pool),
        heads=[name if pool.lm_head == "low" else "high" for name in routes.executors],
        watcher=memory.retainer or memory.observer,
    )


def _layer_groups(num_layers: int, options: EngineOptions) -> tuple[int, ...]:
    """Per layer, the number of its group, 0 upwards: layers of a group keep the same tokens, in the same slots."""
    if options.retention is None:
        return (0,) * num_layers
    return options.retention.layer_groups(num_layers)


def _memory(
    model: LoadedModel,
    router: Router,
    pool: ExecutorPool,
    options: EngineOptions,
    routes: ExecutableRoutes,
) -> _Memory:
    """Where entries lie, and the parts that act on them."""
    layer_groups = _layer_groups(model.config.num_layers, options)
    kv_pool, arena = _storage(model, options, routes.table, num_groups=max(layer_groups) + 1)
    host = retainer = None
    if options.num_host_slots:
        used = {name: pool.executors[name] for name in sorted(routes.used)}
        recompute_s = costs.measure(used, model).token_s
        host = HostTier(
            kv_pool, arena, layer_groups, options.num_host_slots, recompute_s=recompute_s
        )
    if options.retention is None:
        _warn_of_classes(router, routes.table)
    else:
        options.retention.policy.use_for(model=model.name, model_hash=model.model_hash)
        retainer = Retainer(options.retention, kv_pool, arena, layer_groups, routes.table)
    return _Memory(
        layer_groups=layer_groups,
        pool=kv_pool,
        arena=arena,
        host=host,
        sharing=_sharing(router, kv_pool, options) if options.prefix_sharing else None,
        observer=Observer(options.observe, layer_groups) if options.observe else None,
        retainer=retainer,
    )


def _storage(
    model: LoadedModel, options: EngineOptions, table: RouteTable, *, num_groups: int
) -> tuple[KVPool, KVArena]:
    """Pool and arena. New tokens are full or int8; entries may be converted where the retention policy says so."""
    config, retention = model.config, options.retention
    is_int8 = options.kv_cache_dtype == "int8"
    item_bytes = 1 + 4 / config.head_dim if is_int8 else model.dtype.itemsize
    slot_bytes = config.num_layers * config.kv_planes * config.head_dim * item_bytes
    wanted = options.max_num_seqs * config.max_model_len
    num_slots = options.num_kv_slots or max(
        min(wanted, int(DEFAULT_KV_BYTES / slot_bytes)), config.max_model_len
    )
    num_converted = num_slots if retention is not None and retention.compress else 0
    pool = KVPool(
        num_slots=num_slots,
        max_rows=options.max_num_seqs,
        max_len=config.max_model_len,
        num_groups=num_groups,
        slots_for=slots_for(retention, table),
        first_slot=1 if is_int8 else 0,
        num_int8=num_converted,
    )
    arena = KVArena(
        num_layers=config.num_layers,
        num_slots=0 if is_int8 else num_slots,
        kv_planes=config.kv_planes,
        head_dim=config.head_dim,
        dtype=model.dtype,
        num_int8=num_slots if is_int8 else num_converted,
    )
    return pool, arena


def _warn_of_classes(router: Router, table: RouteTable) -> None:
    if classes := sorted({route.retention for route in table.routes} - {"normal"}):
        log.warning(
            "the retention classes %s of router %s have no effect without retention: choose one of conf/kvcache (in "
            "Python: EngineOptions.retention)",
            ", ".join(classes),
            router.name,
        )


def _sharing(router: Router, pool: KVPool, options: EngineOptions) -> PrefixSharing:
    if not is_shareable(router):
        log.warning(
            "prefix_sharing has no effect: router %s depends on %s",
            router.name,
            ", ".join(sorted(router.depends_on & UNSHAREABLE)),
        )
    elif router.level == "token" and (same := sorted(router.depends_on & ALIKE)):
        log.warning(
            "prefix_sharing works among prompts of the same %s only: router %s looks at it",
            " and ".join(same),
            router.name,
        )
    cache = PrefixCache(pool, options.block_tokens)
    return PrefixSharing(cache, pool, prefix_key(router), evicts=options.retention is not None)


def _scheduler(memory: _Memory, options: EngineOptions) -> Scheduler:
    policy = POLICIES[options.scheduler]
    cut_every = options.retention.interval if options.retention else None
    if issubclass(policy, StaticBatchScheduler):
        size = options.static_batch_size or min(DEFAULT_STATIC_BATCH, options.max_num_seqs)
        return policy(
            pool=memory.pool,
            limits=options.limits,
            batch_size=size,
            cut_every=cut_every,
            host=memory.host,
            sharing=memory.sharing,
        )
    return policy(
        pool=memory.pool,
        limits=options.limits,
        cut_every=cut_every,
        host=memory.host,
        sharing=memory.sharing,
    )
