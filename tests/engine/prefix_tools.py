"""What the tests of prefix sharing share: one prompt that others begin as, and engines with and without sharing."""

from typing import Any

import pytest

from tests.engine import retention_cases
from tests.engine.retention_cases import INTERVAL, SHIPPED
from tests.engine.tools import prompts, tiny, twin
from tokenrouter import LLM, EngineOptions
from tokenrouter.kvcache.retention import RetentionPolicy
from tokenrouter.routers import Router

BLOCK = INTERVAL
BASE = prompts()[2]
POLICIES: dict[str, RetentionPolicy | None] = {
    "none": None,
    **{name: retention.policy for name, retention in SHIPPED.items()},
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def options(policy: RetentionPolicy | None = None, **changes: Any) -> EngineOptions:
    """Shared beginnings at every eighth token, with and without retention."""
    block = {"prefix_block": BLOCK} if policy is None else {}
    return retention_cases.options(policy, **{"prefix_sharing": True, **block} | changes)


def cold(policy: RetentionPolicy | None, router: Router | str = "all_high", **changes: Any) -> LLM:
    """The same engine without sharing."""
    asked = retention_cases.options(policy, **changes)
    return LLM(tiny(), router=router, executors=twin(), options=asked)


def warm(policy: RetentionPolicy | None, router: Router | str = "all_high", **changes: Any) -> LLM:
    """An engine that shares."""
    return LLM(tiny(), router=router, executors=twin(), options=options(policy, **changes))
