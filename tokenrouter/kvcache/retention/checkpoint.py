"""A trained retention policy as two files: ``<name>.json`` says what it is, ``<name>.safetensors`` holds the numbers.

F features, P hidden units.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tokenrouter.files import TrainedFormat, replace_file
from tokenrouter.kvcache.retention.entry_features import ENTRY_FEATURES

FORMAT = "tokenrouter retention"
FORMAT_VERSION = 1
PRETRAINED = Path(__file__).parent / "pretrained"
TRAIN = "train one with `python run.py task=train_retention`"
_FILES = TrainedFormat(
    noun="trained retention policy",
    name=FORMAT,
    versions=(FORMAT_VERSION,),
    keys=frozenset({"features", "model", "model_hash", "about", "sha256"}),
    option="kvcache.retention.policy.path",
    remedy=TRAIN,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RetentionModel:
    """One hidden layer over what is known of an entry. Two are equal when they score alike.

    Attributes:
        features: names, in the order of the columns.
        model, model_hash: whose entries it has learned to judge; see LoadedModel.
        tensors: float32 ``low_F``, ``high_F`` (what was seen in training: values are cut to it), ``center_F``,
            ``scale_F``, ``hidden_PF``, ``hidden_bias_P``, ``out_P``.
        about: where it comes from and how good it was: plain values that no policy reads.
    """

    features: tuple[str, ...]
    model: str
    model_hash: str
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, values_NF: Tensor) -> Tensor:
        """Float32 ``[N]``: the larger, the more will be lost without the entry; its scale is its own."""
        t = self.tensors
        standard_NF = (values_NF.clamp(t["low_F"], t["high_F"]) - t["center_F"]) / t["scale_F"]
        hidden_NP = torch.addmm(t["hidden_bias_P"], standard_NF, t["hidden_PF"].t())
        return hidden_NP.relu_() @ t["out_P"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetentionModel) and self.version == other.version

    def __hash__(self) -> int:
        return hash(self.version)

    @property
    def payload(self) -> bytes:
        """The second file's content."""
        return save({name: tensor.contiguous() for name, tensor in self.tensors.items()})

    @property
    def version(self) -> str:
        """Hash of all that a score depends on."""
        facts = json.dumps([self.features, self.model_hash])
        return hashlib.sha256(facts.encode() + self.payload).hexdigest()[:12]


def write_model(trained: RetentionModel, path: Path) -> Path:
    """Stores ``trained``, whole or not at all, and returns the json file's path.

    Args:
        trained: of a training.
        path: of the json file; the second file lies beside it under the same name.

    Raises:
        ValueError: numbers that are not finite, or that no reader would take.
    """
    path = path.with_suffix(".json")
    if wrong := _wrong(trained):
        raise ValueError(
            f"a retention policy that cannot be used is not written to {path}: {wrong}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = trained.payload
    facts = {name: value for name, value in _plain(trained).items() if name != "tensors"}
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": trained.version,
        **facts,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "num_bytes": len(payload),
    }
    replace_file(path.with_suffix(".safetensors"), payload)
    replace_file(path, (json.dumps(header, indent=1) + "\n").encode())
    return path


def read_model(path: Path | str) -> RetentionModel:
    """Loads what ``write_model`` wrote.

    Args:
        path: of either file, or without an ending.

    Raises:
        ValueError: a file that is missing, damaged, cut short, of another format or training, or that was trained on
            other features than this version's.
    """
    given, path = f"path={str(path)!r}: ", Path(path).with_suffix(".json")
    header = _FILES.read_header(path, given=given)
    if tuple(header["features"]) != ENTRY_FEATURES:
        raise ValueError(
            f"{path} was trained on the features {', '.join(header['features'])}, and this version has "
            f"{', '.join(ENTRY_FEATURES)}: {TRAIN}"
        )
    second = path.with_suffix(".safetensors")
    tensors = _FILES.tensors(second, _FILES.read_payload(second, header))
    trained = RetentionModel(
        features=ENTRY_FEATURES,
        model=header["model"],
        model_hash=header["model_hash"],
        tensors={name: tensor.float() for name, tensor in tensors.items()},
        about=header["about"],
    )
    if wrong := _wrong(trained):
        raise ValueError(f"{path} cannot be used: {wrong}; {TRAIN}")
    return trained


def shipped() -> list[Path]:
    """The json files of the policies that come with the package, sorted."""
    return sorted(PRETRAINED.glob("*.json"))


def _plain(trained: RetentionModel) -> dict[str, Any]:
    return {name: getattr(trained, name) for name in RetentionModel.__slots__}


def _wrong(trained: RetentionModel) -> str | None:
    """What keeps the tensors from being used."""
    features = len(trained.features)
    units = len(trained.tensors.get("out_P", ()))
    shapes = {
        **dict.fromkeys(("low_F", "high_F", "center_F", "scale_F"), (features,)),
        "hidden_PF": (units, features),
        "hidden_bias_P": (units,),
        "out_P": (units,),
    }
    found = {name: tuple(tensor.shape) for name, tensor in trained.tensors.items()}
    if found != shapes:
        return f"its tensors are {found}, and {features} features need {shapes}"
    if bad := [
        name for name, tensor in trained.tensors.items() if not bool(tensor.isfinite().all())
    ]:
        return f"{', '.join(bad)} holds NaN or infinity"
    return "scale_F holds a zero" if bool((trained.tensors["scale_F"] == 0).any()) else None
