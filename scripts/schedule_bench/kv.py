"""Decode from int8 KV entries against full ones."""

from tokenrouter.evaluation import ratios as timing
from tokenrouter.telemetry import Spread

from .setup import Bench


def int8_kv(bench: Bench) -> tuple[Spread, float]:
    """Rate of tokens with int8 entries over that with full ones, and their peaks of live bytes in the same steps."""
    sizes = bench.sizes
    title = f"decode, batch {sizes.decode_batch}, context from {sizes.decode_context}"
    prompts = [
        bench.ids[61 * row : 61 * row + sizes.decode_context] for row in range(sizes.decode_batch)
    ]
    for llm in bench.kv.values():
        llm.engine.stats.reset()
    seconds = timing.decode_turns(
        bench.kv, prompts, bench.repeats, num_steps=sizes.decode_steps, title=title
    )
    print(timing.format_rates(title, seconds, sizes.decode_batch))
    rate = timing.speed_ratio(seconds, "int8", "full")
    peaks = {name: llm.engine.stats.peak_live_bytes for name, llm in bench.kv.items()}
    frac = peaks["int8"] / peaks["full"]
    print(
        f"  int8 / full: tok/s {rate.median:.3f} [{rate.min:.3f}, {rate.max:.3f}], peak of live KV bytes {frac:.3f} of "
        f"{peaks['full'] / 1e6:.1f} MB",
        flush=True,
    )
    return rate, frac
