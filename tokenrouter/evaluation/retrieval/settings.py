"""What is asked, how far back, and how often."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from tokenrouter.checks import check_count, check_number
from tokenrouter.evaluation.retrieval.items import TASKS

NAME = "evaluation.retrieval"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalSettings:
    """Target of conf/evaluation/retrieval.yaml: every task at every length and depth.

    Attributes:
        tasks: any of ``TASKS``.
        lengths: of the prompts, in tokens, question included.
        depths: where in the context the answer stands, 0 (its beginning) to 1 (before the question).
        num_examples: of each task, length and depth.

    Raises:
        ValueError: a task that does not exist, a length or depth that is none, one of them twice, or no example.
    """

    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float]
    num_examples: int

    def __post_init__(self) -> None:
        _check_list("tasks", self.tasks, "names", "[passkey,key_value]")
        for task in self.tasks:
            _check_task(task)
        _check_list("lengths", self.lengths, "numbers of tokens", "[256,512]")
        for length in self.lengths:
            check_count(f"{NAME}.lengths", length, 1)
        _check_list("depths", self.depths, "shares", "[0,0.5,1]")
        for depth in self.depths:
            check_number(
                f"{NAME}.depths",
                depth,
                lambda x: 0 <= x <= 1,
                "of 0 to 1: 0 is the context's beginning, 1 its end",
            )
        check_count(f"{NAME}.num_examples", self.num_examples, 1)

    def check_length(self, max_model_len: int) -> None:
        """Raises ValueError where a prompt is as long as the model, or longer: its answer needs room, too."""
        if (longest := max(self.lengths)) >= max_model_len:
            raise ValueError(
                f"{NAME}.lengths holds {longest}, and the model's length is {max_model_len} tokens, answer included: "
                "choose shorter ones, or raise model.max_model_len where it is set"
            )


def _check_task(task: object) -> None:
    if task in TASKS:
        return
    close = difflib.get_close_matches(str(task), TASKS, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(
        f"{NAME}.tasks: there is no task {task!r}; choose of {', '.join(TASKS)}{meant}"
    )


def _check_list(name: str, values: object, what: str, example: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(
            f"{NAME}.{name} must be a list of {what}, such as {example}, got {values!r}"
        )
    if len({repr(value) for value in values}) < len(values):
        raise ValueError(f"{NAME}.{name}={list(values)} names one twice")
