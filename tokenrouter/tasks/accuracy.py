"""The part of a comparison that lm-evaluation-harness measures: evaluation.tasks, of baselines and the run."""

from collections.abc import Mapping
from itertools import islice

from omegaconf import DictConfig, OmegaConf

from tokenrouter.evaluation.harness.results import (
    SystemTasks,
    TaskRow,
    accuracy_by_system,
    accuracy_table,
    mix_tasks,
    task_rows,
    tasks_section,
)
from tokenrouter.evaluation.harness.runner import LoadedTasks, TaskSettings
from tokenrouter.evaluation.harness.scoring import scoring_options
from tokenrouter.evaluation.request_level import choose_high, prompt_shares
from tokenrouter.evaluation.systems import Systems, SystemsBuilder
from tokenrouter.evaluation.tables import as_csv
from tokenrouter.tasks import groups
from tokenrouter.tasks.parts import Part
from tokenrouter.telemetry import RunFolder

ACCURACY_NOTE = (
    "Tasks: accuracy and what it lost against all_high, in percent and percentage points ± standard error, of the "
    "same questions. A tie: luck alone parts the questions on which the two differ at least so unevenly in 5 of 100 "
    "cases (McNemar, exact)."
)
REQUEST_LEVEL_NOTE = (
    "request_level's answers are computed, not run: a question with its choices is one request, so they are "
    "all_high's to the neediest questions and all_low's to the others, up to the run's share of high tokens in the "
    "tasks ({:.1%} of the tokens, as near as whole questions come)."
)


def task_settings(cfg: DictConfig) -> TaskSettings:
    """Which tasks conf/evaluation asks for; it may be none.

    Raises:
        ValueError: a setting of the wrong type or out of its range.
    """
    values = {key: cfg.evaluation[key] for key in groups.TASKS}
    if OmegaConf.is_config(values["tasks"]):
        values["tasks"] = OmegaConf.to_object(values["tasks"])
    return TaskSettings(**values, data_dir=cfg.paths.data_dir)


def load_tasks(cfg: DictConfig) -> LoadedTasks | None:
    """The tasks of conf/evaluation with their questions; None where there are none.

    Raises:
        ValueError: a setting out of its range, a task that does not exist, no data, or no harness.
    """
    settings = task_settings(cfg)
    return LoadedTasks(settings) if settings.tasks else None


def measure_tasks(
    tasks: LoadedTasks, systems: Systems, builder: SystemsBuilder
) -> dict[str, SystemTasks]:
    """Results by system: baselines with their own options, the chosen router with the run's.

    Engines are new, with shared beginnings, on the pool of executors that is there; routers have the thresholds that
    they have for text. request_level is computed from all_high and all_low.
    """
    measured = {}
    for name in dict.fromkeys(
        [*(n for n in ("all_high", "all_low") if n in systems.llms), systems.chosen]
    ):
        options = builder.options if name == systems.chosen else builder.plain_options
        llm = systems.scored.get(name, systems.llms[name])
        measured[name] = tasks.measure(
            builder.llm(llm.router, scoring_options(options, llm.router))
        )
    if systems.ranking_router is None or "request_level" in measured:
        return measured
    computed = _request_level(tasks, systems, measured)
    return {
        name: measured.get(name, computed)
        for name in dict.fromkeys(["all_high", "all_low", "request_level", systems.chosen])
    }


def _request_level(
    tasks: LoadedTasks, systems: Systems, measured: Mapping[str, SystemTasks]
) -> SystemTasks:
    """As a router would decide that sends whole questions high, all tasks together, as much as the run does."""
    router, llm, high = systems.ranking_router, systems.llms["all_high"], measured["all_high"]
    assert router is not None
    most, encode = llm.model.config.max_model_len, llm.tokenizer.encode
    counts, shares, weights = {}, [], []
    for task, questions in tasks.asked().items():
        counts[task] = len(questions)
        outputs = high.results[task].texts or [""] * len(questions)
        for texts, output in zip(questions, outputs, strict=True):
            prompts = [encode(text)[-most:] for text in texts]
            found = prompt_shares(router, llm.token_types, prompts)
            needy = sum(share * len(ids) for share, ids in zip(found, prompts, strict=True))
            num_prompt = sum(map(len, prompts))
            shares.append(needy / num_prompt)
            weights.append(num_prompt + len(encode(output)))
    goes_high = choose_high(router, shares, weights, measured[systems.chosen].high_frac)
    num_high = sum(weight for weight, is_high in zip(weights, goes_high, strict=True) if is_high)
    left = iter(goes_high)
    by_task = {task: list(islice(left, count)) for task, count in counts.items()}
    return mix_tasks(high, measured["all_low"], by_task, num_high / sum(weights))


def report(folder: RunFolder, measured: Mapping[str, SystemTasks], systems: Systems) -> Part:
    """Writes tasks.json (every answer) and accuracy.csv; returns what the run says of them."""
    folder.write_json("tasks.json", {name: one.as_dict() for name, one in measured.items()})
    rows = task_rows(measured, systems.chosen_llm.tokenizer.encode)
    folder.write_text("accuracy.csv", as_csv(TaskRow, rows))
    notes = [ACCURACY_NOTE] if rows else []
    if rows and "request_level" in measured and systems.chosen != "request_level":
        notes.append(REQUEST_LEVEL_NOTE.format(measured["request_level"].high_frac))
    return Part(
        name="tasks",
        tables=(accuracy_table(rows, systems.chosen),) if rows else (),
        notes=(*notes, *_other_notes(measured)),
        section=tasks_section(rows, systems.chosen, measured[systems.chosen].results),
        by_system=accuracy_by_system(rows),
    )


def _other_notes(measured: Mapping[str, SystemTasks]) -> list[str]:
    """One line a task that has no accuracy: every system's numbers."""
    lines = []
    for task, result in measured["all_high"].results.items():
        if result.acc_frac is None:
            values = (
                f"{name} {_numbers(one.results[task].metrics)}"
                for name, one in measured.items()
                if task in one.results
            )
            what = f"Task {task} ({result.num_questions} questions, no accuracy)"
            lines.append(f"{what}: {', '.join(values)}.")
    return lines


def _numbers(metrics: Mapping[str, float]) -> str:
    return "; ".join(f"{key.split(',')[0]} {value:.3f}" for key, value in metrics.items())
