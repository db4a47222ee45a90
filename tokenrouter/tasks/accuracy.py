"""The part of a comparison that lm-evaluation-harness measures: evaluation.tasks, of all_high, all_low and the run."""

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

from tokenrouter.evaluation.harness.runner import LoadedTasks, SystemTasks, TaskSettings
from tokenrouter.evaluation.harness.scoring import scoring_options
from tokenrouter.evaluation.systems import Systems, SystemsBuilder
from tokenrouter.tasks import groups
from tokenrouter.telemetry import RunFolder


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
    they have for text.
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
    return measured


def task_notes(measured: Mapping[str, SystemTasks]) -> list[str]:
    """One line a task: accuracy of each system, in percent with its standard error."""
    first = next(iter(measured.values()), None)
    lines = []
    for task, result in first.results.items() if first is not None else ():
        values = ", ".join(f"{name} {_percent(one, task)}" for name, one in measured.items())
        what = f"{result.metric.split(',')[0]} in %" if result.metric else "no accuracy"
        lines.append(f"Task {task} ({result.num_questions} questions, {what}): {values}.")
    return lines


def write_tasks(folder: RunFolder, measured: Mapping[str, SystemTasks]) -> None:
    """tasks.json: every system's results, question by question."""
    folder.write_json("tasks.json", {name: one.as_dict() for name, one in measured.items()})


def _percent(system: SystemTasks, task: str) -> str:
    result = system.results[task]
    if result.acc_frac is None:
        return "; ".join(
            f"{key.split(',')[0]} {value:.3f}" for key, value in result.metrics.items()
        )
    p, n = result.acc_frac, max(result.num_questions, 2)
    return f"{100 * p:.1f} ± {100 * (p * (1 - p) / (n - 1)) ** 0.5:.1f}"
