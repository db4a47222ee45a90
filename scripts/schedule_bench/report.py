"""A workload's table with what it says, and the same as plain values for JSON."""

from dataclasses import asdict
from typing import Any

from tokenrouter.telemetry import Spread, spread

from .measures import Ratio, Served
from .setup import TOKEN_LEVEL

TITLE = (
    f"{'system':<24}{'output tok/s':>23}{'TTFT p50':>10}{'TTFT p99':>21}{'TPOT p50':>10}{'E2E p99':>9}"
    f"{'queue p50':>11}{'tok/s':>8}{'TTFT p99':>10}"
)
KEYS = {"tok_s": "output_tok_s", "ttft_p99": "ttft_ms_p99"}


def claim_ratios(served: Served) -> dict[str, Ratio]:
    """The token level over static batches: of the default size, then of each size with it in the name."""
    sizes = {"": served.static_batch} | {str(batch): batch for batch in served.baselines}
    return {
        f"tokenlevel_vs_static{suffix}_{name}": served.ratio(key, batch=batch)
        for suffix, batch in sizes.items()
        for name, key in KEYS.items()
    }


def format_served(served: Served) -> str:
    """The table, one line per system, its last two columns over the better static batch, and what follows from it."""
    return "\n".join(
        [
            f"\n{_headline(served)}",
            TITLE,
            *(_line(served, name) for name in served.numbers),
            *(_verdicts(served, batch) for batch in served.baselines),
        ]
    )


def as_values(served: Served) -> dict[str, Any]:
    """Plain values: the requests, all ratios with their baselines, and every system's numbers."""
    return {
        "requests": len(served.requests),
        "prompt_tokens": sum(len(r.prompt_ids) for r in served.requests),
        "output_tokens": sum(r.max_output_tokens for r in served.requests),
        "rate_requests_s": served.rate_requests_s,
        **{claim: asdict(ratio) for claim, ratio in claim_ratios(served).items()},
        "systems": {
            name: {key: asdict(spread(served.of(name, key))) for key in passes[0]}
            | {f"vs_static_{key}": asdict(served.ratio(key, name).value) for key in KEYS.values()}
            for name, passes in served.numbers.items()
        },
    }


def _headline(served: Served) -> str:
    values, rate = as_values(served), served.rate_requests_s
    when = "all at once" if rate is None else f"Poisson arrivals, {rate:.2f} a second"
    return (
        f"{served.name}: {values['requests']} requests, {values['prompt_tokens']:,} tokens in, "
        f"{values['output_tokens']:,} out, {when}. Times in ms, medians [min, max] of passes; the last two columns: "
        f"over the better static batch of {served.static_batch}"
    )


def _line(served: Served, name: str) -> str:
    def of(key: str) -> Spread:
        return spread(served.of(name, key))

    return (
        f"{name:<24}{_ranged(of('output_tok_s'), 1):>23}{of('ttft_ms_p50').median:>10.0f}"
        f"{_ranged(of('ttft_ms_p99'), 0):>21}{of('tpot_ms_p50').median:>10.1f}"
        f"{of('e2e_ms_p99').median:>9.0f}{of('queue_ms_p50').median:>11.0f}"
        f"{served.ratio('output_tok_s', name).value.median:>8.2f}"
        f"{served.ratio('ttft_ms_p99', name).value.median:>10.2f}"
    )


def _ranged(value: Spread, digits: int) -> str:
    return f"{value.median:.{digits}f} [{value.min:.{digits}f}, {value.max:.{digits}f}]"


def _verdicts(served: Served, batch: int) -> str:
    """Both ratios over static batches of one size in words."""
    tok_s, ttft = (served.ratio(key, batch=batch) for key in KEYS.values())
    is_one_batch = served.is_one_batch(batch)
    return "\n".join(
        [
            f"  Static batches of {batch}:",
            _verdict(tok_s, "output tok/s", f"{tok_s.value.median:.2f} times", is_one_batch),
            _verdict(ttft, "p99 TTFT", f"{ttft.value.median:.2f} of", is_one_batch),
        ]
    )


def _verdict(found: Ratio, what: str, times: str, is_one_batch: bool) -> str:
    """A ratio in words; also that token-level scheduling does not pay, where it does not, and why."""
    text = (
        f"  {what}: {TOKEN_LEVEL} has {times} that of {found.baseline}, the better one here "
        f"[{found.value.min:.2f}, {found.value.max:.2f}]."
    )
    if found.pays:
        return text
    why = (
        "equal requests that arrive at once and fit one static batch leave nothing to schedule"
        if is_one_batch
        else "a pass of static is as good"
    )
    return f"{text} Token-level scheduling does not pay in {what}: {why}."
