"""How systems answer: greedy, token by token as they are served; right where the answer comes out exactly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product

from tokenrouter import LLM, SamplingParams
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.retrieval.items import Encode, Item, place_item
from tokenrouter.evaluation.retrieval.settings import RetrievalSettings
from tokenrouter.evaluation.shares import high_work


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """An item and where it stands in the grid of lengths and depths."""

    length: int
    depth_frac: float
    item: Item

    @property
    def task(self) -> str:
        """What is asked."""
        return self.item.task

    @property
    def prompt_ids(self) -> list[int]:
        """What the model reads."""
        return self.item.ids[: self.item.answer_at]

    @property
    def answer_ids(self) -> list[int]:
        """What it must say, exactly."""
        return self.item.ids[self.item.answer_at :]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """One system's: per probe 1.0 where it is right, and the share of the work on the executor ``high``."""

    correct: tuple[float, ...]
    high_frac: float


def make_probes(
    settings: RetrievalSettings, encode: Encode, text_ids: Sequence[int], *, seed: int
) -> list[Probe]:
    """All examples, by task, length and depth, each with words and text of its own.

    Args:
        settings: which.
        encode: text to token ids.
        text_ids: of the other text between question and answer.
        seed: of the draws.

    Raises:
        ValueError: a length that holds no such item.
    """
    return [
        Probe(
            length=length,
            depth_frac=depth,
            item=place_item(
                task, encode, text_ids, length=length, depth_frac=depth, seed=f"{seed} {index}"
            ),
        )
        for task, length, depth, index in product(
            settings.tasks, settings.lengths, settings.depths, range(settings.num_examples)
        )
    ]


def measure_retrieval(systems: Mapping[str, LLM], probes: Sequence[Probe]) -> dict[str, Answers]:
    """Put all probes to every system, those of a task and length at once.

    Args:
        systems: by name, idle. Their engines' counters start anew.
        probes: in the order of ``make_probes``.

    Raises:
        ValueError: a prompt that an engine refuses.
    """
    found = {}
    total = len(systems) * sum(len(probe.prompt_ids) for probe in probes)
    with progress("retrieval", total, unit="tokens") as advance:
        for name, llm in systems.items():
            llm.engine.stats.reset()
            correct: list[float] = []
            for _, group in groupby(probes, key=lambda probe: (probe.task, probe.length)):
                correct += _answer(llm, list(group), partial(advance, name))
            high, executed = high_work(llm)
            found[name] = Answers(correct=tuple(correct), high_frac=high / max(executed, 1))
    return found


def _answer(llm: LLM, probes: Sequence[Probe], tick: Callable[..., None]) -> list[float]:
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(probe.answer_ids),
            ignore_eos=True,
            detokenize=False,
        )
        for probe in probes
    ]
    outputs = llm.generate([probe.prompt_ids for probe in probes], params)
    correct = []
    for probe, output in zip(probes, outputs, strict=True):
        if output.error is not None:
            raise ValueError(f"evaluation.retrieval: the engine refused a prompt: {output.error}")
        correct.append(float(list(output.outputs[0].token_ids) == probe.answer_ids))
        tick(count=len(probe.prompt_ids))
    return correct
