"""Small trained routers, drawn or by hand, for what needs one."""

from dataclasses import replace

import lightgbm
import numpy as np
import torch

from tokenrouter.features import Signals, TokenTypeTable, sequence_batch
from tokenrouter.routers import Router
from tokenrouter.routers.artifact import Artifact, Kind, TrainedFor
from tokenrouter.routers.layer_groups import LayerGroups
from tokenrouter.routers.lookup import NUM_PHASES, Bins
from tokenrouter.types import RouteInput

KINDS = [None, "\n", "7", ".", " the", " ==", " Paris", "The", " river", "ing"]
TABLE = TokenTypeTable.from_texts([KINDS[i % len(KINDS)] for i in range(60)])
NAMES = ("position", "token_type")
TRAINED_FOR = TrainedFor(model="small", model_hash="a" * 16, executor="int8", label="fisher")
STORED = {"0.1": {"prefill": 1.5, "decode": 2.5}}
GROUP_STORED = {"0.1": {"prefill": 0.5, "decode": 1.0}}


def drawn_artifact(
    kind: Kind = "mlp", *, seed: int = 0, groups: LayerGroups | None = None
) -> Artifact:
    """A router with drawn numbers, and perhaps groups of layers."""
    if kind == "trees":
        return Artifact(
            kind=kind,
            bins=Bins(NAMES, ((), ()), ()),
            trained_for=TRAINED_FOR,
            thresholds=STORED,
            layer_groups=groups,
            group_thresholds={} if groups is None else GROUP_STORED,
            text=_drawn_trees(seed),
        )
    bins = Bins(NAMES, ((0.5, 3.5), tuple(i + 0.5 for i in range(7))), (4, 9, 28))
    hidden = 5 if kind == "mlp" else 0
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        "table": torch.randn(bins.num_rows, hidden + NUM_PHASES, generator=draw),
        "head": torch.randn(NUM_PHASES, hidden, generator=draw),
    }
    return Artifact(
        kind=kind,
        bins=bins,
        hidden=hidden,
        trained_for=TRAINED_FOR,
        thresholds=STORED,
        layer_groups=groups,
        group_thresholds={} if groups is None else GROUP_STORED,
        tensors=tensors,
    )


def with_id_numbers(artifact: Artifact, *, seed: int = 0) -> Artifact:
    """``artifact`` with drawn numbers per id, 3 and 2, of 60 ids, and the feature that they need."""
    draw = torch.Generator().manual_seed(seed)
    columns = artifact.hidden + NUM_PHASES
    numbers = {"id": 3, "previous": 2}
    codes = {
        f"{kind}_codes": torch.randint(-127, 128, (60, r), generator=draw, dtype=torch.int8)
        for kind, r in numbers.items()
    }
    weights = {
        f"{kind}_weights": torch.randn(r, columns, generator=draw) / 100
        for kind, r in numbers.items()
    }
    table_KC = artifact.tensors["table"]
    at = artifact.bins.first_id_row
    bins = replace(
        artifact.bins,
        names=(*artifact.bins.names, "previous_id"),
        edges=(*artifact.bins.edges, ()),
    )
    table_KC = torch.cat([table_KC[:at], torch.zeros(1, columns), table_KC[at:]])
    return replace(
        artifact, bins=bins, tensors={**artifact.tensors, "table": table_KC, **codes, **weights}
    )


def with_entropy(artifact: Artifact, *, seed: int = 0) -> Artifact:
    """``artifact`` that also looks at the entropy before a token, with drawn rows: two bins, and one without it."""
    draw = torch.Generator().manual_seed(seed)
    table_KC, at = artifact.tensors["table"], artifact.bins.first_id_row
    rows_3C = torch.randn(3, table_KC.shape[1], generator=draw)
    bins = replace(
        artifact.bins,
        names=(*artifact.bins.names, "entropy"),
        edges=(*artifact.bins.edges, (2.0,)),
    )
    table_KC = torch.cat([table_KC[:at], rows_3C, table_KC[at:]])
    return replace(artifact, bins=bins, tensors={**artifact.tensors, "table": table_KC})


def trained_for(artifact: Artifact, **changes: str) -> Artifact:
    """``artifact``, for another model or executor."""
    return replace(artifact, trained_for=replace(artifact.trained_for, **changes))


def see(
    router: Router,
    ids: list[int],
    prompt_len: int | None = None,
    signals: Signals | None = None,
) -> RouteInput:
    """What ``router`` sees of a sequence."""
    batch = sequence_batch(ids, prompt_len=prompt_len, token_types=TABLE)
    return router.extractor(TABLE, signals).extract(batch)


def _drawn_trees(seed: int) -> str:
    draw = np.random.default_rng(seed)
    values = np.stack([draw.integers(0, 50, 300), draw.integers(0, 8, 300)], 1).astype(float)
    label = values[:, 1] + 10 / (1 + values[:, 0])
    booster = lightgbm.train(
        {"verbosity": -1, "num_threads": 1},
        lightgbm.Dataset(values, label=label, feature_name=list(NAMES)),
        num_boost_round=5,
    )
    text: str = booster.model_to_string()
    return text
