"""Guards prefix sharing under anything at once: random options, prompts that begin alike, faults, aborts, lost entries.

Every request must give the logits, decisions and evictions of a run alone that takes its recorded decisions. Free slots
are filled with NaN after every step, so that whoever reads one shows it.

N tokens of a request, T tokens of a step, V vocabulary.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.testing import assert_close

from tests.engine.prefix_tools import BASE, every_policy
from tests.engine.tools import prompts, tiny, twin
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.features.base import Dependency
from tokenrouter.kvcache.retention import RetentionOptions, RetentionPolicy
from tokenrouter.routers import RandomRouter, RequestLevelRouter, Router
from tokenrouter.scheduler import POLICIES, Request
from tokenrouter.types import RouteInput, RoutingDecision

NUM_REQUESTS = 10
LONGEST = 80  # tokens of a prompt
MOST_FORCED = 20


class Replay(Router):
    """Answers what another run recorded, by position."""

    name = "replay"

    def __init__(self) -> None:
        self.recorded_N: NDArray[np.int16] = np.zeros(0, np.int16)

    @property
    def options(self) -> dict[str, object]:
        return {}

    @property
    def depends_on(self) -> frozenset[Dependency]:
        return frozenset({"tokens"})

    def route(self, inputs: RouteInput) -> RoutingDecision:
        route_T = torch.from_numpy(self.recorded_N)[inputs.positions_T].long()
        return RoutingDecision(
            route_T=route_T,
            score_T=torch.zeros(len(route_T)),
            reason_T=torch.zeros_like(route_T),
            reasons=("recorded",),
        )


@dataclass
class Asked:
    """A request of an attack, and the logits that it was handed, by position."""

    request: Request
    logits_V: dict[int, Tensor] = field(default_factory=dict)

    def take(self, start: int, logits_RV: Tensor) -> None:
        """The request's sink: a position may come once."""
        for position, row_V in enumerate(logits_RV, start):
            assert position not in self.logits_V, "logits of a position twice"
            self.logits_V[position] = row_V.clone()


class Attack:
    """An engine with random options to which random things happen.

    Args:
        seed: of everything that is random.
        policy: of retention; None: no retention.
    """

    def __init__(self, seed: int, policy: RetentionPolicy | None) -> None:
        self.draw = random.Random(seed)
        self.retention = self._retention(policy) if policy is not None else None
        self.options = self._options()
        self.router: Router = RandomRouter(0.5)
        if self.draw.random() < 0.3:
            self.router = RequestLevelRouter(RandomRouter(0.5), high_frac=0.5)
        self.llm = LLM(tiny(), router=self.router, executors=twin(), options=self.options)
        self.engine = self.llm.engine
        host = self.engine.scheduler.host
        if host is not None:
            host._recompute_s = float("inf")
        self.asked: dict[str, Asked] = {}
        self.num_faults = 0
        self._run = self.engine._parts.runner.run
        self.engine._parts.runner.run = self._faulty_run  # type: ignore[method-assign]

    def to_the_end(self) -> None:
        """Adds all requests and steps until none is left; everything is given back."""
        steps, left = 0, NUM_REQUESTS
        while left or self.engine.has_unfinished():
            while left and (self.draw.random() < 0.3 or not self.engine.has_unfinished()):
                left -= 1
                self._add(str(left))
            self._disturb()
            try:
                self.engine.step()
            except RuntimeError as error:
                assert "injected" in str(error)
                self.num_faults += 1
            self._check()
            steps += 1
            assert steps < 5000, "the engine does not finish"
        assert self.engine.pool.available == self.engine.pool.num_slots, "slots leaked"
        self.engine.drop_prefixes()
        assert self.engine.pool.free == self.engine.pool.num_slots, "prefixes leaked"

    def _retention(self, policy: RetentionPolicy) -> RetentionOptions:
        interval = self.draw.choice([2, 5, 8, 16])
        return RetentionOptions(
            policy=policy,
            interval=interval,
            window=self.draw.randint(1, interval),
            layers=2,
            sinks=self.draw.choice([0, 2]),
            recent=self.draw.choice([1, 3, 8]),
        )

    def _options(self) -> EngineOptions:
        draw, seats = self.draw, self.draw.randint(1, 6)
        return EngineOptions(
            max_num_seqs=seats,
            max_num_batched_tokens=max(seats, draw.choice([3, 8, 16, 64])),
            num_kv_slots=draw.choice([LONGEST + MOST_FORCED, 130, 400]),
            scheduler=draw.choice(sorted(POLICIES)),
            phase_order=draw.choice(["mixed", "prefill_first", "decode_first"]),
            max_phase_wait_steps=draw.choice([0, 1, 8]),
            max_overtaken=draw.choice([0, 1, 64]),
            dispatch=draw.choice(["mixed", "queued"]),
            min_batch=draw.choice([1, 4]),
            max_wait_steps=draw.choice([0, 4]),
            num_host_slots=draw.choice([0, 30, 400]),
            prefix_sharing=True,
            prefix_block=draw.choice([1, 3, 8, 16, 33]),
            retention=self.retention,
        )

    def _prompt(self) -> list[int]:
        """A beginning that others have, often as long as a block, sometimes with an end of its own."""
        block = self.options.block_tokens
        stem = self.draw.choice([BASE, prompts(seed=7)[2]])
        length = self.draw.choice(
            [1, block, block + 1, 2 * block, 64, *self.draw.sample(range(2, 60), 4)]
        )
        own = self.draw.choice([0, 0, self.draw.randint(1, 15)])
        ids = [*stem[:length], *(self.draw.randint(3, 383) for _ in range(own))]
        return ids[:LONGEST]

    def _add(self, name: str) -> None:
        forced = [self.draw.randint(3, 383) for _ in range(self.draw.randint(0, MOST_FORCED))]
        before = set(self.engine.scheduler.waiting)
        asked: list[Asked] = []

        def sink(start: int, logits_RV: Tensor) -> None:
            asked[0].take(start, logits_RV)

        self.engine.add_request(
            name,
            self._prompt(),
            SamplingParams(),
            forced_ids=forced,
            logits_sink=sink,
            wants_all_logits=self.draw.random() < 0.15,
            stream=self.draw.random() < 0.5,
        )
        (request,) = set(self.engine.scheduler.waiting) - before
        asked.append(Asked(request))
        self.asked[name] = asked[0]

    def _disturb(self) -> None:
        """What may happen between two steps."""
        if self.asked and self.draw.random() < 0.01:
            name = self.draw.choice(sorted(self.asked))
            if not self.asked[name].request.finished:
                self.engine.abort(name)
                del self.asked[name]
        if self.draw.random() < 0.02:
            self.engine.drop_prefixes()
        if self.draw.random() < 0.05:
            self.engine._parts.compactor.compact()

    def _faulty_run(self, *args: Any) -> Any:
        """A forward that sometimes raises, before or after it has written."""
        is_faulty, wrote = self.draw.random() < 0.04, self.draw.random() < 0.5
        result = self._run(*args) if wrote or not is_faulty else None
        if is_faulty and not any(one.wants_all_logits for one in args[0].requests):
            raise RuntimeError("injected")
        return result if result is not None else self._run(*args)

    def _check(self) -> None:
        """Every count, and whoever reads a free slot from now on reads NaN."""
        pool, arena = self.engine.pool, self.engine._parts.arena
        pool.check_integrity()
        assert pool.free + pool.live + pool.cached == pool.num_slots
        free = np.flatnonzero(pool.tables[0].slots._users_S[: pool.num_slots] == 0)
        arena.kv_LSPD[:, torch.from_numpy(free)] = float("nan")


def compare_alone(attack: Attack) -> None:
    """Each request against an engine that has nothing but it, and shares nothing."""
    replay = Replay()
    lonely = LLM(
        tiny(),
        router=replay,
        executors=twin(),
        options=EngineOptions(
            max_num_seqs=1, max_num_batched_tokens=64, retention=attack.retention
        ),
    )
    for name, asked in attack.asked.items():
        request = asked.request
        replay.recorded_N = request.requested_N
        ids = request.history.ids.tolist()
        expected = run_alone(lonely, ids[: request.prompt_len], ids[request.prompt_len :])
        first = 0 if request.wants_all_logits else request.prompt_len - 1
        assert sorted(asked.logits_V) == list(range(first, len(ids))), name
        for position in set(asked.logits_V) & set(expected.logits_V):
            assert_close(
                asked.logits_V[position], expected.logits_V[position], rtol=1e-4, atol=2e-4
            )
        if attack.retention is not None:
            ours_GN, theirs_GN = request.evicted_at_GN, expected.request.evicted_at_GN
            assert ours_GN is not None and theirs_GN is not None
            assert (ours_GN == theirs_GN).all(), name


def run_alone(llm: LLM, prompt: Sequence[int], forced: Sequence[int]) -> Asked:
    """A forced request from beginning to end."""
    asked: list[Asked] = []
    llm.engine.add_request(
        "alone",
        prompt,
        SamplingParams(),
        forced_ids=forced,
        logits_sink=lambda start, logits_RV: asked[0].take(start, logits_RV),
    )
    asked.append(Asked(llm.engine.scheduler.waiting[0]))
    while llm.engine.has_unfinished():
        llm.engine.step()
    return asked[0]


@every_policy
def test_nothing_at_once_changes_what_a_request_gives(policy: RetentionPolicy | None) -> None:
    """A slot freed twice, too early or never; a prefix found by another key, kept half evicted, after a fault, without
    its statistics or with decisions of others; old content in a slot that is used again."""
    num_shared = num_faults = 0
    for seed in range(4):
        attack = Attack(seed, policy)
        attack.to_the_end()
        compare_alone(attack)
        num_shared += attack.engine.stats.shared_tokens
        num_faults += attack.num_faults
    assert num_shared > 50 and num_faults > 0
