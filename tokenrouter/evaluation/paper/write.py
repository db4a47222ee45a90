"""A table's files, and the page that shows all tables."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tokenrouter.files import replace_file

from .figure import draw_figure
from .render import as_csv, latex, legend, markdown
from .table import Table

RESULTS = "results"
"""Folder beside ``table.yaml``."""


def write_table(table: Table, folder: Path, *, command: str, is_quick: bool) -> list[Path]:
    """Writes table.md, .tex, .csv, about.json, and the figure as PNG and PDF.

    Args:
        table: with rows.
        folder: made if missing.
        command: that makes it again.
        is_quick: of the short form.
    """
    about = _about(table, command=command, is_quick=is_quick)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "table.md": markdown(table),
        "table.tex": latex(table),
        "table.csv": as_csv(table),
        "about.json": json.dumps(about, indent=1, ensure_ascii=False) + "\n",
    }
    for name, text in texts.items():
        replace_file(folder / name, text.encode())
    drawn = draw_figure(table, folder, caption=_origin(about))
    return [*(folder / name for name in texts), *drawn]


def write_page(tables: Path, page: Path, names: Iterable[str]) -> None:
    """Puts every table that has results on one page, with where its numbers come from.

    Args:
        tables: folder of the tables' folders.
        page: the Markdown file to write.
        names: of tables, in the order to show them.
    """
    parts = [PAGE_HEAD]
    for name in names:
        folder = tables / name / RESULTS
        if not (folder / "about.json").exists():
            continue
        about = json.loads((folder / "about.json").read_text())
        parts += [
            f"## {about['title']}",
            about["question"],
            (folder / "table.md").read_text().rstrip(),
            f"{about['legend']} {_origin(about)}",
            f"`{about['command']}`",
        ]
        if (folder / "figure.png").exists():
            parts.append(f"![{about['title']}]({name}/{RESULTS}/figure.png)")
    replace_file(page, ("\n\n".join(parts) + "\n").encode())


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
        f"{form}{about['num_runs']} runs, {', '.join(about['models'])}, {where}, commit "
        f"{', '.join(about['commits'])}, {about['date']}."
    )


def _commit(provenance: Mapping[str, Any]) -> str:
    commit = provenance.get("commit")
    return "unknown" if not commit else commit[:8] + ("+changes" if provenance.get("dirty") else "")


def _hardware(provenance: Mapping[str, Any]) -> str:
    hardware = provenance.get("hardware", {})
    devices: Sequence[str] = hardware.get("devices") or [str(hardware.get("cpu", "unknown"))]
    return f"{', '.join(devices)} ({hardware.get('num_cpus')} cores, {provenance.get('num_threads')} threads)"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
