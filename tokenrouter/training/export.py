"""A trained router as the files that ``router.path`` takes, and how good it is on the validation documents.

N tokens, L layers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenrouter.routers import Thresholds
from tokenrouter.routers.artifact import Artifact, TrainedFor
from tokenrouter.routers.layer_groups import MAX_GROUPS, LayerGroups
from tokenrouter.training.layer_groups import group_layers, layer_need
from tokenrouter.training.losses import SHARES, rank_quality
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.train import Trained, TrainOptions
from tokenrouter.types import Phase

AUTO_GROUPS = 4


def make_artifact(
    data: RouterData,
    trained: Trained,
    *,
    layers: tuple[int, ...] | None,
    about: Mapping[str, Any],
    num_groups: int | None = None,
) -> Artifact:
    """The files' content.

    Args:
        data: that ``trained`` has learned from.
        trained: of ``train``.
        layers: whose labels were added up.
        about: plain values to keep beside what the data set is made of and the quality.
        num_groups: of layers that may be decided about one by one, see ``checked_groups``; None: none.
    """
    facts = data.facts
    head = trained.tensors.get("head")
    need_L = _need(data, trained) if data.has_layers else None
    groups = None
    if num_groups is not None:
        assert need_L is not None, "groups need labels per layer"
        groups = group_layers(need_L, num_groups, facts.get("after_layer", 0))
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
        ),
        thresholds=stored_thresholds(data, trained, None),
        layer_groups=groups,
        group_thresholds={} if groups is None else stored_thresholds(data, trained, groups),
        about={
            "data": facts,
            "layer_need": None if need_L is None else [round(x, 4) for x in need_L.tolist()],
            "valid": validation(data, trained, groups),
            **about,
        },
        tensors=trained.tensors,
        text=trained.text,
    )


def checked_groups(asked: int | str | None, data: RouterData, options: TrainOptions) -> int | None:
    """How many groups of layers a router is to have.

    Args:
        asked: so many; ``auto``: 4 or the number of layers, where labels are of layers and scores are logarithms of
            what is expected, else none; None: none.
        data: whose labels the groups are found in.
        options: of training.

    Raises:
        ValueError: groups that the labels or the loss do not allow, or another value.
    """
    num_layers = data.train.label_NL.shape[1]
    wrong = None
    if not data.has_layers:
        wrong = (
            f"a label of each layer that is decided about is needed, and there are {num_layers} of "
            f"{data.facts['label']}: collect with labels=fisher, and leave train.layers null"
        )
    elif options.loss != "regression" and options.kind != "trees":
        wrong = (
            f"a score of trainer.loss={options.loss} is no logarithm of a need: train by regression"
        )
    if asked is None or (asked == "auto" and wrong):
        return None
    if asked == "auto":
        return min(AUTO_GROUPS, num_layers)
    if type(asked) is not int or not 2 <= asked <= MAX_GROUPS:
        raise ValueError(
            f"train.layer_groups={asked!r} must be auto, null or 2 to {MAX_GROUPS} groups of layers"
        )
    if not wrong and asked > num_layers:
        wrong = f"there are {num_layers} layers"
    if wrong:
        raise ValueError(f"train.layer_groups={asked}: {wrong}; or set train.layer_groups=null")
    return asked


def stored_thresholds(
    data: RouterData, trained: Trained, groups: LayerGroups | None
) -> dict[str, dict[str, float]]:
    """Per share of high work and phase, the threshold on all tokens of the data set."""
    score_N = torch.cat([trained.score_train_N, trained.score_valid_N])
    score_NL = score_N[:, None] if groups is None else _by_layer(score_N, groups)
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


def validation(
    data: RouterData, trained: Trained, groups: LayerGroups | None
) -> dict[str, dict[str, dict[str, float]]]:
    """Quality on the validation documents, per share: of all and of each text, and where groups of layers are decided.

    The last are of pairs of a token and a layer, under ``layer_groups`` and ``layer_groups_{text}``.
    """
    texts = torch.tensor([sorted(set(data.valid.texts)).index(text) for text in data.valid.texts])
    parts: dict[str, Tensor] = {"all": torch.ones(len(texts), dtype=torch.bool)}
    for index, name in enumerate(sorted(set(data.valid.texts))):
        parts[name] = texts == index
    known = {}
    for name, in_part_N in parts.items():
        label_N = data.valid.label_N[in_part_N]
        if len(label_N) > 1 and float(label_N.min()) < float(label_N.max()):
            known[name] = in_part_N
    found = {
        name: _quality(trained.score_valid_N[in_part_N], data.valid.label_N[in_part_N])
        for name, in_part_N in known.items()
    }
    if groups is None:
        return found
    for name, in_part_N in known.items():
        score_NL = _by_layer(trained.score_valid_N[in_part_N], groups)
        key = "layer_groups" if name == "all" else f"layer_groups_{name}"
        found[key] = _quality(score_NL.flatten(), data.valid.label_NL[in_part_N].flatten())
    return found


def _quality(score_N: Tensor, label_N: Tensor) -> dict[str, dict[str, float]]:
    return {f"{share:g}": rank_quality(score_N, label_N, share)._asdict() for share in SHARES}


def _need(data: RouterData, trained: Trained) -> Tensor:
    score_N = torch.cat([trained.score_train_N, trained.score_valid_N])
    return layer_need(score_N, torch.cat([data.train.label_NL, data.valid.label_NL]))


def _by_layer(score_N: Tensor, groups: LayerGroups) -> Tensor:
    return score_N[:, None] + torch.tensor(groups.layer_offsets)
