"""The options of an engine, checked before a model is loaded."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from tokenrouter.checks import check_flag, check_integer
from tokenrouter.engine.dispatcher import DispatchMode
from tokenrouter.engine.observation import ObserveOptions
from tokenrouter.kvcache.retention import RetentionOptions
from tokenrouter.scheduler import (
    POLICIES,
    FCFSScheduler,
    PhaseOrder,
    SchedulerLimits,
    StaticBatchScheduler,
)
from tokenrouter.scheduler.limits import check_choice, check_least

KVCacheDtype = Literal["auto", "int8"]
CONFIG_KEYS = {
    "num_kv_slots": "kvcache.num_slots",
    "kv_cache_dtype": "kvcache.dtype",
    "scheduler": "scheduler.policy",
}
"""Options that have another name in conf/."""
_LABELS = {option: f"{key} (in Python: {option})" for option, key in CONFIG_KEYS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an engine schedules, dispatches and stores.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step, decode and prefill chunks together; also the largest chunk.
        num_kv_slots: tokens that the KV pool holds; None: enough for every running request at full length, up to 1 GiB,
            and at least one request at full length.
        scheduler: who is admitted first: fcfs, priority (of ``add_request``, lower first) or shortest_first; or
            static_batch (whole requests in, whole requests out).
        static_batch_size: requests of a static batch; None: 8, or ``max_num_seqs`` where that is lower.
        phase_order: mixed, prefill_first or decode_first; see SchedulerLimits.
        max_prefill_tokens: prompt tokens of a step; None: only ``max_num_batched_tokens`` counts.
        max_decode_tokens: decode tokens of a step, which then take turns; None: every running request's.
        max_phase_wait_steps: prefill_first and decode_first: the most steps in a row in which the other phase stands
            back; 0 is mixed.
        max_overtaken: priority and shortest_first: a request that later ones passed so many times goes first.
        max_num_waiting: ``LLMEngine.add_request`` raises QueueFullError while so many completions wait; None: never.
        dispatch: mixed, queued or auto; see the dispatcher.
        min_batch: queued and auto: so many decode tokens run without waiting for more.
        max_wait_steps: queued and auto: the most steps that a decode token waits for company.
        seed: of the random stream shared by requests without a seed of their own, -2**63 to 2**64 - 1.
        log_decisions: keep every decision for decisions.parquet.
        observe: attention statistics, which ``LLMEngine.attention_received`` hands out; None: none are taken.
        num_host_slots: entries of preempted requests that are kept outside the pool and come back bit for bit; without
            room, or where a copy costs more by what is measured at start-up, a request is computed again. 0: all are.
        kv_cache_dtype: auto (the model's), or int8 with a scale per token and head, from the first write on.
        prefix_sharing: a prompt that begins as an earlier one uses its KV entries; see PrefixSharing.
        prefix_block: shared beginnings are multiples of so many tokens; with retention, of its interval instead.
        retention: which KV entries are kept; None: all, until their request ends. Not together with ``observe``.

    Raises:
        ValueError: an option outside its range, or two that contradict each other. All that can be known without the
            model is checked here, so that a mistake shows before it is loaded.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    num_kv_slots: int | None = None
    scheduler: str = "fcfs"
    static_batch_size: int | None = None
    phase_order: PhaseOrder = "mixed"
    max_prefill_tokens: int | None = None
    max_decode_tokens: int | None = None
    max_phase_wait_steps: int = 8
    max_overtaken: int = 64
    max_num_waiting: int | None = None
    dispatch: DispatchMode = "auto"
    min_batch: int = 4
    max_wait_steps: int = 4
    seed: int = 0
    log_decisions: bool = False
    observe: ObserveOptions | None = None
    num_host_slots: int = 0
    kv_cache_dtype: KVCacheDtype = "auto"
    prefix_sharing: bool = False
    prefix_block: int = 32
    retention: RetentionOptions | None = None

    def __post_init__(self) -> None:
        check_choice(self, "scheduler", tuple(POLICIES), labels=_LABELS)
        check_choice(self, "dispatch", get_args(DispatchMode))
        check_choice(self, "kv_cache_dtype", get_args(KVCacheDtype), labels=_LABELS)
        check_flag("prefix_sharing", self.prefix_sharing)
        check_flag("log_decisions", self.log_decisions)
        check_integer("seed", self.seed)
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must lie in -2**63 to 2**64 - 1, got {self.seed}")
        lowest = {
            "num_kv_slots": 1,
            "num_host_slots": 0,
            "static_batch_size": 1,
            "min_batch": 1,
            "max_wait_steps": 0,
            "prefix_block": 1,
        }
        optional = ("num_kv_slots", "static_batch_size")
        check_least(self, lowest, optional=optional, labels=_LABELS)
        self._check_parts()
        limits = self.limits
        if self.static_batch_size is not None and self.static_batch_size > limits.max_num_seqs:
            raise ValueError(
                f"static_batch_size {self.static_batch_size} must be at most max_num_seqs {self.max_num_seqs}, the "
                "requests that run at once: lower it, raise max_num_seqs, or leave it null to follow max_num_seqs"
            )

    def _check_parts(self) -> None:
        """``observe`` and ``retention``, by themselves and beside the rest."""
        for name, kind in (("observe", ObserveOptions), ("retention", RetentionOptions)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be {kind.__name__} or None, got {value!r}")
        if self.observe is not None and self.retention is not None:
            raise ValueError(
                "observe and retention watch attention at different positions: set one of them to None"
            )
        if self.kv_cache_dtype == "int8" and self.retention is not None and self.retention.compress:
            raise ValueError(
                f"retention.compress has no effect with {_LABELS['kv_cache_dtype']}=int8, where every entry is int8 "
                "already: set one of them"
            )
        if self.prefix_sharing and self.retention is not None and self.retention.compress:
            raise ValueError(
                "retention.compress rewrites entries that prefix_sharing lets other requests use: set one of them"
            )

    def ignored(self) -> dict[str, str]:
        """Options that differ from their defaults and change nothing beside the others: by name, and why.

        Those of the retention have ``retention.`` before their names.
        """
        policy, found = POLICIES[self.scheduler], {}
        if not issubclass(policy, StaticBatchScheduler):
            found["static_batch_size"] = "only scheduler static_batch has batches"
        if issubclass(policy, FCFSScheduler):
            found["max_overtaken"] = f"scheduler {self.scheduler} lets no request pass another"
        if self.phase_order == "mixed":
            found["max_phase_wait_steps"] = "with phase_order mixed no phase stands back"
        if self.dispatch == "mixed":
            found |= dict.fromkeys(("min_batch", "max_wait_steps"), "dispatch mixed lets none wait")
        if not self.prefix_sharing:
            found["prefix_block"] = "prefix_sharing is off"
        elif self.retention is not None:
            found["prefix_block"] = "with retention, its interval is the block"
        defaults = {field.name: field.default for field in fields(self)}
        found = {name: why for name, why in found.items() if getattr(self, name) != defaults[name]}
        if self.retention is not None:
            found |= {f"retention.{k}": why for k, why in self.retention.ignored().items()}
        return found

    def without_ignored(self) -> "EngineOptions":
        """The same with the defaults in place of the ignored options of its own: for options made from a user's."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self)}
        return replace(
            self, **{name: defaults[name] for name in self.ignored() if name in defaults}
        )

    @property
    def block_tokens(self) -> int:
        """Lengths of shared prefixes are multiples of it: where entries are evicted, what is left there is shared."""
        return self.prefix_block if self.retention is None else self.retention.interval

    @property
    def limits(self) -> SchedulerLimits:
        """The scheduler's part; making it checks it."""
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            max_decode_tokens=self.max_decode_tokens,
            phase_order=self.phase_order,
            max_phase_wait_steps=self.max_phase_wait_steps,
            max_overtaken=self.max_overtaken,
            max_num_waiting=self.max_num_waiting,
        )
