"""Numbers per id: what they add to a score, at what cost, and which files are refused. T tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.routers.trained import drawn_artifact, see, with_id_numbers
from tokenrouter.routers import MLPRouter
from tokenrouter.routers.artifact import Artifact, read_artifact, write_artifact
from tokenrouter.routers.id_numbers import NAMES

IDS = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(0)).tolist()


def router_of(artifact: Artifact, tmp_path: Path) -> MLPRouter:
    return MLPRouter(path=str(write_artifact(artifact, tmp_path / "router")))


def test_the_score_is_a_plain_sum(tmp_path: Path) -> None:
    """Guards against an id that is taken for the one before, a shifted row, and a last id before the first token."""
    artifact = with_id_numbers(drawn_artifact())
    t = artifact.tensors
    router = router_of(artifact, tmp_path)
    inputs = see(router, IDS, prompt_len=200)
    score_T = router.score(inputs)
    for index in (0, 1, 3, 4, 50, 199, 200, 399):
        position, kind, _ = inputs.values_TF[index].tolist()
        bin_row = 0 if position < 1 else 1 if position < 4 else 2
        id_row = 12 + {4: 0, 9: 1, 28: 2}.get(IDS[index], 3)
        units = t["table"][[bin_row, 3 + int(kind), 11, id_row]].sum(0)
        units = units + t["id_codes"][IDS[index]].float() @ t["id_weights"]
        if index:
            units = units + t["previous_codes"][IDS[index - 1]].float() @ t["previous_weights"]
        phase = int(inputs.phase_T[index])
        expected = units[5 + phase] + units[:5].relu() @ t["head"][phase]
        torch.testing.assert_close(score_T[index], expected)


def test_ids_beyond_the_numbers_add_nothing(tmp_path: Path) -> None:
    """Guards against an index out of range, and against another id's numbers."""
    artifact = with_id_numbers(drawn_artifact())
    few = {
        name: tensor[:30] if name.endswith("_codes") else tensor
        for name, tensor in artifact.tensors.items()
    }
    zeroed = {
        name: torch.cat([few[name], torch.zeros_like(tensor[30:])])
        if name.endswith("_codes")
        else tensor
        for name, tensor in artifact.tensors.items()
    }
    short = router_of(replace(artifact, tensors=few), tmp_path / "short")
    full = router_of(replace(artifact, tensors=zeroed), tmp_path / "full")
    inputs = see(short, IDS)
    torch.testing.assert_close(short.score(inputs), full.score(inputs))


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


def test_the_cost_is_one_pass(tmp_path: Path) -> None:
    """Guards against a loop over tokens, and against numbers that are multiplied out again for every step."""
    router = router_of(with_id_numbers(drawn_artifact()), tmp_path)
    plain = router_of(drawn_artifact(), tmp_path / "plain")
    counts = {}
    for name, one in (("numbers", router), ("plain", plain)):
        for length in (2, 400):
            inputs = see(one, IDS[:length])
            with Count() as count:
                one.score(inputs)
            counts[name, length] = count.total
    assert counts["numbers", 2] == counts["numbers", 400]
    assert counts["numbers", 400] - counts["plain", 400] <= 16


def test_scores_do_not_depend_on_the_company(tmp_path: Path) -> None:
    """Guards against a matrix product, whose sums change their order with the number of tokens."""
    router = router_of(with_id_numbers(drawn_artifact()), tmp_path)
    whole_T = router.score(see(router, IDS))
    for length in (1, 2, 3, 7, 16, 33):
        assert torch.equal(router.score(see(router, IDS[:length])), whole_T[:length])


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    """Guards against codes that come back as floats, and a version that does not follow them."""
    artifact = with_id_numbers(drawn_artifact())
    read = read_artifact(write_artifact(artifact, tmp_path / "router"), "mlp")
    assert read.version == artifact.version != with_id_numbers(drawn_artifact(), seed=1).version
    for name in NAMES:
        assert read.tensors[name].dtype == artifact.tensors[name].dtype
        assert torch.equal(read.tensors[name], artifact.tensors[name])


def spoilt(artifact: Artifact, name: str, tensor: torch.Tensor | None) -> Artifact:
    tensors = {k: v for k, v in artifact.tensors.items() if k != name}
    return replace(artifact, tensors=tensors if tensor is None else {**tensors, name: tensor})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("id_weights", None, "tensor id_weights is missing"),
        ("id_codes", torch.zeros(60, 3), r"torch.float32 \[60, 3\].*should be torch.int8"),
        ("previous_codes", torch.zeros(59, 2, dtype=torch.int8), r"should be torch.int8 \[60, 2\]"),
        ("id_weights", torch.zeros(3, 6), r"\[3, 6\] and should be .* \[3, 7\]"),
        ("previous_weights", torch.full((2, 7), torch.nan), "previous_weights holds values that"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    """Guards against a router that decides by numbers that are half there or mean something else."""
    path = write_artifact(
        spoilt(with_id_numbers(drawn_artifact()), name, tensor), tmp_path / "router"
    )
    with pytest.raises(ValueError, match=message):
        read_artifact(path, "mlp")


def test_the_id_before_must_be_among_the_features(tmp_path: Path) -> None:
    artifact = with_id_numbers(drawn_artifact())
    names = (*artifact.bins.names[:-1], "id_bucket")
    path = write_artifact(
        replace(artifact, bins=replace(artifact.bins, names=names)), tmp_path / "router"
    )
    with pytest.raises(ValueError, match="numbers of the id before need the feature previous_id"):
        read_artifact(path, "mlp")
