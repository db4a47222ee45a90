"""Runs three requests under the options of a pair, and one by one as their own yardstick.

T tokens of a request, V vocabulary, N its positions, G layer groups, E entries that were evicted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.engine.tools import SMALL
from tokenrouter import LLM, EngineOptions, RequestOutput, SamplingParams
from tokenrouter.engine.stats import EngineStats
from tokenrouter.executors import ExecutorPool, build_pool
from tokenrouter.executors.pool import POOLS
from tokenrouter.kvcache.retention import Full, RetentionOptions
from tokenrouter.models import LoadedModel
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf
from tokenrouter.routers import RandomRouter, Router
from tokenrouter.scheduler import Request, StepPlan
from tokenrouter.scheduler.request import NEVER

PROMPT_LENS = (26, 21, 17)
OUTPUT_LEN = 14
SHARED_LEN = 16
TOGETHER = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "dispatch": "mixed"}
ONE_BY_ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "dispatch": "mixed"}
RETENTION = {"policy": Full(), "interval": 8, "window": 4, "layers": 2, "sinks": 2, "recent": 3}
TWO_PATHS = {"pool": "int8", "router": lambda: RandomRouter(0.5, seed=1)}
"""Where a setting needs two paths and says nothing else: half of the tokens go low."""
PARAMS = {"temperature": 0.0, "max_tokens": OUTPUT_LEN, "ignore_eos": True}

EXACT, ROUNDED = (2e-5, 1e-5), (5e-2, 1.5e-3)
"""Largest and mean difference of log-probabilities and logits. A last bit that company changes may round an int8 value
the other way; losing int8 somewhere changes all numbers, their mean by over 2e-3."""


@cache
def hf_model() -> Any:
    """Two layers of random weights, as transformers runs them."""
    return tiny_hf("llama", **SMALL)


@cache
def model() -> LoadedModel:
    """The same in float32, as the engine runs it."""
    return from_hf_model(hf_model(), ByteTokenizer(), name="tiny", max_model_len=256)


@cache
def pool(name: str, lm_head: str, kernels: str) -> ExecutorPool:
    """Executors, built once for all tests."""
    return build_pool(replace(POOLS[name], lm_head=lm_head), model(), kernels=kernels)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Random ids that begin alike, and behind each prompt the ids that may be forced after it."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 384, (n + OUTPUT_LEN,), generator=generator) for n in PROMPT_LENS]
    return tuple((*ids[0][:SHARED_LEN].tolist(), *own[SHARED_LEN:].tolist()) for own in ids)


def group(options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The options under ``prefix``, without it."""
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in options.items()
        if name.startswith(f"{prefix}.")
    }


def make_router(options: Mapping[str, Any]) -> Router | str:
    """The router that is asked for, else all high."""
    make, around = options.get("router"), options.get("router.around")
    if make is None:
        return "all_high"
    router: Router = make() if around is None else around(make())
    return router


def make_llm(options: Mapping[str, Any], *, together: bool) -> LLM:
    """An engine with all options but those of a request."""
    engine = {**(TOGETHER if together else ONE_BY_ONE), **group(options, "engine")}
    if retention := group(options, "retention"):
        engine["retention"] = RetentionOptions(**{**RETENTION, **retention})
    executors = pool(
        options.get("pool", "full"),
        options.get("pool.lm_head", "high"),
        options.get("kernels", "auto"),
    )
    llm = LLM(
        model(),
        router=make_router(options),
        executors=executors,
        options=EngineOptions(**engine),
        calibration_ids=[ids[:n] for ids, n in zip(prompts(), PROMPT_LENS, strict=True)],
    )
    if llm.engine.scheduler.host is not None:
        # A tiny model is computed again faster than anything is copied.
        llm.engine.scheduler.host._recompute_s = float("inf")
    return llm


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
    if together and sent.get("neighbour_aborts"):
        result.llm.engine.add_request(
            "neighbour", [9] * 12, SamplingParams(temperature=0, max_tokens=30)
        )
        finish(result, num_steps=6)
        result.llm.engine.abort("neighbour")
    finish(result)
    assert set(result.outputs) == {"0", "1", "2"}
    return result


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
    result.llm.engine.add_request(
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
        decoding = [chunk.request.decoding for chunk in plan.chunks]
        result.most_decode = max(result.most_decode, sum(decoding))
        result.largest_step = max(result.largest_step, sum(c.length for c in plan.chunks))
        result.mixes_phases |= any(decoding) and not all(decoding)
        for chunk in plan.chunks:
            name = chunk.request.request_id.split("#")[0]
            if name not in result.order and name != "neighbour":
                result.order.append(name)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
