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
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tokenrouter.files import replace_file
from tokenrouter.kvcache.retention.entry_features import ENTRY_FEATURES

FORMAT = "tokenrouter retention"
FORMAT_VERSION = 1
PRETRAINED = Path(__file__).parent / "pretrained"
TRAIN = "train one with `python run.py task=train_retention`"


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
    given, path = str(path), Path(path).with_suffix(".json")
    header = _header(path, given)
    if tuple(header["features"]) != ENTRY_FEATURES:
        raise ValueError(
            f"{path} was trained on the features {', '.join(header['features'])}, and this version has "
            f"{', '.join(ENTRY_FEATURES)}: {TRAIN}"
        )
    trained = RetentionModel(
        features=ENTRY_FEATURES,
        model=header["model"],
        model_hash=header["model_hash"],
        tensors=_tensors(path.with_suffix(".safetensors"), header),
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


def _header(path: Path, given: str) -> dict[str, Any]:
    """The json file, with every key that is needed."""
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"path={given!r}: no trained retention policy at {path} ({error.strerror or error}): give "
            f"kvcache.retention.policy.path, or {TRAIN}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}): {TRAIN}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is no trained retention policy (no format {FORMAT!r}): {TRAIN}")
    if header.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {header.get('format_version')!r}, and this version of tokenrouter reads "
            f"{FORMAT_VERSION}: {TRAIN}"
        )
    needed = {"features", "model", "model_hash", "about", "sha256"}
    if missing := sorted(needed - header.keys()):
        raise ValueError(f"{path} lacks {', '.join(missing)}: {TRAIN}")
    return header


def _tensors(path: Path, header: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path.with_suffix('.json')} needs {path.name} beside it ({error.strerror}): copy both files"
        ) from None
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise ValueError(
            f"{path} is cut short or of another training than {path.with_suffix('.json').name}: it has "
            f"{len(payload)} bytes, and {header.get('num_bytes')} were written; copy both files again, or {TRAIN}"
        )
    try:
        return {name: tensor.float() for name, tensor in load(payload).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): {TRAIN}") from None


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
