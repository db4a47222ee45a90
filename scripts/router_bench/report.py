"""The table."""

from collections.abc import Mapping, Sequence

from .summary import Row

TITLE = (
    f"{'router':<10} {'pick':<9} {'asked':>6} {'high':>6}  {'KL, thousandths of a nat':<25} {'vs random':>9}  "
    f"{'of the gain':<20} {'AUROC':>6} {'recall':>6}  the mlp is"
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
    return (
        f"{row['router']:<10} {row['pick']:<9} {100 * row['share']:>5.1f}% {100 * row['high_frac']:>5.1f}%  "
        f"{kl:<25} {ratio:>9}  {gain:<20} {_number(row['auroc'], 3):>6} {_number(row['recall_frac'], 3):>6}  "
        f"{row.get('mlp_is') or '-'}"
    )


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


def _interval(found: Mapping[str, float | None], digits: int) -> str:
    value, low, high = (_number(found[key], digits) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
