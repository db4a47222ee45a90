"""Rows as text, and the numbers that a claim rests on."""

from collections.abc import Iterable, Sequence

from .settings import CONTROLS, INT8, SCORED
from .summary import Row

PPL_PCT, SENSITIVE_PPL_PCT = 1.0, 3.0
MNAT = 1e3
TITLE = (
    f"{'policy':<19}{'budget':>14}{'saved %':>9}{'KL mnat':>9}{'ppl %':>8}{'ppl % of documents':>20}{'KL sens':>9}"
    f"{'ppl % s':>9}{'KL pre':>9}{'KL dec':>9}"
)

RECALL_TITLE = (
    f"{'policy':<19}{'budget':>9}{'decision':>10}{'evicted %':>11}"
    f"{'copy %':>8}{'90 % of draws':>16}{'key %':>8}{'90 % of draws':>16}"
)


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
        "kv_int8": _of_int8(rows),
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
    keys = ("kl_sensitive_mean_nats", "kl_mean_nats", "ppl_rel_pct", "saved_frac")
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


def _of_int8(rows: Sequence[Row]) -> Row | None:
    """Every entry in int8 and none evicted; None where that did not run."""
    row = next((row for row in rows if row["policy"] == INT8), None)
    if row is None:
        return None
    return {
        "saved_frac": row["saved_frac"],
        "kl_mean_mnat": MNAT * row["kl_mean_nats"],
        "kl_sensitive_mean_mnat": _scaled(row["kl_sensitive_mean_nats"], MNAT),
        "ppl_rel_pct": row["ppl_rel_pct"],
        "sensitive_ppl_rel_pct": row["sensitive_ppl_rel_pct"],
    }


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _name(row: Row | None) -> str | None:
    return None if row is None else f"{row['policy']} {row['strength']}"


def recall_line(row: Row) -> str:
    """A row of retrieval as text, below ``RECALL_TITLE``."""
    text = f"{row['policy']:<19}{row['strength']:>9}{row['decision']:>10}{100 * row['evicted_frac']:>11.1f}"
    for task in ("copy", "key_value"):
        value, low, high = (100 * part for part in row["tasks"][task]["acc_frac"].values())
        text += f"{value:>8.1f}{f'{low:.1f} .. {high:.1f}':>16}"
    return text


def line(row: Row) -> str:
    """A row as text, below ``TITLE``."""

    def show(value: float | None, width: int, digits: int, factor: float = 1.0) -> str:
        return f"{'-' if value is None else f'{factor * value:.{digits}f}':>{width}}"

    smallest, *_, largest = row["ppl_rel_pct_quartiles"]
    return (
        f"{row['policy']:<19}{row['strength']:>14}"
        + show(row["saved_frac"], 9, 1, 100)
        + show(row["kl_mean_nats"], 9, 2, MNAT)
        + show(row["ppl_rel_pct"], 8, 2)
        + f"{f'{smallest:.2f} .. {largest:.2f}':>20}"
        + show(row["kl_sensitive_mean_nats"], 9, 2, MNAT)
        + show(row["sensitive_ppl_rel_pct"], 9, 2)
        + show(row["prefill"]["kl_mean_nats"], 9, 2, MNAT)
        + show(row["decode"]["kl_mean_nats"], 9, 2, MNAT)
    )
