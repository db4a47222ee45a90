"""What several runs chose beside all_high: a table for each model on each machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenrouter.evaluation.paper import Column, Run, Table, TableSpec, build_table
from tokenrouter.evaluation.paper.spec import BASELINE
from tokenrouter.evaluation.paper.table import measured
from tokenrouter.evaluation.report.gather import ReportedRun
from tokenrouter.wording import counted

NOT_OF_A_ROW = ("seed=", "paths.", "logger", "hydra", "skip_finished=", "objective=")
"""Overrides that do not tell rows apart: repeats differ by their seed."""
# Of the numbers that are of a text, which repeats share, KL alone has an error and is judged.
COLUMNS = (
    Column(title="output tok/s", key="output_tok_s", better="more"),
    Column(title="times all_high", key="throughput.speedup_vs_all_high", digits=2),
    Column(
        title="KL mnat",
        key="kl_mean_nats",
        digits=2,
        scale=1e3,
        better="less",
        error="kl_stderr_nats",
    ),
    Column(title="KL decode mnat", key="kl_decode_nats", digits=2, scale=1e3),
    Column(title="ppl %", key="ppl_rel_pct", digits=2),
    Column(title="top-1 %", key="top1_agreement_frac", scale=1e2),
    Column(title="same text %", key="same_output_frac", scale=1e2),
    Column(title="high %, text", key="eval_high_frac", scale=1e2),
    Column(title="high %, requests", key="high_frac", scale=1e2),
    Column(title="TTFT p99 ms", key="ttft_p99_ms", digits=0, better="less"),
    Column(title="ITL p99 ms", key="itl_p99_ms", digits=0, better="less"),
    Column(title="KV peak MB", key="kv_peak_live_bytes", scale=1e-6, better="less"),
    Column(title="router %", key="router.overhead_frac", digits=2, scale=1e2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """One table.

    Attributes:
        title: model and machine.
        table: a row of the chosen system and one of all_high per label, which begins with the runs' numbers.
        numbers: by label, of the runs behind it.
    """

    title: str
    table: Table
    numbers: dict[str, Sequence[int]]


def join(runs: Sequence[ReportedRun]) -> list[Joined]:
    """Tables of all runs that chose a system, one per model, machine and number of threads.

    Runs of one clean commit that differ by their seed alone are repeats, and share a row.
    """
    comparing = [each for each in runs if _measures(each)]
    apart: dict[str, list[ReportedRun]] = {}
    for each in comparing:
        run = each.run
        place = repr((run.model_hash, run.machine, run.num_threads))
        apart.setdefault(place, []).append(each)
    return [_joined(own) for own in apart.values()]


def _joined(runs: Sequence[ReportedRun]) -> Joined:
    repeats: dict[tuple[str, ...], list[ReportedRun]] = {}
    for each in runs:
        repeats.setdefault(_row_key(each), []).append(each)
    common = set.intersection(*(set(_own(each.run)) for each in runs)) if len(repeats) > 1 else ()
    labels: dict[tuple[str, ...], Sequence[Run]] = {}
    numbers: dict[str, Sequence[int]] = {}
    for own in repeats.values():
        told = " ".join(o for o in _own(own[0].run) if o not in common) or "defaults"
        label = f"{', '.join(str(each.number) for each in own)}: {told}"
        labels[(label,)] = [_narrowed(each.run) for each in own]
        numbers[label] = [each.number for each in own]
    spec = TableSpec(
        name="report",
        title="Chosen systems",
        question="",
        runs={},
        labels=("run",),
        columns=COLUMNS,
        rows="systems",
    )
    return Joined(title=_title(runs[0].run), table=build_table(spec, labels), numbers=numbers)


def _measures(each: ReportedRun) -> bool:
    """Whether a run has a chosen system with a number in any column."""
    run = each.run
    return run.chosen is not None and any(measured(c, run, run.chosen) for c in COLUMNS)


def _narrowed(run: Run) -> Run:
    """The run with its chosen system and all_high alone."""
    kept = {name: run.systems[name] for name in run.systems if name in (BASELINE, run.chosen)}
    return replace(run, systems=kept)


def _own(run: Run) -> list[str]:
    return [o for o in run.overrides if not o.lstrip("+~").startswith(NOT_OF_A_ROW)]


def _row_key(each: ReportedRun) -> tuple[str, ...]:
    """Equal for repeats; a run of a changed or an unknown commit is no repeat of any other."""
    provenance = each.run.provenance
    commit = provenance.get("commit")
    is_known = bool(commit) and provenance.get("dirty") is False
    return (*sorted(_own(each.run)), str(commit) if is_known else f"run {each.number}")


def _title(run: Run) -> str:
    provenance: dict[str, Any] = dict(run.provenance)
    hardware = provenance["hardware"]
    where = hardware.get("devices") or [hardware.get("cpu", "an unknown machine")]
    named = ", ".join(map(str, where if isinstance(where, list) else [where]))
    model = f"{provenance.get('model', 'unknown model')} ({run.model_hash or 'no hash'})"
    threads = "" if run.num_threads is None else f", {counted(run.num_threads, 'thread')}"
    return f"{model} on {named} ({hardware.get('num_cpus', 'unknown number of')} cores{threads})"
