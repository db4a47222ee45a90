"""Statistics of a model's activations over calibration text, kept on disk from one run to the next.

T tokens, E hidden size, I intermediate.
"""

import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

from tokenrouter.executors.activations import InputMaxima, input_maxima
from tokenrouter.models import LoadedModel
from tokenrouter.workloads.text import LocalText, PythonDocs, calibration_documents, windows

log = logging.getLogger(__name__)

VERSION = 1
"""Of what is measured and how: raised with every change to it, so that older files are not read."""
SEQUENCE_LEN = 512
_DAMAGED = (OSError, ValueError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile)


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Maxima per layer, and the 16 hex digits that stand for what they were measured on."""

    maxima: list[InputMaxima]
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What statistics are measured on.

    Attributes:
        text: its calibration side is read, every fourth document; thresholds are set on it too, and quality is never
            measured there.
        num_tokens: at least so many, in sequences of up to 512 spread evenly over the text.
        cache_dir: folder of the statistics, about 4 bytes per channel and layer; None: ``tokenrouter/calibration`` in
            the user's cache (XDG_CACHE_HOME, by default ``~/.cache``). Where it cannot be written to, they are
            measured again in every run, with a warning.

    Raises:
        ValueError: ``num_tokens`` is not an integer above 0, or ``text`` has no documents to give.
    """

    text: PythonDocs | LocalText = field(default_factory=PythonDocs)
    num_tokens: int = 2048
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if type(self.num_tokens) is not int or self.num_tokens < 1:
            raise ValueError(
                f"calibration num_tokens={self.num_tokens!r} must be an integer of at least 1: 2048 are enough"
            )
        if not hasattr(self.text, "documents"):
            raise ValueError(
                f"calibration text={self.text!r} must be a text as in conf/data, such as PythonDocs(); "
                "in a config, '${data}' is the run's"
            )

    def statistics(self, model: LoadedModel) -> Statistics:
        """Reads them where the same model was measured on the same tokens, else measures and keeps them.

        Raises:
            ValueError: a model without a tokenizer, a text with too few tokens, or activations that are not finite.
        """
        sequences = self._sequences(model)
        key = _key(model, sequences)
        path = self._folder() / f"{key}.npz"
        maxima = _read(path, model)
        if maxima is None:
            log.info("calibrating on %d tokens of %s", sum(map(len, sequences)), self.text.name)
            maxima = input_maxima(model, sequences)
            _check_finite(maxima, model)
            _write(path, maxima)
        return Statistics(maxima=maxima, key=key)

    def _sequences(self, model: LoadedModel) -> list[list[int]]:
        if model.tokenizer is None:
            raise ValueError(
                f"the executor is calibrated on text, and model {model.name!r} has no tokenizer: put its tokenizer "
                "files beside its weights, or choose executor=int8, which needs no calibration"
            )
        text = "\n\n".join(calibration_documents(self.text.documents()))
        ids = list(model.tokenizer.encode(text, add_special_tokens=False))
        length = min(SEQUENCE_LEN, model.config.max_model_len, self.num_tokens)
        count = -(-self.num_tokens // length)
        if len(ids) < length * count:
            raise ValueError(
                f"calibration needs {length * count} tokens (num_tokens={self.num_tokens}, in sequences of {length}), "
                f"and the calibration side of {self.text.name!r} has {len(ids)}: lower num_tokens, or choose a longer "
                "text"
            )
        return windows(ids, length, count)

    def _folder(self) -> Path:
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "tokenrouter" / "calibration"


def _key(model: LoadedModel, sequences: Sequence[Sequence[int]]) -> str:
    """A hash of model, dtype, token ids and how they are measured."""
    what = VERSION, model.model_hash, str(model.dtype), len(sequences)
    digest = hashlib.sha256(repr(what).encode())
    digest.update(np.array(sequences, np.int64).tobytes())
    return digest.hexdigest()[:16]


def _check_finite(maxima: Sequence[InputMaxima], model: LoadedModel) -> None:
    for number, layer in enumerate(maxima):
        for where in fields(layer):
            if not getattr(layer, where.name).isfinite().all():
                raise ValueError(
                    f"calibration of {model.name!r}: the input of {where.name.rpartition('_')[0]} in layer {number} is "
                    "not finite: the weights hold NaN or overflow; check that executor=full gives finite logits"
                )


def _read(path: Path, model: LoadedModel) -> list[InputMaxima] | None:
    """The statistics in ``path``; None where there are none. A damaged file counts as none: zip has checksums."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {f.name: torch.from_numpy(file[f.name]) for f in fields(InputMaxima)}
            return [
                InputMaxima(**{name: values[layer] for name, values in arrays.items()})
                for layer in range(model.config.num_layers)
            ]
    except FileNotFoundError:
        return None
    except _DAMAGED as error:
        log.warning("%s is damaged (%s): calibrating again", path, error)
        return None


def _write(path: Path, maxima: Sequence[InputMaxima]) -> None:
    """Puts the file in its place as a whole; a folder that cannot be written to is a warning."""
    arrays = {
        f.name: torch.stack([getattr(layer, f.name) for layer in maxima]).numpy()
        for f in fields(InputMaxima)
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            np.savez(written, allow_pickle=False, **arrays)
            written.replace(path)
    except OSError as error:
        log.warning(
            "the calibration cannot be kept for the next run, which will repeat it: %s (calibration.cache_dir names "
            "another folder)",
            error,
        )
