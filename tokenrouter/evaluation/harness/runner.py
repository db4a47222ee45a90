"""Task accuracy of several systems by lm-evaluation-harness, on the same questions.

The harness is imported when tasks are asked for, never before.
"""

import difflib
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tokenrouter import LLM
from tokenrouter.checks import check_count, check_flag
from tokenrouter.evaluation.harness import local
from tokenrouter.evaluation.harness.results import SystemTasks, TaskResult
from tokenrouter.evaluation.shares import high_layers

ACCURACIES = ("acc", "exact_match")
"""Metrics that are a share of right answers, the one to report first."""
FEWSHOT_SEED = 1234


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    """Which tasks, and how much of them.

    Attributes:
        tasks: names: of ``tasks/*.yaml`` here, which go first, or the harness's own tasks, groups and tags.
        limit: questions of each task, the first ones; below 1 a share of them; None: all.
        num_fewshot: solved examples before each question; None: as each task says.
        apply_chat_template: put questions as a user's turn.
        data_dir: the folder of local data sets; None where it was not set.

    Raises:
        ValueError: a value of the wrong type or out of its range.
    """

    tasks: Sequence[str]
    limit: float | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    data_dir: str | None = None

    def __post_init__(self) -> None:
        names, limit = self.tasks, self.limit
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"evaluation.tasks must be a list of names, such as [arc_easy,piqa], got {names!r}"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"evaluation.tasks={list(names)} names a task twice")
        is_share = isinstance(limit, float) and 0 < limit < 1
        if limit is not None and not is_share:
            check_count("evaluation.limit", limit, 1)
        if self.num_fewshot is not None:
            check_count("evaluation.num_fewshot", self.num_fewshot, 0)
        check_flag("evaluation.apply_chat_template", self.apply_chat_template)


class LoadedTasks:
    """Tasks with their questions, ready to be put to any number of systems.

    Args:
        settings: what to load. Nothing is loaded from the network where a task of that name is here.

    Raises:
        ValueError: the harness is not installed, a task does not exist, or its data is missing.
    """

    def __init__(self, settings: TaskSettings) -> None:
        check_installed()
        from lm_eval.tasks import TaskManager

        self.settings = settings
        here = local.names()
        with _only_errors():
            manager = TaskManager(
                include_path=str(local.TASKS_DIR),
                include_defaults=not set(settings.tasks) <= set(here),
                metadata={"data_dir": settings.data_dir},
            )
            for name in settings.tasks:
                _check_exists(name, manager.all_tasks, here)
            try:
                self._loaded = manager.load(list(settings.tasks))
            except OSError as error:  # of the hub's: ours are of another kind
                raise ValueError(
                    f"evaluation.tasks: the data of {', '.join(settings.tasks)} could not be loaded "
                    f"({' '.join(str(error).split())}). These read paths.data_dir instead: {', '.join(here)}"
                ) from error
        for task in self._loaded["tasks"].values():
            wanted = settings.num_fewshot
            if wanted is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=wanted or 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The single tasks that the settings' names stand for."""
        return tuple(self._loaded["tasks"])

    def requests(self) -> dict[str, list[Any]]:
        """By task what ``measure`` gives the model, without a chat template: for other measurements."""
        from lm_eval.evaluator_utils import get_sample_size

        found = {}
        for name, task in self._loaded["tasks"].items():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
            task.build_all_requests(
                limit=get_sample_size(task, self.settings.limit), rank=0, world_size=1
            )
            found[name] = list(task.instances)
        return found

    def asked(self) -> dict[str, list[list[str]]]:
        """By task, question by question in the task's order, the texts that the last ``measure`` gave the model.

        A context with each of its continuations, or alone where something is generated.
        """
        found: dict[str, list[list[str]]] = {}
        for name, task in self._loaded["tasks"].items():
            by_question: dict[int, list[str]] = {}
            for one in task.instances:
                texts = [part for part in one.args if isinstance(part, str)]
                by_question.setdefault(one.doc_id, []).append("".join(texts))
            found[name] = [by_question[index] for index in sorted(by_question)]
        return found

    def measure(self, llm: LLM) -> SystemTasks:
        """Puts all questions to ``llm``, whose engine is idle; its counters start anew.

        Raises:
            ValueError: a model without a tokenizer or chat template, a question that the engine refuses, or options of
                generation that it does not have.
        """
        from lm_eval.evaluator import evaluate

        from tokenrouter.evaluation.harness.model import TokenRouterLM

        model, stats = TokenRouterLM(llm), llm.engine.stats
        if self.settings.apply_chat_template and not getattr(llm.tokenizer, "chat_template", None):
            raise ValueError(
                f"evaluation.apply_chat_template=true, and model {llm.model.name!r} has no chat template: set it to "
                "false"
            )
        stats.reset()
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)  # every system gets the same examples
        with _only_errors():
            found = evaluate(
                lm=model,
                task_dict=self._loaded,
                limit=self.settings.limit,
                bootstrap_iters=0,
                apply_chat_template=self.settings.apply_chat_template,
                fewshot_as_multiturn=self.settings.apply_chat_template,
            )
        executed_R = stats.executed_tokens.sum(axis=0)
        return SystemTasks(
            results={name: _result(name, found) for name in self.names},
            high_frac=float(executed_R @ high_layers(llm)) / max(int(executed_R.sum()), 1),
        )


def check_installed() -> None:
    """Raises ValueError where the harness is not."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "evaluation.tasks needs lm-evaluation-harness, which is not installed: pip install -c "
            "requirements/runtime.txt -e '.[lm-eval]', or leave evaluation.tasks empty"
        )


def _check_exists(name: str, known: Sequence[str], here: Sequence[str]) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    raise ValueError(
        f"evaluation.tasks: there is no task {name!r}{f'; did you mean {close[0]}?' if close else ''} On local data: "
        f"{', '.join(here)}; `lm-eval ls tasks` lists the harness's own"
    )


def _result(name: str, found: Mapping[str, Any]) -> TaskResult:
    """From what the harness returns for all tasks."""
    numbers = {
        key: float(value)
        for key, value in found["results"][name].items()
        if "," in key and isinstance(value, int | float)
    }
    result = TaskResult(
        num_questions=int(found["n-samples"][name]["effective"]),
        texts=_texts(found["samples"][name]),
        metrics=numbers,
    )
    metric = next((key for a in ACCURACIES for key in numbers if key.split(",")[0] == a), None)
    if metric is None:
        return result
    kind, by_filter = metric.split(",")
    samples = [one for one in found["samples"][name] if one["filter"] == by_filter]
    samples.sort(key=lambda one: one["doc_id"])
    correct = tuple(float(one[kind]) for one in samples)
    return replace(result, metric=metric, acc_frac=numbers[metric], correct=correct)


def _texts(samples: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """By question the first text that was generated; none where log-likelihoods were asked for."""
    by_question = {one["doc_id"]: one["resps"][0][0] for one in samples}
    texts = [by_question[index] for index in sorted(by_question)]
    return tuple(texts) if all(isinstance(text, str) for text in texts) else ()


@contextmanager
def _only_errors() -> Iterator[None]:
    """The harness warns of every option that a task leaves out."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
