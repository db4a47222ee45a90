"""What is compared: every policy at every strength, or the configs of conf/kvcache as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from tokenrouter.engine.options import KVCacheDtype
from tokenrouter.kvcache.retention import (
    Full,
    HeavyHitter,
    KeyNorm,
    Learned,
    ObservationWindow,
    Random,
    RetentionOptions,
    RetentionPolicy,
    RouteClass,
    ScoredPolicy,
    SinkWindow,
    Threshold,
)
from tokenrouter.tasks.build import engine_options

from .sizes import Sizes

CONF = Path(__file__).resolve().parents[2] / "conf"
SCORED: dict[str, type[ScoredPolicy]] = {
    policy.name: policy
    for policy in (HeavyHitter, ObservationWindow, Learned, KeyNorm, SinkWindow, Random, RouteClass)
}
FULL, INT8 = "full", "int8"
CONTROLS = (FULL, INT8, "sink_window", "random")
POLICIES = (FULL, INT8, "threshold", *SCORED)
RECALL_CONTROLS = ("sink_window", "random")
"""What retrieval is compared with at the same share."""
ROUTERS = {"route": "rule"}
"""By policy the router whose routes it looks at; others run with ``all_high``."""
SHIPPED = "as shipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One policy at one strength.

    Attributes:
        policy: its name; ``int8``: every entry in int8 and none evicted. Of a shipped config: the config's.
        retention: None: every entry stays.
        kv_cache_dtype: see EngineOptions.
        evicted_frac: of the tokens seen; None for a fixed budget, and for policies without a budget.
        max_entries: a fixed budget.
        threshold: None for all but ``threshold``.
        recent: guarded last tokens, where they differ from the schedule's.
        label: of the strength, where it is not to be told by the others.
    """

    policy: str
    retention: RetentionOptions | None
    kv_cache_dtype: KVCacheDtype = "auto"
    evicted_frac: float | None = None
    max_entries: int | None = None
    threshold: float | None = None
    recent: int | None = None
    label: str | None = None

    @property
    def router(self) -> str:
        """Every token is computed high; what differs is the class that its route gives its entry."""
        return ROUTERS.get(self.policy, "all_high")

    @property
    def strength(self) -> str:
        """Of the table: the share that is evicted, the entries that stay, or the threshold."""
        if self.label is not None:
            return self.label
        recent = "" if self.recent is None else f" r{self.recent}"
        recent += " int8" if self.retention and self.retention.compress else ""
        if self.max_entries is not None:
            return f"to {self.max_entries}{recent}"
        if self.evicted_frac is not None:
            return f"{100 * self.evicted_frac:g} %"
        return "" if self.threshold is None else f"< {self.threshold:g}{recent}"


def make_settings(
    schedule: RetentionOptions, sizes: Sizes, policies: Sequence[str]
) -> list[Setting]:
    """Every policy of ``policies`` at every strength, on one schedule."""
    found = []
    for name in policies:
        if name == FULL:
            found.append(_setting(schedule, Full()))
        elif name == INT8:
            found.append(Setting(policy=INT8, retention=None, kv_cache_dtype="int8"))
        elif name == "threshold":
            found += _thresholds(schedule, sizes)
        else:
            found += _budgets(schedule, sizes, name)
    return found


def retrieval_settings(
    schedule: RetentionOptions, sizes: Sizes, policies: Sequence[str]
) -> list[Setting]:
    """What items are read with: shares of the tokens seen, and thresholds, of policies that evict."""
    schedule = replace(schedule, window=min(sizes.question_window, schedule.interval))
    found = []
    for name in policies:
        if name == "threshold":
            found += [
                _setting(schedule, Threshold(threshold=limit), threshold=limit)
                for limit in sizes.retrieval_thresholds
            ]
        elif name in SCORED:
            found += _shares(schedule, sizes, name)
    return found


def shipped_settings() -> list[Setting]:
    """The configs of conf/kvcache with all of their own values, in the order of their names."""
    found = []
    for name in sorted(path.stem for path in (CONF / "kvcache").glob("*.yaml")):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            options = engine_options(compose("config", overrides=[f"kvcache={name}"]))
        policy = options.retention.policy if options.retention else None
        strength = {
            key: getattr(policy, key, None) for key in ("evicted_frac", "max_entries", "threshold")
        }
        found.append(
            Setting(
                policy=name,
                retention=options.retention,
                kv_cache_dtype=options.kv_cache_dtype,
                label=SHIPPED,
                **strength,
            )
        )
    return found


def _thresholds(schedule: RetentionOptions, sizes: Sizes) -> list[Setting]:
    return [
        _setting(schedule, Threshold(threshold=limit), threshold=limit, recent=sizes.guarded_recent)
        for limit in sizes.thresholds
    ]


def _budgets(schedule: RetentionOptions, sizes: Sizes, name: str) -> list[Setting]:
    """Shares of the tokens seen, fixed numbers, and where it is asked for these again with old entries in int8."""
    make, counts = SCORED[name], _fixed_budgets(schedule, sizes)
    found = _shares(schedule, sizes, name)
    for count in counts:
        policy = make(evicted_frac=0.0, max_entries=count)
        recent = round(sizes.recent_frac * count)
        found.append(_setting(schedule, policy, max_entries=count, recent=recent))
    if name in sizes.int8_policies:
        found += [_int8(schedule, make, count, sizes) for count in counts]
    return found


def _shares(schedule: RetentionOptions, sizes: Sizes, name: str) -> list[Setting]:
    return [
        _setting(schedule, SCORED[name](evicted_frac=frac), evicted_frac=frac)
        for frac in sizes.evicted_fracs
    ]


def _setting(schedule: RetentionOptions, policy: RetentionPolicy, **strength: Any) -> Setting:
    recent = strength.get("recent") or schedule.recent
    retention = replace(_scheduled(schedule, policy), recent=recent)
    return Setting(policy=policy.name, retention=retention, **strength)


def _scheduled(schedule: RetentionOptions, policy: RetentionPolicy) -> RetentionOptions:
    """What a policy is to see of attention is left at its default where the policy does not look at it."""
    if "attention" in policy.needs:
        return replace(schedule, policy=policy)
    default = RetentionOptions(policy=policy)
    window = min(default.window, schedule.interval)
    return replace(schedule, policy=policy, window=window, layers=default.layers)


def _int8(
    schedule: RetentionOptions, make: type[ScoredPolicy], count: int, sizes: Sizes
) -> Setting:
    """The last tokens stay by the policy's own choice: those that are guarded would not be converted."""
    policy = make(evicted_frac=0.0, max_entries=count, recent_frac=sizes.recent_frac)
    retention = replace(_scheduled(schedule, policy), compress="old")
    return Setting(policy=policy.name, retention=retention, max_entries=count)


def _fixed_budgets(schedule: RetentionOptions, sizes: Sizes) -> list[int]:
    """Entries with which, and the running chunk's beside them, a document's peak falls by each share."""
    counts = (
        round((1.0 - frac) * sizes.document_tokens) - schedule.interval
        for frac in sizes.fixed_fracs
    )
    return [count for count in counts if count > 0]
