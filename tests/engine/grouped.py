"""A router with drawn numbers that decides about groups of the tiny model's layers."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engine.tools import tiny
from tests.routers.trained import drawn_artifact
from tokenrouter.routers import MLPRouter
from tokenrouter.routers.artifact import write_artifact
from tokenrouter.routers.layer_groups import LayerGroups

GROUPS = LayerGroups(((3,), (0, 2), (1,)), (0.5, 0.0, -0.5))


def grouped_router(executor: str = "full", groups: LayerGroups = GROUPS) -> MLPRouter:
    """With stored thresholds by which tokens take all of its routes, in both phases.

    Args:
        executor: name of the low path's.
        groups: of layers.
    """
    artifact = drawn_artifact(groups=groups)
    known = {
        "model": tiny().name,
        "model_hash": tiny().model_hash,
        "executor": executor,
        "after_layer": min(map(min, groups.layers)),
    }
    artifact = replace(
        artifact,
        trained_for=replace(artifact.trained_for, **known),
        group_thresholds={"0.1": {"prefill": -0.25, "decode": -0.5}},
    )
    with TemporaryDirectory() as folder:
        path = write_artifact(artifact, Path(folder) / "router")
        return MLPRouter(path=str(path), thresholds="shipped")
