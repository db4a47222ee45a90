"""How much is run, and the ways in which one router is asked."""

from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.prefix_bench.setup import QUICK as FEW_REQUESTS
from scripts.prefix_bench.setup import Sizes as RequestSizes
from scripts.router_bench.sizes import QUICK as ROUTER_QUICK
from scripts.router_bench.sizes import Sizes as RouterSizes
from tokenrouter.routers import BatchedRouter, CachedRouter, IntervalRouter, Router

EACH = "each_token"
INTERVALS = (1, 2, 4, 8)
BATCHES = (64, 256)
SHARE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of what is measured.

    Attributes:
        quality: of the windows.
        shared: of the requests that begin alike.
        turns: that count, of prefill.
        decode_turns: the same of decode, as many steps each as the longest interval.
        decode_requests: that decode together.
        context: tokens of their prompts, up to 7 more.
        prompt_tokens: of the prompt whose prefill is timed.
        small_chunk: tokens of a step where it runs in small chunks.
    """

    quality: RouterSizes = field(default_factory=lambda: RouterSizes(windows=4))
    shared: RequestSizes = field(default_factory=RequestSizes)
    turns: int = 9
    decode_turns: int = 24
    decode_requests: int = 32
    context: int = 256
    prompt_tokens: int = 1024
    small_chunk: int = 16


QUICK = Sizes(
    quality=ROUTER_QUICK,
    shared=FEW_REQUESTS,
    turns=1,
    decode_turns=1,
    decode_requests=8,
    context=8,
    prompt_tokens=64,
)


def ways(make: Callable[[], Router]) -> dict[str, Router]:
    """By name, a router as it is and in each wrapper; every one has its own.

    Args:
        make: a new router without thresholds.
    """
    return {
        EACH: make(),
        **{f"interval_{n}": IntervalRouter(make(), every=n) for n in INTERVALS},
        **cached(make),
        **{f"batched_{n}": BatchedRouter(make(), batch=n) for n in BATCHES},
    }


def cached(make: Callable[[], Router]) -> dict[str, Router]:
    """Those of ``ways`` with a cache."""
    return {
        "cached": CachedRouter(make(), key="pattern"),
        "cached_exact": CachedRouter(make(), key="exact"),
    }
