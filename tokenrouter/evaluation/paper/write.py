"""A table's files, and the page that shows all tables."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tokenrouter.files import replace_file
from tokenrouter.wording import counted

from .figure import FIGURES, check_figure, draw_figure
from .render import as_csv, latex, legend, markdown
from .table import Table

RESULTS, QUICK = "results", "quick"
"""Folders beside ``table.yaml``: of the long form and of the short one, which never takes the long one's place."""
ABOUT, TABLE = "about.json", "table.md"


def write_table(table: Table, folder: Path, *, command: str, is_quick: bool) -> list[Path]:
    """Writes table.md, .tex, .csv, the figure as PNG and PDF, and about.json.

    What lies there of an earlier table is removed first. about.json comes last: without it a folder holds no table.

    Args:
        table: with rows.
        folder: made if missing.
        command: that makes it again.
        is_quick: of the short form.

    Raises:
        ValueError: a figure in which nothing would be drawn; nothing is written then.
        OSError: the folder cannot be written.
    """
    about = _about(table, command=command, is_quick=is_quick)
    check_figure(table)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {TABLE: markdown(table), "table.tex": latex(table), "table.csv": as_csv(table)}
    for name in (ABOUT, *texts, *FIGURES):
        (folder / name).unlink(missing_ok=True)
    for name, text in texts.items():
        replace_file(folder / name, text.encode())
    drawn = draw_figure(table, folder, caption=_origin(about))
    replace_file(folder / ABOUT, (json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode())
    return [*(folder / name for name in (*texts, ABOUT)), *drawn]


def write_page(tables: Path, page: Path, names: Iterable[str]) -> list[str]:
    """Puts every table that has results on one page, with where its numbers come from.

    A table is shown in its long form, or in its short one where that is all there is.

    Args:
        tables: folder of the tables' folders.
        page: the Markdown file to write; left as it is where no table has results.
        names: of tables, in the order to show them.

    Returns:
        Of tables whose files are damaged and that are left out: why.
    """
    parts, damaged = [], []
    for name in names:
        for form in (RESULTS, QUICK):
            if not (tables / name / form / ABOUT).exists():
                continue
            try:
                parts += _section(tables, f"{name}/{form}")
            except (OSError, ValueError, KeyError, TypeError) as error:
                damaged.append(
                    f"{tables / name / form} is damaged ({type(error).__name__}: {error}): make the table again"
                )
                continue
            break
    if parts:
        replace_file(page, ("\n\n".join([PAGE_HEAD, *parts]) + "\n").encode())
    return damaged


def _section(tables: Path, place: str) -> list[str]:
    about = json.loads((tables / place / ABOUT).read_text(encoding="utf-8"))
    has_figure = (tables / place / FIGURES[0]).exists()
    return [
        f"## {about['title']}",
        about["question"],
        (tables / place / TABLE).read_text(encoding="utf-8").rstrip(),
        f"{about['legend']} {_origin(about)}".lstrip(),
        f"`{about['command']}`",
        *([f"![{about['title']}]({place}/{FIGURES[0]})"] if has_figure else []),
    ]


PAGE_HEAD = """# Experiments

Written by `bash scripts/reproduce.sh`: each table is built from run folders by what its `table.yaml` says, and lies in
its folder as Markdown, LaTeX and CSV beside its figure. `LOG.md` tells what was tried, with the attempts that lost."""


def _about(table: Table, *, command: str, is_quick: bool) -> dict[str, Any]:
    provenances = [run.provenance for run in table.runs]
    return {
        "title": table.spec.title,
        "question": table.spec.question,
        "command": command,
        "quick": is_quick,
        "legend": legend(table),
        "commits": _distinct(_commit(p) for p in provenances),
        "hardware": _distinct(_hardware(p) for p in provenances),
        "models": _distinct(str(p.get("model")) for p in provenances),
        "date": max((run.finished_at for run in table.runs), default=str(date.today()))[:10],
        "num_runs": len(table.runs),
    }


def _origin(about: Mapping[str, Any]) -> str:
    form = (
        "Short form: enough to see that it runs, too little to trust a number. "
        if about["quick"]
        else ""
    )
    where = "; ".join(about["hardware"])
    return (
        f"{form}{counted(about['num_runs'], 'run')}, {', '.join(about['models'])}, {where}, commit "
        f"{', '.join(about['commits'])}, {about['date']}."
    )


def _commit(provenance: Mapping[str, Any]) -> str:
    commit = provenance.get("commit")
    return "unknown" if not commit else commit[:8] + ("+changes" if provenance.get("dirty") else "")


def _hardware(provenance: Mapping[str, Any]) -> str:
    hardware = provenance.get("hardware", {})
    devices: Sequence[str] = hardware.get("devices") or [str(hardware.get("cpu", "unknown"))]
    return f"{', '.join(devices)} ({hardware.get('num_cpus')} cores, {_threads(provenance)})"


def _threads(provenance: Mapping[str, Any]) -> str:
    count = provenance.get("num_threads")
    return "unknown threads" if count is None else counted(count, "thread")


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
