"""Training, its checkpoints, and what is exported: on a data set whose needy tokens are known."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.training.router_sets import NEEDY_ID, TABLE, need, write_set
from tokenrouter.features import sequence_batch
from tokenrouter.routers import Budget, LinearRouter, MLPRouter, TreesRouter
from tokenrouter.routers.artifact import Kind, read_artifact, write_artifact
from tokenrouter.routers.learned import LearnedRouter
from tokenrouter.routers.wrapper import concat
from tokenrouter.training.export import make_artifact
from tokenrouter.training.losses import mean_gain
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.stopping import load_checkpoint
from tokenrouter.training.train import Trained, TrainOptions, _module, train

ROUTERS: dict[Kind, type[LearnedRouter]] = {
    "mlp": MLPRouter,
    "linear": LinearRouter,
    "trees": TreesRouter,
}
MINIMUM = 0.7  # of the gain that knowing the noisy labels would give; knowing what is to be learned gives about 0.8


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set") / "labels")


def options(kind: Kind, **more: object) -> TrainOptions:
    few = {"max_epochs": 60, "patience": 20, "learning_rate": 0.1, "shrinkage": 1.0}
    if kind != "trees":
        few = {"max_epochs": 25, "batch_size": 256, "learning_rate": 0.05, "id_shrinkage": 1.0}
    return TrainOptions(kind=kind, **(few | more))  # type: ignore[arg-type]


def run(path: Path, folder: Path, kind: Kind, **more: object) -> tuple[RouterData, Trained]:
    data = RouterData(str(path), batch_size=256)
    return data, train(data, options(kind, **more), folder=folder)


@pytest.mark.parametrize("kind", ROUTERS)
def test_every_kind_learns_and_routes_as_it_was_trained(
    data_path: Path, tmp_path: Path, kind: Kind
) -> None:
    """Guards against features in another order, other bins or another head where it routes than where it learned."""
    data, trained = run(data_path, tmp_path, kind)
    gain = mean_gain(trained.score_valid_N, data.valid.label_N)
    assert gain > MINIMUM
    artifact = make_artifact(data, trained, layers=None, about={})
    assert artifact.about["valid"]["all"]["0.1"]["gain_frac"] > MINIMUM
    path = write_artifact(artifact, tmp_path / "router.json")
    router = ROUTERS[kind](path=str(path), budget=Budget(high_frac=0.1), thresholds="shipped")
    extractor = router.extractor(TABLE)
    parts, known = [], []
    for seed in range(5):
        ids = torch.randint(0, 60, (128,), generator=torch.Generator().manual_seed(seed))
        batch = sequence_batch(ids.tolist(), prompt_len=64, row=seed, token_types=TABLE)
        parts.append(extractor.extract(batch))
        known.append(need(ids, torch.arange(128.0)))
    inputs = concat(parts)
    score_T = router.score(inputs)
    assert torch.corrcoef(torch.stack([score_T, torch.cat(known).log()]))[0, 1] > 0.85
    high_frac = float((router.route(inputs).route_T == 0).float().mean())
    assert 0.06 < high_frac < 0.14, "stored thresholds hold on text like the data set's"


def test_an_id_stands_out_by_its_own_row(data_path: Path, tmp_path: Path) -> None:
    """Guards against rows of ids that the shrinkage or a shifted index never lets learn."""
    _, trained = run(data_path, tmp_path, "linear")
    bins = RouterData(str(data_path)).bins
    plain = [8, 18, NEEDY_ID, 38, 48, 58]
    rows = [bins.first_id_row + bins.ids.index(token_id) for token_id in plain]
    column_P = trained.tensors["table"][rows, 0]
    assert plain[int(column_P.argmax())] == NEEDY_ID
    best, second = column_P.topk(2).values
    assert best - second > 0.5


def test_equal_seeds_train_equal_routers(data_path: Path, tmp_path: Path) -> None:
    """Guards against draws that no seed governs."""
    scores = [
        train(
            RouterData(str(data_path), batch_size=256, seed=seed),
            options("mlp", max_epochs=2),
            folder=tmp_path / str(index),
            seed=seed,
        ).score_valid_N
        for index, seed in enumerate((3, 3, 4))
    ]
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])


def test_a_checkpoint_loads_as_plain_tensors_and_by_a_name_that_hydra_takes(
    data_path: Path, tmp_path: Path
) -> None:
    """Guards against a config object in the checkpoint, and against epoch=1.ckpt, which breaks an override."""
    data, trained = run(data_path, tmp_path, "mlp", max_epochs=2)
    [path] = (tmp_path / "checkpoints").glob("*.ckpt")
    assert "=" not in path.name
    torch.load(path, weights_only=True)
    module = _module(data, options("mlp"), seed=9)
    load_checkpoint(module, path)
    torch.testing.assert_close(module.table.detach(), trained.tensors["table"])
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"checkpoint .* cannot be used"):
        load_checkpoint(module, path)


def test_a_checkpoint_of_another_router_is_refused(data_path: Path, tmp_path: Path) -> None:
    """Guards against tables whose rows mean something else."""
    data, _ = run(data_path, tmp_path, "mlp", max_epochs=1)
    [path] = (tmp_path / "checkpoints").glob("*.ckpt")
    with pytest.raises(ValueError, match=r"(?s)cannot be used .*size mismatch.*train again"):
        load_checkpoint(_module(data, options("mlp", hidden=3), seed=0), path)


def test_it_stops_early_and_keeps_the_best_epoch(data_path: Path, tmp_path: Path) -> None:
    """Guards against the last epoch's weights where an earlier one was better, and against patience without effect."""
    logger = CSVLogger(save_dir=tmp_path, name="", version="training")
    data = RouterData(str(data_path), batch_size=256)
    wild = options("mlp", learning_rate=0.5, max_epochs=30, patience=2)
    trained = train(data, wild, folder=tmp_path, loggers=[logger])
    lines = (tmp_path / "training" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("valid/gain_frac")
    gains = [float(cell) for line in lines[1:] if (cell := line.split(",")[column])]
    assert len(gains) < 30 and len(gains) - 1 - gains.index(max(gains)) == 2
    assert mean_gain(trained.score_valid_N, data.valid.label_N) == pytest.approx(max(gains))


def test_fast_dev_run_trains_one_batch_and_writes_no_checkpoint(
    data_path: Path, tmp_path: Path
) -> None:
    _, trained = run(data_path, tmp_path, "mlp", fast_dev_run=True)
    assert trained.score_valid_N.isfinite().all() and not (tmp_path / "checkpoints").exists()
    _, trained = run(data_path, tmp_path, "trees", fast_dev_run=True)
    assert trained.text.count("Tree=") == 1


def test_both_heads_are_trained(data_path: Path, tmp_path: Path) -> None:
    """Guards against a decode head that keeps its first weights, as where the phase is not handed on."""
    _, trained = run(data_path, tmp_path, "mlp", max_epochs=3)
    head_PH = trained.tensors["head"]
    assert not torch.equal(head_PH[0], head_PH[1])


def test_an_exported_router_knows_whom_it_is_for(data_path: Path, tmp_path: Path) -> None:
    data, trained = run(data_path, tmp_path, "linear", max_epochs=1)
    artifact = make_artifact(data, trained, layers=(0, 1), about={"seed": 0})
    read = read_artifact(write_artifact(artifact, tmp_path / "r.json"), "linear")
    assert read.trained_for == artifact.trained_for and read.version == artifact.version
    assert read.trained_for.model_hash == "0123456789abcdef" and read.trained_for.layers == (0, 1)
    assert set(read.thresholds) == {"0.05", "0.1", "0.2"}
    assert set(read.thresholds["0.1"]) == {"prefill", "decode"}
    assert read.about["data"]["label"] == "fisher" and read.about["seed"] == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "forest"}, "trainer.kind='forest'; kinds: mlp, linear, trees"),
        ({"loss": "hinge"}, "trainer.loss='hinge'; losses: regression, ranking, bce_top_share"),
        ({"max_epochs": 0}, "trainer.max_epochs=0 must be an integer of at least 1"),
        ({"learning_rate": -1.0}, "trainer.learning_rate=-1.0 must be a number of at least 0"),
        ({"shrinkage": float("nan")}, "trainer.shrinkage=nan"),
        ({"num_leaves": 1}, "trainer.num_leaves=1 must be an integer of at least 2"),
    ],
)
def test_options_out_of_range_are_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**({"kind": "mlp"} | more))  # type: ignore[arg-type]
