"""What holds an engine's KV entries, and what moves, shares, watches and evicts them."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tokenrouter.engine import costs
from tokenrouter.engine.executable import ExecutableRoutes
from tokenrouter.engine.observation import Observer
from tokenrouter.engine.options import EngineOptions
from tokenrouter.engine.prefix_key import ALIKE, UNSHAREABLE, is_shareable, prefix_key
from tokenrouter.engine.retainer import Retainer, bounds_live
from tokenrouter.executors import ExecutorPool
from tokenrouter.kernels import QuantizedRows
from tokenrouter.kvcache import HostTier, KVArena, KVPool, MeanKeys, PrefixCache
from tokenrouter.kvcache.retention import RetentionOptions
from tokenrouter.models import LoadedModel
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import PrefixSharing
from tokenrouter.telemetry.memory import machine_bytes
from tokenrouter.types import RouteTable

log = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 1 << 30
BOOK_BYTES = 16
"""What a slot costs in tables beside its entry, at most, and a token of a request that has none yet."""


class Memory(NamedTuple):
    """The parts; None for those that the options do not ask for."""

    layer_groups: tuple[int, ...]
    pool: KVPool
    arena: KVArena
    host: HostTier | None
    sharing: PrefixSharing | None
    observer: Observer | None
    retainer: Retainer | None
    mean_keys: MeanKeys | None


def build_memory(
    model: LoadedModel,
    router: Router,
    pool: ExecutorPool,
    options: EngineOptions,
    routes: ExecutableRoutes,
) -> Memory:
    """Where entries lie, and the parts that act on them.

    Args:
        model: loaded.
        router: whose answers a prefix cache's key holds.
        pool: executors built for ``model``; its kernels quantise entries.
        options: of the engine.
        routes: as the pool runs them.

    Raises:
        ValueError: a retention policy that does not fit the model or the routes, or more requests or slots than the
            machine has memory for.
    """
    layer_groups = _layer_groups(model.config.num_layers, options)
    _check_room(model, options, num_groups=max(layer_groups) + 1)
    kv_pool, arena = _storage(
        model,
        options,
        routes.table,
        num_groups=max(layer_groups) + 1,
        quantize=pool.kernels.quantize_rows,
    )
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
    return Memory(
        layer_groups=layer_groups,
        pool=kv_pool,
        arena=arena,
        host=host,
        sharing=_sharing(router, kv_pool, options) if options.prefix_sharing else None,
        observer=Observer(options.observe, layer_groups) if options.observe else None,
        retainer=retainer,
        mean_keys=_mean_keys(model, pool, kv_pool, layer_groups),
    )


def _mean_keys(
    model: LoadedModel, pool: ExecutorPool, kv_pool: KVPool, layer_groups: tuple[int, ...]
) -> MeanKeys | None:
    sparse, max_len = pool.low_attention, model.config.max_model_len
    if sparse is None:
        return None
    if sparse.first_limited >= max_len:
        log.warning(
            "executor.low_attention has no effect: it sees everything up to %d tokens, and the model's length is %d",
            sparse.first_limited,
            max_len,
        )
    return MeanKeys(
        kv_pool.tables,
        layer_groups,
        block=sparse.block,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )


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


def _layer_groups(num_layers: int, options: EngineOptions) -> tuple[int, ...]:
    """Per layer, the number of its group, 0 upwards: layers of a group keep the same tokens, in the same slots."""
    if options.retention is None:
        return (0,) * num_layers
    return options.retention.layer_groups(num_layers)


def _check_room(model: LoadedModel, options: EngineOptions, *, num_groups: int) -> None:
    """Refuse sizes for which every allocation fails, before the first is tried."""
    request_bytes = model.config.vocab_size + BOOK_BYTES * num_groups * model.config.max_model_len
    slot_bytes = _slot_bytes(model, is_int8=options.kv_cache_dtype == "int8")
    for key, option, count, item, item_bytes in (
        ("scheduler.max_num_seqs", "max_num_seqs", options.max_num_seqs, "request", request_bytes),
        (
            "kvcache.num_slots",
            "num_kv_slots",
            options.num_kv_slots or 0,
            "slot",
            int(slot_bytes) + BOOK_BYTES * num_groups,
        ),
    ):
        wanted, there = count * item_bytes, machine_bytes()
        if there is not None and wanted > there:
            raise ValueError(
                f"{key}={count} asks for {wanted:,} bytes ({item_bytes:,} a {item}), and this machine has {there:,}: "
                f"set at most {there // item_bytes} (in Python: EngineOptions.{option})"
            )


def _slot_bytes(model: LoadedModel, *, is_int8: bool) -> float:
    """Of an entry as it is first stored, in all layers."""
    config = model.config
    item_bytes = 1 + 4 / config.head_dim if is_int8 else model.dtype.itemsize
    return config.num_layers * config.kv_planes * config.head_dim * item_bytes


def _storage(
    model: LoadedModel,
    options: EngineOptions,
    table: RouteTable,
    *,
    num_groups: int,
    quantize: Callable[[Tensor], QuantizedRows],
) -> tuple[KVPool, KVArena]:
    """Pool and arena. New tokens are full or int8; entries may be converted where the retention policy says so."""
    config, retention = model.config, options.retention
    is_int8 = options.kv_cache_dtype == "int8"
    slot_bytes = _slot_bytes(model, is_int8=is_int8)
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
        quantize=quantize,
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
