"""A data set for the learned retention policy on disk: a file per window, whole or not there.

N tokens, I intervals, G layer groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tokenrouter.files import replace_file
from tokenrouter.training.retention.sums import WindowSums
from tokenrouter.training.storage import LabelStore

KIND = "retention_sums"
_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class SummedWindow:
    """One window.

    Attributes:
        ids_N: int64, of its whole intervals.
        sums: of its entries.
    """

    ids_N: Tensor
    sums: WindowSums


class SumsStore:
    """The folder of one data set.

    Args:
        path: made at the first ``open``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._folder = LabelStore(path)

    def open(self, about: Mapping[str, Any]) -> None:
        """Begins, or goes on with, a data set.

        Args:
            about: plain values that determine every window: model, interval, groups, texts, seed.

        Raises:
            ValueError: the folder holds something else, or is damaged.
        """
        self._folder.open({**about, "kind": KIND})

    @property
    def about(self) -> dict[str, Any]:
        """What its windows are made of; raises ValueError where there is no such data set."""
        about = self._folder.about
        if about.get("kind") != KIND:
            raise ValueError(
                f"{self.path} holds {about.get('kind')} labels, and a retention policy learns from "
                "task=collect_retention"
            )
        return about

    def finished(self) -> frozenset[str]:
        """Names of the windows that are done."""
        return frozenset(file.stem for file in self._files(""))

    def write(self, name: str, window: SummedWindow) -> None:
        """Puts one window in its place as a whole.

        Raises:
            ValueError: a sum that is not finite; nothing is stored.
        """
        sums = window.sums
        if not all(bool(x.isfinite().all()) for x in sums):
            raise ValueError(f"window {name}: a sum is not finite; nothing is stored of it")
        tensors = {"ids_N": window.ids_N, **sums._asdict()}
        content = save({key: tensor.contiguous() for key, tensor in tensors.items()})
        replace_file(self.path / "windows" / f"{name}{_SUFFIX}", content)

    def load(self, split: str) -> list[SummedWindow]:
        """All windows of a split (``train``, ``valid``).

        Raises:
            ValueError: no data set, none of the split, a file that is cut short, or sums that are not finite.
        """
        about, files = self.about, self._files(f"{split}-")
        if not files:
            raise ValueError(
                f"{self.path} has no windows of the split {split!r} yet: collect more tokens with "
                "task=collect_retention"
            )
        return [_read(file, about) for file in files]

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a file beside the windows, whole or not at all."""
        self._folder.write_json(name, value)

    def _files(self, prefix: str) -> list[Path]:
        return sorted((self.path / "windows").glob(f"{prefix}*{_SUFFIX}"))


def _read(file: Path, about: Mapping[str, Any]) -> SummedWindow:
    again = "remove it, and task=collect_retention makes it again"
    try:
        found = load(file.read_bytes())
        window = SummedWindow(
            ids_N=found["ids_N"], sums=WindowSums(found["received_GIN"], found["needed_GIN"])
        )
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{file} is damaged or cut short ({error}): {again}") from None
    num_tokens = len(window.ids_N)
    shape = about["groups"], num_tokens // about["interval"], num_tokens
    if any(tuple(x.shape) != shape for x in window.sums):
        raise ValueError(f"{file} holds sums of another shape than {shape}: {again}")
    if not all(bool(x.isfinite().all()) for x in window.sums):
        raise ValueError(f"{file} holds NaN or infinity: {again}")
    return window
