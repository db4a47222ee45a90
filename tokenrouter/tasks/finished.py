"""Jobs of sweeps that are done already: found by what they compute, so that a repeated sweep computes the rest."""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tokenrouter.telemetry.provenance import ROOT, git_state
from tokenrouter.telemetry.runfolder import STATUS, is_finished, read_object

log = logging.getLogger(__name__)
UNHASHED = ("skip_finished", "objective")
"""Keys that change nothing of what a job computes; ``paths`` is treated by itself."""
ASIDE = "earlier-"
"""Folders inside a job's with what earlier runs left there begin so."""


def config_hash(cfg: DictConfig) -> str:
    """Of the resolved config, whatever its paths are.

    A value that is taken from ``paths`` counts as the name of its key there. Code, and the content of files that the
    config names, are not in it.

    Args:
        cfg: the composed config.

    Returns:
        16 hexadecimal digits.

    Raises:
        OmegaConfBaseException: the config does not resolve.
    """
    plain = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    assert isinstance(plain, DictConfig)
    for key in UNHASHED:
        plain.pop(key, None)
    plain.paths = {key: f"<{key}>" for key in plain.get("paths") or {}}
    resolved = OmegaConf.to_container(plain, resolve=True, throw_on_missing=True)
    return hashlib.sha256(json.dumps(resolved, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]


def find_finished(wanted: str, folder: Path, sweep_dir: Path, output_dir: Path) -> Path | None:
    """The run folder of a job that ended well.

    Args:
        wanted: its ``config_hash``.
        folder: of the job that would run; looked at first.
        sweep_dir: its sweep, whose other jobs are looked at, too.
        output_dir: with other sweeps (``sweeps/<date>/<time>/<job>``), the newest of which wins.
    """
    others = [*sweep_dir.glob(f"*/{STATUS}"), *output_dir.glob(f"sweeps/*/*/*/{STATUS}")]
    newest = sorted({path.parent.resolve() for path in others}, reverse=True)
    for candidate in (folder, *newest):
        if is_finished(candidate, config_hash=wanted):
            return candidate
    return None


def other_commit(folder: Path) -> str:
    """That a run was of another commit than the code is now, in words; empty where it was not, or nothing is known."""
    now, _ = git_state(ROOT)
    then = read_object(folder / "provenance.json").get("commit")
    if not now or not then or now == then:
        return ""
    return f" (at commit {then[:8]}; this is {now[:8]})"


def run_folders(sweep_dir: Path) -> Iterator[Path]:
    """The run folders of a sweep's jobs, in their order."""
    found = [path.parent for path in sweep_dir.rglob(STATUS)]
    own = [path for path in found if not _is_aside(path.relative_to(sweep_dir))]
    yield from sorted(own, key=lambda path: (len(path.name), path.name))


def _is_aside(path: Path) -> bool:
    return any(part.startswith(ASIDE) for part in path.parts)


def put_aside(folder: Path) -> None:
    """Make room in a job's folder where an earlier run lies: its files go to ``earlier-<n>`` there.

    The log stays: it is open, and goes on.
    """
    if not (folder / STATUS).exists():
        return
    aside = folder / f"{ASIDE}{1 + len(list(folder.glob(f'{ASIDE}*')))}"
    log.info("%s holds an earlier run, which goes to %s in it", folder, aside.name)
    aside.mkdir()
    for entry in list(folder.iterdir()):
        if not entry.name.startswith(ASIDE) and entry.suffix != ".log":
            entry.rename(aside / entry.name)


def read_objective(cfg: DictConfig, folder: Path) -> Any:
    """What a search is told of a job: the numbers of metrics.json that ``objective`` names.

    Args:
        cfg: the composed config; ``objective`` is a dotted path, a list of them, or None.
        folder: the job's run folder.

    Returns:
        A float, a list of them, or None, as ``objective`` is.

    Raises:
        ValueError: a path is no number there.
    """
    if cfg.objective is None:
        return None
    try:
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"objective={cfg.objective} is taken from metrics.json, and this task writes none: choose task=evaluate, "
            "task=tradeoff or task=benchmark"
        ) from None
    if isinstance(cfg.objective, str):
        return _number(metrics, cfg.objective)
    return [_number(metrics, path) for path in cfg.objective]


def _number(metrics: Any, path: str) -> float:
    value = metrics
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            known = (
                f"; instead of {key} there is {', '.join(value)}" if isinstance(value, dict) else ""
            )
            raise ValueError(f"objective={path} is not in metrics.json of this task{known}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"objective={path} must be a number of metrics.json, and is {value!r}")
    return float(value)
