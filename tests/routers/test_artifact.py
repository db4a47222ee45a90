"""What a trained router is stored as: it comes back the same, or is refused in words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.routers.trained import drawn_artifact, trained_for
from tokenrouter.routers import LinearRouter, MLPRouter, TreesRouter
from tokenrouter.routers.artifact import Kind, read_artifact, shipped, write_artifact

KINDS: list[Kind] = ["mlp", "linear", "trees"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_as_it_was(tmp_path: Path, kind: Kind) -> None:
    """Guards against a version or a number that changes on the way, and against an ending that matters."""
    artifact = drawn_artifact(kind)
    path = write_artifact(artifact, tmp_path / "deep" / "router")
    for given in (path, path.with_suffix(""), path.with_suffix(".safetensors")):
        read = read_artifact(given, kind)
        assert read.version == artifact.version
        assert (read.bins, read.trained_for, read.text) == (
            artifact.bins,
            artifact.trained_for,
            artifact.text,
        )
        for name, tensor in artifact.tensors.items():
            assert torch.equal(read.tensors[name], tensor)
    assert sorted(f.suffix for f in path.parent.iterdir()) == sorted(
        {".json", ".txt" if kind == "trees" else ".safetensors"}
    )


def test_the_version_follows_all_that_a_decision_depends_on() -> None:
    """Guards against decisions of one router that are taken for another's."""
    one = drawn_artifact()
    others = [
        drawn_artifact(seed=1),
        drawn_artifact("linear"),
        trained_for(one, executor="int8_smooth"),
        trained_for(one, model_hash="b" * 16),
        replace(one, bins=replace(one.bins, ids=(4, 9, 29))),
        replace(one, thresholds={"0.1": {"prefill": 1.0, "decode": 2.5}}),
    ]
    assert len({a.version for a in (one, *others)}) == 1 + len(others)
    assert replace(one, about={"note": "other"}).version == one.version


def change(key: str, value: object) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        header = json.loads(path.read_text())
        path.write_text(json.dumps(header | {key: value}))

    return apply


def drop(key: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        header = json.loads(path.read_text())
        del header[key]
        path.write_text(json.dumps(header))

    return apply


def cut(suffix: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path.with_suffix(suffix)
        file.write_bytes(file.read_bytes()[:-10])

    return apply


def remove(suffix: str) -> Callable[[Path], None]:
    return lambda path: path.with_suffix(suffix).unlink()


FEATURE = {"edges": [0.5], "name": "mood"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove(".json"), "no trained router at .*task=train_router"),
        (remove(".safetensors"), "needs router.safetensors beside it .*copy both files"),
        (cut(".json"), "is damaged or cut short"),
        (cut(".safetensors"), "cut short or of another training .* has 407 bytes, and 417 were"),
        (change("format", "zip"), "is no trained router"),
        (change("format_version", 3), "format version 3, and .* tokenrouter reads 1, 2, 4"),
        (change("kind", "linear"), "kind 'linear', and this is router=mlp: choose router=linear"),
        (change("kind", "forest"), "kind 'forest'; kinds: mlp, linear, trees"),
        (change("features", [FEATURE]), r"do not exist here \(mood\); features: position"),
        (change("hidden", 6), r"tensor table has shape \[15, 7\] and should have \[15, 8\]"),
        (change("ids", [4]), r"does not fit its tensors: tensor table has shape"),
        (drop("trained_for"), "lacks trained_for"),
        (
            change("features", [{"name": "position", "edges": [3.5, 0.5]}]),
            "edges of position do not ascend",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    """Guards against a router that decides by numbers that are half there or mean something else."""
    path = write_artifact(drawn_artifact(), tmp_path / "router")
    number = path.with_suffix(".safetensors").stat().st_size
    spoil(path)
    with pytest.raises(
        ValueError, match=message.replace("407", str(number - 10)).replace("417", str(number))
    ):
        read_artifact(path, "mlp")


def test_files_of_the_version_before_are_read(tmp_path: Path) -> None:
    """Guards against routers that were trained before and cannot be used any more."""
    path = write_artifact(drawn_artifact(), tmp_path / "router")
    change("format_version", 1)(path)
    assert read_artifact(path, "mlp").version == drawn_artifact().version


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Guards against NaN scores, which are over no threshold: every token would go low."""
    artifact = drawn_artifact()
    table = artifact.tensors["table"].clone()
    table[3, 1] = float("nan")
    spoilt = replace(artifact, tensors={**artifact.tensors, "table": table})
    path = write_artifact(spoilt, tmp_path / "router")
    with pytest.raises(ValueError, match="tensor table holds values that are not finite"):
        read_artifact(path, "mlp")


def test_writing_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a half-written file that takes a good one's place."""
    path = write_artifact(drawn_artifact(), tmp_path / "router")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("tokenrouter.files.os.replace", full)
    with pytest.raises(OSError, match="no space"):
        write_artifact(drawn_artifact(seed=1), path)
    assert read_artifact(path, "mlp").version == drawn_artifact().version


@pytest.mark.parametrize("router", [MLPRouter, LinearRouter, TreesRouter])
def test_shipped_routers_are_small_and_alike(router: type[MLPRouter]) -> None:
    """Guards against a shipped file for one low path only, or with features of its own, which wrappers copy."""
    paths = shipped(router.kind)
    assert list(paths) == ["int8", "int8_smooth"], (
        "the first one scores until the low path is known"
    )
    artifacts = {name: read_artifact(path, router.kind) for name, path in paths.items()}
    assert len({artifact.bins.names for artifact in artifacts.values()}) == 1
    for name, artifact in artifacts.items():
        assert artifact.trained_for.executor == name
        assert artifact.trained_for.model_hash == artifacts["int8"].trained_for.model_hash
        assert len(artifact.payload) + paths[name].stat().st_size < 1_000_000
        assert set(artifact.thresholds) == {"0.05", "0.1", "0.2"}
