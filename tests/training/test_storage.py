"""Guards the data set on disk: whole or not there, never of two kinds, and readable as what it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenrouter.training.storage import LabelStore, WindowRows

ABOUT: dict[str, Any] = {"label": "fisher", "features": ["position", "entropy"], "seed": 0}


def features(count: int = 6) -> torch.Tensor:
    """The second one exists for decode tokens alone."""
    features_NF = torch.arange(2.0 * count).view(count, 2)
    features_NF[:4, 1] = torch.nan
    return features_NF


def rows(count: int = 6, split: str = "train") -> WindowRows:
    return WindowRows(
        text="made_up",
        split=split,
        window=3,
        prompt_len=4,
        columns={
            "document": torch.full((count,), 2),
            "position": torch.arange(count),
            "token_id": torch.arange(count) + 50,
            "phase": (torch.arange(count) >= 4).long(),
            "prefix_hash": torch.arange(count) - (1 << 62),
        },
        features_NF=features(count),
        label_NC=torch.arange(3.0 * count).view(count, 3),
    )


@pytest.fixture
def store(tmp_path: Path) -> LabelStore:
    store = LabelStore(tmp_path / "set")
    store.open(ABOUT)
    return store


def test_what_is_written_is_read(store: LabelStore) -> None:
    """A column in another order or dtype, rows of the wrong split."""
    store.write("train-made_up-00003", rows())
    store.write("valid-made_up-00000", rows(5, "valid"))
    found = store.load("train").with_format("torch")
    assert torch.equal(found["label"][:], rows().label_NC)
    torch.testing.assert_close(found["features"][:], rows().features_NF, equal_nan=True)
    assert found["label"][:].dtype == found["features"][:].dtype == torch.float32
    for name, value_N in rows().columns.items():
        assert torch.equal(found[name][:].long(), value_N), name
    row = store.load("train")[5]
    scalars = {k: row[k] for k in ("text", "split", "window", "prompt_len", "phase")}
    assert list(scalars.values()) == ["made_up", "train", 3, 4, 1]
    schema = store.load().features
    names = ("document", "phase", "prefix_hash")
    assert [schema[name].dtype for name in names] == ["int32", "int8", "int64"]
    assert len(store.load()) == 11 and set(store.load("valid")["split"]) == {"valid"}


def test_rows_that_the_window_does_not_tell_are_left_out(store: LabelStore) -> None:
    """Zeros or NaN as the only labels of a token; horizons that are known must stay."""
    label_NC = rows().label_NC
    label_NC[4, 1:], label_NC[5] = torch.nan, torch.nan
    store.write("train-made_up-00003", replace(rows(), label_NC=label_NC))
    found = store.load().with_format("torch")
    assert found["position"][:].tolist() == [0, 1, 2, 3, 4]
    assert found["label"][4][0] == 12 and found["label"][4][1:].isnan().all()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"features_NF": features().masked_fill(features() == 2, torch.nan)}, "a feature is not"),
        ({"features_NF": features().nan_to_num(0).masked_fill(features() == 9, torch.inf)}, "fini"),
        ({"label_NC": torch.full((6, 3), torch.inf)}, "unknown, negative or infinite"),
        ({"label_NC": torch.full((6, 3), torch.nan)}, "unknown, negative or infinite"),
        ({"label_NC": torch.full((6, 3), -1.0)}, "unknown, negative or infinite"),
    ],
)
def test_what_is_not_finite_is_not_stored(
    store: LabelStore, broken: dict[str, torch.Tensor], message: str
) -> None:
    """A router that learns from NaN; half a window on disk."""
    with pytest.raises(ValueError, match=f"window train-x-00000: .*{message}"):
        store.write("train-x-00000", replace(rows(), **broken))
    assert not list((store.path / "windows").iterdir())


def test_what_was_interrupted_is_made_again(store: LabelStore) -> None:
    """A half-written window that counts as finished."""
    store.write("train-made_up-00003", rows())
    (store.path / "windows" / "train-made_up-00004.partial").mkdir()
    assert store.finished() == {"train-made_up-00003"}
    store.open(ABOUT)
    assert [f.name for f in (store.path / "windows").iterdir()] == ["train-made_up-00003"]


def test_rows_of_another_kind_are_refused(store: LabelStore) -> None:
    """Labels of two executors, feature lists or models in one data set."""
    before = (store.path / "about.json").read_text()
    with pytest.raises(
        ValueError, match=r"features=\['position', 'entropy'\], and this run .*'repeats'"
    ):
        store.open({**ABOUT, "features": ["position", "repeats"]})
    with pytest.raises(ValueError, match=r"executor=None, and this run has executor='int8'"):
        store.open({**ABOUT, "executor": "int8"})
    assert (store.path / "about.json").read_text() == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """A misspelt path that fills somebody's folder."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty and holds no data set of labels"):
        LabelStore(tmp_path).open(ABOUT)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_what_cannot_be_read_says_why(store: LabelStore, tmp_path: Path) -> None:
    """An empty or truncated data set that fails in a library's words."""
    with pytest.raises(ValueError, match=r"no rows of the split 'valid' yet .*task=collect"):
        store.load("valid")
    with pytest.raises(ValueError, match="holds no data set of labels"):
        LabelStore(tmp_path / "elsewhere").load()
    store.write("train-made_up-00003", rows())
    [file] = (store.path / "windows" / "train-made_up-00003").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"train-made_up-00003 is damaged .*: remove it"):
        store.load()
    (store.path / "about.json").write_text("{")
    with pytest.raises(ValueError, match=r"about\.json is damaged"):
        store.load()
    (store.path / "about.json").write_text(json.dumps({"format_version": 99}))
    with pytest.raises(ValueError, match="no data set of format 1"):
        store.load()
