"""Guards sweeps: a failing job that stops or hides the others, shared W&B runs, work done twice, a silent exit."""

import json
import pickle
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from omegaconf import OmegaConf

from tests.tasks.jobs import (
    ROOT,
    compose_config,
    run_py,
    wandb_artifacts,
    wandb_config,
    wandb_exit_codes,
    wandb_run,
    wandb_summary,
)
from tests.tasks.run_folders import make_run
from tokenrouter.evaluation import paper
from tokenrouter.tasks import sweeps
from tokenrouter.tasks.doctor_run import read_run
from tokenrouter.tasks.finished import config_hash, find_finished, put_aside, read_objective
from tokenrouter.telemetry.runfolder import RunFolder, leaves

FAMILIES = ("llama", "gpt", "qwen2")  # the second is none
SWEEP = (
    "-m",
    "debug=tiny",
    "logger=wandb",
    "task=generate",
    "prompt=hi",
    "sampling.max_tokens=3",
    f"model.name={','.join(FAMILIES)}",
)


class Sweep(NamedTuple):
    """What a sweep of three jobs left."""

    output_dir: Path
    path: Path
    done: subprocess.CompletedProcess[str]

    @property
    def jobs(self) -> list[Path]:
        return [self.path / number for number in "012"]

    @property
    def text(self) -> str:
        return self.done.stdout + self.done.stderr


def _status(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "status.json").read_text())
    return found


def _sweep(output_dir: Path) -> Sweep:
    done = run_py(output_dir, *SWEEP)
    return Sweep(output_dir, sorted(output_dir.glob("sweeps/*/*"))[-1], done)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Three jobs, of which the second fails."""
    return _sweep(tmp_path_factory.mktemp("outputs"))


@pytest.mark.slow
def test_a_failing_job_is_visible_and_the_others_run(sweep: Sweep) -> None:
    assert sweep.done.returncode == 1
    assert [_status(job)["status"] for job in sweep.jobs] == ["ok", "failed", "ok"]
    failed = _status(sweep.jobs[1])
    assert (
        failed["error"].startswith("ValueError: no tiny model")
        and "Traceback" in failed["traceback"]
    )
    assert "no tiny model of family 'gpt'" in (sweep.jobs[1] / "run.log").read_text()
    assert "3 jobs of the sweep: 1 failed, 2 ok" in sweep.text
    assert "job 1 (" in sweep.text and "Traceback" not in sweep.text
    said = json.loads((sweep.path / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in said] == ["ok", "failed", "ok"]


@pytest.mark.slow
def test_each_job_has_a_wandb_run_of_its_own(sweep: Sweep) -> None:
    """Hydra's jobs share a process: the first one's run took all of them, with its config."""
    runs = [wandb_run(job) for job in sweep.jobs]
    assert len({run.run_id for run in runs}) == 3
    assert {(run.run_group, run.job_type) for run in runs} == {(sweep.path.name, "generate")}
    assert [wandb_exit_codes(job) for job in sweep.jobs] == [[0], [1], [0]]
    assert [wandb_config(job)["model"]["name"] for job in sweep.jobs] == list(FAMILIES)
    for job in (sweep.jobs[0], sweep.jobs[2]):
        metrics = json.loads((job / "metrics.json").read_text())
        summary = wandb_summary(job)
        assert all(summary[path.replace(".", "/")] == value for path, value in leaves(metrics))
    files = [wandb_artifacts(job)["run"] for job in sweep.jobs]
    assert all({"status.json", "config.yaml", "run.log"} <= set(names) for names in files)
    assert ["metrics.json" in names for names in files] == [True, False, True]


@pytest.mark.slow
def test_a_repeated_sweep_runs_what_did_not_end_well(sweep: Sweep) -> None:
    again = _sweep(sweep.output_dir)
    assert again.path != sweep.path and again.done.returncode == 1
    status = [_status(job) for job in again.jobs]
    assert [s["status"] for s in status] == ["skipped", "failed", "skipped"]
    assert [status[i]["finished_in"] for i in (0, 2)] == [str(sweep.jobs[i]) for i in (0, 2)]
    assert "1 failed, 2 skipped" in again.text and "skip_finished=false" in again.text
    assert paper.read_run(again.jobs[0]).path == sweep.jobs[0]
    with pytest.raises(ValueError, match=f"was skipped.* give run={sweep.jobs[0]}"):
        read_run(again.jobs[0])


@pytest.mark.slow
def test_a_search_outlives_a_trial_that_fails(tmp_path: Path) -> None:
    """A trial that ends the search, or counts as a result."""
    done = run_py(
        tmp_path,
        "hparams_search=rule_weights",
        "hydra.sweeper.n_trials=2",
        f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db",
        "debug=tiny",
        "evaluation.num_windows=1",
        "evaluation.decode_windows=0",
        "model.name=choice(llama,gpt)",
        "hydra.sweeper.sampler.seed=3",  # draws gpt, then llama
    )
    assert done.returncode == 1, done.stderr
    [sweep] = tmp_path.glob("sweeps/*/*")
    status = [_status(sweep / job)["status"] for job in ("0", "1")]
    assert status == ["failed", "ok"], done.stderr
    best = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    metrics = json.loads((sweep / "1" / "metrics.json").read_text())
    assert best["best_value"] == metrics["quality"]["kl_mean_nats"]
    assert best["best_params"]["model.name"] == "llama"
    assert (tmp_path / "study.db").exists() and "no tiny model of family 'gpt'" in done.stdout


def test_what_goes_to_other_processes_can_be_sent() -> None:
    """joblib and submitit pickle the callbacks, and bring back a job's error, whatever it was made of."""
    assert isinstance(pickle.loads(pickle.dumps(sweeps.SweepReport())), sweeps.SweepReport)
    assert str(pickle.loads(pickle.dumps(sweeps.JobFailed("no model")))) == "no model"


def _finished(path: Path, cfg: Any) -> Path:
    RunFolder(path, facts={"config_hash": config_hash(cfg)}).succeed()
    return path


def test_paths_are_not_what_a_job_computes() -> None:
    """A sweep that starts afresh because its output went elsewhere, or skips what was never computed."""
    base = ("debug=tiny", "data=wikitext2", "objective=a")
    same = [
        compose_config(*base, "paths.output_dir=/a", "paths.data_dir=/b"),
        compose_config(*base, "paths.data_dir=/c", "skip_finished=false", "objective=null"),
    ]
    assert config_hash(same[0]) == config_hash(same[1])
    for override in ("seed=1", "num_threads=3", "evaluation.num_repeats=2"):
        assert config_hash(compose_config(*base, override)) != config_hash(same[0])


def test_only_a_job_that_ended_well_is_found_the_newest_first(tmp_path: Path) -> None:
    cfg = compose_config("debug=tiny")
    wanted = config_hash(cfg)
    day = tmp_path / "sweeps" / "2030-01-01"
    RunFolder(day / "03" / "0", facts={"config_hash": wanted}).fail(ValueError())
    RunFolder(day / "04" / "0", facts={"config_hash": wanted})  # killed
    new = day / "05" / "0"
    assert find_finished(wanted, new, new.parent, tmp_path) is None
    for time in ("01", "02"):
        _finished(day / time / "0", cfg)
    assert find_finished(wanted, new, new.parent, tmp_path) == day / "02" / "0"
    assert find_finished(config_hash(compose_config("seed=1")), new, new.parent, tmp_path) is None
    elsewhere = tmp_path / "mine"  # hydra.sweep.dir=mine
    own = _finished(elsewhere / "0", cfg)
    assert find_finished(wanted, elsewhere / "1", elsewhere, tmp_path / "none") == own
    cut = RunFolder(elsewhere / "3", facts={"config_hash": wanted})
    cut.write_metrics({})
    cut.succeed()
    assert find_finished(wanted, cut.path, tmp_path / "none", tmp_path / "none") == cut.path
    (cut.path / "metrics.json").write_text("")
    assert find_finished(wanted, cut.path, tmp_path / "none", tmp_path / "none") is None


def test_a_sweep_below_a_folder_of_any_name_is_reported(tmp_path: Path) -> None:
    """Exit code 0 of a sweep whose jobs failed, because its folder lies in one that is called earlier-something."""
    RunFolder(tmp_path / "earlier-runs" / "0").fail(ValueError("no room"))
    RunFolder(tmp_path / "earlier-runs" / "1" / "earlier-1").fail(ValueError("put aside"))
    report = sweeps.SweepReport()
    report.on_multirun_start(
        OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "earlier-runs")}}})
    )
    with pytest.raises(SystemExit):
        report.on_multirun_end(OmegaConf.create())
    assert len(json.loads((tmp_path / "earlier-runs/sweep.json").read_text())["jobs"]) == 1


def test_a_sweep_in_the_same_folder_keeps_what_earlier_runs_left(tmp_path: Path) -> None:
    """ "already holds a run" for each job that had failed; results of a killed run among those of the next."""
    for number in (1, 2):
        folder = RunFolder(tmp_path)
        folder.write_json("metrics.json", {"run": number})
        (tmp_path / "run.log").write_text("open")
        put_aside(tmp_path)
        assert (
            json.loads((tmp_path / f"earlier-{number}/metrics.json").read_text())["run"] == number
        )
    assert {path.name for path in tmp_path.iterdir()} == {"run.log", "earlier-1", "earlier-2"}
    put_aside(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_sweep_in_which_all_jobs_fail_says_so_and_ends_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = sweeps.SweepReport()
    report.on_multirun_start(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    RunFolder(tmp_path / "0", job="seed=0").fail(ValueError("first"))
    RunFolder(tmp_path / "model=a" / "b", job="seed=1")  # killed; its folder's name has a slash
    with pytest.raises(SystemExit) as ended:
        report.on_multirun_end(OmegaConf.create())
    assert ended.value.code == 1
    assert "all 2 jobs of the sweep failed" in caplog.text and "first" in caplog.text
    assert "(seed=1) running: it did not end" in caplog.text


def test_what_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's "Could not find 'hydra/sweeper/optuna'" says nothing of a package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = (
        "hparams_search=kv_budget",
        "hydra/launcher=joblib",
        "hydra/launcher=submitit_slurm",
    )
    sweeps.check_extras([*arguments, "hydra/launcher=basic"])
    monkeypatch.setattr(sweeps, "_is_installed", lambda module: False)
    for argument, extra in zip(arguments, ("optuna", "joblib", "submitit"), strict=True):
        with pytest.raises(SystemExit, match=rf"{argument} needs .*'\.\[{extra}\]'"):
            sweeps.check_extras(["-m", argument])
        assert extra in extras["optional-dependencies"]
    sweeps.check_extras(["hydra/launcher=basic", "hparams_search=null"])


@pytest.mark.parametrize(
    ("launcher", "task", "is_warned"),
    [
        ({"_target_": "a.JoblibLauncher", "n_jobs": 2}, "benchmark", True),
        ({"_target_": "a.JoblibLauncher", "n_jobs": 1}, "benchmark", False),
        ({"_target_": "a.LocalLauncher"}, "tradeoff", True),
        ({"_target_": "a.LocalLauncher"}, "evaluate", False),
        ({"_target_": "a.BasicLauncher"}, "benchmark", False),
    ],
)
def test_times_beside_other_jobs_are_called_no_measurement(
    launcher: Mapping[str, Any], task: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sweeps.warn_of_neighbours(OmegaConf.create(dict(launcher)), f"tokenrouter.tasks.{task}.run")
    assert ("are no measurement" in caplog.text) == is_warned


def test_an_objective_is_a_number_of_the_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {}, {"quality.kl_mean_nats": 0.5, "quality.tasks": {}}, {})

    def read(objective: Any) -> Any:
        return read_objective(OmegaConf.create({"objective": objective}), run)

    assert read(None) is None and read("quality.kl_mean_nats") == 0.5
    assert read(["quality.kl_mean_nats", "quality.kl_mean_nats"]) == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"quality\.kl is not in .*kl_mean_nats"):
        read("quality.kl")
    with pytest.raises(ValueError, match=r"quality\.tasks must be a number"):
        read("quality.tasks")
    (run / "metrics.json").unlink()
    with pytest.raises(ValueError, match="this task writes none"):
        read("quality.kl_mean_nats")


def test_the_wandb_sweep_is_one_that_run_py_takes() -> None:
    """A name in sweep.yaml that the config or metrics.json does not have."""
    sweep = yaml.safe_load((ROOT / "scripts" / "sweep.yaml").read_text())
    first = {
        name: space.get("value", (space.get("values") or [space.get("min")])[0])
        for name, space in sweep["parameters"].items()
    }
    cfg = compose_config("logger.mode=online", *[f"{k}={v}" for k, v in first.items()])
    assert cfg.logger.mode == "online" and cfg.task._target_.endswith("evaluate.run")
    assert sweep["metric"] == {"name": "quality/kl_mean_nats", "goal": "minimize"}
    assert (ROOT / sweep["program"]).exists() and "${args_no_hyphens}" in sweep["command"]
