"""The only place where the two levels meet: ``LLMEngine.step`` is a token's path on one screen."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokenrouter.engine.decider import Decider, StepDecision
from tokenrouter.engine.decision_log import DecisionRecorder
from tokenrouter.engine.dispatcher import Dispatcher, Work
from tokenrouter.engine.live import LiveRequests
from tokenrouter.engine.observation import Observer, Received
from tokenrouter.engine.retainer import Retainer
from tokenrouter.engine.runner import Runner
from tokenrouter.engine.sampler import Sampler
from tokenrouter.engine.signals import SignalFeed
from tokenrouter.engine.stats import EngineStats, StepTimes
from tokenrouter.engine.step import PackedStep, pack
from tokenrouter.features import Signals
from tokenrouter.kvcache import Compactor, KVArena, KVPool
from tokenrouter.outputs import RequestOutput
from tokenrouter.routers.base import Router
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.scheduler import PrefixSharing, QueueFullError, Request, Scheduler
from tokenrouter.scheduler.request import LogitsSink
from tokenrouter.types import RouteTable, StepFeedback


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """Everything an engine is made of; ``tokenrouter.engine.build`` puts it together."""

    router: Router
    route_table: RouteTable
    decider: Decider
    signals: Signals
    feed: SignalFeed | None
    scheduler: Scheduler
    dispatcher: Dispatcher
    runner: Runner
    sampler: Sampler
    pool: KVPool
    arena: KVArena
    compactor: Compactor
    live: LiveRequests
    stats: EngineStats
    recorder: DecisionRecorder | None
    observer: Observer | None
    retainer: Retainer | None
    sharing: PrefixSharing | None


class LLMEngine:
    """Continuous batching with a decision per token. Not thread safe: one caller adds, steps and aborts.

    Attributes:
        router: decides; ``step`` tells it what was done.
        route_table: the routes that its tokens run on: the router's own, and ``high`` behind them where the pool can
            run none of those in place of one that it lacks an executor for. ``stats`` and outputs index it.
        scheduler, pool: the requests, and the KV slots they hold.
        signals: what features read beside the tokens; ``signals.record_error`` tells it of measured errors.
        stats: counters since their last reset.
        kv_bytes_per_slot: of one token as it is first stored, keys and values of all layers.
        int8_bytes_per_slot: of one token in int8, scales included.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.router = parts.router
        self.route_table = parts.route_table
        self.scheduler = parts.scheduler
        self.pool = parts.pool
        self.signals = parts.signals
        self.stats = parts.stats
        arena = parts.arena
        self.int8_bytes_per_slot = arena.int8_bytes_per_slot
        per_slot = arena.int8_bytes_per_slot if arena.is_all_int8 else arena.bytes_per_slot
        self.kv_bytes_per_slot = per_slot

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs that changed.

        An exception of the forward reaches the caller, and the step counts as not done: no token was added, and the
        same step may be tried again. Decisions that were taken stay, and are counted and logged already. One of a
        retention policy or of ``Router.observe`` reaches the caller when the step is done: the next one hands back
        its outputs, too.
        """
        parts, started = self._parts, time.perf_counter()
        plan = parts.scheduler.schedule()
        self.stats.num_preemptions += len(plan.preempted)
        self.stats.shared_tokens += plan.num_shared_tokens
        if not plan.requests:
            return parts.live.take_changed()
        step, used_slots = pack(plan, parts.scheduler.tokens), self.pool.used
        self._note_live_bytes()
        scheduled = time.perf_counter()

        if parts.feed is not None:
            self.stats.router_s += parts.feed.start(step)
        begun = parts.runner.begin(step)
        decision = parts.decider.decide(step, begun.hidden_TE if begun else None)
        self._record(step, decision)
        work = parts.dispatcher.dispatch(step, decision.executed_T)
        self._account_waiting(step, work, scheduled)
        result = parts.runner.run(step, work, decision.executed_T, begun)

        ran_at = time.perf_counter()
        sampled = parts.live.sample(step, result.due_R, result.logits_RV, parts.sampler)
        self._advance(step, work)
        accepted = parts.live.accept(step, result.due_R, sampled)
        if parts.feed is not None:
            self.stats.router_s += parts.feed.take(step, result.due_R, result.logits_RV)
        sampled_at = time.perf_counter()
        self._retire(step, work, accepted.ended)
        outputs = parts.live.take_changed()
        self._give_memory_back()

        ended = time.perf_counter()
        self.stats.output_tokens += accepted.num_new
        route_tokens = self.stats.count_tokens(decision, step.batch.phase_T.numpy(), result.ran_T)
        self.stats.add_forward(result.times)
        times = StepTimes(
            schedule_s=scheduled - started,
            executor_s=result.seconds,
            sampler_s=sampled_at - ran_at,
            memory_s=ended - sampled_at,
            step_s=ended - started,
        )
        self.stats.record(times, live_slots=used_slots)
        self._tell_router(route_tokens, times.step_s, outputs)
        return outputs

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
        forced_ids: Sequence[int] | None = None,
        logits_sink: LogitsSink | None = None,
        wants_all_logits: bool = False,
        logits_from: int = 0,
        stream: bool = True,
    ) -> None:
        """Queues a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, or token ids.
            params: defaults as in SamplingParams.
            priority: lower goes first, with the scheduler ``priority``; others ignore it, with a warning.
            arrival_s: on the clock of ``time.perf_counter``; now when None.
            forced_ids: teacher forcing: after the prompt these ids are fed one by one instead of sampled ones.
            logits_sink: called with (position of the first row, float32 logits ``[rows, V]``); needs ``forced_ids`` or
                ``wants_all_logits``.
            wants_all_logits: the sink gets every position from ``logits_from`` on, not only those that are due.
            logits_from: what lies before may come from a shared prefix.
            stream: ``step`` hands back its state after every new token, not only at the end.

        Raises:
            QueueFullError: ``EngineOptions.max_num_waiting`` completions wait already; one request's come in together.
                Nothing of it is kept, and ``stats.num_rejected`` counts it.
            ValueError: a duplicate id; a prompt that is empty, too long, larger than the pool or with ids outside the
                vocabulary; params that this model cannot serve; a sink that gets nothing, or with ``prompt_logprobs``.
        """
        self._refuse_when_full(request_id)
        arrival = time.perf_counter() if arrival_s is None else arrival_s
        requests = self._parts.live.admit(
            request_id,
            prompt,
            params or SamplingParams(),
            priority=priority,
            arrival_s=arrival,
            forced_ids=forced_ids,
            logits_sink=logits_sink,
            wants_all_logits=wants_all_logits,
            logits_from=logits_from,
            stream=stream,
            pool=self.pool,
        )
        try:
            self.stats.router_s += self._parts.decider.admit(requests)
        except Exception:
            self._parts.live.forget(request_id)
            raise
        for request in requests:
            self.scheduler.add(request)

    def abort(self, request_id: str, *, silent: bool = False) -> None:
        """Ends a request with finish reason ``abort`` and frees its slots; an unknown id is ignored.

        The next step hands back its last output, unless ``silent``.
        """
        for request in self._parts.live.abort(request_id):
            self.scheduler.finish(request)
        if silent:
            self._parts.live.forget(request_id)
        self._give_memory_back()

    def has_unfinished(self) -> bool:
        """Whether ``step`` still has something to do or to hand back."""
        return self.scheduler.has_unfinished or self._parts.live.has_changed

    def drop_prefixes(self) -> None:
        """Empties the prefix cache and what the router keeps of its answers; requests that run keep what they use."""
        self.router.forget()
        if self._parts.sharing is not None:
            self._parts.sharing.cache.clear()
            self._give_memory_back()

    @property
    def decisions(self) -> DecisionRecorder | None:
        """The decision log, when asked for."""
        return self._parts.recorder

    @property
    def attention_received(self) -> Received:
        """Of the last step: per request id and layer group, how much attention each of its tokens received.

        Float32, one value per token: summed over the queries that ``EngineOptions.observe`` asks for, mean over heads
        and over the layers that report (one decode token gives 1 in all). Empty where nothing was asked for; a
        preempted request's tokens report again.
        """
        observer = self._parts.observer
        return {} if observer is None else observer.received()

    def _refuse_when_full(self, request_id: str) -> None:
        if self.scheduler.is_full:
            self.stats.num_rejected += 1
            raise QueueFullError(
                f"request {request_id!r} is refused: {len(self.scheduler.waiting)} requests wait, and max_num_waiting "
                f"is {self.scheduler.limits.max_num_waiting}: add it again after some steps, or raise "
                "scheduler.max_num_waiting (in Python: EngineOptions.max_num_waiting)"
            )

    def _record(self, step: PackedStep, decision: StepDecision) -> None:
        """Before the forward: a step that is tried again finds its tokens decided."""
        self.stats.count_decisions(decision)
        if self._parts.recorder is not None:
            self._parts.recorder.record(step, decision)

    def _account_waiting(self, step: PackedStep, work: Work, now_s: float) -> None:
        step.tokens.run(step.row_C[work.running], now_s)
        step.tokens.wait(step.row_C[work.deferred], now_s)

    def _advance(self, step: PackedStep, work: Work) -> None:
        ran, stop_C = work.running, step.start_C + step.length_C
        self.stats.reused_tokens += step.tokens.advance(step.row_C[ran], stop_C[ran])
        step.tokens.state_R["waited_steps"][step.row_C[work.deferred]] += 1

    def _retire(self, step: PackedStep, work: Work, ended: Sequence[Request]) -> None:
        """Evicts what is due, keeps prefixes for others, and frees what ended requests hold."""
        parts = self._parts
        try:
            if parts.retainer is not None:
                self.stats.count_retention(*parts.retainer.retire())
            if parts.sharing is not None:
                state_C = step.tokens.state_R[step.row_C[work.running]]
                may_offer_C = state_C["num_shared"] < state_C["shares_to"]
                for c in work.running[may_offer_C].tolist():
                    parts.sharing.offer(step.requests[c])
        finally:
            for request in ended:
                parts.scheduler.finish(request)

    def _note_live_bytes(self) -> None:
        """With the step's new slots and before anything is evicted: the most that it holds."""
        arena, stats, seen = self._parts.arena, self.stats, self.pool.seen
        live_bytes = self.pool.used_bytes(self.kv_bytes_per_slot, self.int8_bytes_per_slot)
        converted = self.pool.converted
        num_int8 = self.pool.used if arena.is_all_int8 else converted
        stats.peak_live_bytes = max(stats.peak_live_bytes, live_bytes)
        stats.peak_full_bytes = max(stats.peak_full_bytes, seen * arena.bytes_per_slot)
        stats.peak_kept_bytes = max(stats.peak_kept_bytes, seen * self.kv_bytes_per_slot)
        stats.peak_int8_tokens = max(stats.peak_int8_tokens, num_int8)
        stats.peak_converted = max(stats.peak_converted, converted)

    def _give_memory_back(self) -> None:
        num_bytes = self.pool.touched_bytes(self.kv_bytes_per_slot, self.int8_bytes_per_slot)
        self.stats.peak_allocated_bytes = max(self.stats.peak_allocated_bytes, num_bytes)
        compactor, is_idle = self._parts.compactor, not self.scheduler.has_unfinished
        self.stats.num_compactions += compactor.compact_if_due(is_idle=is_idle)

    def _tell_router(
        self, route_tokens: dict[str, int], step_s: float, outputs: list[RequestOutput]
    ) -> None:
        """What the step did; where the router raises, the step's outputs come with those of the next one."""
        feedback = StepFeedback(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            free_slot_frac=self.pool.available / self.pool.num_slots,
            route_tokens=route_tokens,
            step_ms=1e3 * step_s,
        )
        try:
            self.router.observe(feedback)
        except Exception:
            self._parts.live.hand_back(outputs)
            raise
