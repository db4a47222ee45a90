"""From KL per window to rows with intervals, and to the JSON object's first keys."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from tokenrouter.evaluation.divergence import position_buckets
from tokenrouter.evaluation.router_scores import Bootstrap, as_values, gain_share, mean, ratio
from tokenrouter.telemetry import spread
from tokenrouter.types import Phase

from .asking import first_decided
from .equal_speed import JUDGED, RIVALS, compared, overall
from .measures import Measured, Smoothed
from .routings import Key
from .throughput import Speeds

Found = Mapping[Key, Measured]
Row = dict[str, Any]


def rows_of(text: str, found: Found, speeds: Mapping[Phase, Speeds]) -> list[Row]:
    """A row per phase, share, router and pick, in the order of measuring.

    Args:
        text: its name.
        found: of ``measure_text``.
        speeds: of each phase.

    Raises:
        ValueError: fewer than two windows.
    """
    bootstrap = Bootstrap(len(next(iter(found.values())).kl_WN))
    rows = []
    for key in sorted(found, key=lambda key: (key[0], key[3])):
        row = _row(text, key, found, bootstrap)
        if key[1] in speeds[key[0]].routers:
            turns = speeds[key[0]].vs_all_high(key[1], row["high_frac"])
            row["tok_s_vs_all_high"] = asdict(spread(turns))
        rows.append(row)
    return rows


def at_equal_speed(text: str, found: Found, speeds: Mapping[Phase, Speeds]) -> dict[str, Any]:
    """The mlp beside each rival that is as fast: by share, and in one word for all.

    Args:
        text: its name.
        found: of ``measure_text``.
        speeds: of each phase.
    """
    said: dict[str, Any] = {}
    for phase, own in speeds.items():
        part = "" if phase == Phase.PREFILL else "_decode"
        known = {key[1] for key in found if key[0] == phase}
        by_rival = {rival: compared(found, own, rival, phase) for rival in RIVALS if rival in known}
        verdicts = [row[f"{JUDGED}_is"] for rows in by_rival.values() for row in rows]
        said[f"mlp{part}_at_equal_tok_s_{text}"] = overall(verdicts)
        for rival, rows in by_rival.items():
            said[f"mlp{part}_vs_{rival}_at_equal_tok_s_{text}"] = rows
    return said


def claims(rows: Sequence[Row], smoothed: Mapping[str, Smoothed | None]) -> dict[str, Any]:
    """What is asked of the mlp: by text its least share of the oracle's gain, its KL over random's, and smoothed.

    Of prefill, and of decode where the key says so.

    Args:
        rows: of all texts.
        smoothed: by text; None where it was not measured.
    """
    found: dict[str, Any] = {}
    for text in dict.fromkeys(row["text"] for row in rows):
        for phase, pick, part in (
            ("prefill", "threshold", ""),
            ("prefill", "rank", "_rank"),
            ("decode", "threshold", "_decode"),
            ("decode", "rank", "_decode_rank"),
        ):
            wanted = {"text": text, "phase": phase, "router": JUDGED, "pick": pick}
            if not (own := [row for row in rows if wanted.items() <= row.items()]):
                continue
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


def _row(text: str, key: Key, found: Found, bootstrap: Bootstrap) -> Row:
    phase, router, pick, share = key
    own = found[key]
    kl_W, buckets = own.kl_WN.mean(1), _buckets(phase, own.kl_WN.shape[1])
    row: Row = {
        "text": text,
        "phase": phase.name.lower(),
        "router": router,
        "pick": pick,
        "share": share,
        "high_frac": float(own.high_frac_W.mean()),
        "kl_mean_nats": as_values(bootstrap.interval(mean, kl_W)),
        "auroc": _known(float(own.auroc_W.mean())),
        "recall_frac": _known(float(own.recall_W.mean())),
        "kl_by_position": {name: float(own.kl_WN[:, mask].mean()) for name, mask in buckets},
    }
    if router == "all_low":
        return row
    random, oracle = (found[phase, name, "exact", share] for name in ("random", "oracle"))

    def gain(mask: Any) -> dict[str, float | None]:
        kls: list[Tensor] = [m.kl_WN[:, mask].mean(1) for m in (random, own, oracle)]
        return as_values(bootstrap.interval(gain_share, *kls))

    judged = found[phase, JUDGED, "rank" if pick == "rank" else "threshold", share]
    return row | {
        "vs_random": as_values(bootstrap.interval(ratio, kl_W, random.kl_WN.mean(1))),
        "gain_frac": gain(slice(None)),
        "gain_frac_by_position": {name: gain(mask)["value"] for name, mask in buckets},
        "mlp_is": None if router == JUDGED else bootstrap.verdict(judged.kl_WN.mean(1), kl_W),
    }


def _buckets(phase: Phase, num_tokens: int) -> list[tuple[str, Any]]:
    first = first_decided(phase)
    return list(position_buckets(np.arange(first, first + num_tokens)))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
