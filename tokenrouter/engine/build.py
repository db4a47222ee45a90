"""Puts an engine together from a model, a router and a pool. The defaults are the library's."""

import logging
import warnings

from tokenrouter.engine import costs
from tokenrouter.engine.decider import Decider
from tokenrouter.engine.decision_log import DecisionRecorder
from tokenrouter.engine.dispatcher import Dispatcher
from tokenrouter.engine.engine import EngineParts, LLMEngine
from tokenrouter.engine.executable import ExecutableRoutes, check_after_layer, executable_routes
from tokenrouter.engine.live import LiveRequests
from tokenrouter.engine.memory import Memory, build_memory
from tokenrouter.engine.observation import Observer
from tokenrouter.engine.options import EngineOptions
from tokenrouter.engine.runner import Runner
from tokenrouter.engine.sampler import Sampler
from tokenrouter.engine.signals import SignalFeed, check_observed
from tokenrouter.engine.stats import EngineStats
from tokenrouter.engine.step import ForwardBuilder
from tokenrouter.executors import ExecutorPool
from tokenrouter.features import Signals, TokenTypeTable, feature_specs, needs_signals
from tokenrouter.kvcache import Compactor
from tokenrouter.kvcache.host import SwapCounts
from tokenrouter.models import Decoder, LoadedModel
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import POLICIES, Scheduler, StaticBatchScheduler

log = logging.getLogger(__name__)

DEFAULT_STATIC_BATCH = 8


def build_engine(
    model: LoadedModel,
    router: Router,
    pool: ExecutorPool,
    token_types: TokenTypeTable,
    options: EngineOptions,
) -> LLMEngine:
    """An engine for ``model``; executors and weights may be shared with other engines, KV is its own.

    Options that have no effect, or not the one that they name, are warned of.

    Args:
        model: loaded.
        router: ready to decide: checked and calibrated.
        pool: executors built for ``model``.
        token_types: of the model's vocabulary.
        options: checked by themselves.

    Raises:
        ValueError: a feature of the router looks at attention that ``options`` do not observe; a route cannot be
            built; a router that decides after layers which its routes do not share.
    """
    check_observed(router.features, options.observe, model.config.num_layers, router.name)
    _warn_of_ignored(options)
    has_sparse = pool.low_attention is not None
    routes = executable_routes(
        router, model.config.num_layers, pool.executors, has_sparse=has_sparse
    )
    check_after_layer(router, routes.table, model.config.num_layers)
    memory = build_memory(model, router, pool, options, routes)
    scheduler = _scheduler(memory, options)
    signals = Signals(options.max_num_seqs, token_types)
    extractor = router.extractor(token_types, signals)
    return LLMEngine(
        EngineParts(
            router=router,
            route_table=routes.table,
            decider=Decider(router, extractor, routes.executed_of, routes.table.names),
            signals=signals,
            feed=_feed(router, signals, scheduler, memory.observer),
            scheduler=scheduler,
            dispatcher=_dispatcher(router, routes, model, pool, options),
            runner=_runner(router, routes, model, pool, memory),
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


def _warn_of_ignored(options: EngineOptions) -> None:
    """By the warnings module, which says the same only once however many engines are built."""
    if ignored := options.ignored():
        names = "; ".join(f"{name} ({why})" for name, why in ignored.items())
        warnings.warn(
            f"options without effect: {names}. Leave them at their defaults, or change what they depend on",
            stacklevel=4,
        )
    if options.retention is not None and (more := options.retention.kept_beyond_budget):
        warnings.warn(more, stacklevel=4)


def _dispatcher(
    router: Router,
    routes: ExecutableRoutes,
    model: LoadedModel,
    pool: ExecutorPool,
    options: EngineOptions,
) -> Dispatcher:
    """With one executor in use, or one set of weights, ``auto`` has nothing to weigh, and nothing is measured.

    A step whose first layers have run before its tokens are decided goes on in one forward.
    """
    if router.after_layer and options.dispatch == "queued":
        warnings.warn(
            f"dispatch=queued has no effect: router {router.name} decides after layer {router.after_layer}, when all "
            "tokens of a step are in one forward",
            stacklevel=4,
        )
    mode = "mixed" if router.after_layer else options.dispatch
    weighs = mode == "auto" and len(routes.used) > 1 and not pool.shares_weights
    used = {name: pool.executors[name] for name in sorted(routes.used)}
    return Dispatcher(
        routes.table,
        routes.executors,
        mode="mixed" if mode == "auto" and not weighs else mode,
        min_batch=options.min_batch,
        max_wait_steps=options.max_wait_steps,
        costs=costs.measure(used, model) if weighs else None,
    )


def _runner(
    router: Router,
    routes: ExecutableRoutes,
    model: LoadedModel,
    pool: ExecutorPool,
    memory: Memory,
) -> Runner:
    return Runner(
        Decoder(model, pool.kernels, memory.layer_groups),
        pool,
        memory.arena,
        ForwardBuilder(routes.table, model.config.num_layers, memory.pool, pool.low_attention),
        heads=[name if pool.lm_head == "low" else "high" for name in routes.executors],
        watcher=memory.retainer or memory.observer,
        mean_keys=memory.mean_keys,
        after_layer=router.after_layer,
    )


def _scheduler(memory: Memory, options: EngineOptions) -> Scheduler:
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


def token_types_of(model: LoadedModel, router: Router) -> TokenTypeTable:
    """The vocabulary's types; without a tokenizer there are none, and a router that needs them is refused."""
    if model.tokenizer is not None:
        return TokenTypeTable.from_tokenizer(model.tokenizer, model.config.vocab_size)
    if needed := [spec.name for spec in feature_specs(router.features) if spec.needs_text]:
        raise ValueError(
            f"router {router.name} needs {', '.join(needed)}, and model {model.name!r} "
            "has no tokenizer: choose a router without token types, e.g. all_high, or load the model with its "
            "tokenizer files"
        )
    return TokenTypeTable.from_texts([None] * model.config.vocab_size)
