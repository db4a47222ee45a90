"""What a feature of the compatibility matrix is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.compatibility.running import Run
from tokenrouter.kvcache.retention import RetentionPolicy, RouteClass
from tokenrouter.routers import Router

Sign = Callable[[Run], bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One way to switch a feature on.

    Attributes:
        options: by dotted name. ``engine.*`` of EngineOptions, ``retention.*`` of RetentionOptions, ``params.*`` of
            SamplingParams, ``request.*`` of how requests are sent (``running.send``); ``router`` and ``router.around``
            make a router, and one around it, ``router.low_class`` names the retention class of its low routes;
            ``pool``, ``pool.lm_head`` and ``kernels``.
        two_paths: it says something only where tokens take two paths: see ``engines.TWO_PATHS``.
        evicts: it says something only where entries are evicted: see ``engines.EVICTS``.
        changes_output: else outputs must be what they are without it.
        sign: whether a run shows that it was on, where outputs alone do not; None: nothing shows it.
    """

    options: Mapping[str, Any]
    two_paths: bool = False
    evicts: bool = False
    changes_output: bool = True
    sign: Sign | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Feature:
    """A row of the matrix: what a user would look for, under which option, and its settings by name."""

    group: str
    key: str
    title: str
    settings: Mapping[str, Setting]


def feature(group: str, key: str, title: str, **settings: Setting) -> Feature:
    """A feature; its settings by name."""
    return Feature(group=group, key=key, title=title, settings=settings)


def neutral(sign: Sign | None, *, two_paths: bool = False, **options: Any) -> Setting:
    """A setting of EngineOptions that may change no output."""
    named = {f"engine.{name}": value for name, value in options.items()}
    return Setting(options=named, changes_output=False, sign=sign, two_paths=two_paths)


def params(sign: Sign | None = None, **options: Any) -> Setting:
    """A setting of SamplingParams."""
    return Setting(options={f"params.{name}": value for name, value in options.items()}, sign=sign)


def routed(**options: Any) -> Setting:
    """A pool or a router that sends tokens both ways."""
    named = {name.replace("_", "."): value for name, value in options.items()}
    return Setting(options=named, two_paths=True, sign=lambda run: len(run.executors_used) > 1)


def router(make: Callable[[], Router]) -> Setting:
    """A router over the int8 pool."""
    return routed(router=make)


def retention(policy: RetentionPolicy) -> Setting:
    """A policy that acts on every eighth token; see ``engines.RETENTION``."""
    return Setting(
        options={"retention.policy": policy},
        two_paths=isinstance(policy, RouteClass),
        sign=lambda run: run.stats.evicted_entries > 0,
    )
