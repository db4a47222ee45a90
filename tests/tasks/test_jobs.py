"""Guards against jobs that fail silently, leave W&B runs open, or hide a user's mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.tasks.jobs import (
    ROOT,
    compose_config,
    run_in,
    wandb_artifacts,
    wandb_config,
    wandb_exit_codes,
    wandb_records,
    wandb_run,
    wandb_summary,
)
from tokenrouter import LLM, kernels
from tokenrouter.evaluation.quality import QualityReport
from tokenrouter.kernels import KernelSet
from tokenrouter.tasks import compare
from tokenrouter.tasks.common import open_job, quote_prompt, task_name
from tokenrouter.tasks.tracking import MAX_NAME, run_name
from tokenrouter.telemetry.runfolder import leaves

TINY = ("debug=tiny", "evaluation.num_windows=1", "evaluation.decode_windows=1")


def _status(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((path / "status.json").read_text())
    return result


def test_a_good_job_closes_its_offline_run_with_everything_in_it(tradeoff_run: Path) -> None:
    assert wandb_exit_codes(tradeoff_run) == [0]
    records = list(wandb_records(tradeoff_run))
    keys = {[*item.nested_key, item.key][0] for r in records for item in r.history.item}
    assert {"quality/kl_mean_nats", "throughput/output_tok_s", "tradeoff", "routes"} <= keys
    config = wandb_config(tradeoff_run)
    assert config["model"]["name"] == "llama" and config["seed"] == 0
    steps = [r.metric.step_metric for r in records if r.metric.glob_name == "steps/*"]
    assert steps == ["steps/step"] and wandb_run(tradeoff_run).job_type == "tradeoff"
    logged = [i for r in records for i in r.history.item if list(i.nested_key) == ["steps/step"]]
    assert len(logged) == len((tradeoff_run / "steps.jsonl").read_text().splitlines())


def test_the_tracker_has_the_table_the_folder_and_a_summary_of_results_alone(
    tradeoff_run: Path,
) -> None:
    """A summary that ends in the last engine step's numbers, or a folder that is taken while it says running."""
    metrics = json.loads((tradeoff_run / "metrics.json").read_text())
    summary = wandb_summary(tradeoff_run)
    for path, value in leaves(metrics):
        assert value is None or summary[path.replace(".", "/")] == value, path
    assert not [key for key in summary if key.startswith("steps/")]
    artifacts = wandb_artifacts(tradeoff_run)
    assert {"metrics.json", "status.json", "config.yaml", "tradeoff.png"} <= set(artifacts["run"])
    assert not [name for name in artifacts["run"] if name.startswith("wandb")]
    [table] = tradeoff_run.glob("wandb/offline-run-*/files/media/table/systems_*.table.json")
    rows = json.loads(table.read_text())
    name = rows["columns"].index("name")
    assert [row[name] for row in rows["data"]][:2] == ["all_high", "all_low"]


def test_every_task_has_the_job_type_that_its_file_is_called_by() -> None:
    """Runs of two tasks that W&B shows as one type."""
    files = sorted((ROOT / "conf" / "task").glob("*.yaml"))
    assert files
    for path in files:
        own = OmegaConf.load(path)
        assert task_name(own if "task" in own else OmegaConf.create({"task": own})) == path.stem


def test_a_failing_job_says_so_in_its_folder_and_to_wandb(tmp_path: Path) -> None:
    cfg = compose_config("debug=tiny", "logger=wandb")
    with pytest.raises(RuntimeError, match="broken"), open_job(cfg, tmp_path, ["debug=tiny"]):
        raise RuntimeError("broken")
    status = _status(tmp_path)
    assert status["status"] == "failed" and status["job"] == "debug=tiny"
    assert "test_a_failing_job" in status["traceback"]
    assert wandb_exit_codes(tmp_path) == [1]


def test_an_interrupted_job_is_not_left_running(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        open_job(compose_config("debug=tiny", "logger=wandb"), tmp_path, []),
    ):
        raise KeyboardInterrupt
    status = _status(tmp_path)
    assert status["status"] == "failed" and status["error"] == "interrupted by the user"
    assert wandb_exit_codes(tmp_path) == [1]


def test_a_missing_value_fails_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"model\.name"):
        run_in(tmp_path, "debug=tiny", "model=hf")
    status = _status(tmp_path)
    assert status["status"] == "failed" and "model.name" in status["error"]


def test_two_jobs_of_one_process_are_two_wandb_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with open_job(compose_config("debug=tiny", "logger=wandb"), tmp_path / name, [name]):
            pass
    assert wandb_run(tmp_path / "a").run_id != wandb_run(tmp_path / "b").run_id
    assert wandb_exit_codes(tmp_path / "a") == wandb_exit_codes(tmp_path / "b") == [0]


def test_a_long_job_has_a_short_wandb_name_and_its_own(tmp_path: Path) -> None:
    """A prompt of thousands of characters became the run's name, line breaks too."""
    prompt = "prompt=" + "why?\n" * 1000
    for name, ending in (("a", "one"), ("b", "two")):
        overrides = ["task=generate", prompt + ending]
        with open_job(compose_config("debug=tiny", "logger=wandb"), tmp_path / name, overrides):
            pass
    names = [wandb_run(tmp_path / name).display_name for name in ("a", "b")]
    assert names[0] != names[1] and all(len(name) <= MAX_NAME for name in names)
    assert all(name.startswith("task=generate prompt=why? why?") for name in names)
    assert "\n" not in "".join(names)
    assert _status(tmp_path / "a")["job"].endswith("one")


def test_a_short_job_keeps_its_name() -> None:
    assert run_name("router=rule executor=int8") == "router=rule executor=int8"
    assert len(run_name("x" * MAX_NAME)) == MAX_NAME and run_name("x" * MAX_NAME) == "x" * MAX_NAME


def test_without_logger_there_is_no_wandb_folder(tmp_path: Path) -> None:
    with open_job(compose_config("debug=tiny"), tmp_path, []) as job:
        job.finish({"kv": {"peak_live_bytes": 1}})
    assert not (tmp_path / "wandb").exists() and (tmp_path / "metrics.json").exists()


def test_an_unknown_wandb_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="offline, online or disabled"):
        run_in(tmp_path, "debug=tiny", "logger=wandb", "logger.mode=on")


def test_benchmark_measures_speed_only(tmp_path: Path) -> None:
    metrics = json.loads((run_in(tmp_path, *TINY, "task=benchmark") / "metrics.json").read_text())
    assert "quality" not in metrics and metrics["throughput"]["output_tok_s"] > 0
    assert set(metrics["baselines"]["all_high"]) == {
        "output_tok_s",
        "ttft_p99_ms",
        "kv_peak_live_bytes",
    }
    assert not (tmp_path / "tradeoff.png").exists() and (tmp_path / "routes.png").exists()


def test_evaluate_measures_quality_only(tmp_path: Path) -> None:
    metrics = json.loads((run_in(tmp_path, *TINY, "task=evaluate") / "metrics.json").read_text())
    assert set(metrics) == {"quality", "memory", "baselines"}
    assert set(metrics["baselines"]) == {"all_high", "all_low", "request_level"}
    assert metrics["baselines"]["all_low"]["kl_mean_nats"] > 0


def test_generate_streams_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path, "debug=tiny", "task=generate", "prompt='a, b'", "sampling.max_tokens=6")
    shown = capsys.readouterr().out
    assert "[4 tokens in, 6 out (length)" in shown and "routes: high" in shown
    assert (tmp_path / "completion.txt").read_text() in shown
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert set(metrics) == {"throughput", "latency", "router", "routes", "kv", "memory"}


def test_the_reference_runs_on_the_chosen_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that all quality is measured against ran on ``auto``, whatever ``kernels.backend`` said."""
    references: list[LLM] = []
    measure = compare.measure_quality

    def record(reference: LLM, *arguments: Any) -> QualityReport:
        references.append(reference)
        return measure(reference, *arguments)

    monkeypatch.setattr(compare, "measure_quality", record)
    monkeypatch.setattr(kernels, "_native_or_reference", _auto)
    run_in(tmp_path, *TINY, "task=evaluate", "kernels.backend=reference")
    assert [llm.pool.kernels.name for llm in references] == ["reference"]


def _auto() -> KernelSet:
    raise AssertionError("kernels of the backend auto were asked for")


def test_a_refused_prompt_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        run_in(tmp_path, "debug=tiny", "task=generate", "prompt=''")


@pytest.mark.parametrize("router", ["all_high", "all_low", "layerwise", "random", "request_level"])
def test_the_main_job_runs_with_every_kind_of_router(tmp_path: Path, router: str) -> None:
    changes = ["router.high_frac=0.4"] if router == "request_level" else []
    path = run_in(tmp_path, *TINY, f"router={router}", *changes)
    systems = json.loads((path / "systems.json").read_text())["rows"]
    assert [row["name"] for row in systems if row["chosen"]] == [router]
    assert len(systems) == (4 if router.startswith(("all_", "request")) else 5)


def test_the_main_job_runs_without_a_low_path(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="asks for route 'low'"):
        path = run_in(tmp_path, *TINY, "executor=full")
    metrics = json.loads((path / "metrics.json").read_text())
    assert set(metrics["baselines"]) == {"all_high", "static_batch"}
    assert metrics["routes"]["low"]["degraded_frac"] == 1.0
    assert metrics["routes"]["low"]["token_frac"] == 0.0
    assert "no low path" in (path / "table.md").read_text()


@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
@example("Why, oh why? (a, b) [c] {d: e} = f")
@example("It's 5 o'clock \\")
@example("a\\'b")
@example("first line\nsecond line")
@example("\"quoted\" and 'quoted'")
@example("${seed}")
def test_any_prompt_reaches_the_model_as_typed(text: str) -> None:
    [argument] = quote_prompt([f"prompt={text}"])
    override = OverridesParser.create().parse_override(argument)
    if text[0] in "'\"" and text[-1] == text[0] and len(text) > 1:
        return  # already quoted for Hydra
    assert override.value() == text


def test_other_arguments_and_quoted_prompts_are_left_alone() -> None:
    arguments = ["run.py", "router=rule", "prompt='a, b'", 'prompt="x"', "-m", "prompts=1"]
    assert quote_prompt(arguments) == arguments
