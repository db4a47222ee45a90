"""Training for groups of layers: labels per layer of work, a score per group, one threshold for all.

N tokens, L layers.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tasks.jobs import run_in
from tests.training.router_sets import FACTS, KINDS, NEEDY_ID, TABLE, window_rows
from tokenrouter.features import sequence_batch
from tokenrouter.routers import LinearRouter, MLPRouter
from tokenrouter.routers.artifact import Kind, read_artifact, write_artifact
from tokenrouter.routers.layer_groups import per_layer
from tokenrouter.training.export import make_artifact
from tokenrouter.training.losses import LOSSES, LossName, mean_gain
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.storage import LabelStore
from tokenrouter.training.train import TrainOptions, _module, train
from tokenrouter.types import Phase

GROUPS = ((0, 1), (1, 6))
LAYERS = [f"layer_{layer}" for layer in range(6)]


def need(ids_N: Tensor) -> Tensor:
    """What is to be learned, ``[N, 6]``: newlines need the first layer, one id needs the others."""
    is_newline_N1 = (ids_N % len(KINDS) == 1).float()[:, None]
    is_needy_N1 = (ids_N == NEEDY_ID).float()[:, None]
    return torch.cat([1 + 15 * is_newline_N1, (1 + 7 * is_needy_N1).expand(-1, 5)], 1)


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows whose labels are noisy, in six layers."""
    store = LabelStore(tmp_path_factory.mktemp("set") / "labels")
    store.open(FACTS | {"label_columns": LAYERS})
    for split, count in (("train", 30), ("valid", 5)):
        for number in range(count):
            rows = window_rows(number, split)
            draw = torch.Generator().manual_seed(number)
            noise_NL = torch.empty(128, 6).exponential_(generator=draw)
            label_NL = need(rows.columns["token_id"]) * noise_NL
            store.write(f"{split}-drawn-{number:05d}", replace(rows, label_NC=label_NL))
    return store.path


def grouped(path: Path) -> RouterData:
    return RouterData(str(path), layer_groups=GROUPS, batch_size=256)


def test_a_label_is_the_mean_over_the_groups_layers(data_path: Path) -> None:
    """Guards against sums, by which a group of many layers looks needy whatever it costs to keep it high."""
    data, whole = grouped(data_path), RouterData(str(data_path))
    parts = [RouterData(str(data_path), layers=[layer]).train.label_NG for layer in range(6)]
    torch.testing.assert_close(data.train.label_NG[:, :1], parts[0])
    torch.testing.assert_close(data.train.label_NG[:, 1:], sum(parts[1:], torch.zeros(1)) / 5)
    total_N = per_layer(data.train.label_NG, data.width_G).view(-1, 6).sum(1)
    torch.testing.assert_close(total_N[:, None], whole.train.label_NG)


@pytest.mark.parametrize("name", LOSSES)
def test_a_pair_weighs_by_its_layers(data_path: Path, name: LossName) -> None:
    """Guards against one layer that pulls at the shared weights as much as five: what is repeated weighs more."""
    data = grouped(data_path)
    module = _module(data, TrainOptions(kind="mlp", loss=name), seed=0)
    score_NG = torch.zeros(64, 2, requires_grad=True)
    module._loss(score_NG, torch.ones(64, 2) * torch.arange(64)[:, None]).backward()
    assert score_NG.grad is not None
    first, second = score_NG.grad.abs().sum(0).tolist()
    assert second > 2 * first > 0


@pytest.mark.parametrize(("kind", "router"), [("mlp", MLPRouter), ("linear", LinearRouter)])
def test_each_group_learns_its_own_need(
    data_path: Path, tmp_path: Path, kind: Kind, router: type[MLPRouter]
) -> None:
    """Guards against one score for all groups, groups that change places on export, and a share of other work."""
    data = grouped(data_path)
    options = TrainOptions(kind=kind, max_epochs=15, learning_rate=0.05, id_shrinkage=1.0)
    trained = train(data, options, folder=tmp_path)
    flat = (
        per_layer(x, data.width_G).flatten() for x in (trained.score_valid_NG, data.valid.label_NG)
    )
    assert mean_gain(*flat) > 0.7
    artifact = make_artifact(data, trained, layers=None, about={})
    assert artifact.trained_for.layer_groups == GROUPS
    path = write_artifact(artifact, tmp_path / "router.json")
    made = router(path=str(path), thresholds="shipped")
    ids = torch.randint(0, 60, (1000,), generator=torch.Generator().manual_seed(0))
    batch = sequence_batch(ids.tolist(), prompt_len=500, token_types=TABLE)
    inputs = made.extractor(TABLE).extract(batch)
    score_TG = made.score(inputs)
    for group, needy_T in enumerate((ids % len(KINDS) == 1, ids == NEEDY_ID)):
        others_T = ~needy_T & (score_TG[:, 1 - group] < score_TG[:, 1 - group].quantile(0.8))
        assert score_TG[needy_T, group].median() > score_TG[others_T, group].quantile(0.95)
    for phase in Phase:
        parts = (data.train, trained.score_train_NG), (data.valid, trained.score_valid_NG)
        score_NG = torch.cat([score_NG[part.phase_N == phase] for part, score_NG in parts])
        is_high_N = per_layer(score_NG, data.width_G) >= made.thresholds[phase]
        assert float(is_high_N.float().mean()) == pytest.approx(0.1, abs=0.002), "of the work"


def test_a_job_trains_and_a_group_of_the_model_is_refused_in_words(
    data_path: Path, tmp_path: Path
) -> None:
    """Guards against an option that never arrives, and a router of half of the layers."""
    few = ("trainer.features=[position]", "trainer.max_epochs=1", "trainer.id_numbers=0")
    job = ("task=train_router", f"train.data={data_path}", "logger=none", *few)
    folder = run_in(tmp_path / "a", *job, "train.layer_groups=[[0,1],[1,6]]")
    assert read_artifact(folder / "router.json", "mlp").trained_for.layer_groups == GROUPS
    summary = json.loads((folder / "trained.json").read_text())
    assert "0.1" in summary["valid"]["all"]
    said = r"train\.layer_groups=\[\[0, 1\], \[1, 3\]\] must be ranges .* from layer 0 to 6; null"
    with pytest.raises(ValueError, match=said):
        run_in(tmp_path / "b", *job, "train.layer_groups=[[0,1],[1,3]]")


def test_what_groups_do_not_go_with_is_refused(data_path: Path, tmp_path: Path) -> None:
    """Guards against layers that are left out in silence, and trees that learn the first group alone."""
    with pytest.raises(
        ValueError, match=r"train.layers=\[1\] adds up some layers.*set one to null"
    ):
        RouterData(str(data_path), layers=[1], layer_groups=GROUPS)
    with pytest.raises(ValueError, match=r"trees have one score .*choose trainer=mlp or linear"):
        train(grouped(data_path), TrainOptions(kind="trees"), folder=tmp_path)
    store = LabelStore(tmp_path / "one")
    store.open(FACTS | {"label_columns": ["all_layers"], "label": "own_kl"})
    store.write("train-drawn-00000", replace(window_rows(0, "train"), label_NC=torch.ones(128, 1)))
    with pytest.raises(ValueError, match=r"needs a label per layer, and own_kl has all_layers"):
        RouterData(str(store.path), layer_groups=GROUPS)


def test_groups_begin_where_the_decision_is(tmp_path: Path) -> None:
    """Guards against a group of layers that have run when the router is asked."""
    store = LabelStore(tmp_path)
    store.open(FACTS | {"label_columns": LAYERS, "after_layer": 2})
    for split in ("train", "valid"):
        rows = window_rows(0, split)
        label_NL = need(rows.columns["token_id"])
        store.write(f"{split}-drawn-00000", replace(rows, label_NC=label_NL))
    with pytest.raises(ValueError, match="from layer 2 to 6"):
        RouterData(str(tmp_path), layer_groups=GROUPS)
    data = RouterData(str(tmp_path), layer_groups=((2, 3), (3, 6)))
    expected_N = need(data.train.ids_N)[:, 2]
    torch.testing.assert_close(data.train.label_NG, expected_N[:, None].expand(-1, 2))
