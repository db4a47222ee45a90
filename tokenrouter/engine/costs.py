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

    def queueing_pays(self, tokens: Mapping[str, int], min_batch: int, max_wait_steps: int) -> bool:
        """Whether letting the smaller groups wait for ``min_batch`` tokens costs less per token than mixing now.

        A group that waits costs its share of a later forward of ``min_batch`` tokens, which also pays attention's and
        the loop's own launches: they are taken as half of the cheapest token-wise pass. And while it waits its requests
        stand still: every step costs them their share of that step. As many tokens are taken to join per step as are
        there now.

        Args:
            tokens: decode tokens of this step per executor.
            min_batch: tokens that a group waits for.
            max_wait_steps: and how long at most.
        """
        if len(tokens) < 2:
            return False
        largest = max(tokens, key=lambda name: tokens[name])
        launch_s = 0.5 * min(times[0] for times in self.seconds.values())
        mixed_s = sum(self.tokenwise_s(name, count) for name, count in tokens.items())
        queued_s = self.tokenwise_s(largest, tokens[largest])
        standing_s = (queued_s + launch_s) / sum(tokens.values())  # of one token for one step
        for name, count in tokens.items():
            if name != largest:
                batch = max(min_batch, count)
                wait_steps = min(max_wait_steps, (batch - count) / count)
                queued_s += (self.tokenwise_s(name, batch) + launch_s) * count / batch
                queued_s += standing_s * count * wait_steps
        return queued_s < mixed_s


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
            for layer in range(config.num_layers):
                executor.qkv(layer, hidden_TE, qkv_TO)
                executor.attention_out(layer, heads_TA, hidden_TE)
                executor.mlp(layer, hidden_TE)
            best = min(best, time.perf_counter() - started)
        times.append(best)
    return tuple(times)
