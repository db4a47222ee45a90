"""``scripts/reproduce.sh``: runs what the tables of experiments/ need, and writes them.

A run lies under the hash of its resolved config, so that an interrupted reproduction goes on where it stopped, and
tables that need the same run share it.
"""

import argparse
import difflib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hydra import compose, initialize_config_dir

from tokenrouter.evaluation.paper import Run, TableSpec, build_table, read_run, read_spec
from tokenrouter.evaluation.paper.write import QUICK, RESULTS, write_page, write_table
from tokenrouter.tasks.finished import config_hash
from tokenrouter.tasks.worker import Worker
from tokenrouter.telemetry.runfolder import is_finished, read_status

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "experiments"
RUN = "run"
"""``@run`` in an override: the folder of the run itself."""
UNTRACKED = "logger=none"
DATA_DIR = "TOKENROUTER_DATA_DIR"
"""Read by conf/paths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One run that tables need.

    Attributes:
        overrides: of run.py.
        folder: of the run, named by the hash of its resolved config.
        name: for the terminal.
    """

    overrides: Sequence[str]
    folder: Path
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a table needs.

    Attributes:
        prepared: what the others look into, in order.
        rows: runs by the labels of the table's rows.
    """

    prepared: Sequence[Work]
    rows: Mapping[tuple[str, ...], Sequence[Work]]

    def in_order(self) -> list[Work]:
        """All runs, each behind those that it looks into."""
        return [*self.prepared, *(work for repeats in self.rows.values() for work in repeats)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and writes tables.

    Returns:
        0; 1 where a run failed or a table could not be written, after all others were; 130 after Ctrl-C.
    """
    known = table_names(TABLES)
    parser = _parser(known)
    args = parser.parse_args(arguments)
    names = _asked(parser, args.tables, known)
    try:
        specs = [read_spec(TABLES / name / "table.yaml") for name in names]
        with_tasks = _has_questions(specs)
        planned = {
            spec.name: plan(spec, args.runs, quick=args.quick, with_tasks=with_tasks)
            for spec in specs
        }
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        failed = run_all(work for plan in planned.values() for work in plan.in_order())
    except OSError as error:
        print(f"error: runs cannot be kept in {args.runs}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where this one stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    written = [_write_table(s, planned[s.name], args.into, is_quick=args.quick) for s in specs]
    is_shown = _write_page(args.into, known)
    return int(failed or not all(written) or not is_shown)


def _asked(
    parser: argparse.ArgumentParser, names: Sequence[str], known: Sequence[str]
) -> Sequence[str]:
    """Each table once, all of them where none is named; ends the script where there is no such table."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            parser.error(
                f"there is no table {name!r}{meant} There are: {', '.join(known) or 'none'}"
            )
    return list(dict.fromkeys(names)) or known


def _write_table(spec: TableSpec, planned: Plan, into: Path, *, is_quick: bool) -> bool:
    """Whether a table could be written from its runs; says why not, or where it is."""
    folder = into / spec.name / (QUICK if is_quick else RESULTS)
    try:
        runs = {
            labels: [read_run(work.folder) for work in repeats]
            for labels, repeats in planned.rows.items()
        }
        write(spec, runs, folder, is_quick=is_quick)
    except (ValueError, OSError) as error:
        print(f"error: table {spec.name} is not written: {error}", file=sys.stderr)
        return False
    print(f"table {spec.name} in {folder}")
    return True


def _write_page(into: Path, names: Sequence[str]) -> bool:
    """The page of all tables; whether it and all of them could be shown."""
    page = into / "README.md"
    try:
        problems = write_page(into, page, names)
    except OSError as error:
        problems = [f"{page} is not written: {error}"]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if page.exists():
        print(f"all tables are shown by {page}")
    return not problems


def table_names(folder: Path) -> list[str]:
    """Of the tables of a folder, in the order of their names."""
    return sorted(path.parent.name for path in folder.glob("*/table.yaml"))


def plan(spec: TableSpec, runs: Path, *, quick: bool, with_tasks: bool = False) -> Plan:
    """What a table needs to be run.

    Args:
        spec: the table.
        runs: folder of all run folders.
        quick: the short form.
        with_tasks: ask lm-eval's questions, where the table has some.

    Raises:
        ValueError: overrides that do not compose, or name a run that is not prepared before.
    """
    folders: dict[str, Path] = {}

    def work(name: str, overrides: Sequence[str]) -> Work:
        own = [_with_folders(override, folders) for override in overrides]
        folder = (runs / hash_of(own)).resolve()
        own = [_with_folders(override, {RUN: folder}) for override in own]
        return Work(overrides=own, folder=folder, name=f"{spec.name} {name}")

    prepared = []
    for name, overrides in spec.preparations(quick=quick).items():
        prepared.append(work(name, overrides))
        folders[name] = prepared[-1].folder
    rows = {
        labels: [work(" ".join(labels), own) for own in repeats]
        for labels, repeats in spec.jobs(quick=quick, with_tasks=with_tasks).items()
    }
    return Plan(prepared=prepared, rows=rows)


def _has_questions(specs: Sequence[TableSpec]) -> bool:
    """Whether lm-eval and its questions are there; says what is missing where tables ask for them."""
    missing = [
        what
        for what, is_there in (
            ("lm-eval (pip install -e '.[lm-eval]')", find_spec("lm_eval") is not None),
            ("a folder of local data sets (TOKENROUTER_DATA_DIR)", bool(os.environ.get(DATA_DIR))),
        )
        if not is_there
    ]
    asking = [spec.name for spec in specs if spec.tasks]
    if asking and missing:
        print(
            f"without the columns of tasks, which need {' and '.join(missing)}: {', '.join(asking)}"
        )
    return not missing


def _with_folders(override: str, folders: Mapping[str, Path]) -> str:
    """``@name`` replaced by a folder; ``@run`` stays until it is known."""

    def folder(found: re.Match[str]) -> str:
        name = found[1]
        if name in folders:
            return str(folders[name])
        if name == RUN:
            return found[0]
        known = ", ".join(folders) or "none"
        raise ValueError(f"{override}: there is no run @{name} before this one; prepared: {known}")

    return re.sub(r"@(\w+)(?=/|$)", folder, override)


def hash_of(overrides: Sequence[str]) -> str:
    """``config_hash`` of what the overrides compose to.

    Raises:
        ValueError: they do not compose.
    """
    try:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("config", overrides=[*overrides, UNTRACKED])
        return config_hash(cfg)
    except Exception as error:  # Hydra's own come in many kinds
        raise ValueError(f"{' '.join(overrides)}: {' '.join(str(error).split())}") from None


def run_all(work: Iterable[Work]) -> bool:
    """Runs what has not ended well yet, one after the other in a process beside this one; whether any failed.

    A failed one leaves its status.json and log; the others go on.
    """
    wanted = list({each.folder: each for each in work}.values())
    missing = [each for each in wanted if not is_finished(each.folder)]
    print(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them done before", flush=True)
    failed = False
    with Worker() as worker:
        for index, each in enumerate(missing):
            started = time.perf_counter()
            returncode = _run(each, worker)
            took = f"{time.perf_counter() - started:.0f} s"
            print(f"[{index + 1}/{len(missing)}] {each.name}: {took}", flush=True)
            if returncode:
                failed = True
                print(
                    f"  failed (exit code {returncode}): {_reason(each.folder)}; see {_log(each.folder)}",
                    file=sys.stderr,
                    flush=True,
                )
    return failed


def write(
    spec: TableSpec, runs: Mapping[tuple[str, ...], Sequence[Run]], folder: Path, *, is_quick: bool
) -> list[Path]:
    """Builds a table and writes its files.

    Raises:
        ValueError: nothing to show, or runs that do not belong in one table.
    """
    command = f"bash scripts/reproduce.sh {spec.name}{' --quick' if is_quick else ''}"
    table = build_table(spec, runs)
    return write_table(table, folder, command=command, is_quick=is_quick)


def _run(work: Work, worker: Worker) -> int:
    """Exit code of one run; what an unfinished one left is removed first."""
    shutil.rmtree(work.folder, ignore_errors=True)
    work.folder.parent.mkdir(parents=True, exist_ok=True)
    return worker.run([*work.overrides, UNTRACKED], work.folder, _log(work.folder))


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def _reason(folder: Path) -> str:
    status = read_status(folder)
    return str(status.get("error", status.get("status", "it did not begin")))


def _parser(known: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/reproduce.sh", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"of: {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="the short form of every run")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "outputs" / "reproduce", help="folder of run folders"
    )
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
