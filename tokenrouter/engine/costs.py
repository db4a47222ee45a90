"""What a forward costs here, measured at start-up, so that `auto` dispatch can choose per step.

The token-wise operators of an executor cost almost the same for 1 token as for 16 (weights are streamed, operators are
launched), so running two executors in one small step can cost nearly two steps.

T tokens, E hidden size, A attention outputs.
"""

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from tokenrouter.executors import Executor
from tokenrouter.models import LoadedModel

SIZES = (1, 4, 16, 64)
REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds of the token-wise operators of all layers, per executor, at the token counts ``SIZES``."""

    seconds: Mapping[str, tuple[float, ...]]

    def tokenwise_s(self, executor: str, num_tokens: float) -> float:
        """Interpolated (beyond the last size: in proportion) seconds for ``num_tokens`` tokens."""
        if num_tokens <= 0:
            return 0.0
        known = self.seconds[executor]
        if num_tokens >= SIZES[-1]:
            return known[-1] * num_tokens / SIZES[-1]
        right = max(bisect_left(SIZES, num_tokens), 1)
        low, high = SIZES[right - 1], SIZES[right]
        share = (max(num_tokens, low) - low) / (high - low)
        return known[right - 1] * (1 - share) + known[right] * share

    @property
    def token_s(self) -> float:
        """Of one token among many, on the cheapest executor: the least that computing it again costs."""
        return min(known[-1] for known in self.seconds.values()) / SIZES[-1]

    def saved_s(self, executor: str, num_tokens: int, batch: int) -> float:
        """What ``num_tokens`` tokens save when they run among ``batch`` tokens of their executor."""
        alone_s = self.tokenwise_s(executor, num_tokens)
        return alone_s - self.tokenwise_s(executor, batch) * num_tokens / batch


_MEASURED: WeakKeyDictionary[Executor, dict[int, tuple[float, ...]]] = WeakKeyDictionary()


def measure(executors: Mapping[str, Executor], model: LoadedModel) -> CostModel:
    """Times the executors' token-wise operators over all layers, each executor once per number of threads.

    Results are kept as long as the executor lives, so that engines on one pool share them.

    Args:
        executors: by the name that routes use.
        model: the one that the executors were built for.
    """
    threads = torch.get_num_threads()
    seconds: dict[str, tuple[float, ...]] = {}
    for name, executor in executors.items():
        measured = _MEASURED.setdefault(executor, {})
        if threads not in measured:
            measured[threads] = _measure(executor, model)
        seconds[name] = measured[threads]
    return CostModel(seconds=seconds)


@torch.inference_mode()
def _measure(executor: Executor, model: LoadedModel) -> tuple[float, ...]:
    """The fastest of a few passes over all layers, in seconds, at each of ``SIZES``."""
    config = model.config
    times = []
    for size in SIZES:
        hidden_TE = torch.zeros(size, config.hidden_size, dtype=model.dtype)
        qkv_TO = torch.zeros(size, config.qkv_size, dtype=model.dtype)
        heads_TA = torch.zeros(size, config.num_heads * config.head_dim, dtype=model.dtype)
        best = float("inf")
        for _ in range(REPEATS):
            started = time.perf_counter()
            executor.qkv(0, hidden_TE, qkv_TO)
            for layer in range(config.num_layers):
                following = qkv_TO if layer + 1 < config.num_layers else None
                executor.finish_layer(layer, heads_TA, hidden_TE, following)
            best = min(best, time.perf_counter() - started)
        times.append(best)
    return tuple(times)
