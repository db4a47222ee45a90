"""Runs three requests under the options of a pair, and one by one as their own yardstick.

T tokens of a request, V vocabulary, N its positions, G layer groups, E entries that were evicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.compatibility.engines import (
    PARAMS,
    PROMPT_LENS,
    group,
    make_llm,
    model,
    prompts,
)
from tokenrouter import LLM, RequestOutput, SamplingParams
from tokenrouter.engine import QueueFullError
from tokenrouter.engine.stats import EngineStats
from tokenrouter.scheduler import Request, StepPlan
from tokenrouter.scheduler.request import NEVER

EXACT, ROUNDED = (2e-5, 1e-5), (5e-2, 1.5e-3)
"""Largest and mean difference of log-probabilities and logits. A last bit that company changes may round an int8 value
the other way; losing int8 somewhere changes all numbers, their mean by over 2e-3."""


@dataclass
class Run:
    """What three requests gave, and how the steps looked on the way."""

    llm: LLM
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    largest_step: int = 0
    most_decode: int = 0
    mixes_phases: bool = False
    waited: bool = False
    most_running: int = 0
    num_aborted: int = 0
    num_swapped: int = 0
    num_observed: int = 0
    num_outputs: int = 0
    pieces: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def stats(self) -> EngineStats:
        return self.llm.engine.stats

    @property
    def executors_used(self) -> set[str]:
        table = self.llm.engine.route_table
        ran_R = self.stats.executed_tokens.sum(0)
        return {
            name
            for route, ran in zip(table.routes, ran_R, strict=True)
            for name in route.executors
            if ran
        }

    @property
    def rounds(self) -> bool:
        """Whether anything is int8: products or entries."""
        return "low" in self.llm.pool.executors or self.stats.peak_int8_tokens > 0

    @property
    def num_completions(self) -> int:
        return min(len(output.outputs) for output in self.outputs.values())

    @property
    def num_stopped(self) -> int:
        completions = [c for output in self.outputs.values() for c in output.outputs]
        return sum(c.finish_reason == "stop" for c in completions)

    @property
    def has_logprobs(self) -> bool:
        return all(o.outputs[0].logprobs for o in self.outputs.values())

    @property
    def has_prompt_logprobs(self) -> bool:
        return all(o.prompt_logprobs for o in self.outputs.values())

    @property
    def num_groups(self) -> int:
        return len(self.llm.engine.pool.tables)

    @property
    def kernels(self) -> str:
        return type(self.llm.pool.kernels).__name__

    @property
    def num_logged(self) -> int:
        recorder = self.llm.engine.decisions
        return sum(len(b["position"]) for b in recorder.blocks) if recorder is not None else 0

    def evicted(self, name: str) -> list[list[int]]:
        """Per evicted entry of a completion its layer group and position, and how many tokens there were then."""
        at_GN = self.requests[name].evicted_at_GN
        if at_GN is None:
            return []
        index_E2 = np.argwhere(at_GN != NEVER)
        return np.column_stack([index_E2, at_GN[tuple(index_E2.T)]]).tolist()  # type: ignore[no-any-return]


def run(options: Mapping[str, Any], *, together: bool) -> Run:
    """Three requests, all at once or one after the other."""
    result = Run(make_llm(options, together=together))
    sent = group(options, "request")
    params = SamplingParams(**{**PARAMS, **group(options, "params")})
    if together and sent.get("forerunners"):
        send_forerunners(result)
    watch(result)
    for index in range(3):
        send(result, index, params, sent)
        if not together:
            finish(result)
    if result.llm.engine.scheduler.is_full:
        with pytest.raises(QueueFullError):
            result.llm.engine.add_request("refused", [9] * 12, params)
    if together and sent.get("neighbour_aborts"):
        add(result, "neighbour", [9] * 12, SamplingParams(temperature=0, max_tokens=30))
        finish(result, num_steps=6)
        result.llm.engine.abort("neighbour")
    finish(result)
    assert set(result.outputs) == {"0", "1", "2"}
    return result


def add(result: Run, name: str, ids: Sequence[int], params: SamplingParams, **how: Any) -> None:
    """Queues a request; where the queue is full, when some steps have made room."""
    engine = result.llm.engine
    while engine.scheduler.is_full:
        finish(result, num_steps=1)
    engine.add_request(name, ids, params, **how)


def send_forerunners(result: Run) -> None:
    """Requests with the same prompts that come and go before, and do not count."""
    engine = result.llm.engine
    for index, prompt_len in enumerate(PROMPT_LENS):
        ids = prompts()[index][:prompt_len]
        engine.add_request(f"forerunner{index}", ids, SamplingParams(temperature=0, max_tokens=2))
    while engine.has_unfinished():
        engine.step()
    engine.stats.reset()
    if engine.decisions is not None:
        engine.decisions.reset()


def send(result: Run, index: int, params: SamplingParams, sent: Mapping[str, Any]) -> None:
    """Queues one request."""
    ids, name, forced = prompts()[index], str(index), {}
    if sent.get("forced"):
        rows = result.logits[name] = torch.full((len(ids), model().config.vocab_size), torch.nan)

        def sink(start: int, logits_TV: Tensor) -> None:
            rows[start : start + len(logits_TV)] = logits_TV

        forced = {"forced_ids": ids[PROMPT_LENS[index] :], "logits_sink": sink}
    add(
        result,
        name,
        ids[: PROMPT_LENS[index]],
        params,
        priority=sent["priorities"][index] if "priorities" in sent else 0,
        stream=sent.get("stream", False),
        **forced,
    )
    result.requests |= {r.request_id: r for r in result.llm.engine.scheduler.waiting}


def finish(result: Run, num_steps: int = 2000) -> None:
    """Steps; the pool is sound after every step and empty at the end."""
    engine = result.llm.engine
    for _ in range(num_steps):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            if output.request_id == "neighbour":
                result.num_aborted += output.outputs[0].finish_reason == "abort"
                continue
            result.outputs[output.request_id] = output
            result.num_outputs += 1
            for c in output.outputs:
                key = output.request_id, c.index
                result.pieces[key] = result.pieces.get(key, "") + c.delta
                assert result.pieces[key] == c.text
        if len(engine.scheduler.running) > 1:
            engine.pool.check_integrity()
        result.waited |= any(r.waited_steps for r in engine.scheduler.running)
        result.num_swapped += sum(r.swapped is not None for r in engine.scheduler.waiting)
        result.num_observed += len(engine.attention_received)
    else:
        assert num_steps < 2000, "the engine does not finish"
        return
    assert engine.pool.live == 0, "slots leaked"


def watch(result: Run) -> None:
    """Notes what every plan holds."""
    scheduler = result.llm.engine.scheduler
    schedule = scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        unfinished = [request for request in scheduler.running if not request.finished]
        result.most_running = max(result.most_running, len(unfinished))
        decoding = [request.decoding for request in plan.requests]
        result.most_decode = max(result.most_decode, sum(decoding))
        result.largest_step = max(result.largest_step, int(plan.length_C.sum()))
        result.mixes_phases |= any(decoding) and not all(decoding)
        for request in plan.requests:
            name = request.request_id.split("#")[0]
            if name not in result.order and name != "neighbour":
                result.order.append(name)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
