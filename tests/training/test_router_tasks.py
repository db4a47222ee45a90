"""task=train_router and task=calibrate from their configs, and what they refuse."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import InstantiationException

from tests.tasks.jobs import compose_config, run_in, wandb_exit_codes
from tests.training.router_sets import write_set
from tokenrouter.models import tiny_random
from tokenrouter.routers import Budget, LinearRouter
from tokenrouter.routers.artifact import read_artifact, write_artifact
from tokenrouter.tasks.calibrate import CalibrateOptions, least_share
from tokenrouter.tasks.common import root_cause
from tokenrouter.training.export import make_artifact
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.train import TrainOptions, train

FEW = (
    "trainer.features=[position,token_type]",
    "trainer.max_epochs=3",
    "trainer.id_numbers=0",
)
TINY = ("debug=tiny", "logger=none", "evaluation.num_windows=2")


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set as if it were of the tiny model."""
    model = tiny_random("llama")
    return write_set(
        tmp_path_factory.mktemp("set") / "labels", model=model.name, model_hash=model.model_hash
    )


@pytest.fixture(scope="module")
def router_path(data_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router for the tiny model."""
    folder = tmp_path_factory.mktemp("router")
    data = RouterData(str(data_path), features=["position", "token_type"], min_id_count=10**6)
    options = TrainOptions(kind="linear", max_epochs=3)
    trained = train(data, options, folder=folder)
    artifact = make_artifact(data, trained, layers=None, about={})
    return write_artifact(artifact, folder / "router.json")


def refused(path: Path, *overrides: str) -> str:
    """What a job says when it refuses."""
    with pytest.raises((ValueError, InstantiationException)) as error:
        run_in(path, *overrides)
    return str(root_cause(error.value))


def test_a_router_is_trained_tracked_and_exported(data_path: Path, tmp_path: Path) -> None:
    """Guards against a run that leaves no curve, is not closed at the tracker, or exports what cannot be read."""
    folder = run_in(
        tmp_path / "run",
        "task=train_router",
        f"train.data={data_path}",
        "train.layers=[1]",
        "logger=wandb",
        *FEW,
    )
    artifact = read_artifact(folder / "router.json", "mlp")
    assert artifact.trained_for.layers == (1,)
    assert artifact.about["trainer"]["max_epochs"] == 3
    rows = (folder / "training" / "metrics.csv").read_text().splitlines()
    assert {"train/loss", "valid/loss", "valid/gain_frac"} <= set(rows[0].split(","))
    assert wandb_exit_codes(folder) == [0]
    summary = json.loads((folder / "trained.json").read_text())
    assert summary["version"] == artifact.version and "0.1" in summary["valid"]["all"]
    assert json.loads((folder / "provenance.json").read_text())["model"] == "tiny_llama"


WITH_IDS = ("trainer.features=[position,previous_id]", "trainer.max_epochs=2", "logger=none")


def test_numbers_of_ids_come_from_the_model_and_the_entropies(tmp_path: Path) -> None:
    """Guards against the documented commands, which no other test runs with their own options."""
    output = f"paths.output_dir={tmp_path}"
    sizes = "collect.window_tokens=64 collect.num_tokens=512 collect.entropy_tokens=256".split()
    folder = run_in(tmp_path / "c", "task=collect", "labels=own_kl", *TINY[:2], output, *sizes)
    data = json.loads((folder / "collected.json").read_text())["path"]
    more = (f"train.data={data}", *WITH_IDS)
    folder = run_in(tmp_path / "run", "task=train_router", "debug=tiny", *more)
    tensors = read_artifact(folder / "router.json", "mlp").tensors
    assert tensors["id_codes"].shape[1] == 6 and tensors["previous_codes"].shape[1] == 4
    assert tensors["head"].shape[1] == 4 * 16
    said = refused(tmp_path / "other", "task=train_router", "debug=tiny", "model.name=qwen2", *more)
    assert "holds labels of the model tiny_llama" in said and "trainer.id_numbers=0" in said


def test_a_data_set_without_entropies_is_refused(data_path: Path, tmp_path: Path) -> None:
    """Guards against numbers of zeros, which look trained."""
    more = (f"train.data={data_path}", *WITH_IDS)
    said = refused(tmp_path / "run", "task=train_router", "debug=tiny", *more)
    assert "holds no entropies" in said and "trainer.id_numbers=0" in said


def test_layers_that_are_not_there_write_nothing(data_path: Path, tmp_path: Path) -> None:
    said = refused(
        tmp_path / "run",
        "task=train_router",
        f"train.data={data_path}",
        "train.layers=[5]",
        f"train.path={tmp_path}/router.json",
        "logger=none",
        *FEW,
    )
    assert "train.layers=[5]" in said and not (tmp_path / "router.json").exists()


def test_a_data_set_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.data has no value yet; add to the command"):
        run_in(tmp_path / "run", "task=train_router")


@pytest.mark.parametrize("kind", ["mlp", "linear", "trees"])
def test_every_trainer_config_is_one(kind: str) -> None:
    """Guards against a config whose kind is not its name."""
    cfg = compose_config("task=train_router", f"trainer={kind}", "train.data=x")
    assert cfg.trainer.kind == kind
    assert cfg.trainer._target_ == "tokenrouter.training.train.TrainOptions"


def test_a_share_is_calibrated_and_judged_on_other_text(router_path: Path, tmp_path: Path) -> None:
    """Guards against a share reported where it was set, and against a file that router.thresholds does not take."""
    folder = run_in(
        tmp_path / "run",
        "task=calibrate",
        "router=linear",
        f"router.path={router_path}",
        "calibrate.high_frac=0.2",
        *TINY,
    )
    about = json.loads((folder / "calibrated.json").read_text())
    achieved = about["achieved_high_frac"]
    for share in achieved["calibration"].values():
        assert share == pytest.approx(0.2, abs=0.05)
    assert achieved["evaluation"] != achieved["calibration"]
    assert about["asked"] == {"high_frac": 0.2, "kl_nats": None}
    router = LinearRouter(path=str(router_path), thresholds=str(folder / "thresholds.json"))
    assert len(router.thresholds) == len(achieved["calibration"])
    assert not router.needs_calibration


def test_a_share_of_the_work_is_calibrated(data_path: Path, tmp_path: Path) -> None:
    """Guards against tokens that count as low where some of their layers are high."""
    data = RouterData(
        str(data_path),
        features=["position", "token_type"],
        min_id_count=10**6,
    )
    trained = train(data, TrainOptions(kind="linear", max_epochs=2), folder=tmp_path)
    path = write_artifact(
        make_artifact(data, trained, layers=None, about={}, num_groups=2), tmp_path / "router.json"
    )
    common = ("task=calibrate", "router=linear", f"router.path={path}", *TINY)
    folder = run_in(tmp_path / "run", *common, "calibrate.high_frac=0.3")
    about = json.loads((folder / "calibrated.json").read_text())
    for share in about["achieved_high_frac"]["calibration"].values():
        assert share == pytest.approx(0.3, abs=0.03)


def test_a_kl_is_calibrated(router_path: Path, tmp_path: Path) -> None:
    """Guards against a KL of another measure than task=evaluate's, and against more high tokens than needed."""
    common = ("task=calibrate", "router=linear", f"router.path={router_path}", *TINY)
    folder = run_in(tmp_path / "all", *common, "calibrate.high_frac=null", "calibrate.kl_nats=1e9")
    about = json.loads((folder / "calibrated.json").read_text())
    assert about["budget_high_frac"] == 0.0
    low = about["kl_mean_nats"]["calibration"]
    folder = run_in(
        tmp_path / "half",
        *common,
        "calibrate.high_frac=null",
        f"calibrate.kl_nats={low / 2}",
        "calibrate.max_steps=3",
    )
    about = json.loads((folder / "calibrated.json").read_text())
    assert 0 < about["budget_high_frac"] < 1
    assert about["kl_mean_nats"]["calibration"] <= low / 2
    assert about["kl_mean_nats"]["evaluation"] > 0


@pytest.mark.parametrize(
    ("kl_of", "target", "expected"),
    [
        (lambda share: 0.1 * (1 - share), 0.2, 0.0),
        (lambda share: 0.1 * (1 - share), 0.05, 0.5),
        (lambda share: 0.1 * (1 - share), 0.03, 0.7),
    ],
)
def test_bisection_finds_the_least_share(
    kl_of: Callable[[float], float], target: float, expected: float
) -> None:
    """Guards against the other end of the last interval, which misses the target."""
    found = least_share(kl_of, target, max_steps=12)
    assert found == pytest.approx(expected, abs=0.02) and kl_of(found) <= target


def test_a_kl_that_all_high_does_not_reach_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_nats=0.001 cannot be reached: all high has 0.01000"):
        least_share(lambda share: 0.02 - 0.01 * share, 0.001, max_steps=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "takes one target"),
        ({"high_frac": 0.1, "kl_nats": 0.1}, "takes one target"),
        ({"high_frac": 1.2}, "calibrate.high_frac=1.2 is outside 0 to 1"),
        ({"kl_nats": -1.0}, "calibrate.kl_nats=-1.0 must be a number above 0"),
        ({"high_frac": 0.1, "num_windows": 0}, "calibrate.num_windows must be"),
    ],
)
def test_targets_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CalibrateOptions(**options)  # type: ignore[arg-type]


def test_a_router_without_a_score_of_its_own_is_refused(tmp_path: Path) -> None:
    assert "rule is none: set router=mlp" in refused(
        tmp_path, "task=calibrate", "router=rule", *TINY
    )


def test_the_shipped_router_refuses_another_model(tmp_path: Path) -> None:
    """Guards against a default that routes any model by what SmolLM2 needs."""
    said = refused(tmp_path / "run", "router=mlp", "executor=int8", *TINY)
    assert "was trained for the model" in said and "task=train_router" in said


def test_a_router_of_the_model_serves(router_path: Path, tmp_path: Path) -> None:
    """Guards against a trained router that only tests can load."""
    folder = run_in(
        tmp_path / "run",
        "router=linear",
        "executor=int8",
        f"router.path={router_path}",
        "router.budget.high_frac=0.3",
        *TINY,
    )
    shares = json.loads((folder / "metrics.json").read_text())["routes"]
    assert 0.1 < shares["high"]["prefill_token_frac"] < 0.5


def test_a_set_budget_needs_new_thresholds(router_path: Path) -> None:
    """Guards against thresholds of the former share."""
    router = LinearRouter(path=str(router_path), thresholds="shipped")
    router.set_budget(Budget(high_frac=0.4))
    assert router.needs_calibration and router.budget.high_frac == 0.4
