"""Times the parts of an engine's steps from outside, by what the parts are called."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from tokenrouter import LLM
from tokenrouter.engine import engine as step_module
from tokenrouter.models import Decoder

PARTS = (
    *("schedule", "pack", "decide", "dispatch", "build", "forward", "logits"),
    *("sample", "accept", "retire", "other"),
)
Seconds = dict[str, float]


class StepTimer:
    """Steps of an engine, each with the seconds of its parts.

    Args:
        llm: an engine of its own: another one that steps meanwhile would be counted in.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._spent: Seconds = {}

    def steps(self, count: int) -> list[Seconds]:
        """Runs ``count`` steps.

        Returns:
            Per step the seconds of every part of ``PARTS``, which add up to ``step``, the whole of it.
        """
        with self._watched():
            return [self._step() for _ in range(count)]

    def _step(self) -> Seconds:
        self._spent = dict.fromkeys((*PARTS, "run"), 0.0)
        started = time.perf_counter()
        self._llm.engine.step()
        total_s, spent = time.perf_counter() - started, self._spent
        spent["build"] = spent.pop("run") - spent["forward"] - spent["logits"]
        return spent | {"other": total_s - sum(spent.values()), "step": total_s}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        parts = self._llm.engine._parts
        watched: list[tuple[Any, str, str]] = [
            (parts.scheduler, "schedule", "schedule"),
            (step_module, "pack", "pack"),
            (parts.decider, "decide", "decide"),
            (parts.dispatcher, "dispatch", "dispatch"),
            (parts.runner, "run", "run"),
            (Decoder, "forward", "forward"),
            (parts.live, "sample", "sample"),
            (parts.live, "accept", "accept"),
            (parts.scheduler, "finish", "retire"),
            *((part, "retire", "retire") for part in (parts.retainer,) if part is not None),
            *((part, "offer", "retire") for part in (parts.sharing,) if part is not None),
            *((path, "logits", "logits") for path in self._llm.pool.executors.values()),
        ]
        with ExitStack() as stack:
            for owner, name, part in watched:
                timed = self._timed(getattr(owner, name), part)
                stack.enter_context(patch.object(owner, name, timed))
            yield

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._spent[part] += time.perf_counter() - started

        return timed
