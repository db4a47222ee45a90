"""A data set of labels on disk: one folder per window, finished or not there, and what all of them are made of.

``<path>/about.json`` says what every row is made of, ``provenance.json`` where the latest of them come from, and
``windows/<name>`` is a ``datasets`` data set of one window's tokens.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from torch import Tensor

from tokenrouter.features import where_they_exist
from tokenrouter.files import replace_file

FORMAT_VERSION = 1
_PARTIAL = ".partial"


def text_of(window: str) -> str:
    """The source of the window of that name, ``<split>-<text>-<number>``."""
    return window.split("-", 1)[1].rsplit("-", 1)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRows:
    """The tokens of one window. N tokens, F features, C label columns.

    Attributes:
        text: name of the source.
        split: train or valid.
        window: number of the window in its source and split.
        prompt_len: tokens of its prompt.
        columns: per token, int64 ``[N]``: document, position, token_id, phase, prefix_hash.
        features_NF: float32; anything where a feature does not exist in the token's phase.
        label_NC: float32; NaN where the window does not tell.
    """

    text: str
    split: str
    window: int
    prompt_len: int
    columns: Mapping[str, Tensor]
    features_NF: Tensor
    label_NC: Tensor


class LabelStore:
    """The folder of one data set.

    Args:
        path: made at the first ``open``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def open(self, about: Mapping[str, Any]) -> None:
        """Begins, or goes on with, a data set.

        Args:
            about: plain values that determine every row: label, model, executor, features, texts, seed.

        Raises:
            ValueError: the folder holds rows that are made of something else, or is damaged.
        """
        about = {"format_version": FORMAT_VERSION, **about}
        file = self.path / "about.json"
        if file.exists():
            _check_same(self.path, self.about, json.loads(json.dumps(about)))
        elif self.path.exists() and any(self.path.iterdir()):
            raise ValueError(
                f"{self.path} is not empty and holds no data set of labels (no about.json): choose another "
                "collect.path"
            )
        (self.path / "windows").mkdir(parents=True, exist_ok=True)
        if not file.exists():
            self.write_json("about.json", about)
        for left in (self.path / "windows").glob(f"*{_PARTIAL}"):
            shutil.rmtree(left)

    @property
    def about(self) -> dict[str, Any]:
        """What its rows are made of; raises ValueError where there is no data set."""
        file = self.path / "about.json"
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} holds no data set of labels (no about.json): collect one with task=collect"
            ) from None
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}): collect into another folder") from error
        if not isinstance(about, dict) or about.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{self.path} is no data set of format {FORMAT_VERSION}: collect it again in another folder"
            )
        return about

    def finished(self) -> frozenset[str]:
        """Names of the windows that are done."""
        folders = (self.path / "windows").glob("*")
        return frozenset(f.name for f in folders if not f.name.endswith(_PARTIAL))

    def write(self, name: str, rows: WindowRows) -> None:
        """Puts one window in its place as a whole. Rows whose label is unknown in every column are left out.

        Raises:
            ValueError: a feature that is not finite, an infinite or negative label, or no label at all.
        """
        kept_N = ~rows.label_NC.isnan().all(1)
        exists_NF = where_they_exist(self.about["features"], rows.columns["phase"])
        if not (rows.features_NF.isfinite() | ~exists_NF).all():
            raise ValueError(f"window {name}: a feature is not finite; nothing is stored of it")
        if not kept_N.any() or (rows.label_NC < 0).any() or rows.label_NC.isinf().any():
            raise ValueError(
                f"window {name}: its labels are unknown, negative or infinite; nothing is stored of it: check that "
                "the model gives finite logits"
            )
        count, width = int(kept_N.sum()), rows.features_NF.shape[1]
        schema = _schema(width, rows.label_NC.shape[1])
        values: dict[str, Any] = {
            "text": [rows.text] * count,
            "split": [rows.split] * count,
            "window": [rows.window] * count,
            "prompt_len": [rows.prompt_len] * count,
            "features": rows.features_NF[kept_N].contiguous().numpy(),
            "label": rows.label_NC[kept_N].contiguous().numpy(),
        } | {key: value_N[kept_N].numpy() for key, value_N in rows.columns.items()}
        folder = self.path / "windows" / name
        partial = folder.with_name(name + _PARTIAL)
        datasets.Dataset.from_dict(values, features=schema).save_to_disk(str(partial))
        os.replace(partial, folder)

    def load(
        self, split: str | None = None, texts: Collection[str] | None = None
    ) -> datasets.Dataset:
        """All rows of a split (``train``, ``valid``; None: of both), window by window.

        Args:
            split: None: of both.
            texts: names of sources; None: of all.

        Raises:
            ValueError: no data set, one without rows of the split, or a text that it has not.
        """
        about = self.about
        known = self.finished()
        if missing := sorted(set(texts or ()) - set(map(text_of, known))):
            raise ValueError(
                f"{self.path} has no rows of {', '.join(missing)}; it has: "
                f"{', '.join(sorted(set(map(text_of, known))))}"
            )
        names = sorted(
            name
            for name in known
            if (split is None or name.startswith(f"{split}-"))
            and (texts is None or text_of(name) in texts)
        )
        if not names:
            of_split = f" of the split {split!r}" if split else ""
            raise ValueError(
                f"{self.path} has no rows{of_split} yet ({about.get('label')}): collect more tokens with task=collect"
            )
        parts: Sequence[Any] = [self._load(self.path / "windows" / name) for name in names]
        return datasets.concatenate_datasets(list(parts))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a file beside the windows, whole or not at all."""
        replace_file(self.path / name, (json.dumps(value, indent=2) + "\n").encode())

    def _load(self, folder: Path) -> Any:
        try:
            return datasets.load_from_disk(str(folder))
        except Exception as error:  # pyarrow, json and datasets each have their own
            raise ValueError(
                f"{folder} is damaged ({type(error).__name__}: {error}): remove it, and task=collect makes it again"
            ) from error


def _schema(num_features: int, num_columns: int) -> datasets.Features:
    def vector(length: int) -> Any:
        return datasets.List(datasets.Value("float32"), length=length)

    scalars = {
        "document": "int32",
        "position": "int32",
        "token_id": "int32",
        "prompt_len": "int32",
        "window": "int32",
        "prefix_hash": "int64",
        "phase": "int8",
        "split": "string",
        "text": "string",
    }
    return datasets.Features(
        {name: datasets.Value(dtype) for name, dtype in scalars.items()}
        | {"features": vector(num_features), "label": vector(num_columns)}
    )


def _check_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in sorted({*found, *wanted}):
        if found.get(key) != wanted.get(key):
            raise ValueError(
                f"{path} was collected with {key}={found.get(key)!r}, and this run has {key}={wanted.get(key)!r}: "
                "choose another collect.path, or leave it null for a folder of its own"
            )
