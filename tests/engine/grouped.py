"""A router with drawn numbers that decides about groups of the tiny model's layers."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engine.tools import tiny
from tests.routers.trained import drawn_artifact
from tokenrouter.routers import MLPRouter
from tokenrouter.routers.artifact import write_artifact
from tokenrouter.routers.layer_groups import Groups

GROUPS = ((0, 1), (1, 3), (3, 4))


def grouped_router(executor: str = "full", groups: Groups = GROUPS) -> MLPRouter:
    """With stored thresholds by which tokens take many of its routes, in both phases.

    Args:
        executor: name of the low path's.
        groups: of layers.
    """
    artifact = drawn_artifact(groups=groups)
    known = {
        "model": tiny().name,
        "model_hash": tiny().model_hash,
        "executor": executor,
        "after_layer": groups[0][0],
    }
    artifact = replace(
        artifact,
        trained_for=replace(artifact.trained_for, **known),
        thresholds={"0.1": {"prefill": 2.5, "decode": 2.0}},
    )
    with TemporaryDirectory() as folder:
        path = write_artifact(artifact, Path(folder) / "router")
        return MLPRouter(path=str(path), thresholds="shipped")
