"""What a bisection says: the table, one paragraph per dimension, and bisect.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tokenrouter.tasks.bisect_differences import Difference
from tokenrouter.tasks.bisect_systems import Dimension
from tokenrouter.wording import counted

BUG = (
    "This is a bug: which requests run together, in which chunks, and what of them is kept outside the pool, must not "
    "change an output but for near-ties. Please report it with this folder."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one dimension changed.

    Attributes:
        dimension: that was switched on.
        setting: what is on in it.
        is_used: the configuration uses it; else nothing was run.
        is_lossless: what was switched on must not change an output, but for near-ties.
        num_requests: that were served.
        differences: one for each request whose output changed against the step before.
        num_changed_in_all: requests whose output differs from that with everything off.
    """

    dimension: Dimension
    setting: str
    is_used: bool
    is_lossless: bool
    num_requests: int
    differences: tuple[Difference, ...]
    num_changed_in_all: int

    @property
    def real(self) -> list[Difference]:
        """Those that are no near-ties."""
        return [d for d in self.differences if not d.is_near_tie]

    @property
    def shown(self) -> Difference | None:
        """The first difference that is no near-tie, or else the first; None without any."""
        return next(iter([*self.real, *self.differences]), None)

    @property
    def is_bug(self) -> bool:
        """An output changed that must not, and no near-tie excuses it."""
        return self.is_lossless and bool(self.real)

    @property
    def verdict(self) -> str:
        """In a few words."""
        if not self.is_used:
            return "not used"
        if not self.differences:
            return "no output changes"
        if not self.real:
            return "near-ties only"
        return "BUG" if self.is_bug else "changes outputs"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        tokens = [d.output_token for d in self.differences]
        return {
            "dimension": self.dimension,
            "setting": self.setting,
            "verdict": self.verdict,
            "num_requests": self.num_requests,
            "num_changed": len(self.differences),
            "num_near_ties": len(self.differences) - len(self.real),
            "num_changed_in_all": self.num_changed_in_all,
            "earliest_token": min(tokens, default=None),
            "median_token": median(tokens) if tokens else None,
            "differences": [d.as_dict() for d in self.differences],
        }


COLUMNS = (
    ("dimension", "dimension"),
    ("verdict", "verdict"),
    ("requests changed", "num_changed"),
    ("near-ties", "num_near_ties"),
    ("earliest token", "earliest_token"),
    ("median token", "median_token"),
    ("changed in all", "num_changed_in_all"),
)


def format_steps(steps: Sequence[Step], notes: Sequence[str]) -> str:
    """The table, a paragraph per dimension, and the notes: markdown that also reads as plain text."""
    rows = [[title for title, _ in COLUMNS]]
    for step in steps:
        values = step.as_dict()
        cells = [
            values[key] if step.is_used or isinstance(values[key], str) else None
            for _, key in COLUMNS
        ]
        rows.append(["" if cell is None else str(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    table = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([*table, "", *map(explain, steps), "", conclusion(steps), *notes]) + "\n"


def explain(step: Step) -> str:
    """One paragraph: what the dimension is set to, and the difference that shows it best."""
    head = f"{step.dimension} ({step.setting}): "
    if not step.is_used:
        return head + "this configuration does not use it."
    found = step.shown
    if found is None:
        return f"{head}no output of {counted(step.num_requests, 'request')} changes."
    head += f"{len(step.differences)} of {counted(step.num_requests, 'request')} changed. "
    return head + describe(found, step.dimension) + (f" {BUG}" if step.is_bug else "")


def describe(found: Difference, dimension: Dimension) -> str:
    """A difference in sentences; what was evicted only where memory is what was switched on."""
    score = "no score" if found.score != found.score else f"score {found.score:.4g}"
    route = found.requested
    if found.executed != found.requested:
        route += f" (ran on {found.executed})"
    seen = ", ".join(f"{count:,} {name}" for name, count in found.routes_seen.items() if count)
    text = (
        f'Request {found.request} ("{found.prompt}") at output token {found.output_token}: '
        f"{found.after_text!r} for {found.before_text!r}. The token at position {found.position}, which made it, went "
        f"{route} ({found.reason}, {score}); it and those before it: {seen}. {_closeness(found)}"
    )
    if dimension == "memory":
        text += f" {_evicted(found)}"
    return text


def conclusion(steps: Sequence[Step]) -> str:
    """Names the dimension at fault."""
    bugs = [step for step in steps if step.is_bug]
    if bugs:
        return f"At fault: {bugs[0].dimension}, which must change nothing. Look into that first."
    changing = [step for step in steps if step.real]
    if not changing:
        return "No dimension changes an output, but for near-ties."
    worst = max(changing, key=lambda step: len(step.real))
    others = [step.dimension for step in changing if step is not worst]
    also = f"; {' and '.join(others)} too, in fewer or as many requests" if others else ""
    share = f"{len(worst.real)} of {counted(worst.num_requests, 'request')}"
    return f"Outputs change most by {worst.dimension}: {share}{also}."


def _closeness(found: Difference) -> str:
    best = f"The two best logits were {found.best_gap_logits:.3g} apart"
    if found.swap_gap_logits is None:
        return f"{best}, and the new token was not among the candidates."
    if found.is_near_tie:
        return f"{best}: a near-tie."
    return f"{best}, the two chosen ones {found.swap_gap_logits:.3g}."


def _evicted(found: Difference) -> str:
    if not found.num_evicted:
        return "None of its entries had been evicted by then."
    few = ", ".join(f"position {at} at {when} tokens" for at, when in found.evicted_at.items())
    more = ", ..." if found.num_evicted > len(found.evicted_at) else ""
    return f"{found.num_evicted:,} of its {found.position + 1:,} entries had been evicted by then ({few}{more})."
