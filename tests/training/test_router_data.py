"""The data module: what is learned from, and what is refused."""

from pathlib import Path

import datasets
import pytest
import torch

from tests.training.router_sets import FACTS, FEATURES, window_rows, write_set
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.storage import LabelStore


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set") / "labels")


def test_layers_are_added_up(data_path: Path) -> None:
    """Guards against a label of another layer subset than the one asked for."""
    both = RouterData(str(data_path)).train.label_N
    parts = [RouterData(str(data_path), layers=[layer]).train.label_N for layer in (0, 1)]
    torch.testing.assert_close(both, parts[0] + parts[1])


def test_splits_are_by_document(data_path: Path) -> None:
    """Guards against validation on the training documents."""
    data = RouterData(str(data_path))
    assert len(data.train) == 40 * 128 and len(data.valid) == 6 * 128


def test_batches_are_shuffled_by_the_seed_and_hold_every_token_once(data_path: Path) -> None:
    """Guards against a run that cannot be repeated, and against tokens that are dropped."""

    def order(seed: int) -> torch.Tensor:
        data = RouterData(str(data_path), batch_size=100, seed=seed)
        return torch.cat([label_B for *_, label_B in data.train_dataloader()])

    assert torch.equal(order(1), order(1)) and not torch.equal(order(1), order(2))
    data = RouterData(str(data_path))
    expected_N = (data.train.label_N / data.mean_label).flatten().sort().values
    torch.testing.assert_close(order(1).flatten().sort().values, expected_N)


def test_bins_fit_the_kind_of_feature(data_path: Path) -> None:
    """Guards against token types that share a bin, and positions in equal steps, where the first ones matter."""
    bins = RouterData(str(data_path), min_id_count=5).bins
    edges = dict(zip(bins.names, bins.edges, strict=True))
    assert edges["token_type"] == tuple(i + 0.5 for i in range(7))
    assert edges["position"][:4] == (0.5, 1.5, 2.5, 3.5)
    assert len(edges["position"]) < 20
    assert edges["log_frequency"] == tuple(sorted(edges["log_frequency"]))
    assert len(bins.ids) == 60


def test_features_can_be_chosen(data_path: Path) -> None:
    """Guards against columns that are taken in the order of the data set."""
    data = RouterData(str(data_path), features=["repeats", "position"])
    whole = RouterData(str(data_path))
    assert torch.equal(data.train.values_NF, whole.train.values_NF[:, [4, 0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["entropy"]}, "has no feature entropy; it has: position, .*trainer.features"),
        ({"layers": [7]}, r"train.layers=\[7\]: the label fisher has columns layer_0 to layer_1"),
        ({"layers": []}, r"train.layers=\[\]"),
    ],
)
def test_what_the_data_set_lacks_is_named(data_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterData(str(data_path), **options)


def test_no_data_set_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    """Guards against training on nothing."""
    with pytest.raises(ValueError, match=r"holds no data set of labels.*task=collect"):
        RouterData(str(tmp_path / "nowhere"))
    LabelStore(tmp_path / "empty").open(FACTS)
    with pytest.raises(ValueError, match=r"no rows of the split 'train'"):
        RouterData(str(tmp_path / "empty"))


def test_retention_labels_are_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path, num_train=1, num_valid=1, kind="retention", label="future_attention")
    with pytest.raises(ValueError, match=r"holds retention labels .future_attention."):
        RouterData(str(path))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("features", float("nan"), "feature position is not finite for 2048 of 2048 train tokens"),
        ("label", float("nan"), "a train label is negative or not finite"),
        ("label", 1.0, "train tokens all have the same label, so there is nothing to learn"),
    ],
)
def test_bad_values_are_refused(
    tmp_path: Path, column: str, value: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against NaN weights, and against a router of one class that routes at random."""
    path = write_set(tmp_path, num_train=16, num_valid=2)
    width = {"features": len(FEATURES), "label": 2}[column]
    load = LabelStore.load

    def spoilt(store: LabelStore, split: str, texts: None) -> datasets.Dataset:
        rows = load(store, split, texts)
        cells = [[value] * width] * len(rows)
        return rows.remove_columns(column).add_column(column, cells, feature=rows.features[column])

    monkeypatch.setattr(LabelStore, "load", spoilt)
    with pytest.raises(ValueError, match=message):
        RouterData(str(path))


def test_the_drawn_set_is_what_collect_stores(data_path: Path) -> None:
    """Guards these tests: columns of other names would make them pass on data that nobody writes."""
    rows = LabelStore(data_path).load("train")
    assert set(rows.column_names) >= {"features", "label", "token_id", "phase", "text", "document"}
    assert rows[0]["label"] == pytest.approx(window_rows(0, "train").label_NC[0].tolist())
