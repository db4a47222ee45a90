"""Every config of conf/kvcache, found by listing, with a schedule so short that tiny requests come to many decisions.

A new file there is tested by whatever asks for ``every_policy``, without being named here.
"""

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from tests.kvcache.trained_retention import drawn_for_any_model
from tokenrouter import EngineOptions
from tokenrouter.kvcache.retention import Learned, RetentionOptions, RetentionPolicy, SinkWindow
from tokenrouter.tasks import build

CONF = Path(__file__).resolve().parents[2] / "conf"
CONFIGS = sorted(path.stem for path in (CONF / "kvcache").glob("*.yaml"))
INTERVAL = 8
SCHEDULE: dict[str, Any] = {
    "interval": INTERVAL,
    "window": 4,
    "layers": 2,
    "sinks": 2,
    "recent": 3,
    "groups": 1,
}
SMALL = {"recent_frac": 0.25, "threshold": 1.0}
"""Options of policies, where they have them: gaps among old entries, not one gap behind the sinks; and a tiny model's
attention is so even that a lower threshold keeps everything."""
NOTHING = {"evicted_frac": 0.0, "max_entries": None, "threshold": 1e-9}
"""Options with which a policy acts and evicts nothing."""


@cache
def config_options(name: str) -> EngineOptions:
    """The engine's options of a config of conf/kvcache, as shipped."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build.engine_options(compose("config", overrides=[f"kvcache={name}"]))


def with_options(policy: RetentionPolicy, options: dict[str, Any]) -> RetentionPolicy:
    """The policy with those of the options that it has; at least one. A trained one is for tiny models then."""
    if type(policy) is Learned:
        policy = drawn_for_any_model(
            evicted_frac=policy.evicted_frac, max_entries=policy.max_entries
        )
    own = {f.name for f in fields(policy) if f.init}  # type: ignore[arg-type]
    mine = {name: value for name, value in options.items() if name in own}
    assert mine, f"{policy.name} has none of {', '.join(options)}: say here how it is made small"
    return replace(policy, **mine)  # type: ignore[type-var]


def short(policy: RetentionPolicy, **changes: Any) -> RetentionOptions:
    """A policy with decisions so often that a prompt of 90 tokens has ten."""
    return RetentionOptions(**{"policy": policy, **SCHEDULE, **changes})


def options(retention: RetentionOptions | RetentionPolicy | None, **changes: Any) -> EngineOptions:
    """Retention, or a policy with the short schedule, in an engine of small steps."""
    if isinstance(retention, RetentionPolicy):
        retention = short(retention)
    return EngineOptions(**{"max_num_batched_tokens": 64, "retention": retention} | changes)


def _shipped() -> dict[str, RetentionOptions]:
    """Every config with a policy, made small; the rest of its options as it is."""
    found = {name: config_options(name).retention for name in CONFIGS}
    return {
        name: replace(retention, policy=with_options(retention.policy, SMALL), **SCHEDULE)
        for name, retention in found.items()
        if retention is not None
    }


SHIPPED = _shipped()
PLAIN = [name for name in CONFIGS if name not in SHIPPED]
"""Configs without a policy."""
CASES: dict[str, RetentionOptions] = SHIPPED | {
    "most evicted": short(SinkWindow(evicted_frac=0.75)),
    "bounded": short(SinkWindow(evicted_frac=0, max_entries=9)),
}
every_policy = pytest.mark.parametrize("retention", CASES.values(), ids=CASES)
every_shipped = pytest.mark.parametrize("retention", SHIPPED.values(), ids=SHIPPED)
