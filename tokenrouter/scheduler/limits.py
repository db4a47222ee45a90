"""How much a step may hold, and which phase goes first. Checked here, by name, for the engine's options, too."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from tokenrouter.checks import check_count

PhaseOrder = Literal["mixed", "prefill_first", "decode_first"]
_NO_LABELS: Mapping[str, str] = MappingProxyType({})


def check_least(
    options: Any,
    lowest: Mapping[str, int],
    *,
    optional: Collection[str] = (),
    labels: Mapping[str, str] = _NO_LABELS,
) -> None:
    """Refuse options that are no counts.

    Args:
        options: an object with the options as attributes.
        lowest: by option, the least that is allowed.
        optional: those that may be None, which stands for no value.
        labels: what messages call an option, where that is not its name.

    Raises:
        ValueError: the first option that is no integer, or out of range.
    """
    for name, least in lowest.items():
        value = getattr(options, name)
        if value is not None or name not in optional:
            check_count(labels.get(name, name), value, least)


def check_choice(
    options: Any, name: str, choices: tuple[str, ...], *, labels: Mapping[str, str] = _NO_LABELS
) -> None:
    """Raise ValueError for an option that is none of its choices; ``labels`` as in ``check_least``."""
    value = getattr(options, name)
    if value not in choices:
        raise ValueError(
            f"unknown {labels.get(name, name)} {value!r}; choose one of: {', '.join(choices)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """What a plan may hold, and how long anything waits at most.

    A step's prompt tokens are chunks of prompts and of recomputes after a preemption; its decode tokens are the last
    known tokens of requests whose other tokens all have their KV, one each.

    Phase orders, named in Sarathi-Serve's comparison (Agrawal et al. 2024, arXiv:2403.02310):

    - ``mixed``: decode tokens, then prompt tokens with what is left of the step (Sarathi-Serve's stall-free batches).
    - ``prefill_first``: a step that can run prompt tokens runs only those (vLLM's scheduler before chunked prefill,
      Kwon et al. 2023). A short time to first token, and gaps between the tokens of requests that decode.
    - ``decode_first``: while any request decodes, a step runs decode tokens only, and prompts come together every so
      many steps (as with SGLang's option num_continuous_decode_steps). Even gaps between tokens, and a longer time to
      the first one. It does not wait until nothing decodes, as FasterTransformer does: seats would stay empty.

    In both, ``max_phase_wait_steps`` bounds the wait: when the phase that stands back has had something to run for so
    many steps, the next step is a mixed one. A decode token that dispatch then puts off waits for another such step.

    Attributes:
        max_num_seqs: requests that run at once, at most.
        max_num_batched_tokens: tokens of a plan, at most; at least ``max_num_seqs``.
        max_prefill_tokens: prompt tokens of a plan, at most; None: what the plan can hold.
        max_decode_tokens: decode tokens of a plan, at most; None: all. Those that had no place go first next time.
        phase_order: see above.
        max_phase_wait_steps: the most steps in a row in which a phase stands back; 0 is ``mixed``.
        max_overtaken: how many times requests that came later may pass a request before it goes first: one is admitted
            while it waits, or some run on while it is preempted. 0: first come, first served.
        max_num_waiting: a queue that holds so many is full; None: it never is.

    Raises:
        ValueError: a value out of range, or two that contradict each other.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int | None = None
    max_decode_tokens: int | None = None
    phase_order: PhaseOrder = "mixed"
    max_phase_wait_steps: int = 8
    max_overtaken: int = 64
    max_num_waiting: int | None = None

    def __post_init__(self) -> None:
        check_choice(self, "phase_order", get_args(PhaseOrder))
        check_least(
            self,
            {
                "max_num_seqs": 1,
                "max_num_batched_tokens": 1,
                "max_prefill_tokens": 1,
                "max_decode_tokens": 1,
                "max_phase_wait_steps": 0,
                "max_overtaken": 0,
                "max_num_waiting": 1,
            },
            optional=("max_prefill_tokens", "max_decode_tokens", "max_num_waiting"),
        )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs "
                f"{self.max_num_seqs}: every running request decodes one token per step"
            )
        for name, most in (
            ("max_prefill_tokens", "max_num_batched_tokens"),
            ("max_decode_tokens", "max_num_seqs"),
        ):
            value, bound = getattr(self, name), getattr(self, most)
            if value is not None and value > bound:
                raise ValueError(
                    f"{name} {value} must be at most {most} {bound}, above which it has no effect: lower it, raise "
                    f"{most}, or leave it null"
                )
