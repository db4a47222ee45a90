"""Guards the engine as a whole: add, step, abort in any order, in small pools, with two paths in every mode."""

from functools import cache
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.engine.tools import SMALL, NearTies
from tokenrouter import LLM, EngineOptions, RequestOutput, SamplingParams
from tokenrouter.executors import ExecutorPool
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.packing import PackedModel
from tokenrouter.kernels import select
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.routers import RandomRouter
from tokenrouter.scheduler import POLICIES, Scheduler

MAX_TOTAL = 36


@cache
def model() -> LoadedModel:
    return tiny_random("llama", **SMALL)


@cache
def pool() -> ExecutorPool:
    """Two float32 paths of different weights."""
    kernels, second = select(), tiny_random("llama", seed=1, **SMALL)
    executors = {
        "high": FullExecutor(PackedModel(model(), kernels)),
        "low": FullExecutor(PackedModel(second, kernels)),
    }
    return ExecutorPool(executors=executors, lm_head="high", kernels=kernels)


def make(**options: Any) -> LLM:
    return LLM(
        model(), router=RandomRouter(0.5), executors=pool(), options=EngineOptions(**options)
    )


@cache
def lonely() -> LLM:
    """Runs one request at a time: what every output must equal."""
    return make(max_num_seqs=1, max_num_batched_tokens=64)


@cache
def alone(prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and routes of a greedy request run alone."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    (output,) = lonely().generate([prompt], params)
    return output.outputs[0].token_ids, output.outputs[0].routes


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 384, (length,), generator=generator).tolist())


class EngineMachine(RuleBasedStateMachine):
    """The engine against each request run alone."""

    @initialize(
        scheduler=st.sampled_from(sorted(POLICIES)),
        phase_order=st.sampled_from(["mixed", "prefill_first", "decode_first"]),
        host_slots=st.sampled_from([0, 20, 200]),
        dispatch=st.sampled_from(["mixed", "queued", "auto"]),
        seats=st.integers(1, 5),
        more_tokens=st.sampled_from([0, 3, 20]),
        slots=st.integers(MAX_TOTAL, 3 * MAX_TOTAL),
        min_batch=st.integers(1, 4),
        max_wait=st.integers(0, 4),
        block=st.sampled_from([0, 1, 3, 8]),
    )
    def start(
        self,
        scheduler: str,
        phase_order: str,
        host_slots: int,
        dispatch: str,
        seats: int,
        more_tokens: int,
        slots: int,
        min_batch: int,
        max_wait: int,
        block: int,
    ) -> None:
        self.llm = make(
            scheduler=scheduler,
            phase_order=phase_order,
            num_host_slots=host_slots,
            dispatch=dispatch,
            max_num_seqs=seats,
            max_num_batched_tokens=seats + more_tokens,
            num_kv_slots=slots,
            static_batch_size=(seats + 1) // 2,
            min_batch=min_batch,
            max_wait_steps=max_wait,
            prefix_sharing=block > 0,
            prefix_block=max(block, 1),
        )
        self.engine = self.llm.engine
        if self.engine.scheduler.host is not None:
            self.engine.scheduler.host._recompute_s = float("inf")
        self.asked: dict[str, tuple[tuple[int, ...], int]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()
        self.bound = max_wait
        self.ties = NearTies(lonely())

    @property
    def unfinished(self) -> list[str]:
        done = {i for i, output in self.last.items() if output.finished}
        return [i for i in self.asked if i not in done and i not in self.aborted]

    @rule(seed=st.integers(0, 30), length=st.integers(1, 20), max_tokens=st.integers(1, 16))
    def add(self, seed: int, length: int, max_tokens: int) -> None:
        name = str(len(self.asked))
        self.asked[name] = (prompt_of(seed, length), max_tokens)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(name, *(self.asked[name][0], params), stream=seed % 2 == 0)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.unfinished))
        self.engine.abort(name)
        self.aborted.add(name)
        self.engine.pool.check_integrity()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def add_twice(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.unfinished))
        try:
            self.engine.add_request(name, [5], SamplingParams())
        except ValueError as error:
            assert "already in use" in str(error)
        else:
            raise AssertionError("a duplicate id was taken")

    def one_step(self) -> None:
        for output in self.engine.step():
            assert output.request_id in self.asked
            before = self.last.get(output.request_id)
            assert before is None or not before.finished, "an output after the last one"
            self.last[output.request_id] = output
        self.engine.pool.check_integrity()
        scheduler: Scheduler = self.engine.scheduler
        assert all(r.waited_steps <= self.bound for r in scheduler.running)
        num_computed = sum(r.num_computed for r in scheduler.running)
        assert num_computed <= int(self.engine.pool.tables[0].num_kept_R.sum())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_unfinished():
            self.one_step()
            steps += 1
            assert steps < 3000, "the engine does not finish"
        self.engine.drop_prefixes()
        assert self.engine.pool.free == self.engine.pool.num_slots, "slots leaked"
        self.engine.pool.check_integrity()
        host = self.engine.scheduler.host
        assert host is None or host.live == 0, "room of the host tier leaked"
        assert self.engine.pool.num_free_rows == len(self.engine.pool.tables[0].num_kept_R), (
            "rows leaked"
        )
        assert set(self.last) == set(self.asked)
        for name, (prompt, max_tokens) in self.asked.items():
            (one,) = self.last[name].outputs
            expected, expected_routes = alone(prompt, max_tokens)
            if name in self.aborted:
                assert one.finish_reason == "abort"
                expected = expected[: len(one.token_ids)]
            else:
                assert one.finish_reason == "length"
            self.ties.same(prompt, expected, one.token_ids)
            if one.token_ids == expected and name not in self.aborted:
                assert one.routes == expected_routes
        assert self.ties.count <= 1


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
