"""Engines that decode in turns, and where their steps spend their time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tokenrouter import LLM, SamplingParams
from tokenrouter.evaluation.progress import progress
from tokenrouter.executors import build_pool
from tokenrouter.models import LoadedModel
from tokenrouter.telemetry import Spread, spread
from tokenrouter.workloads import PythonDocs, evaluation_documents

from .parts import PARTS, Seconds, StepTimer

SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "top_p": {"top_p": 0.9},
}
COMPUTE = ("forward", "logits")
Turns = list[Seconds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run: requests, the tokens of their prompts, and the steps of a turn."""

    batch: int = 32
    context: int = 512
    steps: int = 24


QUICK = Sizes(batch=3, context=16, steps=4)


def build(model: LoadedModel, sizes: Sizes, *, router: str, executor: str) -> dict[str, LLM]:
    """By name an engine on one pool of executors, whose requests are past their prompts.

    Raises:
        ValueError: more requests than an engine runs at once, or they are longer than the model or the text allows.
    """
    pool = build_pool(executor, model)
    text = "\n\n".join(evaluation_documents(PythonDocs().documents()))
    ids = list(model.tokenizer.encode(text, add_special_tokens=False))
    prompts = [ids[61 * row : 61 * row + sizes.context] for row in range(sizes.batch)]
    if (shortest := len(prompts[-1])) < sizes.context:
        raise ValueError(
            f"context {sizes.context} is longer than the text allows: {shortest} tokens are left"
        )
    found = {}
    for name, sampling in SAMPLING.items():
        found[name] = llm = LLM(model, router=router, executors=pool)
        _start(llm, prompts, sampling)
    return found


def measure(llms: Mapping[str, LLM], sizes: Sizes, repeats: int) -> dict[str, Turns]:
    """By engine and turn the seconds of a median step's parts; a turn of each goes before and does not count."""
    timers = {name: StepTimer(llm) for name, llm in llms.items()}
    turns: dict[str, Turns] = {name: [] for name in llms}
    with progress("steps", (repeats + 1) * len(llms), unit="turns") as advance:
        for turn in range(repeats + 1):
            for name, timer in timers.items():
                steps = timer.steps(sizes.steps)
                if turn:
                    turns[name].append({key: median(s[key] for s in steps) for key in steps[0]})
                advance(name)
    return turns


def as_values(turns: Mapping[str, Turns]) -> dict[str, Any]:
    """Plain values in microseconds: by engine a step, its parts and its overhead; the overhead's share of it."""
    found = {name: _spreads(of) for name, of in turns.items()}
    return {
        **{f"step_{name}_ms": _of(of, "step", 1e3).median for name, of in turns.items()},
        **{
            f"step_{name}_overhead_frac": spread([_overhead(t) / t["step"] for t in of]).median
            for name, of in turns.items()
        },
        "parts_us": {
            name: {key: asdict(value) for key, value in parts.items()}
            for name, parts in found.items()
        },
    }


def format_turns(turns: Mapping[str, Turns]) -> str:
    """A line per part, for every engine its microseconds and its share of a step."""
    found = {name: _spreads(of) for name, of in turns.items()}
    lines = [f"{'us of a step':<14}" + "".join(f"{name:>40}" for name in found)]
    for key in (*PARTS, "overhead", "step"):
        cells = []
        for parts in found.values():
            value, share = parts[key], 100 * parts[key].median / parts["step"].median
            cells.append(
                f"{value.median:>12,.0f} [{value.min:,.0f}, {value.max:,.0f}]{share:>7.1f} %"
            )
        lines.append(f"{key:<14}" + "".join(f"{cell:>40}" for cell in cells))
    return "\n".join(lines)


def _start(llm: LLM, prompts: Sequence[Sequence[int]], sampling: Mapping[str, float]) -> None:
    """Adds a request per prompt, without an end of its own, and runs all prompts."""
    seats = llm.options.max_num_seqs
    if len(prompts) > seats:
        raise ValueError(f"batch {len(prompts)} must be at most {seats}, the requests of one step")
    options: Any = {"max_tokens": None, "ignore_eos": True, "detokenize": False, **sampling}
    params = SamplingParams(**options)
    for row, prompt in enumerate(prompts):
        llm.engine.add_request(str(row), prompt, params, stream=False)
    while llm.engine.stats.output_tokens < len(prompts) or any(
        r.num_computed < r.prompt_len for r in llm.engine.scheduler.running
    ):
        llm.engine.step()


def _spreads(turns: Turns) -> dict[str, Spread]:
    found = {key: _of(turns, key, 1e6) for key in (*PARTS, "step")}
    return found | {"overhead": spread([1e6 * _overhead(turn) for turn in turns])}


def _of(turns: Turns, key: str, factor: float) -> Spread:
    return spread([factor * turn[key] for turn in turns])


def _overhead(turn: Seconds) -> float:
    return turn["step"] - sum(turn[key] for key in COMPUTE)
