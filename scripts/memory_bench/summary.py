"""From scores to rows of a table, and from rows to the numbers that a claim rests on."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tokenrouter.evaluation.divergence import Bools, TokenScores

from .measures import Reference, Run
from .setup import CONTROLS, SCORED, Bench

PPL_PCT, SENSITIVE_PPL_PCT = 1.0, 3.0
Row = dict[str, Any]
TITLE = (
    f"{'policy':<19}{'budget':>14}{'saved %':>9}{'KL':>9}{'ppl %':>8}{'KL sens':>9}{'ppl % s':>9}"
    f"{'KL pre':>9}{'KL dec':>9}{'copy %':>8}{'key %':>7}"
)


class Summary:
    """Turns runs into rows.

    Args:
        reference: what they are compared with.
        bench: what was read.
    """

    def __init__(self, bench: Bench, reference: Reference) -> None:
        self._bench = bench
        self._reference = reference
        own = self._own = _in_order(reference.scores)
        prompt_len_N = np.array([d.prompt_len for d in bench.documents])[own.window]
        self._is_decode_N = own.position >= prompt_len_N
        self._is_sensitive_N = np.concatenate([part.numpy() for part in reference.is_sensitive_N])
        self._source_N = np.array([d.source for d in bench.documents])[own.window]

    def facts(self) -> Row:
        """Of the reference and the tasks."""
        tokens, sensitive = len(self._own), int(self._is_sensitive_N.sum())
        return {
            "documents": {
                source: [len(d.ids) for d in self._bench.documents if d.source == source]
                for source in self._sources()
            },
            "tokens": tokens,
            "sensitive_tokens": sensitive,
            "sensitive_frac": sensitive / tokens,
            "sensitive_frac_by_source": {
                source: float(self._is_sensitive_N[self._source_N == source].mean())
                for source in self._sources()
            },
            "ppl_full": self._own.ppl,
            "peak_live_bytes_full": round(sum(self._reference.peak_bytes)),
            "retrieval": {
                task: {"answers": len(found), "solved_by_full": sum(found)}
                for task, found in self._solved(self._reference.solved).items()
            },
        }

    def row(self, run: Run) -> Row:
        """One setting: memory, quality over all and over sensitive tokens, by phase and source, retrieval."""
        scores, everywhere = _in_order(run.scores), np.ones(len(self._own), np.bool_)
        peak, full = round(sum(run.peak_bytes)), round(sum(self._reference.peak_bytes))
        masks = {"prefill": ~self._is_decode_N, "decode": self._is_decode_N}
        retrieval = self._accuracies(run)
        known = [acc for acc in retrieval.values() if acc is not None]
        return {
            "policy": run.setting.policy,
            "strength": run.setting.strength,
            "evicted_frac": run.setting.evicted_frac,
            "max_entries": run.setting.max_entries,
            "threshold": run.setting.threshold,
            "recent": run.setting.retention.recent,
            "peak_live_bytes": peak,
            "engine_peak_live_bytes": run.engine_peak_bytes,
            "saved_frac": 1.0 - peak / full,
            **self._quality(scores, everywhere),
            **{phase: self._quality(scores, mask) for phase, mask in masks.items()},
            "sources": {
                source: self._quality(scores, self._source_N == source)
                | {"saved_frac": self._saved_frac(run, source)}
                for source in self._sources()
            },
            "retrieval": retrieval,
            "retrieval_acc_frac": sum(known) / len(known) if known else None,
        }

    def _quality(self, scores: TokenScores, mask: Bools) -> Row:
        found: Row = {}
        for name, chosen in (("", mask), ("sensitive_", mask & self._is_sensitive_N)):
            own, part = _subset(self._own, chosen), _subset(scores, chosen)
            has_next = bool((~np.isnan(own.nll_nats)).any())
            found |= {
                f"kl_{name}mean_nats": part.kl_mean_nats if len(part) else None,
                f"{name}ppl_rel_pct": 100 * (part.ppl / own.ppl - 1) if has_next else None,
            }
        return found

    def _accuracies(self, run: Run) -> dict[str, float | None]:
        """Share of the answers that the full cache predicts; None: there are none, or nothing was evicted."""
        full = self._solved(self._reference.solved)
        if run.solved is None:
            return dict.fromkeys(full)
        own = self._solved(run.solved)
        return {
            task: sum(a and b for a, b in zip(full[task], own[task], strict=True)) / sum(full[task])
            if any(full[task])
            else None
            for task in full
        }

    def _solved(self, by_item: Sequence[list[bool]]) -> dict[str, list[bool]]:
        """By task, of all its items."""
        found: dict[str, list[bool]] = {}
        for item, answers in zip(self._bench.items, by_item, strict=True):
            found.setdefault(item.task, []).extend(answers)
        return found

    def _saved_frac(self, run: Run, source: str) -> float:
        chosen = [i for i, d in enumerate(self._bench.documents) if d.source == source]
        peak, full = (
            sum(held[i] for i in chosen) for held in (run.peak_bytes, self._reference.peak_bytes)
        )
        return 1.0 - peak / full

    def _sources(self) -> list[str]:
        return list(dict.fromkeys(d.source for d in self._bench.documents))


def claims(rows: Sequence[Row]) -> Row:
    """What is saved at no more than 1 % perplexity over all and 3 % over sensitive tokens, and by which row."""
    best = _most_saved(row for row in rows if row["policy"] not in CONTROLS)
    threshold = _most_saved(row for row in rows if row["policy"] == "threshold")
    return {
        "kv_saved_frac_at_1pct": best["saved_frac"] if best else None,
        "kv_ppl_rel_pct": best["ppl_rel_pct"] if best else None,
        "kv_sensitive_ppl_rel_pct": best["sensitive_ppl_rel_pct"] if best else None,
        "kv_best": _name(best),
        "kv_threshold_saved_frac_at_1pct": threshold["saved_frac"] if threshold else None,
        "kv_controls_saved_frac_at_1pct": {
            control: found["saved_frac"]
            for control in CONTROLS[1:]
            if (found := _most_saved(row for row in rows if row["policy"] == control))
        },
        "kv_by_budget": _against_controls(rows),
    }


def _most_saved(rows: Iterable[Row]) -> Row | None:
    good = [
        row
        for row in rows
        if row["ppl_rel_pct"] <= PPL_PCT
        and (row["sensitive_ppl_rel_pct"] or 0.0) <= SENSITIVE_PPL_PCT
    ]
    return max(good, key=lambda row: float(row["saved_frac"]), default=None)


def _against_controls(rows: Sequence[Row]) -> dict[str, Row]:
    """Per budget the policy with the least KL on sensitive tokens, and the controls beside it."""
    keys = ("kl_sensitive_mean_nats", "retrieval_acc_frac")
    found: dict[str, Row] = {}
    for budget in dict.fromkeys(row["strength"] for row in rows if row["policy"] in SCORED):
        same = [row for row in rows if row["strength"] == budget]
        own = [row for row in same if row["policy"] not in CONTROLS and row[keys[0]] is not None]
        if not own:
            continue
        best = min(own, key=lambda row: float(row[keys[0]]))
        controls = [row for row in same if row["policy"] in CONTROLS]
        found[budget] = {
            row["policy"]: {key: row[key] for key in keys} for row in (best, *controls)
        }
    return found


def _name(row: Row | None) -> str | None:
    return None if row is None else f"{row['policy']} {row['strength']}"


def line(row: Row) -> str:
    """A row as text, below ``TITLE``."""

    def show(value: float | None, width: int, digits: int, factor: float = 1.0) -> str:
        return f"{'-' if value is None else f'{factor * value:.{digits}f}':>{width}}"

    return (
        f"{row['policy']:<19}{row['strength']:>14}"
        + show(row["saved_frac"], 9, 1, 100)
        + show(row["kl_mean_nats"], 9, 4)
        + show(row["ppl_rel_pct"], 8, 2)
        + show(row["kl_sensitive_mean_nats"], 9, 4)
        + show(row["sensitive_ppl_rel_pct"], 9, 2)
        + show(row["prefill"]["kl_mean_nats"], 9, 4)
        + show(row["decode"]["kl_mean_nats"], 9, 4)
        + show(row["retrieval"].get("copy"), 8, 1, 100)
        + show(row["retrieval"].get("key_value"), 7, 1, 100)
    )


def _in_order(scores: TokenScores) -> TokenScores:
    """By document, then by position: rows of several documents come mixed."""
    return _take(scores, np.lexsort((scores.position, scores.window)))


def _subset(scores: TokenScores, mask: Bools) -> TokenScores:
    return _take(scores, np.flatnonzero(mask))


def _take(scores: TokenScores, index: np.ndarray) -> TokenScores:
    return TokenScores(**{name: getattr(scores, name)[index] for name in TokenScores.__slots__})
