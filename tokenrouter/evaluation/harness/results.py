"""What systems answered, beside all_high: rows of accuracy.csv, the table, and metrics.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from tokenrouter.evaluation.generations import Generation, compare_generations
from tokenrouter.evaluation.paired import compare_answers, stderr_pp
from tokenrouter.evaluation.tables import markdown, number, p_value, with_error

HIGH = "all_high"
Answer = TypeVar("Answer")
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """One system's answers to one task.

    Attributes:
        num_questions: that were put.
        metric: the harness's name of the accuracy; None: the task has none.
        acc_frac: share of right answers.
        correct: by question, 1.0 where the answer is right, in the task's order.
        texts: by question, what was generated; empty where choices were scored.
        metrics: every number that the harness reports of it, by its name and filter.
    """

    num_questions: int
    metric: str | None = None
    acc_frac: float | None = None
    correct: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemTasks:
    """One system's results by task, and the share of the work (tokens times layers) on the executor ``high``."""

    results: Mapping[str, TaskResult]
    high_frac: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRow:
    """A line of accuracy.csv: one system's answers to one task; docs/metrics.md defines the columns.

    What is None was not measured: the test of all_high against itself, a standard error of one question.
    """

    task: str
    system: str
    n: int
    metric: str
    acc_frac: float
    acc_stderr_pp: float | None
    acc_drop_pp: float | None = None
    acc_drop_stderr_pp: float | None = None
    only_high_right: int | None = None
    only_own_right: int | None = None
    mcnemar_p: float | None = None
    verdict: str | None = None
    same_output_frac: float | None = None
    common_tokens_mean: float | None = None
    length_ratio: float | None = None
    chrf: float | None = None


def mix_tasks(
    high: SystemTasks, low: SystemTasks, goes_high: Mapping[str, Sequence[bool]], high_frac: float
) -> SystemTasks:
    """Answers of a system that runs whole questions high or low, from those of all_high and all_low.

    Tasks without an accuracy are left out: their numbers are no means over questions.

    Args:
        high: of all_high.
        low: of all_low, to the same questions.
        goes_high: by task, per question in the task's order.
        high_frac: share of the tokens that are high so.
    """
    results = {}
    for task, one in high.results.items():
        if one.acc_frac is not None:
            other, sides = low.results[task], goes_high[task]
            correct = _either(sides, one.correct, other.correct)
            results[task] = TaskResult(
                num_questions=one.num_questions,
                metric=one.metric,
                acc_frac=sum(correct) / len(correct),
                correct=correct,
                texts=_either(sides, one.texts, other.texts) if one.texts else (),
            )
    return SystemTasks(results=results, high_frac=high_frac)


def _either(
    goes_high: Sequence[bool], high: Sequence[Answer], low: Sequence[Answer]
) -> tuple[Answer, ...]:
    """Per question the answer of the side that it goes to."""
    return tuple(a if is_high else b for is_high, a, b in zip(goes_high, high, low, strict=True))


def task_rows(measured: Mapping[str, SystemTasks], encode: Encode) -> list[TaskRow]:
    """By task and system, those that have an accuracy; every system but all_high is compared with it.

    Args:
        measured: by system, all_high among them.
        encode: text to tokens, in which generated texts are compared.
    """
    return [
        _row(task, name, system.results[task], None if name == HIGH else high, encode)
        for task, high in measured[HIGH].results.items()
        for name, system in measured.items()
        if task in system.results and system.results[task].acc_frac is not None
    ]


def _row(
    task: str, system: str, result: TaskResult, high: TaskResult | None, encode: Encode
) -> TaskRow:
    assert result.acc_frac is not None and result.metric is not None
    row: dict[str, Any] = {
        "task": task,
        "system": system,
        "n": result.num_questions,
        "metric": result.metric,
        "acc_frac": result.acc_frac,
        "acc_stderr_pp": stderr_pp(result.correct),
    }
    if high is not None:
        paired = compare_answers(result.correct, high.correct)
        row |= {
            "acc_drop_pp": paired.drop_pp,
            "acc_drop_stderr_pp": paired.drop_stderr_pp,
            "only_high_right": paired.only_other_right,
            "only_own_right": paired.only_own_right,
            "mcnemar_p": paired.mcnemar_p,
            "verdict": paired.verdict,
        }
        if result.texts:
            sides = ([Generation(encode(t), t) for t in one.texts] for one in (result, high))
            match = asdict(compare_generations(*sides))
            row |= {name: value for name, value in match.items() if name != "num_texts"}
    return TaskRow(**row)


def accuracy_by_system(rows: Sequence[TaskRow]) -> dict[str, dict[str, float]]:
    """By system, ``tasks.<task>.acc_frac`` and its standard error where one is known, of rows of ``task_rows``."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        own = found.setdefault(row.system, {})
        own[f"tasks.{row.task}.acc_frac"] = row.acc_frac
        if row.acc_stderr_pp is not None:
            own[f"tasks.{row.task}.acc_stderr_frac"] = row.acc_stderr_pp / 100
    return found


def accuracy_table(rows: Sequence[TaskRow], chosen: str) -> str:
    """The rows for reading, the run's in bold; empty without rows."""
    titles = (
        "task|system|n|acc %|drop pp|only all_high right|only it right|McNemar p|against all_high"
    )
    texts = "same text %|same tokens|chrF|length"
    return markdown(
        [*titles.split("|"), *texts.split("|")],
        [
            (
                row.task,
                f"**{row.system}**" if row.system == chosen else row.system,
                f"{row.n:,}",
                with_error(100.0 * row.acc_frac, row.acc_stderr_pp),
                with_error(row.acc_drop_pp, row.acc_drop_stderr_pp, sign=True),
                number(row.only_high_right, 0),
                number(row.only_own_right, 0),
                p_value(row.mcnemar_p),
                row.verdict or "",
                number(row.same_output_frac, 0, 1e2),
                number(row.common_tokens_mean, 1),
                number(row.chrf, 1),
                number(row.length_ratio, 2),
            )
            for row in rows
        ],
        num_left=2,
    )


def tasks_section(
    rows: Sequence[TaskRow], chosen: str, results: Mapping[str, TaskResult]
) -> dict[str, dict[str, Any]]:
    """By task, for metrics.json: questions, and where there is an accuracy how it stands beside all_high's.

    Args:
        rows: of ``task_rows``.
        chosen: the run's name among them.
        results: the run's, by task.
    """
    section: dict[str, dict[str, Any]] = {
        task: {"n": result.num_questions} for task, result in results.items()
    }
    left_out = ("task", "system", "metric", "verdict")
    for row in rows:
        if row.system == chosen:
            values = asdict(row) | ({"acc_drop_pp": 0.0} if chosen == HIGH else {})
            section[row.task] |= {
                key: value
                for key, value in values.items()
                if key not in left_out and value is not None
            }
    return section
