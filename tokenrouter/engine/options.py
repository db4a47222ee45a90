"""The options of an engine, checked before a model is loaded."""

from dataclasses import dataclass
from typing import Literal, get_args

from tokenrouter.engine.dispatcher import DispatchMode
from tokenrouter.engine.observation import ObserveOptions

SchedulerName = Literal["fcfs", "static_batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an engine schedules, dispatches and stores.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step, decode and prefill chunks together; also the largest chunk.
        num_kv_slots: tokens that the KV pool holds; None: enough for every running request at full length, up to 1 GiB,
            and at least one request at full length.
        scheduler: fcfs (continuous batching), or static_batch (whole requests in, whole requests out).
        static_batch_size: requests of a static batch; None: 8, or ``max_num_seqs`` where that is lower.
        dispatch: mixed, queued or auto; see the dispatcher.
        min_batch: queued and auto: so many decode tokens run without waiting for more.
        max_wait_steps: queued and auto: the most steps that a decode token waits for company.
        seed: of the random stream shared by requests without a seed of their own.
        log_decisions: keep every decision for decisions.parquet.
        observe: attention statistics, which ``LLMEngine.attention_received`` hands out; None: none are taken.

    Raises:
        ValueError: an option outside its range, or two that contradict each other. All that can be known without the
            model is checked here, so that a mistake shows before it is loaded.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    num_kv_slots: int | None = None
    scheduler: SchedulerName = "fcfs"
    static_batch_size: int | None = None
    dispatch: DispatchMode = "auto"
    min_batch: int = 4
    max_wait_steps: int = 4
    seed: int = 0
    log_decisions: bool = False
    observe: ObserveOptions | None = None

    def __post_init__(self) -> None:
        for name, choices in (("scheduler", SchedulerName), ("dispatch", DispatchMode)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise ValueError(
                    f"unknown {name} {value!r}; choose one of: {', '.join(get_args(choices))}"
                )
        lowest = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "num_kv_slots": 1,
            "static_batch_size": 1,
            "min_batch": 1,
            "max_wait_steps": 0,
        }
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs "
                f"{self.max_num_seqs}: every running request decodes one token per step"
            )
        if self.static_batch_size is not None and self.static_batch_size > self.max_num_seqs:
            raise ValueError(
                f"static_batch_size {self.static_batch_size} must be at most max_num_seqs {self.max_num_seqs}, the "
                "requests that run at once: lower it, raise max_num_seqs, or leave it null to follow max_num_seqs"
            )
