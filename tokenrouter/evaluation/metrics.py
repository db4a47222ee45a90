"""metrics.json, section by section. docs/metrics.md defines every key; names are a contract."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tokenrouter import LLM
from tokenrouter.engine import EngineStats
from tokenrouter.evaluation.divergence import TokenScores
from tokenrouter.evaluation.generations import GenerationMatch
from tokenrouter.evaluation.quality import Quality
from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.evaluation.shares import high_layers
from tokenrouter.evaluation.slo import SLO
from tokenrouter.evaluation.throughput import Repeat, Throughput
from tokenrouter.types import Phase, Route
from tokenrouter.workloads import RequestSet

BASELINES = ("all_high", "all_low", "request_level", "static_batch")
Section = dict[str, Any]


def quality_section(chosen: Quality, high: Quality, reference: TokenScores) -> Section:
    """KL, perplexity and agreement of the chosen router, and its routes in the scored tokens.

    Beside each KL stands all_high's own.
    """
    phases: Section = {"prefill": _phase(chosen.prefill, high.prefill)}
    if chosen.decode is not None and high.decode is not None:
        phases["decode"] = _phase(chosen.decode, high.decode)
    scores = chosen.prefill
    return {
        "kl_mean_nats": scores.kl_mean_nats,
        "kl_high_mean_nats": high.prefill.kl_mean_nats,
        **phases,
        "ppl": scores.ppl,
        "ppl_rel_pct": 100.0 * (scores.ppl / reference.ppl - 1.0),
        "top1_agreement_frac": scores.top1_agreement_frac,
        "routes": chosen.routes,
    }


def _phase(chosen: TokenScores, high: TokenScores) -> Section:
    own, theirs = chosen.kl_by_position(), high.kl_by_position()
    return {
        "kl_mean_nats": chosen.kl_mean_nats,
        "kl_high_mean_nats": high.kl_mean_nats,
        "by_position": {
            name: {"kl_mean_nats": own[name], "kl_high_mean_nats": theirs[name]} for name in own
        },
    }


def generations_section(match: GenerationMatch) -> Section:
    """The chosen router's texts beside all_high's; a score that was not computed is left out."""
    return {key: value for key, value in asdict(match).items() if value is not None}


def throughput_section(chosen: Throughput, rows: Mapping[str, SystemRow]) -> Section:
    """Rates of the chosen router and its speed-up over each baseline that ran."""
    own = chosen.output_tok_s.median
    section = {
        "output_tok_s": own,
        "total_tok_s": chosen.total_tok_s.median,
        "requests_s": chosen.requests_s.median,
        "busy_s": chosen.busy_s.median,
        "makespan_s": chosen.makespan_s.median,
    }
    for name in ("all_high", "request_level", "static_batch"):
        other = rows[name].output_tok_s if name in rows else None
        if other is not None:
            section[f"speedup_vs_{name}"] = own / other.median
    return section


def workload_section(workload: RequestSet) -> Section:
    """What was served, and what was changed to make it fit."""
    return {
        "num_requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "arrival_span_s": workload.arrival_span_s,
        "clipped_requests": workload.clipped_requests,
        "clipped_prompt_tokens": workload.clipped_prompt_tokens,
        "clipped_output_tokens": workload.clipped_output_tokens,
        "wrapped_requests": workload.wrapped_requests,
    }


def latency_section(chosen: Throughput, slo: SLO) -> Section:
    """Percentiles of the chosen router's latencies, its goodput and the SLO that it is measured by."""
    goodput = slo.goodput(chosen)
    return {
        **{name: value for name, value in chosen.latency().items() if value is not None},
        "goodput_frac": goodput.frac,
        "goodput_requests_s": goodput.requests_s,
        "slo": slo.section(),
    }


def serving_sections(llm: LLM, passes: Sequence[Repeat]) -> dict[str, Section]:
    """Router, routes and KV of the chosen router, summed over its passes."""
    stats = [repeat.stats for repeat in passes]
    router_s = sum(s.router_s for s in stats)
    decided, reused = sum(s.decided_tokens for s in stats), sum(s.reused_tokens for s in stats)
    repeated = sum(s.repeated_tokens for s in stats)
    router: Section = {
        "us_per_token": 1e6 * router_s / max(decided, 1),
        "overhead_frac": overhead_frac(passes),
        "decided_frac": (decided - repeated) / max(decided + reused, 1),
        "version": llm.router.version,
    }
    if (hits := cache_hit_frac(passes)) is not None:
        router["cache_hit_frac"] = hits
    return {"router": router, "routes": _routes(llm, passes), "kv": _kv(llm, stats)}


def _kv(llm: LLM, stats: Sequence[EngineStats]) -> Section:
    """Peaks over the passes; entries evicted as tokens of all layer groups; per pass, so that passes do not add up."""
    num_groups = len(llm.engine.pool.tables)
    most = max(stats, key=lambda s: s.num_preemptions)
    section: Section = {
        "peak_live_bytes": max(s.peak_live_bytes for s in stats),
        "peak_allocated_bytes": max(s.peak_allocated_bytes for s in stats),
        "saved_frac": 1
        - max(s.peak_live_bytes for s in stats) / max(s.peak_full_bytes for s in stats),
        "evicted_tokens": max(s.evicted_entries for s in stats) / num_groups,
        "int8_tokens": max(s.peak_int8_tokens for s in stats),
        "shared_tokens": max(s.shared_tokens for s in stats),
        "compactions": max(s.num_compactions for s in stats),
        "preemption": {
            "preemptions": most.num_preemptions,
            "swaps_out": most.swaps.num_out,
            "swaps_in": most.swaps.num_in,
            "recomputes": most.num_recomputes,
            "recomputed_tokens": most.reused_tokens,
        },
    }
    if llm.engine.scheduler.host is not None:
        section["host"] = {
            "peak_entries": max(s.swaps.peak_entries for s in stats),
            "peak_bytes": max(s.swaps.peak_bytes for s in stats),
            "copy_ms": 1e3 * max(s.swaps.copy_s for s in stats),
        }
    return section


def overhead_frac(passes: Sequence[Repeat]) -> float:
    """Time in features and router over the forwards' time."""
    stats = [repeat.stats for repeat in passes]
    return sum(s.router_s for s in stats) / sum(s.executor_s for s in stats)


def cache_hit_frac(passes: Sequence[Repeat]) -> float | None:
    """Share of the tokens looked up in the router's cache that cost no decision; None without a cache."""
    counts = [s.route_cache for repeat in passes if (s := repeat.stats).route_cache is not None]
    lookups = sum(c.lookups for c in counts if c is not None)
    return sum(c.hits for c in counts if c is not None) / lookups if lookups else None


def _routes(llm: LLM, passes: Sequence[Repeat]) -> Section:
    stats = [repeat.stats for repeat in passes]
    executed = np.sum([s.executed_tokens for s in stats], axis=0)
    requested = np.sum([s.requested_tokens for s in stats], axis=0)
    degraded = np.sum([s.degraded_tokens for s in stats], axis=0)
    table = llm.engine.route_table.routes
    high_R = high_layers(llm)
    path_ms = _ms_per_token(table, executed.sum(axis=0).tolist(), stats)
    section: Section = {}
    for index, route in enumerate(table):
        paths = sorted(route.executors)
        entry: Section = {
            "executor": "+".join(
                llm.pool.executors[path].name for path in paths if path in llm.pool.executors
            ),
            "high_layers_frac": float(high_R[index]),
            "token_frac": _frac(executed[:, index].sum(), executed.sum()),
            "prefill_token_frac": _frac(
                executed[Phase.PREFILL, index], executed[Phase.PREFILL].sum()
            ),
            "decode_token_frac": _frac(executed[Phase.DECODE, index], executed[Phase.DECODE].sum()),
            "degraded_frac": _frac(degraded[index], requested[:, index].sum()),
        }
        if len(paths) == 1 and executed[:, index].any() and paths[0] in path_ms:
            entry["ms_per_token"] = path_ms[paths[0]]
        section[route.name] = entry
    return section


def _ms_per_token(
    routes: Sequence[Route], tokens: Sequence[int], stats: Sequence[EngineStats]
) -> dict[str, float]:
    """Per executor path, its time over the tokens of all routes on it; a token counts by its share of layers there."""
    path_s: dict[str, float] = {}
    for s in stats:
        for path, seconds in s.executor_s_by_path.items():
            path_s[path] = path_s.get(path, 0.0) + seconds
    path_tokens: dict[str, float] = {}
    for route, count in zip(routes, tokens, strict=True):
        for start, stop, path in route.spans:
            share = (stop - start) / route.spans[-1].stop
            path_tokens[path] = path_tokens.get(path, 0.0) + count * share
    return {path: 1e3 * path_s[path] / n for path, n in path_tokens.items() if n and path in path_s}


def _frac(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0


def baselines_section(rows: Mapping[str, SystemRow]) -> Section:
    """What the baselines reached; a value that the task did not measure is left out."""
    names = ("output_tok_s", "kl_mean_nats", "ppl", "ttft_p99_ms", "kv_peak_live_bytes")
    section: Section = {}
    for name in BASELINES:
        if name in rows:
            row = rows[name]
            values = {key: getattr(row, key) for key in names if getattr(row, key) is not None}
            if row.output_tok_s is not None:
                values["output_tok_s"] = row.output_tok_s.median
            section[name] = values
    return section
