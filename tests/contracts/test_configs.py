"""Guards against configs that no longer compose, resolve or build. Files are found by listing."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tokenrouter import EngineOptions
from tokenrouter.evaluation.quality import QualitySettings
from tokenrouter.executors import PoolSpec
from tokenrouter.kvcache.retention import RetentionOptions
from tokenrouter.routers import Router
from tokenrouter.routers.oracle import save_labels
from tokenrouter.tasks import build

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = {
    path.name: sorted(f.stem for f in path.glob("*.yaml"))
    for path in CONF.iterdir()
    if path.is_dir()
}
CHOICES = [(group, name) for group, names in sorted(GROUPS.items()) for name in names]
NEEDED = {
    "hf": ["model.name=some/model"],
    "oracle": ["router.path=some/file"],
    "train_retention": ["train.data=some/folder"],
    "train_router": ["train.data=some/folder"],
}
TASK_OF = {"labels": "collect", "trainer": "train_router"}
"""Groups that one task has, and the others do not."""


def _compose(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def _choices(group: str) -> list[str]:
    assert GROUPS[group], f"conf/{group} is empty"
    return GROUPS[group]


@pytest.mark.parametrize(("group", "name"), CHOICES, ids=lambda value: str(value))
def test_every_config_composes_and_resolves(
    group: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENROUTER_DATA_DIR", raising=False)
    task = TASK_OF.get(group)
    more = [*NEEDED.get(name, []), *NEEDED.get(task or "", [])]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(
            "config",
            overrides=[*([f"task={task}"] if task else []), f"{group}={name}", *more],
            return_hydra_config=True,
        )
    parts = {key: value for key, value in cfg.items() if key != "hydra"}
    for part in parts.values():
        if OmegaConf.is_config(part):
            OmegaConf.to_container(part, resolve=True, throw_on_missing=True)
    assert group in ("experiment", "hparams_search", "debug", "hydra") or parts[group] is not None


def test_every_line_fits_the_width_of_a_page() -> None:
    """A comment that stands beyond the edge, where nobody reads it."""
    wide = [
        f"{path.relative_to(CONF)}:{number}"
        for path in sorted(CONF.rglob("*.yaml"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert not wide


@pytest.mark.parametrize("name", _choices("task"))
def test_every_task_is_a_function(name: str) -> None:
    assert callable(instantiate(_compose(f"task={name}").task))


@pytest.mark.parametrize("name", _choices("router"))
def test_every_router_builds_and_is_called_like_its_file(name: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.safetensors"
    save_labels(labels, [[1, 2]], [torch.ones(2)], label="fisher")
    needed = [f"router.path={labels}"] if name == "oracle" else []
    router = instantiate(_compose(f"router={name}", *needed).router)
    assert isinstance(router, Router) and router.name == name


@pytest.mark.parametrize("name", _choices("executor"))
def test_every_executor_pool_has_a_high_path(name: str) -> None:
    spec = instantiate(_compose(f"executor={name}").executor)
    assert isinstance(spec, PoolSpec) and callable(spec.high)


@pytest.mark.parametrize("name", _choices("scheduler"))
def test_every_scheduler_reaches_the_engine_key_by_key(name: str) -> None:
    cfg = _compose(f"scheduler={name}")
    options = build.engine_options(cfg)
    assert options.scheduler == cfg.scheduler.policy == name
    known = {field.name for field in fields(EngineOptions)} | {"policy"}
    assert {str(key) for key in cfg.scheduler} <= known


@pytest.mark.parametrize("name", _choices("kvcache"))
def test_every_retention_policy_reaches_the_engine(name: str) -> None:
    """A policy called otherwise than its file, or an option that its config leaves out of sight."""
    cfg = _compose(f"kvcache={name}")
    options = build.engine_options(cfg)
    assert options.kv_cache_dtype == cfg.kvcache.dtype
    retention = options.retention
    if cfg.kvcache.retention is None:
        assert retention is None and name in ("full", "int8")
        return
    assert retention is not None and retention.policy.name == name
    policy, options = dict(cfg.kvcache.retention.policy), dict(cfg.kvcache.retention)
    assert set(policy) - {"_target_"} == {
        f.name
        for f in fields(retention.policy)
        if f.init  # type: ignore[arg-type]
    }
    assert set(options) - {"_target_", "_convert_", "policy"} | {"policy"} == {
        f.name for f in fields(RetentionOptions)
    }


def test_the_default_config_is_the_librarys_default() -> None:
    assert build.engine_options(_compose()) == EngineOptions()


@pytest.mark.parametrize("name", _choices("data"))
def test_every_text_has_a_name(name: str) -> None:
    assert instantiate(_compose(f"data={name}").data).name == name


@pytest.mark.parametrize("name", _choices("evaluation"))
def test_every_evaluation_is_possible(name: str) -> None:
    cfg = _compose(f"evaluation={name}").evaluation
    settings = QualitySettings(
        window_tokens=cfg.window_tokens,
        num_windows=cfg.num_windows,
        decode_tokens=cfg.decode_tokens,
        decode_windows=cfg.decode_windows,
    )
    assert settings.decodes and cfg.num_repeats >= 1


def test_the_main_job_is_what_the_readme_says() -> None:
    cfg = _compose()
    assert cfg.task._target_ == "tokenrouter.tasks.tradeoff.run"
    assert cfg.router._target_.endswith("RuleRouter") and cfg.executor.low is not None
    assert cfg.evaluation.window_tokens == 2048 and cfg.logger.mode == "offline"
    assert cfg.workload.prompt_lengths == [20, 30, 50, 80, 120, 200, 500, 1000] * 2


def test_the_run_seed_reaches_every_part_that_draws() -> None:
    cfg = _compose("seed=7", "router=random")
    assert cfg.router.seed == cfg.workload.seed == build.engine_options(cfg).seed == 7


def test_a_budget_is_one_override() -> None:
    router = instantiate(_compose("router.budget.high_frac=0.1").router)
    assert router.needs_calibration and router.budget.high_frac == 0.1
