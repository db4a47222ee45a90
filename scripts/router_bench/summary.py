"""From KL per window to rows with intervals, and to the JSON object's first keys."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tokenrouter.evaluation.divergence import position_buckets
from tokenrouter.evaluation.router_scores import Bootstrap, Interval, gain_share, mean, ratio

from .measures import Key, Measured, Smoothed

Found = Mapping[Key, Measured]
Row = dict[str, Any]
JUDGED = "mlp"


def rows_of(text: str, found: Found) -> list[Row]:
    """A row per router, pick and share, in the order of measuring.

    Args:
        text: its name.
        found: of ``measure_text``.

    Raises:
        ValueError: fewer than two windows.
    """
    num_windows, num_tokens = next(iter(found.values())).kl_WN.shape
    bootstrap = Bootstrap(num_windows)
    return [
        _row(text, key, found, bootstrap, num_tokens=num_tokens)
        for key in sorted(found, key=lambda key: key[2])
    ]


def claims(rows: Sequence[Row], smoothed: Mapping[str, Smoothed | None]) -> dict[str, Any]:
    """What is asked of the mlp: by text its least share of the oracle's gain, its KL over random's, and smoothed.

    Args:
        rows: of all texts.
        smoothed: by text; None where it was not measured.
    """
    found: dict[str, Any] = {}
    for text in dict.fromkeys(row["text"] for row in rows):
        for pick, part in (("threshold", ""), ("rank", "_rank")):
            own = [r for r in rows if (r["text"], r["router"], r["pick"]) == (text, JUDGED, pick)]
            gains = [row["gain_frac"]["value"] for row in own]
            found[f"mlp{part}_oracle_gain_frac_{text}"] = None if None in gains else min(gains)
            found[f"mlp{part}_kl_vs_random_{text}"] = own[-1]["vs_random"]["value"]
    known = {text: value for text, value in smoothed.items() if value is not None}
    for text, value in known.items():
        interval = Bootstrap(len(value.kl_W)).interval(ratio, value.kl_W, value.plain_low_W)
        found[f"smooth5_kl_vs_plain_low_{text}"] = as_values(interval)
        found[f"smooth5_high_frac_{text}"] = value.high_frac
    key = "smooth5_kl_vs_plain_low"
    found[key] = max((found[f"{key}_{text}"]["value"] for text in known), default=None)
    return found


def as_values(interval: Interval) -> dict[str, float | None]:
    """Value, low and high; None for what is not defined, since JSON has no NaN."""
    return {name: _known(value) for name, value in interval._asdict().items()}


def _row(text: str, key: Key, found: Found, bootstrap: Bootstrap, *, num_tokens: int) -> Row:
    router, pick, share = key
    own = found[key]
    kl_W = own.kl_WN.mean(1)
    row: Row = {
        "text": text,
        "router": router,
        "pick": pick,
        "share": share,
        "high_frac": float(own.high_frac_W.mean()),
        "kl_mean_nats": as_values(bootstrap.interval(mean, kl_W)),
        "auroc": _known(float(own.auroc_W.mean())),
        "recall_frac": _known(float(own.recall_W.mean())),
        "kl_by_position": {
            name: float(own.kl_WN[:, mask].mean()) for name, mask in _buckets(num_tokens)
        },
    }
    if router == "all_low":
        return row
    random, oracle = found["random", "exact", share], found["oracle", "exact", share]

    def gain(mask: Any) -> dict[str, float | None]:
        kls: list[Tensor] = [m.kl_WN[:, mask].mean(1) for m in (random, own, oracle)]
        return as_values(bootstrap.interval(gain_share, *kls))

    judged = found[JUDGED, "rank" if pick == "rank" else "threshold", share]
    return row | {
        "vs_random": as_values(bootstrap.interval(ratio, kl_W, random.kl_WN.mean(1))),
        "gain_frac": gain(slice(None)),
        "gain_frac_by_position": {name: gain(mask) for name, mask in _buckets(num_tokens)},
        "mlp_is": None if router == JUDGED else bootstrap.verdict(judged.kl_WN.mean(1), kl_W),
    }


def _buckets(num_tokens: int) -> list[tuple[str, Any]]:
    return list(position_buckets(np.arange(num_tokens)))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
