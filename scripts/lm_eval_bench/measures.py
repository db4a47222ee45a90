"""Turns of both sides over the same requests, and what they answer."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenrouter.telemetry import Spread, spread

from .setup import OURS, THEIRS, Bench

WARM_UP = 16
ALL = "all"
Answers = Sequence[tuple[float, bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One task, or all of them.

    Attributes:
        num_requests: of a turn.
        seconds: by side, of each turn.
    """

    num_requests: int
    seconds: Mapping[str, Sequence[float]]

    def requests_s(self, side: str) -> Spread:
        """Requests per second."""
        return spread([self.num_requests / seconds for seconds in self.seconds[side]])

    @property
    def ratio(self) -> Spread:
        """Ours over theirs, turn by turn."""
        pairs = zip(self.seconds[OURS], self.seconds[THEIRS], strict=True)
        return spread([theirs / ours for ours, theirs in pairs])

    def as_values(self) -> dict[str, Any]:
        """Plain values."""
        rates = {f"{side}_requests_s": asdict(self.requests_s(side)) for side in self.seconds}
        return {"requests": self.num_requests, **rates, "ratio": asdict(self.ratio)}


def measure(bench: Bench) -> tuple[dict[str, Measured], dict[str, Any]]:
    """By task and for all of them what was measured, and how the sides' answers differ."""
    for requests in bench.requests.values():
        for model in bench.models.values():
            model.loglikelihood(requests[:WARM_UP], disable_tqdm=True)
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    answers: dict[tuple[str, str], Answers] = {}
    for _ in range(bench.repeats):
        for task, requests in bench.requests.items():
            for side, model in bench.models.items():
                started = time.perf_counter()
                answers[task, side] = model.loglikelihood(requests, disable_tqdm=True)
                seconds[task, side].append(time.perf_counter() - started)
    found = {
        task: Measured(
            num_requests=len(requests), seconds={side: seconds[task, side] for side in bench.models}
        )
        for task, requests in bench.requests.items()
    }
    total = {
        side: [
            sum(turn) for turn in zip(*(one.seconds[side] for one in found.values()), strict=True)
        ]
        for side in bench.models
    }
    found[ALL] = Measured(num_requests=sum(map(len, bench.requests.values())), seconds=total)
    return found, compare_answers(bench.requests, answers)


def compare_answers(
    requests: Mapping[str, Sequence[Any]], answers: Mapping[tuple[str, str], Answers]
) -> dict[str, Any]:
    """The largest and mean distance of log-likelihoods in nats, and the questions with another best choice."""
    distances, others, questions = [], 0, 0
    for task, of_task in requests.items():
        best: dict[str, dict[int, tuple[float, int]]] = {OURS: {}, THEIRS: {}}
        for side, by_doc in best.items():
            for index, (request, (score, _)) in enumerate(
                zip(of_task, answers[task, side], strict=True)
            ):
                by_doc[request.doc_id] = max(
                    by_doc.get(request.doc_id, (score, index)), (score, index)
                )
        questions += len(best[OURS])
        others += sum(best[OURS][doc][1] != best[THEIRS][doc][1] for doc in best[OURS])
        both = zip(answers[task, OURS], answers[task, THEIRS], strict=True)
        distances += [abs(ours - theirs) for (ours, _), (theirs, _) in both]
    return {
        "max_distance_nats": max(distances),
        "mean_distance_nats": sum(distances) / len(distances),
        "questions": questions,
        "other_choices": others,
    }


def format_found(found: Mapping[str, Measured], differences: Mapping[str, Any]) -> str:
    """A line per task, and one on the answers."""
    lines = [f"{'task':<12}{'requests':>9}{OURS + ' /s':>26}{THEIRS + ' /s':>26}{'ratio':>22}"]
    for task, one in found.items():
        cells = [_cell(one.requests_s(side), 1) for side in (OURS, THEIRS)]
        lines.append(
            f"{task:<12}{one.num_requests:>9}{cells[0]:>26}{cells[1]:>26}{_cell(one.ratio, 2):>22}"
        )
    return "\n".join(
        [
            *lines,
            f"log-likelihoods differ by {differences['mean_distance_nats']:.3f} nats in the mean, "
            f"{differences['max_distance_nats']:.3f} at most; {differences['other_choices']} of "
            f"{differences['questions']} questions have another best choice",
        ]
    )


def _cell(value: Spread, digits: int) -> str:
    return f"{value.median:,.{digits}f} [{value.min:,.{digits}f}, {value.max:,.{digits}f}]"
