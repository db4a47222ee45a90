"""From scores to rows of a table."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenrouter.evaluation.divergence import Bools, TokenScores

from .measures import Reference, Run
from .setup import Bench

Row = dict[str, Any]
QUARTILES = (0, 25, 50, 75, 100)


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
        """Of the reference."""
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
        }

    def row(self, run: Run) -> Row:
        """One setting: memory, quality over all and over sensitive tokens, by phase, source and document."""
        scores, everywhere = _in_order(run.scores), np.ones(len(self._own), np.bool_)
        peak, full = round(sum(run.peak_bytes)), round(sum(self._reference.peak_bytes))
        masks = {"prefill": ~self._is_decode_N, "decode": self._is_decode_N}
        documents, retention = self._by_document(run, scores), run.setting.retention
        return {
            "policy": run.setting.policy,
            "strength": run.setting.strength,
            "evicted_frac": run.setting.evicted_frac,
            "max_entries": run.setting.max_entries,
            "threshold": run.setting.threshold,
            "recent": retention.recent if retention else None,
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
            "by_document": documents,
            "ppl_rel_pct_quartiles": _quartiles([found["ppl_rel_pct"] for found in documents]),
        }

    def _by_document(self, run: Run, scores: TokenScores) -> list[Row]:
        """What each document loses and saves, in their order."""
        peaks = zip(run.peak_bytes, self._reference.peak_bytes, strict=True)
        return [
            {"source": document.source, "saved_frac": 1.0 - own / full}
            | self._quality(scores, self._own.window == index)
            for index, (document, (own, full)) in enumerate(
                zip(self._bench.documents, peaks, strict=True)
            )
        ]

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

    def _saved_frac(self, run: Run, source: str) -> float:
        chosen = [i for i, d in enumerate(self._bench.documents) if d.source == source]
        peak, full = (
            sum(held[i] for i in chosen) for held in (run.peak_bytes, self._reference.peak_bytes)
        )
        return 1.0 - peak / full

    def _sources(self) -> list[str]:
        return list(dict.fromkeys(d.source for d in self._bench.documents))


def _quartiles(values: Sequence[float]) -> list[float]:
    """Smallest, lower quartile, median, upper quartile, largest."""
    return [float(value) for value in np.percentile(values, QUARTILES)]


def _in_order(scores: TokenScores) -> TokenScores:
    """By document, then by position: rows of several documents come mixed."""
    return _take(scores, np.lexsort((scores.position, scores.window)))


def _subset(scores: TokenScores, mask: Bools) -> TokenScores:
    return _take(scores, np.flatnonzero(mask))


def _take(scores: TokenScores, index: np.ndarray) -> TokenScores:
    return TokenScores(**{name: getattr(scores, name)[index] for name in TokenScores.__slots__})
