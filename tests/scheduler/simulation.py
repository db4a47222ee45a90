"""Drives a scheduling policy without a model: what it plans is done, or put off, and checked."""

from collections.abc import Callable

from tokenrouter.features import TokenHistory
from tokenrouter.kvcache import KVPool
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.scheduler import Request, Scheduler, StepPlan


def request(name: str, prompt_len: int, num_output: int) -> Request:
    """A request that generates ``num_output`` tokens, whatever they are."""
    return Request(
        request_id=name,
        params=SamplingParams(max_tokens=num_output),
        history=TokenHistory([5] * prompt_len, prompt_len + num_output),
        prompt_len=prompt_len,
        max_total=prompt_len + num_output,
        arrival_s=0.0,
    )


class Simulation:
    """A scheduler, and what an engine would do with its plans."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pool: KVPool = scheduler.pool
        self.requests: list[Request] = []
        self.num_preemptions = 0

    def add(self, prompt_len: int, num_output: int) -> Request:
        """Queues a request; its name is its number."""
        made = request(str(len(self.requests)), prompt_len, num_output)
        self.requests.append(made)
        self.scheduler.add(made)
        return made

    def abort(self, victim: Request) -> None:
        """As the engine aborts."""
        victim.finished = True
        self.scheduler.finish(victim)
        self.pool.check_integrity()

    def step(self, put_off: Callable[[Request], bool] = lambda _: False) -> StepPlan:
        """Plans, checks the plan and runs it, but for decode tokens that ``put_off`` keeps for later."""
        plan = self.scheduler.schedule()
        self.check(plan)
        self.num_preemptions += len(plan.preempted)
        for index, chunk in enumerate(plan.chunks):
            one = chunk.request
            if index and one.decoding and put_off(one):
                one.waited_steps += 1
                continue  # an engine runs at least one chunk of a plan
            one.computed_up_to(chunk.start + chunk.length)
            if one.num_computed == one.num_tokens:
                one.history.append(5)
                if one.num_tokens == one.max_total:
                    one.finished = True
                    self.scheduler.finish(one)
            self.pool.check_integrity()
        return plan

    def run(self, put_off: Callable[[Request], bool] = lambda _: False) -> int:
        """Steps until nothing is left; returns the number of steps."""
        steps, empty = 0, 0
        while self.scheduler.has_unfinished:
            plan = self.step(put_off)
            steps += 1
            empty = 0 if plan.chunks else empty + 1
            assert empty < 3, "the policy plans nothing though requests wait"
            assert steps < 5000, "requests never finish"
        assert self.pool.free == self.pool.num_slots, "slots leaked"
        assert self.pool.num_free_rows == len(self.pool.tables[0].num_kept_R), "rows leaked"
        return steps

    def check(self, plan: StepPlan) -> None:
        """What a plan promises."""
        self.pool.check_integrity()
        planned = [chunk.request for chunk in plan.chunks]
        assert len(set(planned)) == len(planned), "two chunks of one request"
        assert sum(c.length for c in plan.chunks) <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        for chunk in plan.chunks:
            one = chunk.request
            assert one in self.scheduler.running and not one.finished
            assert chunk.length > 0 and chunk.start == one.num_computed
            assert chunk.start + chunk.length <= one.num_tokens
            assert self.pool.tables[0].num_kept_R[one.row] >= chunk.start + chunk.length, "no slots"
        for one in plan.preempted:
            assert one not in planned and one not in self.scheduler.running
            assert (
                one in self.scheduler.waiting
                and one.row == -1
                and one.num_computed == one.waited_steps == 0
            )
