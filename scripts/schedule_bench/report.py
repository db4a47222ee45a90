"""A workload's table with what it says, and the same as plain values for JSON."""

from dataclasses import asdict
from typing import Any

from tokenrouter.telemetry import Spread, spread

from .measures import Ratio, Served
from .setup import TOKEN_LEVEL

TITLE = (
    f"{'system':<22}{'output tok/s':>23}{'TTFT p50':>10}{'TTFT p99':>21}{'TPOT p50':>10}{'E2E p99':>9}"
    f"{'queue p50':>11}{'tok/s':>8}{'TTFT p99':>10}"
)
TOK_S, TTFT_P99 = "tokenlevel_vs_static_tok_s", "tokenlevel_vs_static_ttft_p99"
CLAIMS = {TOK_S: "output_tok_s", TTFT_P99: "ttft_ms_p99"}


def format_served(served: Served) -> str:
    """The table, one line per system, its last two columns over the better static batch, and what follows from it."""
    tok_s, ttft = (served.ratio(key) for key in CLAIMS.values())
    return "\n".join(
        [
            f"\n{_headline(served)}",
            TITLE,
            *(_line(served, name) for name in served.numbers),
            _verdict(served, tok_s, "output tok/s", f"{tok_s.value.median:.2f} times"),
            _verdict(served, ttft, "p99 TTFT", f"{ttft.value.median:.2f} of"),
        ]
    )


def as_values(served: Served) -> dict[str, Any]:
    """Plain values: the requests, both ratios with their baselines, and every system's numbers."""
    return {
        "requests": len(served.requests),
        "prompt_tokens": sum(len(r.prompt_ids) for r in served.requests),
        "output_tokens": sum(r.max_output_tokens for r in served.requests),
        "rate_requests_s": served.rate_requests_s,
        **{claim: asdict(served.ratio(key)) for claim, key in CLAIMS.items()},
        "systems": {
            name: {key: asdict(spread(served.of(name, key))) for key in passes[0]}
            | {f"vs_static_{key}": asdict(served.ratio(key, name).value) for key in CLAIMS.values()}
            for name, passes in served.numbers.items()
        },
    }


def _headline(served: Served) -> str:
    values, rate = as_values(served), served.rate_requests_s
    when = "all at once" if rate is None else f"Poisson arrivals, {rate:.2f} a second"
    return (
        f"{served.name}: {values['requests']} requests, {values['prompt_tokens']:,} tokens in, "
        f"{values['output_tokens']:,} out, {when}. Times in ms, medians [min, max] of passes; the last two columns: "
        "over the better static batch"
    )


def _line(served: Served, name: str) -> str:
    def of(key: str) -> Spread:
        return spread(served.of(name, key))

    return (
        f"{name:<22}{_ranged(of('output_tok_s'), 1):>23}{of('ttft_ms_p50').median:>10.0f}"
        f"{_ranged(of('ttft_ms_p99'), 0):>21}{of('tpot_ms_p50').median:>10.1f}"
        f"{of('e2e_ms_p99').median:>9.0f}{of('queue_ms_p50').median:>11.0f}"
        f"{served.ratio('output_tok_s', name).value.median:>8.2f}"
        f"{served.ratio('ttft_ms_p99', name).value.median:>10.2f}"
    )


def _ranged(value: Spread, digits: int) -> str:
    return f"{value.median:.{digits}f} [{value.min:.{digits}f}, {value.max:.{digits}f}]"


def _verdict(served: Served, found: Ratio, what: str, times: str) -> str:
    """A ratio in words; also that token-level scheduling does not pay, where it does not, and why."""
    text = (
        f"  {what}: {TOKEN_LEVEL} has {times} that of {found.baseline}, the better static batch here "
        f"[{found.value.min:.2f}, {found.value.max:.2f}]."
    )
    if found.pays:
        return text
    why = (
        "equal requests that arrive at once and fit one static batch leave nothing to schedule"
        if served.is_one_batch
        else "a pass of static is as good"
    )
    return f"{text} Token-level scheduling does not pay in {what}: {why}."
