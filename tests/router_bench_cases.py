"""A bench of routers on a tiny model, with an mlp of drawn weights per low path, and speeds as if measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.router_bench.setup import EXECUTORS, Bench, build
from scripts.router_bench.sizes import QUICK
from scripts.router_bench.throughput import Speeds
from tokenrouter.executors.calibration import Calibration
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.routers.artifact import Artifact, TrainedFor, write_artifact
from tokenrouter.routers.layer_groups import LayerGroups
from tokenrouter.routers.lookup import NUM_PHASES, Bins
from tokenrouter.telemetry import Spread

HIDDEN = 4


def write_router(
    folder: Path,
    model: LoadedModel,
    executor: str,
    name: str = "tiny",
    groups: LayerGroups | None = None,
) -> Path:
    """An mlp with drawn weights; that of the smoothed path looks at logits in decode."""
    bins = Bins(("position", "token_type"), ((3.5, 15.5), (0.5, 1.5, 2.5)), (35, 104))
    if executor == "int8_smooth":
        bins = Bins((*bins.names, "entropy"), (*bins.edges, (5.2,)), bins.ids)
    draw = torch.Generator().manual_seed(3)
    tensors = {
        "table": torch.randn(bins.num_rows, HIDDEN + NUM_PHASES, generator=draw),
        "head": torch.randn(NUM_PHASES, HIDDEN, generator=draw),
    }
    of = TrainedFor(
        model=model.name,
        model_hash=model.model_hash,
        executor=executor,
        label="fisher",
    )
    artifact = Artifact(
        kind="mlp", bins=bins, trained_for=of, hidden=HIDDEN, tensors=tensors, layer_groups=groups
    )
    return write_artifact(artifact, folder / f"{name}_{executor}_mlp.json")


def tiny_routers(folder: Path) -> Path:
    """A router for each executor."""
    for executor in EXECUTORS:
        write_router(folder, tiny_random(), executor)
    return folder


def tiny_bench(folder: Path, cache: Path) -> Bench:
    """Of the routers in ``folder``; ``cache`` is for the calibration of the smoothed path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "_folder", lambda _: cache)
        return build(
            tiny_random(),
            replace(QUICK, windows=3),
            executor="int8",
            texts=("python_docs",),
            data_dir=None,
            routers=folder,
        )


def at(value: float) -> list[float]:
    return [1.25 * value, value, 0.9 * value]


SPEEDS = Speeds(
    all_high_tok_s=Spread(median=100.0, min=90.0, max=110.0),
    times={
        "all_low": [(0.0, at(0.5))],
        **{name: [(0.05, at(0.6)), (0.2, at(0.8))] for name in ("random", "mlp", "rule")},
        "layerwise": [(0.1, at(0.625)), (0.25, at(0.8))],
    },
)
