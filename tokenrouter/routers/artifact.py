"""What a trained router is stored as: ``<name>.json`` says what it is, a second file beside it holds the numbers.

The second file is ``<name>.safetensors`` for look-up tables and ``<name>.txt`` for trees, in their library's own text.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors.torch import save
from torch import Tensor

from tokenrouter.features import FEATURES
from tokenrouter.files import TrainedFormat, replace_file
from tokenrouter.routers.layer_groups import LayerGroups, layer_groups
from tokenrouter.routers.lookup import Bins, check_tensors

FORMAT = "tokenrouter router"
READABLE = (1, 2, 4)
"""Version 1 has no numbers of ids, and version 2 no groups of layers; files without groups are still written as 2."""
Kind = Literal["mlp", "linear", "trees"]
SUFFIX: Mapping[str, str] = {"mlp": ".safetensors", "linear": ".safetensors", "trees": ".txt"}
TRAIN = "train one with `python run.py task=train_router`"
PRETRAINED = Path(__file__).parent / "pretrained"
_FILES = TrainedFormat(
    noun="trained router",
    name=FORMAT,
    versions=READABLE,
    keys=frozenset(
        {"kind", "features", "hidden", "trained_for", "thresholds", "ids", "sha256", "about"}
    ),
    option="router.path",
    remedy=TRAIN,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedFor:
    """Whose tokens a router has learned to route.

    Attributes:
        model: its name, for messages.
        model_hash: of the weights, see LoadedModel.
        executor: name of the low path's executor, such as ``int8_smooth``.
        label: of the label maker.
        layers: whose labels were added up; None: all that a decision is about.
        after_layer: layers of a token that have run before it is asked; 0: none.
    """

    model: str
    model_hash: str
    executor: str
    label: str
    layers: tuple[int, ...] | None = None
    after_layer: int = 0

    def facts(self) -> dict[str, Any]:
        """As it is stored: ``after_layer`` only where it is not 0, as before it could be another number."""
        facts = asdict(self)
        if not self.after_layer:
            del facts["after_layer"]
        return facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A trained router.

    Attributes:
        kind: of router that runs it.
        bins: names of the features in order, how they are cut, and the ids with a row of their own; trees
            have no edges and no ids.
        hidden: units of the one hidden layer; 0 for ``linear`` and ``trees``.
        trained_for: model, low path and label.
        thresholds: by share of high tokens (``0.1``) and phase (``prefill``), on the text that it was trained on.
        layer_groups: that may be decided about one by one; None: there are none.
        group_thresholds: like ``thresholds``, by share of the high work, where groups are decided about one by one.
        about: where it comes from and how good it was: plain values that no router reads.
        tensors: float32 ``table [K, H + P]`` and ``head [P, H]`` with a score per phase (P), and those of
            ``vocabulary_rows`` where ids have numbers; none for trees.
        text: the trees; empty for tables.
    """

    kind: Kind
    bins: Bins
    trained_for: TrainedFor
    hidden: int = 0
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    layer_groups: LayerGroups | None = None
    group_thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    text: str = ""

    @property
    def payload(self) -> bytes:
        """The second file's content."""
        if self.kind == "trees":
            return self.text.encode()
        return save({name: tensor.contiguous() for name, tensor in self.tensors.items()})

    @property
    def version(self) -> str:
        """Hash of all that a decision depends on."""
        facts = [self.kind, asdict(self.bins), self.hidden, self.trained_for.facts()]
        digest = hashlib.sha256(json.dumps(facts).encode() + self.payload)
        digest.update(json.dumps(self.thresholds, sort_keys=True).encode())
        if self.layer_groups is not None:
            digest.update(json.dumps(self._groups, sort_keys=True).encode())
        return digest.hexdigest()[:12]

    @property
    def _groups(self) -> dict[str, Any]:
        """Groups of layers as they are stored."""
        assert self.layer_groups is not None
        return {**asdict(self.layer_groups), "thresholds": self.group_thresholds}


def write_artifact(artifact: Artifact, path: Path) -> Path:
    """Stores ``artifact``, whole or not at all.

    Args:
        artifact: trained.
        path: of the json file; the second file lies beside it under the same name.

    Returns:
        The json file's path.
    """
    path = path.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = artifact.payload
    header = {
        "format": FORMAT,
        "format_version": 2 if artifact.layer_groups is None else 4,
        "version": artifact.version,
        "kind": artifact.kind,
        "features": [
            {"name": name, "edges": list(edges)}
            for name, edges in zip(artifact.bins.names, artifact.bins.edges, strict=True)
        ],
        "hidden": artifact.hidden,
        "trained_for": artifact.trained_for.facts(),
        "thresholds": artifact.thresholds,
        **({} if artifact.layer_groups is None else {"layer_groups": artifact._groups}),
        "ids": list(artifact.bins.ids),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "num_bytes": len(payload),
        "about": artifact.about,
    }
    replace_file(path.with_suffix(SUFFIX[artifact.kind]), payload)
    replace_file(path, _dump(header).encode())
    return path


def read_artifact(path: Path | str, kind: Kind) -> Artifact:
    """Loads what ``write_artifact`` wrote.

    Args:
        path: of either file, or without an ending.
        kind: that the router at hand runs.

    Raises:
        ValueError: a file that is missing, damaged, cut short, of another format or kind, or asks for features that do
            not exist.
    """
    path = Path(path).with_suffix(".json")
    header = _header(path)
    if header["kind"] != kind:
        raise ValueError(
            f"{path} holds a router of kind {header['kind']!r}, and this is router={kind}: choose router="
            f"{header['kind']}, or another router.path"
        )
    features = header["features"]
    names = tuple(feature["name"] for feature in features)
    if unknown := [name for name in names if name not in FEATURES]:
        raise ValueError(
            f"{path} was trained on features that do not exist here ({', '.join(unknown)}); features: "
            f"{', '.join(FEATURES)}: {TRAIN}"
        )
    second = path.with_suffix(SUFFIX[kind])
    payload = _FILES.read_payload(second, header)
    bins = Bins(names, tuple(tuple(f["edges"]) for f in features), tuple(header["ids"]))
    groups, group_thresholds = _groups(path, header)
    artifact = Artifact(
        kind=kind,
        bins=bins,
        hidden=header["hidden"],
        trained_for=_trained_for(header),
        thresholds=header["thresholds"],
        layer_groups=groups,
        group_thresholds=group_thresholds,
        about=header["about"],
        tensors={} if kind == "trees" else _FILES.tensors(second, payload),
        text=payload.decode() if kind == "trees" else "",
    )
    if kind == "trees":
        return artifact
    if wrong := check_tensors(bins, artifact.tensors, hidden=artifact.hidden):
        raise ValueError(f"{path} does not fit its tensors: {wrong}; {TRAIN}")
    return artifact


def shipped(kind: Kind) -> dict[str, Path]:
    """The routers of a kind that come with the package: path by the executor that they were trained for, sorted."""
    found = PRETRAINED.glob(f"*_{kind}.json")
    return dict(sorted((_header(path)["trained_for"]["executor"], path) for path in found))


def _header(path: Path) -> dict[str, Any]:
    """The json file, with every key that is needed."""
    header = _FILES.read_header(path)
    if header["kind"] not in get_args(Kind):
        raise ValueError(
            f"{path} holds a router of kind {header['kind']!r}; kinds: {', '.join(get_args(Kind))}"
        )
    if bad := [f["name"] for f in header["features"] if not _is_ascending(f["edges"])]:
        raise ValueError(f"{path}: the edges of {', '.join(bad)} do not ascend: {TRAIN}")
    return header


def _trained_for(header: Mapping[str, Any]) -> TrainedFor:
    """Whose tokens it has learned to route."""
    facts = dict(header["trained_for"])
    if facts.get("layers") is not None:
        facts["layers"] = tuple(facts["layers"])
    return TrainedFor(**facts)


def _groups(
    path: Path, header: Mapping[str, Any]
) -> tuple[LayerGroups | None, Mapping[str, Mapping[str, float]]]:
    """Groups of layers and their thresholds; raises ValueError for such as there cannot be."""
    if (stored := header.get("layer_groups")) is None:
        return None, {}
    try:
        first = header["trained_for"].get("after_layer", 0)
        groups = layer_groups(stored["layers"], stored["offsets"], first)
        return groups, dict(stored["thresholds"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} has no layer_groups that fit: {error}: {TRAIN}") from None


def _is_ascending(edges: list[float]) -> bool:
    return all(a < b for a, b in pairwise(edges)) and all(map(math.isfinite, edges))


def _dump(header: Mapping[str, Any]) -> str:
    """A key on each line, so that a difference between two versions can be read."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in header.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
