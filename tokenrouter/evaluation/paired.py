"""Two systems on the same questions: what one lost against the other, and whether that is more than luck."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from tokenrouter.evaluation.router_scores import Verdict

SIGNIFICANCE = 0.05
"""A difference that luck makes at least this often is a tie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """One system's answers beside another's.

    Attributes:
        num_questions: that both answered.
        drop_pp: share of right answers, the other's minus its own, in percentage points: positive is worse.
        drop_stderr_pp: standard error of the mean of the differences question by question; None with one question.
        only_other_right: questions that the other one answers better.
        only_own_right: questions that it answers better itself.
        mcnemar_p: probability that luck parts the questions on which they differ at least so unevenly.
    """

    num_questions: int
    drop_pp: float
    drop_stderr_pp: float | None
    only_other_right: int
    only_own_right: int
    mcnemar_p: float

    @property
    def verdict(self) -> Verdict:
        """A tie where luck alone may have made the difference (``SIGNIFICANCE``)."""
        if self.mcnemar_p >= SIGNIFICANCE:
            return "tie"
        return "worse" if self.only_other_right > self.only_own_right else "better"


def compare_answers(own: Sequence[float], other: Sequence[float]) -> Paired:
    """Pair answers question by question.

    Args:
        own: per question 1 where the answer is right, 0 where it is wrong, or a score between.
        other: the same of the system that it is compared with.

    Raises:
        ValueError: no question, or not as many of both.
    """
    if len(own) != len(other) or not own:
        raise ValueError(
            f"{len(own)} and {len(other)} answers cannot be paired: give both systems' for the same questions"
        )
    lost = [theirs - mine for mine, theirs in zip(own, other, strict=True)]
    only_other, only_own = sum(d > 0 for d in lost), sum(d < 0 for d in lost)
    return Paired(
        num_questions=len(lost),
        drop_pp=100.0 * fmean(lost),
        drop_stderr_pp=stderr_pp(lost),
        only_other_right=only_other,
        only_own_right=only_own,
        mcnemar_p=mcnemar(only_other, only_own),
    )


def mcnemar(only_other: int, only_own: int) -> float:
    """McNemar's test (1947), exact and two-sided: the p-value of so uneven a split of the questions that differ.

    Of scores between 0 and 1 it is the sign test of the differences.

    Args:
        only_other: questions that the other system alone answers right.
        only_own: questions that the system alone answers right.
    """
    count = only_other + only_own
    term = tail = 1
    for k in range(min(only_other, only_own)):
        term = term * (count - k) // (k + 1)  # binomial of count and k + 1
        tail += term
    return min(1.0, 2 * tail / (1 << count))


def stderr_pp(values: Sequence[float]) -> float | None:
    """Standard error of the mean of ``values``, in percentage points; None of fewer than two."""
    return 100.0 * stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
