"""report.html: one file without scripts or anything from outside; every word of a run's files is escaped."""

import html
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenrouter.evaluation.paper.render import VERDICT_MARKS, legend, table_cells
from tokenrouter.evaluation.paper.spec import BASELINE
from tokenrouter.evaluation.report.gather import Gathered, LeftOut, ReportedRun
from tokenrouter.evaluation.report.joined import Joined
from tokenrouter.evaluation.tables import table_columns
from tokenrouter.telemetry.runfolder import leaves
from tokenrouter.wording import writable

TITLE = "Runs side by side"
KEY_NUMBERS = (
    "quality.kl_mean_nats",
    "quality.kl_high_mean_nats",
    "quality.decode.kl_mean_nats",
    "quality.ppl_rel_pct",
    "quality.top1_agreement_frac",
    "quality.tasks.",
    "throughput.output_tok_s",
    "throughput.speedup_vs_",
    "generations.",
    "latency.ttft_ms.p",
    "latency.tpot_ms.p",
    "latency.goodput_frac",
    "router.",
    "routes.",
    "kv.peak_live_bytes",
    "kv.saved_frac",
    "memory.",
)
"""What the dotted path of a number that is shown at once begins with; the others are behind a fold."""
KEY_PROVENANCE = ("commit", "dirty", "model", "model_hash", "seed", "num_threads", "hardware.cpu")
STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#16181d;--muted:#5b6472;--line:#d5dae1;--panel:#f4f6f8;--link:#1d4e89}
body{margin:0 auto;max-width:92rem;padding:1.5rem 1rem 4rem;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin-top:2.2rem}h3{font-size:1rem;margin-bottom:.3rem}
section{border-top:1px solid var(--line)}
a{color:var(--link)}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--line);padding:.2rem .5rem;text-align:right;white-space:nowrap;font-size:.92em}
th:first-child,td:first-child,.texts td{text-align:left;white-space:normal;overflow-wrap:break-word}
.wide td:first-child{min-width:11rem;max-width:26rem}
.texts td{max-width:44rem}
tr.chosen td{font-weight:600;background:var(--panel)}
p,li,summary{overflow-wrap:anywhere}
.muted,.notes{color:var(--muted)}
code{background:var(--panel);border:1px solid var(--line);border-radius:3px;padding:0 .3em;overflow-wrap:anywhere}
img{max-width:100%;height:auto;background:#fff;border:1px solid var(--line);margin:.6rem 0;display:block}
@media(prefers-color-scheme:dark){
:root{--bg:#14171c;--ink:#eceff3;--muted:#a3adba;--line:#3a414c;--panel:#1f242c;--link:#7db2ea}}
"""


def html_page(gathered: Gathered, tables: Sequence[Joined]) -> str:
    """The whole page: tables of all runs, what was left out, each run."""
    runs = gathered.runs
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" ',
            "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f'<link rel="icon" href="data:,"><title>{TITLE}</title><style>{STYLE}</style></head>\n',
            f"<body><h1>{TITLE}</h1>\n",
            *map(_joined, tables),
            _without_table(runs, tables),
            _left_out(gathered.left_out),
            *map(_run, runs),
            "</body></html>\n",
        )
    )


def _joined(joined: Joined) -> str:
    header, lines = table_cells(joined.table, VERDICT_MARKS, escape=_text)
    chosen = [row.labels[1] != BASELINE for row in joined.table.rows]
    rows = []
    for row, line, is_chosen in zip(joined.table.rows, lines, chosen, strict=True):
        numbers = joined.numbers[row.labels[0]]
        links = ", ".join(f'<a href="#run-{number}">{number}</a>' for number in numbers)
        told = _text(row.labels[0].partition(": ")[2])
        rows.append(([f"{links}: {told}", *line[1:]], is_chosen))
    return (
        f"<h2>Chosen systems beside all_high: {_text(joined.title)}</h2>\n{_table(header, rows)}"
        f'<p class="notes">{_text(legend(joined.table))} Runs of one clean commit that differ by their seed alone '
        "share a row. Other models and machines have tables of their own.</p>\n"
    )


def _without_table(runs: Sequence[ReportedRun], tables: Sequence[Joined]) -> str:
    shown = {number for joined in tables for own in joined.numbers.values() for number in own}
    missing = [each for each in runs if each.number not in shown]
    if not missing:
        return ""
    links = ", ".join(f'<a href="#run-{each.number}">{each.number}</a>' for each in missing)
    return f"<p>In no table above, since they compare no systems: {links}.</p>\n"


def _left_out(left_out: Sequence[LeftOut]) -> str:
    if not left_out:
        return '<p class="muted">No folder was left out.</p>\n'
    items = "".join(
        f"<li><code>{_text(each.path)}</code> {_text(each.reason)}</li>" for each in left_out
    )
    return f"<h2>Left out</h2>\n<ul>{items}</ul>\n"


def _run(each: ReportedRun) -> str:
    run = each.run
    return (
        f'<section id="run-{each.number}"><h2>{each.number}: {_text(each.name)}</h2>\n'
        f"<p>{_overrides(run.overrides)}</p>\n"
        f'<p class="muted">{_text(run.path)}<br>{_status(run.status)}</p>\n'
        f"{_systems(each)}{_numbers(run.metrics)}{_provenance(run.provenance)}"
        f"{''.join(_figure(each, *figure) for figure in each.figures)}</section>\n"
    )


def _overrides(overrides: Sequence[str]) -> str:
    if not overrides:
        return "No overrides: the defaults."
    return " ".join(f"<code>{_text(override)}</code>" for override in overrides)


def _status(status: Mapping[str, Any]) -> str:
    told = {"started": "started_at", "finished": "finished_at", "took, in seconds,": "duration_s"}
    times = [f"{words} {_text(status[key])}" for words, key in told.items() if key in status]
    return "; ".join([_text(status.get("status")), *times])


def _systems(each: ReportedRun) -> str:
    if not each.rows:
        return ""
    columns = table_columns(each.rows)
    names = [row.name for row in each.rows]
    values = [column for title, column in columns.items() if title != "system"]
    cells = ([_text(name), *map(_text, line)] for name, *line in zip(names, *values, strict=True))
    rows = [(line, row.chosen) for line, row in zip(cells, each.rows, strict=True)]
    notes = "<br>".join(map(_text, each.run.notes))
    return f'<h3>Systems</h3>\n{_table(map(_text, columns), rows)}<p class="notes">{notes}</p>\n'


def _numbers(metrics: Mapping[str, Any]) -> str:
    found = list(leaves(metrics))
    key = [(path, value) for path, value in found if path.startswith(KEY_NUMBERS)]
    others = [(path, value) for path, value in found if not path.startswith(KEY_NUMBERS)]
    return (
        f"<h3>Key numbers</h3>\n{_pairs(key)}{_fold('The other numbers of metrics.json', others)}"
    )


def _provenance(provenance: Mapping[str, Any]) -> str:
    found = list(leaves(provenance))
    key = [(path, value) for path, value in found if path in KEY_PROVENANCE]
    others = [(path, value) for path, value in found if path not in KEY_PROVENANCE]
    return (
        f"<h3>Provenance</h3>\n{_pairs(key)}{_fold('The other facts of provenance.json', others)}"
    )


def _fold(title: str, pairs: Sequence[tuple[str, Any]]) -> str:
    return f"<details><summary>{title}</summary>\n{_pairs(pairs)}</details>\n" if pairs else ""


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td><code>{_text(path)}</code></td><td>{_text(_value(value))}</td></tr>"
        for path, value in pairs
    )
    return f'<table class="texts">{rows}</table>\n'


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "unknown"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _figure(each: ReportedRun, name: str, content: bytes | None) -> str:
    if content is None:
        return f"<p>{_text(name)} is no picture, or it is damaged.</p>\n"
    data = b64encode(content).decode()
    alt = _text(f"{name} of run {each.number}: {each.name}")
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">\n'


def _table(header: Iterable[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """Cells that are escaped already; a row that is ``True`` stands out."""

    def body() -> Iterator[str]:
        for line, is_chosen in rows:
            kind = ' class="chosen"' if is_chosen else ""
            yield f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>"

    heads = "".join(f"<th>{title}</th>" for title in header)
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(body())}'
        "</tbody></table></div>\n"
    )


def _text(value: Any) -> str:
    """Escaped, and such that it can be written."""
    return html.escape(writable(str(value)))
