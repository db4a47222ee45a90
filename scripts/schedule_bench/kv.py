"""Decode from int8 KV entries, all or the old ones, against full ones."""

from tokenrouter.evaluation import ratios as timing
from tokenrouter.telemetry import Spread

from .setup import Bench


def int8_kv(bench: Bench) -> dict[str, tuple[Spread, float]]:
    """By system beside ``full``: its rate of tokens and its peak of live bytes in the same steps, both over full's."""
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
    peaks = {name: llm.engine.stats.peak_live_bytes for name, llm in bench.kv.items()}
    found = {}
    for name in [name for name in bench.kv if name != "full"]:
        rate, frac = timing.speed_ratio(seconds, name, "full"), peaks[name] / peaks["full"]
        found[name] = rate, frac
        print(
            f"  {name} / full: tok/s {rate.median:.3f} [{rate.min:.3f}, {rate.max:.3f}], peak of live KV bytes "
            f"{frac:.3f} of {peaks['full'] / 1e6:.1f} MB",
            flush=True,
        )
    return found
