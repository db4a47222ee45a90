"""Routing by known labels, on the text that was labelled and nowhere else."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.routers.wrapping import ids, see
from tokenrouter.routers import Budget, OracleRouter
from tokenrouter.routers.oracle import save_labels

TEXTS = [ids(120, 1), ids(80, 2)]
LABELS = [torch.rand(len(text), 4, generator=torch.Generator().manual_seed(9)) for text in TEXTS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_labels(tmp_path / "labels.safetensors", TEXTS, LABELS, label="fisher")
    return tmp_path / "labels.safetensors"


def test_the_tokens_with_the_largest_labels_go_high(path: Path) -> None:
    """Guards against a label found for another token, and against a share that is not the budget's."""
    router = OracleRouter(str(path), Budget(high_frac=0.2))
    answers = [router.route(see(router, text, 40)) for text in TEXTS]
    label_N = torch.cat([label.sum(1) for label in LABELS])
    assert torch.equal(torch.cat([answer.score_T for answer in answers]), label_N)
    high = torch.cat([answer.route_T for answer in answers]) == 0
    assert int(high.sum()) == 40
    assert label_N[high].min() >= label_N[~high].max()


def test_a_budget_holds_among_equal_labels(tmp_path: Path) -> None:
    """Guards against a threshold that all equal labels reach."""
    path = tmp_path / "labels.safetensors"
    save_labels(path, TEXTS, [torch.zeros(len(text)) for text in TEXTS], label="flat")
    shares = []
    for seed in (0, 1):
        router = OracleRouter(str(path), Budget(high_frac=0.25, seed=seed))
        shares.append(torch.cat([router.route(see(router, text)).route_T for text in TEXTS]))
    assert [int((route_T == 0).sum()) for route_T in shares] == [50, 50]
    assert not torch.equal(*shares), "the seed draws"


def test_unknown_tokens_are_refused(path: Path) -> None:
    """Guards against a nearest label for a token that has none."""
    router = OracleRouter(str(path))
    with pytest.raises(
        ValueError, match=r"no label for 2 of 122 tokens \(the first: id 5 at pos.* 120"
    ):
        router.route(see(router, [*TEXTS[0], 5, 6]))
    with pytest.raises(ValueError, match=r"no label for 79 of 79 .*teacher-forced"):
        router.route(see(router, TEXTS[1][1:]))


def test_the_version_follows_the_labels(path: Path, tmp_path: Path) -> None:
    """Guards against decisions by old labels reused after the file was written anew."""
    before = OracleRouter(str(path)).version
    again = tmp_path / "again.safetensors"
    save_labels(again, TEXTS[::-1], LABELS[::-1], label="fisher")
    assert OracleRouter(str(again)).version == before
    save_labels(path, TEXTS, [label * 2 for label in LABELS], label="fisher")
    assert OracleRouter(str(path)).version != before


@pytest.mark.parametrize(
    ("token_ids", "scores", "message"),
    [
        ([], [], "0 sequences"),
        (TEXTS, LABELS[:1], "2 sequences and 1 tensors"),
        ([[1, 2]], [torch.ones(3)], "sequence 0 has 2 tokens and 3 labels"),
        ([[1]], [torch.tensor([float("nan")])], "sequence 0 has labels that are not finite"),
    ],
)
def test_labels_that_cannot_be_are_not_written(
    tmp_path: Path, token_ids: list[list[int]], scores: list[torch.Tensor], message: str
) -> None:
    """Guards against a file that is wrong only when it is read."""
    with pytest.raises(ValueError, match=message):
        save_labels(tmp_path / "labels.safetensors", token_ids, scores, label="fisher")
    assert not list(tmp_path.iterdir())


def test_a_prefix_of_several_sequences_has_the_mean_of_its_labels(tmp_path: Path) -> None:
    """Guards against windows of text that cannot be labelled since two of them begin with the same word."""
    path = tmp_path / "labels.safetensors"
    texts = [[1, 2], [1, 3], [1, 2, 4]]
    save_labels(path, texts, [torch.ones(2), torch.zeros(2), torch.tensor([2.0, 4, 5])], label="a")
    router = OracleRouter(str(path))
    assert router.route(see(router, texts[2])).score_T.tolist() == [1.0, 2.5, 5.0]
    assert router.route(see(router, texts[1])).score_T.tolist() == [1.0, 0.0]


def test_files_that_hold_no_labels_are_refused(tmp_path: Path, path: Path) -> None:
    """Guards against a traceback of the file format's library."""
    with pytest.raises(ValueError, match=r"router\.path=.*none\.safetensors cannot be read"):
        OracleRouter(str(tmp_path / "none.safetensors"))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"cut\.safetensors cannot be read"):
        OracleRouter(str(cut))
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(2)}, str(other))
    with pytest.raises(ValueError, match=r"other\.safetensors is no file of labels"):
        OracleRouter(str(other))
    with pytest.raises(ValueError, match=r"set router\.budget\.high_frac"):
        OracleRouter(str(path), Budget())
