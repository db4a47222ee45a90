"""What is measured. Each function takes the built systems and returns ratios, or plain values, by their keys."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from tokenrouter import LLM
from tokenrouter.evaluation import ratios as timing
from tokenrouter.kernels import huge_pages
from tokenrouter.telemetry import Spread, spread
from tokenrouter.types import Phase

from .setup import Bench

DECODE_BATCH = 32
TRANSFORMERS = "transformers"
Ratios = dict[str, Spread]
Seconds = Mapping[str, Sequence[float]]


def serve(bench: Bench) -> Ratios:
    """All requests, on every system and the peer."""
    tokens = sum(r.params.max_tokens or 0 for r in bench.requests)
    peer = {TRANSFORMERS: bench.peer.serve_s}
    runs = peer | timing.serve_runs(bench.systems, bench.requests)
    seconds = turns(bench, f"{len(bench.requests)} requests, {tokens} tokens out", runs, tokens)
    for name, llm in bench.systems.items():
        print(f"  {name}: {timing.format_times(llm.engine.stats)}")
    return ratios(
        seconds,
        all_high_vs_transformers=("all_high", TRANSFORMERS),
        routed_vs_all_high=("routed", "all_high"),
        routed_vs_transformers=("routed", TRANSFORMERS),
        all_low_vs_all_high=("all_low", "all_high"),
        shared_high_vs_all_high=("shared_high", "all_high"),
        shared_routed_vs_shared_high=("shared_routed", "shared_high"),
        shared_routed_vs_all_high=("shared_routed", "all_high"),
        shared_routed_vs_transformers=("shared_routed", TRANSFORMERS),
    )


def routing(bench: Bench) -> dict[str, float]:
    """The routed systems' shares of high tokens and their router's overhead, of the last pass."""
    found = {}
    for name in ("routed", "shared_routed"):
        stats = bench.systems[name].engine.stats
        found |= {
            f"{name}_high_frac": stats.token_frac("high"),
            f"{name}_high_frac_prefill": stats.token_frac("high", Phase.PREFILL),
            f"{name}_high_frac_decode": stats.token_frac("high", Phase.DECODE),
        }
        key = "router_overhead_frac" if name == "routed" else "shared_router_overhead_frac"
        found[key] = stats.overhead_frac
    show_values("routing while serving", found)
    return found


def prefill_256(bench: Bench) -> Ratios:
    """A prompt of 256 tokens."""
    runs = timing.prefill_runs(bench.systems, bench.ids[:256])
    seconds = turns(bench, "prefill of 256 tokens", runs, 256)
    return ratios(
        seconds,
        prefill256_low_vs_high=("all_low", "all_high"),
        prefill256_shared_high_vs_high=("shared_high", "all_high"),
    )


def prefill_1024(bench: Bench) -> Ratios:
    """A prompt of 1,024 tokens, the peer's forward of the same tokens and one with column sums among them."""
    ids = bench.ids[:1024]
    systems = bench.systems | {"observed": bench.observed}
    peer = {TRANSFORMERS: partial(bench.peer.prefill_s, ids)}
    seconds = turns(
        bench, "prefill of 1,024 tokens", peer | timing.prefill_runs(systems, ids), 1024
    )
    return ratios(
        seconds,
        prefill1024_low_vs_high=("all_low", "all_high"),
        prefill1024_high_vs_transformers=("all_high", TRANSFORMERS),
        prefill1024_low_vs_transformers=("all_low", TRANSFORMERS),
    ) | overheads(seconds, prefill1024_column_sums_frac=("observed", "all_high"))


def decode_32(bench: Bench) -> Ratios:
    """A batch of 32 requests that decode together; one reports attention, one runs on the reference kernels."""
    names = ("all_high", "all_low", "routed", "shared_routed")
    systems = {name: bench.systems[name] for name in names}
    systems |= {"observed": bench.observed, "reference_kernels": bench.reference_kernels}
    seconds = decode(bench, systems, DECODE_BATCH, bench.sizes.decode_context)
    return ratios(
        seconds,
        decode32_low_vs_high=("all_low", "all_high"),
        decode32_routed_vs_low=("routed", "all_low"),
        decode32_shared_routed_vs_low=("shared_routed", "all_low"),
        decode32_high_vs_reference_kernels=("all_high", "reference_kernels"),
    ) | overheads(seconds, decode32_received_frac=("observed", "all_high"))


def decode_1(bench: Bench) -> Ratios:
    """One request that decodes alone, also as a share of the rate at which its int8 weights could be copied."""
    systems = {name: bench.systems[name] for name in ("all_high", "all_low", "shared_routed")}
    systems |= {"head_low": bench.head_low}
    seconds = decode(bench, systems, 1, 256)
    weights = bench.head_low.pool.executors["low"].packed_weights
    num_bytes = sum(w.numel() * w.element_size() for w in weights)
    copies = {"copy": partial(_copy_s, bench.sizes.copy_bytes)}
    copied = timing.take_turns(copies, bench.repeats, title="copy bandwidth")["copy"]
    bandwidth = spread([bench.sizes.copy_bytes / s for s in copied]).median
    print(f"  copy bandwidth {bandwidth / 1e9:.1f} GB/s, int8 weights {num_bytes / 1e6:.1f} MB")
    return ratios(
        seconds | {"weights_once": [num_bytes / bandwidth] * bench.repeats},
        decode1_low_vs_high=("all_low", "all_high"),
        decode1_head_low_bandwidth_frac=("head_low", "weights_once"),
    )


def decode(
    bench: Bench, systems: Mapping[str, LLM], batch: int, context: int
) -> dict[str, list[float]]:
    """Stretches of decode steps of every system, each with its own running batch; their rates are printed."""
    title = f"decode, batch {batch}, context from {context}"
    prompts = [bench.ids[61 * row : 61 * row + context] for row in range(batch)]
    seconds = timing.decode_turns(
        systems, prompts, bench.repeats, num_steps=bench.sizes.decode_steps, title=title
    )
    print(timing.format_rates(title, seconds, batch))
    return seconds


def turns(bench: Bench, title: str, runs: Mapping[str, timing.Timed], tokens: int) -> Seconds:
    """Seconds of every run, turn by turn; their rates are printed."""
    seconds = timing.take_turns(runs, bench.repeats, title=title)
    print(timing.format_rates(title, seconds, tokens))
    return seconds


def ratios(seconds: Seconds, **pairs: tuple[str, str]) -> Ratios:
    """The named ratios of rates, first over second; printed."""
    return _shown({key: timing.speed_ratio(seconds, *pair) for key, pair in pairs.items()})


def overheads(seconds: Seconds, **pairs: tuple[str, str]) -> Ratios:
    """The share of the second's time that the first takes in addition; printed. Below zero: within the noise."""
    found = {}
    for key, (name, other) in pairs.items():
        both = zip(seconds[name], seconds[other], strict=True)
        found[key] = spread([own / others - 1 for own, others in both])
    return _shown(found)


def show_values(title: str, values: Mapping[str, float]) -> None:
    """Prints named values, one a line."""
    print(f"\n{title}")
    for key, value in values.items():
        print(f"  {key:36s} {value:9.5f}")


def _shown(found: Ratios) -> Ratios:
    for key, value in found.items():
        print(f"  {key:36s} {value.median:7.3f}   [{value.min:.3f}, {value.max:.3f}]")
    return found


def _copy_s(num_bytes: int) -> float:
    """Seconds that reading and writing ``num_bytes`` in all takes: half of them are copied."""
    whole = torch.empty(num_bytes // 4)
    huge_pages.prefer(whole)
    source, target = whole.fill_(1.0).chunk(2)
    target.copy_(source)
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started
