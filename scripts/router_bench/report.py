"""Tables in text, and the JSON object."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .summary import Row

TITLE = (
    f"{'phase':<8} {'router':<10} {'pick':<9} {'asked':>6} {'high':>6}  {'KL, thousandths of a nat':<25} "
    f"{'vs random':>9}  {'of the gain':<20} {'AUROC':>6} {'recall':>6}  {'tok/s':>6}  the mlp is"
)


def table(rows: Sequence[Row]) -> str:
    """The rows of one text, a line each, below a title."""
    first = rows[0]
    return "\n".join([f"\n{first['text']}", TITLE, *map(line, rows)])


def line(row: Row) -> str:
    """One row of the table; dashes where a number does not exist."""
    kl = _interval({key: 1e3 * value for key, value in row["kl_mean_nats"].items()}, 3)
    ratio = _number(row["vs_random"]["value"], 3) if "vs_random" in row else "-"
    gain = _interval(row["gain_frac"], 2) if "gain_frac" in row else "-"
    speed = row.get("tok_s_vs_all_high")
    return (
        f"{row['phase']:<8} {row['router']:<10} {row['pick']:<9} {100 * row['share']:>5.1f}% "
        f"{100 * row['high_frac']:>5.1f}%  "
        f"{kl:<25} {ratio:>9}  {gain:<20} {_number(row['auroc'], 3):>6} {_number(row['recall_frac'], 3):>6}  "
        f"{_number(speed and speed['median'], 3):>6}  "
        f"{row.get('mlp_is') or '-'}"
    )


def equal_speed_lines(found: Mapping[str, Any]) -> str:
    """What the mlp's KL is of that of others that are as fast."""
    lines = ["\nthe mlp's KL over that of others at its throughput"]
    for key, value in found.items():
        if isinstance(value, str):
            lines.append(f"{key}: {value}")
            continue
        for row in value:
            lines.append(
                f"{key}: {100 * row['share']:.0f}% high, {row['tok_s_vs_all_high']:.3f} of all_high's tok/s: "
                f"{_interval(row['kl_ratio'], 3)}, {row['mlp_is']}"
            )
    return "\n".join(lines)


def cost_lines(costs: Mapping[str, Mapping[str, float]]) -> str:
    """By router and phase the microseconds per token and their share of the executors' time."""
    lines = [f"\n{'router':<10} {'tokens':<14} {'us a token':>11} {'of executors':>13}"]
    for name, cost in costs.items():
        for phase in ("decode", "prefill"):
            lines.append(
                f"{name:<10} {phase:<14} {cost[f'{phase}_us_per_token']:>11.3f} "
                f"{100 * cost[f'{phase}_overhead_frac']:>12.2f}%"
            )
    return "\n".join(lines)


def as_json(found: Mapping[str, Any]) -> str:
    """An object with a line per entry, and per row of ``rows``; numbers have five digits."""
    parts = []
    for key, value in found.items():
        text = json.dumps(_rounded(value), default=str)
        if key == "rows":
            text = (
                "[\n" + ",\n".join(json.dumps(_rounded(row), default=str) for row in value) + "\n]"
            )
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _interval(found: Mapping[str, float | None], digits: int) -> str:
    value, low, high = (_number(found[key], digits) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
