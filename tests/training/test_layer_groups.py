"""Groups of layers of like need: how they are found in labels, stored with their thresholds, and refused.

N tokens, L layers.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tasks.jobs import run_in
from tests.training.router_sets import FACTS, TABLE, window_rows
from tokenrouter.features import sequence_batch
from tokenrouter.routers import LinearRouter, MLPRouter, TreesRouter
from tokenrouter.routers.artifact import Kind, read_artifact, write_artifact
from tokenrouter.routers.learned import LearnedRouter
from tokenrouter.training.export import checked_groups, make_artifact
from tokenrouter.training.layer_groups import group_layers, layer_need
from tokenrouter.training.losses import rank_quality
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.storage import LabelStore
from tokenrouter.training.train import TrainOptions, train
from tokenrouter.types import Phase

NEED_L = torch.tensor([3.0, 1.0, 0.1, 1.2, 0.1, 0.6])
LAYERS = [f"layer_{layer}" for layer in range(6)]


def write_labels(path: Path, *, after_layer: int = 0) -> Path:
    """Windows whose tokens need what an id says, noisily, times what a layer needs; the first one all layers alike."""
    store = LabelStore(path)
    store.open(FACTS | {"label_columns": LAYERS, "after_layer": after_layer})
    for split, count in (("train", 30), ("valid", 5)):
        for number in range(count):
            rows = window_rows(number, split)
            draw = torch.Generator().manual_seed(number)
            need_N = 1.0 + (rows.columns["token_id"] % 10 == 1) * 9.0
            label_NL = need_N[:, None] * NEED_L
            label_NL[0] = 300.0
            label_NL = label_NL * torch.empty(128, 6).exponential_(generator=draw)
            store.write(f"{split}-drawn-{number:05d}", replace(rows, label_NC=label_NL))
    return store.path


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labels(tmp_path_factory.mktemp("set") / "labels")


def test_need_is_what_layers_need_of_like_tokens() -> None:
    """Guards against a few tokens that need all layers alike, whose labels would hide what layers need."""
    score_N = torch.tensor([0.0, 0.0, math.log(1000.0)])
    label_NL = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1000.0, 1000.0]])
    torch.testing.assert_close(
        layer_need(score_N, label_NL), torch.tensor([14.0, 6.0], dtype=torch.float64) / 10
    )
    silent = layer_need(torch.zeros(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert float(silent[1]) > 0, "a layer without any label has an offset, too"


def test_layers_of_like_need_belong_together() -> None:
    """Guards against groups of neighbours, offsets of other groups, and numbers that begin elsewhere."""
    found = group_layers(NEED_L, 4, first=2)
    assert found.layers == ((2,), (3, 5), (7,), (4, 6))
    expected = [math.log(value) for value in (3.0, 1.1, 0.6, 0.1)]
    assert found.offsets == pytest.approx(expected)
    assert group_layers(NEED_L, 2).layers == ((0, 1, 3, 5), (2, 4))
    for wrong in (1, 7):
        with pytest.raises(ValueError, match=f"{wrong} groups of 6 layers: choose 2 to 6"):
            group_layers(NEED_L, wrong)


@given(
    need=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=7),
    num_groups=st.integers(2, 4),
)
def test_no_other_groups_are_more_alike(need: list[float], num_groups: int) -> None:
    """Guards against a search that stops at the first cut: against all ways to cut the ordered layers."""
    need_L, count = torch.tensor(need, dtype=torch.float64), min(num_groups, len(need))
    found = group_layers(need_L, count)

    def cost(parts: list[Tensor]) -> float:
        return sum(float((part.log() - part.log().mean()).square().sum()) for part in parts)

    ordered_L = need_L.sort(descending=True).values
    cuts = torch.combinations(torch.arange(1, len(need)), count - 1).tolist()
    best = min(cost(list(ordered_L.tensor_split(cut))) for cut in cuts)
    own = cost([need_L[list(group)] for group in found.layers])
    assert own == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "router"), [("mlp", MLPRouter), ("linear", LinearRouter), ("trees", TreesRouter)]
)
def test_the_labels_groups_are_found_and_stored(
    data_path: Path, tmp_path: Path, kind: Kind, router: type[LearnedRouter]
) -> None:
    """Guards against groups by the neediest tokens alone, and thresholds for a share of other work."""
    data = RouterData(str(data_path), batch_size=256)
    options = TrainOptions(kind=kind, max_epochs=15, learning_rate=0.05, id_shrinkage=1.0)
    trained = train(data, options, folder=tmp_path)
    artifact = make_artifact(data, trained, layers=None, about={}, num_groups=4)
    groups = artifact.layer_groups
    assert groups is not None and groups.layers == ((0,), (1, 3), (5,), (2, 4))
    expected = [math.log(value) for value in (3.0, 1.1, 0.6, 0.1)]
    assert groups.offsets[:3] == pytest.approx(expected[:3], abs=0.15)
    assert groups.offsets[3] < -1.5
    assert artifact.about["layer_need"] == pytest.approx(NEED_L.tolist(), abs=0.3)
    by_layer = artifact.about["valid"]["layer_groups"]["0.1"]["captured_frac"]
    tokens_N = trained.score_valid_N[:, None].expand(-1, 6).flatten()
    alike = rank_quality(tokens_N, data.valid.label_NL.flatten(), 0.1).captured_frac
    if kind != "trees":  # whose leaves of 30 first tokens fall short of what these need
        assert by_layer > alike + 0.02, "of the same work"
    path = write_artifact(artifact, tmp_path / "router.json")
    made = router(path=str(path), thresholds="shipped")
    ids = torch.cat([part.ids_N for part in (data.train, data.valid)]).tolist()
    batch = sequence_batch(ids[:128], prompt_len=64, token_types=TABLE)
    inputs = made.extractor(TABLE).extract(batch)
    assert len(made.routes(6).routes) == 5 and len(made.route(inputs).route_T.unique()) >= 3
    for phase in Phase if kind != "trees" else ():  # which have too few different scores
        parts = (data.train, trained.score_train_N), (data.valid, trained.score_valid_N)
        score_N = torch.cat([score_N[part.phase_N == phase] for part, score_N in parts])
        is_high_NL = score_N[:, None] + torch.tensor(groups.layer_offsets) >= made.thresholds[phase]
        assert float(is_high_NL.float().mean()) == pytest.approx(0.1, abs=0.005), "of the work"


def test_a_job_trains_with_groups_and_without(data_path: Path, tmp_path: Path) -> None:
    """Guards against an option that never arrives."""
    few = ("trainer.features=[position]", "trainer.max_epochs=1", "trainer.id_numbers=0")
    job = ("task=train_router", f"train.data={data_path}", "logger=none", *few)
    sizes = {}
    for name, more in (
        ("auto", ()),
        ("two", ("train.layer_groups=2",)),
        ("none", ("train.layer_groups=null",)),
        ("ranking", ("trainer.loss=ranking",)),
    ):
        folder = run_in(tmp_path / name, *job, *more)
        groups = read_artifact(folder / "router.json", "mlp").layer_groups
        sizes[name] = groups and len(groups.layers)
        summary = json.loads((folder / "trained.json").read_text())
        valid = summary["valid"]
        texts = {name for name in valid if name != "all" and "layer_groups" not in name}
        by_layer = {name for name in valid if "layer_groups" in name}
        of_texts = {"layer_groups", *(f"layer_groups_{text}" for text in texts)}
        assert texts and by_layer == (set() if groups is None else of_texts)
    assert sizes == {"auto": 4, "two": 2, "none": None, "ranking": None}


def test_what_groups_do_not_go_with_is_refused(data_path: Path, tmp_path: Path) -> None:
    """Guards against groups without labels to find them by, and offsets that are added to another scale."""
    regression = TrainOptions(kind="mlp")
    data, some = RouterData(str(data_path)), RouterData(str(data_path), layers=[1, 2])
    with pytest.raises(ValueError, match=r"layer_groups=3: a label of each layer.*null"):
        checked_groups(3, some, regression)
    with pytest.raises(ValueError, match=r"trainer.loss=ranking is no logarithm.*null"):
        checked_groups(3, data, TrainOptions(kind="mlp", loss="ranking"))
    with pytest.raises(ValueError, match="layer_groups=7: there are 6 layers"):
        checked_groups(7, data, regression)
    for wrong in (1, 9, 2.0, "many", True):
        with pytest.raises(ValueError, match="must be auto, null or 2 to 8"):
            checked_groups(wrong, data, regression)  # type: ignore[arg-type]
    assert checked_groups("auto", some, regression) is None
    store = LabelStore(tmp_path / "one")
    store.open(FACTS | {"label_columns": ["all_layers"], "label": "own_kl"})
    for split in ("train", "valid"):
        label_N1 = torch.rand(128, 1)
        store.write(f"{split}-drawn-00000", replace(window_rows(0, split), label_NC=label_N1))
    with pytest.raises(ValueError, match="there are 1 of own_kl: collect with labels=fisher"):
        checked_groups(2, RouterData(str(store.path)), regression)


def test_groups_begin_where_the_decision_is(tmp_path: Path) -> None:
    """Guards against a group of layers that have run when the router is asked."""
    data = RouterData(str(write_labels(tmp_path / "late", after_layer=2)))
    options = TrainOptions(kind="linear", max_epochs=3)
    trained = train(data, options, folder=tmp_path)
    artifact = make_artifact(data, trained, layers=None, about={}, num_groups=2)
    assert artifact.layer_groups is not None
    assert artifact.layer_groups.layers == ((3, 5), (2, 4))
