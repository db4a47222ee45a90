"""Requests of the tasks, and the two models that answer them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.harness.runner import LoadedTasks, TaskSettings
from tokenrouter.evaluation.harness.scoring import scoring_options
from tokenrouter.executors import build_pool
from tokenrouter.models import LoadedModel
from tokenrouter.routers import AllHighRouter

OURS, THEIRS = "tokenrouter", "transformers"
BATCH_SIZE = 8
TASKS = ("arc_easy", "piqa", "hellaswag", "openbookqa", "boolq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is measured.

    Attributes:
        requests: by task those of all its questions, choice by choice.
        models: by side the harness's model.
        repeats: turns that count.
    """

    requests: Mapping[str, Sequence[Any]]
    models: Mapping[str, Any]
    repeats: int


def load_requests(tasks: Sequence[str], *, limit: int, data_dir: str | None) -> dict[str, Any]:
    """By task the harness's requests of its first questions.

    Raises:
        ValueError: no harness, an unknown task, no data, or a task that is no multiple choice.
    """
    settings = TaskSettings(tasks=tasks, limit=limit, data_dir=data_dir)
    requests = LoadedTasks(settings).requests()
    for name, of_task in requests.items():
        if any(request.request_type != "loglikelihood" for request in of_task):
            raise ValueError(f"task {name} is no multiple choice: choose others by --tasks")
    return requests


def build(
    model: LoadedModel, hf_model: Any, requests: Mapping[str, Sequence[Any]], *, repeats: int
) -> Bench:
    """Both sides, with the engine's tokenizer."""
    from lm_eval.models.huggingface import HFLM

    from tokenrouter.evaluation.harness.model import TokenRouterLM

    router = AllHighRouter()
    options = scoring_options(EngineOptions(), router)
    llm = LLM(model, router=router, executors=build_pool("full", model), options=options)
    theirs = HFLM(
        pretrained=hf_model, tokenizer=model.tokenizer, batch_size=BATCH_SIZE, device="cpu"
    )
    return Bench(
        requests=requests, models={OURS: TokenRouterLM(llm), THEIRS: theirs}, repeats=repeats
    )
