"""What systems answered, beside all_high: rows of retrieval.csv, the table, and metrics.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from tokenrouter.evaluation.paired import compare_answers, stderr_pp
from tokenrouter.evaluation.retrieval.measure import Answers, Probe
from tokenrouter.evaluation.tables import markdown, number, p_value, with_error

HIGH = "all_high"
_PAIRED = {
    "drop_pp": "exact_drop_pp",
    "drop_stderr_pp": "exact_drop_stderr_pp",
    "only_other_right": "only_high_right",
    "only_own_right": "only_own_right",
    "mcnemar_p": "mcnemar_p",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalRow:
    """A line of retrieval.csv; docs/metrics.md defines the columns.

    ``length_tokens`` and ``depth_frac`` are None where all are taken together. What is None else was not measured: the
    test of all_high against itself, a standard error of one example.
    """

    task: str
    length_tokens: int | None
    depth_frac: float | None
    system: str
    n: int
    exact_frac: float
    exact_stderr_pp: float | None
    exact_drop_pp: float | None = None
    exact_drop_stderr_pp: float | None = None
    only_high_right: int | None = None
    only_own_right: int | None = None
    mcnemar_p: float | None = None
    verdict: str | None = None


def mix_answers(
    high: Answers, low: Answers, goes_high: Sequence[bool], high_frac: float
) -> Answers:
    """Answers of a system that runs whole prompts high or low, from those of all_high and all_low.

    Args:
        high: of all_high.
        low: of all_low, to the same probes.
        goes_high: per probe.
        high_frac: share of the tokens that are high so.
    """
    sides = zip(goes_high, high.correct, low.correct, strict=True)
    correct = tuple(a if is_high else b for is_high, a, b in sides)
    return Answers(correct=correct, high_frac=high_frac)


def retrieval_rows(probes: Sequence[Probe], measured: Mapping[str, Answers]) -> list[RetrievalRow]:
    """By task, all of it, by length, by depth, and by both; every system, compared with all_high.

    Args:
        probes: in the order of the answers.
        measured: by system, all_high among them.
    """
    groups: dict[tuple[str, int | None, float | None], list[int]] = {}
    for index, probe in enumerate(probes):
        for length, depth in product((None, probe.length), (None, probe.depth_frac)):
            groups.setdefault((probe.task, length, depth), []).append(index)
    return [
        _row(key, name, members, answers, None if name == HIGH else measured[HIGH])
        for key, members in groups.items()
        for name, answers in measured.items()
    ]


def _row(
    key: tuple[str, int | None, float | None],
    system: str,
    members: Sequence[int],
    answers: Answers,
    high: Answers | None,
) -> RetrievalRow:
    own = [answers.correct[index] for index in members]
    values: dict[str, Any] = {}
    if high is not None:
        paired = compare_answers(own, [high.correct[index] for index in members])
        values = {column: getattr(paired, name) for name, column in _PAIRED.items()}
        values["verdict"] = paired.verdict
    return RetrievalRow(
        task=key[0],
        length_tokens=key[1],
        depth_frac=key[2],
        system=system,
        n=len(own),
        exact_frac=sum(own) / len(own),
        exact_stderr_pp=stderr_pp(own),
        **values,
    )


def retrieval_table(rows: Sequence[RetrievalRow], chosen: str) -> str:
    """Exact answers in percent, by task, length and system; the depths side by side, the run in bold."""
    cells = {(r.task, r.length_tokens, r.system, r.depth_frac): r.exact_frac for r in rows}
    depths = sorted({r.depth_frac for r in rows if r.depth_frac is not None})
    has_one_length = len({r.length_tokens for r in rows}) == 2  # and all together
    return markdown(
        [
            *("task", "length", "system", "n", *(f"depth {depth:g}" for depth in depths)),
            *("all %", "drop pp", "only all_high right", "only it right"),
            *("McNemar p", "against all_high"),
        ],
        [
            (
                row.task,
                "all" if row.length_tokens is None else f"{row.length_tokens:,}",
                f"**{row.system}**" if row.system == chosen else row.system,
                f"{row.n:,}",
                *(
                    number(cells.get((row.task, row.length_tokens, row.system, depth)), 0, 1e2)
                    for depth in depths
                ),
                with_error(100.0 * row.exact_frac, row.exact_stderr_pp),
                with_error(row.exact_drop_pp, row.exact_drop_stderr_pp, sign=True),
                number(row.only_high_right, 0),
                number(row.only_own_right, 0),
                p_value(row.mcnemar_p),
                row.verdict or "",
            )
            for row in rows
            if row.depth_frac is None and not (has_one_length and row.length_tokens is None)
        ],
        num_left=3,
    )


def retrieval_by_system(rows: Sequence[RetrievalRow]) -> dict[str, dict[str, float]]:
    """By system, ``retrieval.<task>.exact_frac`` over all lengths and depths, of rows of ``retrieval_rows``."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.length_tokens is None and row.depth_frac is None:
            found.setdefault(row.system, {})[f"retrieval.{row.task}.exact_frac"] = row.exact_frac
    return found


def retrieval_section(rows: Sequence[RetrievalRow], chosen: str) -> dict[str, dict[str, Any]]:
    """By task, for metrics.json: the run's exact answers, how they stand beside all_high's, by length and by depth.

    Args:
        rows: of ``retrieval_rows``.
        chosen: the run's name among them.
    """
    section: dict[str, dict[str, Any]] = {}
    left_out = ("task", "length_tokens", "depth_frac", "system", "verdict")
    for row in rows:
        if row.system != chosen:
            continue
        task = section.setdefault(row.task, {})
        length, depth = row.length_tokens, row.depth_frac
        if length is None and depth is None:
            values = asdict(row) | ({"exact_drop_pp": 0.0} if chosen == HIGH else {})
            task |= {k: v for k, v in values.items() if k not in left_out and v is not None}
        elif depth is None:
            task.setdefault("by_length", {})[str(length)] = {"exact_frac": row.exact_frac}
        elif length is None:
            name = f"{100 * depth:g}"
            task.setdefault("by_depth_pct", {})[name] = {"exact_frac": row.exact_frac}
    return section
