"""A trained router as the files that ``router.path`` takes, and how good it is on the validation documents.

N tokens, L layers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenrouter.routers import Thresholds
from tokenrouter.routers.artifact import Artifact, TrainedFor
from tokenrouter.routers.layer_groups import per_layer
from tokenrouter.training.losses import SHARES, rank_quality
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.train import Trained
from tokenrouter.types import Phase


def make_artifact(
    data: RouterData,
    trained: Trained,
    *,
    layers: tuple[int, ...] | None,
    about: Mapping[str, Any],
) -> Artifact:
    """The files' content.

    Args:
        data: that ``trained`` has learned from.
        trained: of ``train``.
        layers: whose labels were added up.
        about: plain values to keep beside what the data set is made of and the quality.
    """
    facts = data.facts
    head = trained.tensors.get("head")
    return Artifact(
        kind=trained.kind,
        bins=trained.bins,
        hidden=0 if head is None else head.shape[1],
        trained_for=TrainedFor(
            model=facts["model"],
            model_hash=facts["model_hash"],
            executor=facts["executor"],
            label=facts["label"],
            layers=layers,
            after_layer=facts.get("after_layer", 0),
            layer_groups=data.layer_groups,
        ),
        thresholds=stored_thresholds(data, trained),
        about={"data": facts, "valid": validation(data, trained), **about},
        tensors=trained.tensors,
        text=trained.text,
    )


def stored_thresholds(data: RouterData, trained: Trained) -> dict[str, dict[str, float]]:
    """Per share of high work and phase, the threshold on all tokens of the data set."""
    score_NG = torch.cat([trained.score_train_NG, trained.score_valid_NG])
    score_NL = per_layer(score_NG, data.width_G)
    phase_N = torch.cat([data.train.phase_N, data.valid.phase_N])
    found = {}
    for share in SHARES:
        by_phase = {phase: score_NL[phase_N == phase] for phase in Phase}
        thresholds = Thresholds()
        thresholds.calibrate(
            share, {phase: s for phase, s in by_phase.items() if len(s) > 2 / share}
        )
        found[f"{share:g}"] = {p.name.lower(): value for p, value in thresholds.values.items()}
    return found


def validation(data: RouterData, trained: Trained) -> dict[str, dict[str, dict[str, float]]]:
    """Quality on the validation documents: of all of them and of each text, per share."""
    texts = torch.tensor([sorted(set(data.valid.texts)).index(text) for text in data.valid.texts])
    parts: dict[str, Tensor] = {"all": torch.ones(len(texts), dtype=torch.bool)}
    for index, name in enumerate(sorted(set(data.valid.texts))):
        parts[name] = texts == index
    label_NG, score_NG = data.valid.label_NG, trained.score_valid_NG
    found = {}
    for name, in_part_N in parts.items():
        score_N, label_N = (
            per_layer(x[in_part_N], data.width_G).flatten() for x in (score_NG, label_NG)
        )
        if int(in_part_N.sum()) > 1 and float(label_N.min()) < float(label_N.max()):
            found[name] = {
                f"{share:g}": rank_quality(score_N, label_N, share)._asdict() for share in SHARES
            }
    return found
