"""Routers that learn from some of a data set's sources only, to see how they do on a kind of text they never saw."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.router_sets import FACTS, window_rows
from tokenrouter.training.entropies import FOLDER, collect_entropies, load_entropies
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.storage import LabelStore, text_of
from tokenrouter.training.windows import Window


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Rows of two sources, one of whose names holds a dash."""
    store = LabelStore(tmp_path / "labels")
    store.open(FACTS | {"texts": {"prose": "a", "code-old": "b"}})
    for number, text in enumerate(("prose", "code-old", "prose")):
        for split in ("train", "valid"):
            rows = replace(window_rows(number, split), text=text)
            store.write(f"{split}-{text}-{number:05d}", rows)
    return store.path


def test_only_named_sources_are_learned_from(path: Path) -> None:
    """Guards against rows, and facts in the router's file, of a text that was left out."""
    whole, some = RouterData(str(path)), RouterData(str(path), texts=["code-old"])
    for part, all_parts in ((some.train, whole.train), (some.valid, whole.valid)):
        assert set(part.texts) == {"code-old"} and set(all_parts.texts) == {"prose", "code-old"}
        assert 0 < len(part) < len(all_parts)
    assert some.facts["texts"] == {"code-old": "b"} and len(whole.facts["texts"]) == 2
    assert text_of("train-code-old-00001") == "code-old"


def test_a_source_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="no rows of poems; it has: code-old, prose"):
        RouterData(str(path), texts=["prose", "poems"])


def test_entropies_of_other_sources_are_left_out(
    tmp_path: Path, decoder: DifferentiableDecoder
) -> None:
    """Guards against a router that knows the ids of a text it must not have seen."""
    windows = [
        Window(
            text=text,
            split="train",
            number=0,
            ids_N=torch.arange(start, start + 8),
            document_N=torch.zeros(8, dtype=torch.int64),
            prompt_len=8,
            seed=0,
        )
        for text, start in (("prose", 1), ("code-old", 20))
    ]
    collect_entropies(windows, folder=tmp_path, decoder=decoder, on_done=lambda *_: None)
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    assert load_entropies(tmp_path, ()).ids_N.numel() == 16
    found = load_entropies(tmp_path, (), ["code-old"])
    assert found.ids_N.tolist() == list(range(20, 28))
