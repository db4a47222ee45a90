"""From measurements to plain values, and to tables."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from scripts.prefix_bench.setup import SHARED
from scripts.router_bench.summary import as_values
from tokenrouter.evaluation.router_scores import Bootstrap, mean, ratio

from .cost import Numbers
from .quality import Quality
from .ways import EACH

Qualities = Mapping[str, Mapping[str, Quality]]
"""By text and way of asking."""
Costs = Mapping[str, Mapping[str, Sequence[Numbers]]]
"""By phase and way of asking, a turn each."""
Row = dict[str, Any]
ALL = "all texts"
QUALITY_TITLE = (
    f"{'asked':<14} {'high':>6} {'KL, thousandths of a nat':>26} {'vs each token':>20} {'hits':>7}"
)
COST_TITLE = (
    f"{'asked':<14} {'us a token':>24} {'vs each token':>20} {'of executors':>12} {'decided':>8} "
    f"{'hits':>7}"
)


def quality_rows(found: Qualities) -> list[Row]:
    """Per text, and over the windows of all, a row per way of asking."""
    rows: list[Row] = []
    names = list(next(iter(found.values())))
    pooled = {name: _pooled([found[text][name] for text in found]) for name in names}
    for text, of in {**found, ALL: pooled}.items():
        bootstrap = Bootstrap(len(of[EACH].kl_W))
        for name, own in of.items():
            rows.append(
                {
                    "text": text,
                    "way": name,
                    "high_frac": float(own.high_frac_W.mean()),
                    "kl_mean_nats": as_values(bootstrap.interval(mean, own.kl_W)),
                    "kl_vs_each_token": as_values(
                        bootstrap.interval(ratio, own.kl_W, of[EACH].kl_W)
                    ),
                    "cache_hit_frac": own.hit_frac,
                }
            )
    return rows


def cost_rows(found: Costs) -> list[Row]:
    """Per phase and way of asking the medians, and microseconds beside those of each token, turn by turn.

    Ranges are from the 10th to the 90th percentile of the turns.
    """
    rows: list[Row] = []
    for phase, of in found.items():
        each = [turn["us_per_token"] for turn in of[EACH]]
        for name, turns in of.items():
            medians = {key: median(turn[key] for turn in turns) for key in turns[0]}
            us = [turn["us_per_token"] for turn in turns]
            ratios = [own / other for own, other in zip(us, each, strict=True)]
            rows.append(
                {
                    "phase": phase,
                    "way": name,
                    **medians,
                    "us_range": _range(us),
                    "us_vs_each_token": median(ratios),
                    "us_vs_each_token_range": _range(ratios),
                }
            )
    return rows


def claims(
    qualities: Sequence[Row],
    costs: Sequence[Row],
    shared: Mapping[str, Mapping[str, Numbers]],
) -> dict[str, Any]:
    """The JSON object's first keys: KL over all texts and microseconds beside asking about each token; hit rates."""
    found: dict[str, Any] = {}
    for row in qualities:
        if row["text"] == ALL and row["way"] != EACH:
            found[_key(row["way"], "kl_vs_each_token")] = row["kl_vs_each_token"]["value"]
    for row in costs:
        if row["way"] != EACH:
            part = "" if row["phase"] == "decode" else f"{row['phase']}_"
            found[_key(row["way"], f"{part}us_vs_each_token")] = row["us_vs_each_token"]
    for system, of in shared.items():
        suffix = "_and_prefix_sharing" if system == SHARED else ""
        found[f"cache_hit_frac_shared_prompt{suffix}"] = of["cached"]["cache_hit_frac"]
    return found


def quality_table(rows: Sequence[Row]) -> str:
    """A line per row, below a title per text."""
    lines, text = [], None
    for row in rows:
        if row["text"] != text:
            text = row["text"]
            lines += [f"\n{text}", QUALITY_TITLE]
        kl = {key: 1e3 * value for key, value in row["kl_mean_nats"].items()}
        lines.append(
            f"{row['way']:<14} {_percent(row['high_frac']):>6} {_interval(kl, 2):>26} "
            f"{_interval(row['kl_vs_each_token'], 3):>20} {_percent(row['cache_hit_frac']):>7}"
        )
    return "\n".join(lines)


def cost_table(rows: Sequence[Row]) -> str:
    """A line per row, below a title per phase."""
    lines, phase = [], None
    for row in rows:
        if row["phase"] != phase:
            phase = row["phase"]
            lines += [f"\n{phase}", COST_TITLE]
        us = _spread(row["us_per_token"], row["us_range"], 3)
        versus = _spread(row["us_vs_each_token"], row["us_vs_each_token_range"], 2)
        lines.append(
            f"{row['way']:<14} {us:>24} {versus:>20} {_percent(row['overhead_frac'], 2):>12} "
            f"{_percent(row['decided_frac']):>8} {_percent(row.get('cache_hit_frac')):>7}"
        )
    return "\n".join(lines)


def shared_table(found: Mapping[str, Mapping[str, Numbers]]) -> str:
    """A line per engine and way of asking."""
    lines = [
        f"\nshared prompt\n{'engine':<8} {'asked':<14} {'shared tokens':>14} {'hits':>7} {'asked':>7}"
    ]
    for system, of in found.items():
        for name, row in of.items():
            lines.append(
                f"{system:<8} {name:<14} {row['shared_tokens']:>14,} {_percent(row.get('cache_hit_frac')):>7} "
                f"{_percent(row['asked_frac']):>7}"
            )
    return "\n".join(lines)


def _pooled(parts: Sequence[Quality]) -> Quality:
    hits = [p.hit_frac for p in parts]
    return Quality(
        kl_W=torch.cat([p.kl_W for p in parts]),
        high_frac_W=torch.cat([p.high_frac_W for p in parts]),
        hit_frac=None if None in hits else sum(h for h in hits if h is not None) / len(hits),
    )


def _range(values: Sequence[float]) -> list[float]:
    low, high = np.percentile(values, (10, 90)).tolist()
    return [low, high]


def _key(way: str, what: str) -> str:
    """A way's number goes last: ``interval_kl_vs_each_token_8``."""
    kind, _, number = way.rpartition("_")
    return f"{kind}_{what}_{number}" if number.isdigit() else f"{way}_{what}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def _interval(found: Mapping[str, float | None], digits: int) -> str:
    value, low, high = ("-" if v is None else f"{v:.{digits}f}" for v in found.values())
    return f"{value} [{low}, {high}]"


def _spread(value: float, range_: Sequence[float], digits: int) -> str:
    return f"{value:.{digits}f} [{range_[0]:.{digits}f}, {range_[1]:.{digits}f}]"
