"""The folder of one run. Tables and figures are built from its files, never from a tracker."""

import json
import math
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenrouter.files import replace_file

SCHEMA_VERSION = 1
"""Of a run folder's files; another one is not read together with this."""
STATUS = "status.json"
"""What makes a folder a run."""
SECTIONS = (
    "quality",
    "generations",
    "throughput",
    "latency",
    "router",
    "routes",
    "kv",
    "memory",
    "baselines",
)


class RunFolder:
    """Writes the files of a run: config, overrides, provenance, metrics, steps, status.

    ``status.json`` says ``running`` from the start, then ``ok``, ``failed`` or, of a job that an earlier one has done
    already, ``skipped``; a run that was killed stays ``running``, one that the user interrupted has failed.

    Args:
        path: the folder; made if missing, refused if it already holds a run.
        job: the job's name, kept in ``status.json``.
        facts: further facts about the job, kept there too.
    """

    def __init__(
        self, path: Path | str, *, job: str = "run", facts: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        if (self.path / STATUS).exists():
            raise ValueError(
                f"{self.path} already holds a run (status.json); choose another folder or remove it"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._job, self._facts = job, dict(facts or {})
        self._json_files: list[str] = []
        self._started_at = _now()
        self._start_s = time.perf_counter()
        self._write_status("running")

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file whole or not at all."""
        target = self.path / name
        replace_file(target, text.encode())
        return target

    def write_json(self, name: str, value: Any) -> Path:
        """Write JSON; NaN and infinities become null."""
        if name != STATUS and name not in self._json_files:
            self._json_files.append(name)
        return self.write_text(
            name, json.dumps(_nulled(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        )

    def write_config(self, config_yaml: str, overrides: Sequence[str]) -> None:
        """Write the resolved configuration and the overrides that led to it."""
        self.write_text("config.yaml", config_yaml)
        self.write_text(
            "overrides.yaml",
            "".join(f"- {json.dumps(o, ensure_ascii=False)}\n" for o in overrides) or "[]\n",
        )

    def write_metrics(self, metrics: Mapping[str, Any]) -> Path:
        """Write metrics.json in the order of ``SECTIONS``; NaN and unknown sections are refused."""
        unknown = [name for name in metrics if name not in SECTIONS]
        if unknown:
            raise ValueError(
                f"metrics.json has no section {unknown[0]!r}; sections: {', '.join(SECTIONS)}"
            )
        bad = [
            path
            for path, value in leaves(metrics)
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if bad:
            raise ValueError(f"metrics.json: not a finite number: {', '.join(bad)}")
        return self.write_json(
            "metrics.json", {name: metrics[name] for name in SECTIONS if name in metrics}
        )

    def write_steps(self, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write ``steps.jsonl``, one line per engine step."""
        return self.write_text(
            "steps.jsonl", "".join(json.dumps(_nulled(row), allow_nan=False) + "\n" for row in rows)
        )

    def succeed(self) -> None:
        """Mark the run as ok; its JSON files are listed, so that a lost one is missed."""
        self._write_status("ok", json_files=self._json_files)

    def skip(self, finished_in: Path) -> None:
        """Mark the run as done before, in another folder."""
        self._write_status("skipped", finished_in=str(finished_in))

    def fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """Mark the run as failed, with the traceback; for ``KeyboardInterrupt`` with a reason alone.

        Args:
            error: what ended it.
            cause: what to name as the reason, where ``error`` only wraps it.
        """
        if isinstance(error, KeyboardInterrupt):
            self._write_status("failed", error="interrupted by the user")
            return
        self._write_status(
            "failed",
            error=f"{type(cause or error).__name__}: {cause or error}",
            traceback="".join(traceback.format_exception(error)),
        )

    def _write_status(self, status: str, **details: str | list[str]) -> None:
        record: dict[str, Any] = {
            "status": status,
            "schema_version": SCHEMA_VERSION,
            "job": self._job,
            "started_at": self._started_at,
        } | self._facts
        if status != "running":
            record |= {
                "finished_at": _now(),
                "duration_s": round(time.perf_counter() - self._start_s, 3),
            }
        self.write_json(STATUS, record | details)


def read_status(folder: Path) -> dict[str, Any]:
    """``status.json`` of a run folder; empty where there is none that can be read."""
    return read_object(folder / STATUS)


def is_finished(folder: Path, **facts: str) -> bool:
    """Whether a folder holds a run that ended well, that this code reads, and whose JSON files are all whole.

    Args:
        folder: of the run.
        facts: what its status.json must say as well, such as ``config_hash``.
    """
    status = read_status(folder)
    wanted = {"status": "ok", "schema_version": SCHEMA_VERSION} | facts
    if any(status.get(key) != value for key, value in wanted.items()):
        return False
    names = {*status.get("json_files", ()), *(path.name for path in folder.glob("*.json"))}
    return all(_is_json(folder / name) for name in names)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def read_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds; empty where it is missing, damaged, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted path and value of every leaf of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nulled(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _nulled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nulled(item) for item in value]
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
