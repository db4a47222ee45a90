"""Recorded traces in the folder of local data sets."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenrouter.checks import check_count, check_text
from tokenrouter.workloads.text import DATA_DIR_HELP, read_text
from tokenrouter.workloads.timed import Shape, TimedWorkload


@dataclass(frozen=True, kw_only=True)
class TraceWorkload(TimedWorkload):
    """Lengths and arrival times of a recorded trace; prompts are cut from the text of the run.

    The file is read once: ``check`` and ``build`` need the same of it.

    Args:
        data_dir: the folder of local data sets; None where it was not set.
        file: the trace in it.
        start: so many requests of the trace are skipped.

    Raises:
        ValueError: ``data_dir`` or ``file`` is no text, ``start`` no count; and as TimedWorkload.
    """

    data_dir: str | None
    file: str
    start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is not None:
            check_text("workload.data_dir", self.data_dir)
        check_text("workload.file", self.file)
        check_count("workload.start", self.start, 0)

    def shapes(self) -> list[Shape]:
        """See TimedWorkload."""
        return self._shapes

    @cached_property
    def _shapes(self) -> list[Shape]:
        path = self._path()
        found = self._read(path, read_text(path, "workload.file"))
        found.sort(key=lambda shape: shape.arrival_s)
        stop = self.start + self.num_requests
        if stop > len(found):
            raise ValueError(
                f"workload.start={self.start} and workload.num_requests={self.num_requests} need a "
                f"trace of {stop} requests, and {path.name} has {len(found)}: lower one of them"
            )
        return found[self.start : stop]

    @abstractmethod
    def _read(self, path: Path, text: str) -> list[Shape]:
        """Every request of the trace ``path``, which holds ``text``; raises ValueError with the line that is none."""

    def _path(self) -> Path:
        if not self.data_dir:
            raise ValueError(
                f"the trace {self.file} needs a folder of local data sets: {DATA_DIR_HELP}"
            )
        path = Path(self.data_dir).expanduser() / self.file
        if not path.is_file():
            raise ValueError(f"no trace {path}; {DATA_DIR_HELP}")
        return path


@contextmanager
def at_line(path: Path, number: int) -> Iterator[None]:
    """Says of a ValueError in the block which line of which trace it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{path}, line {number}: {error}; mend the line, or check workload.file"
        ) from error
