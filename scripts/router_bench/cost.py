"""What a decision costs beside the executors' time for the same tokens, and what the smoothed path serves."""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from tokenrouter import LLM, SamplingParams
from tokenrouter.evaluation import ratios as timing
from tokenrouter.executors import build_pool
from tokenrouter.features import FeatureExtractor, TextSignals, TokenTypeTable, sequence_batch
from tokenrouter.features.signals import LOGIT_SIGNALS
from tokenrouter.routers import Router
from tokenrouter.telemetry import Spread
from tokenrouter.types import TokenBatch
from tokenrouter.workloads import LengthMix

from .measures import SMOOTH_SHARE
from .setup import SMOOTH, Bench
from .sizes import Sizes

DECODE_BATCH = 32
SHARE = 0.1
Costs = dict[str, dict[str, float]]


def router_costs(bench: Bench, dtype: str = "bfloat16") -> Costs:
    """By router, at a budget of 10 %, microseconds per token and the share of the executors' time, per phase.

    The executors' time is of an engine with the mlp, on the pool of the bench's executor. ``served``: the engine's own
    count of the same, in which what it does around the router is included; only of the mlp. Medians of turns.

    Args:
        bench: its first text's tokens are run.
        dtype: of the high path.
    """
    sizes, ids = bench.sizes, some_ids(bench)
    model = bench.model.astype(dtype)
    llm = LLM(
        model,
        router=bench.learned("mlp", bench.executor, SHARE),
        executors=build_pool(bench.executor, model),
    )
    routers = bench.scored(SHARE)
    batches = {
        "decode": decode_batch(ids, sizes.context, bench.types),
        "prefill": sequence_batch(ids[: sizes.chunk_tokens], token_types=bench.types),
    }
    runs = {
        "decode": partial(_decode_s, llm, ids, sizes),
        "prefill": partial(_prefill_s, llm, ids, sizes),
    }
    for router in routers.values():
        router.calibrate([_extractor(router, b, bench.types).extract(b) for b in batches.values()])
    turns: dict[str, dict[str, list[float]]] = {name: {} for name in routers}

    def note(name: str, key: str, value: float) -> None:
        turns[name].setdefault(key, []).append(value)

    for turn in range(sizes.turns + 1):
        for phase, batch in batches.items():
            executor_s, served_frac = runs[phase]()
            spent = {
                name: _call_s(r, batch, bench.types, sizes.calls) for name, r in routers.items()
            }
            if not turn:
                continue
            note("mlp", f"{phase}_served_overhead_frac", served_frac)
            for name, seconds in spent.items():
                note(name, f"{phase}_us_per_token", 1e6 * seconds / len(batch))
                note(name, f"{phase}_overhead_frac", seconds / len(batch) / executor_s)
    return {name: {key: median(v) for key, v in of.items()} for name, of in turns.items()}


def smooth_serving(bench: Bench, dtype: str = "bfloat16") -> Spread | None:
    """Requests served on the smoothed path with a learned 5 % high, times as fast as all_high on the same pool.

    Args:
        bench: its first text is what the prompts are cut from.
        dtype: of the high path.

    Returns:
        None where there is no trained mlp for the smoothed path.
    """
    if "mlp" not in bench.trained.get(SMOOTH, {}):
        return None
    sizes, model = bench.sizes, bench.model.astype(dtype)
    pool = build_pool(SMOOTH, model)
    llms = {
        "smooth5": LLM(model, router=bench.learned("mlp", SMOOTH, SMOOTH_SHARE), executors=pool),
        "all_high": LLM(model, router="all_high", executors=pool),
    }
    mix = LengthMix(
        prompt_lengths=sizes.prompt_lengths,
        output_min=min(8, sizes.output_max),
        output_max=sizes.output_max,
    )
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    requests = mix.requests(encode, some_ids(bench))
    seconds = timing.take_turns(
        timing.serve_runs(llms, requests), sizes.turns, title=f"{len(requests)} requests"
    )
    return timing.speed_ratio(seconds, "smooth5", "all_high")


def decode_batch(ids: Sequence[int], context: int, types: TokenTypeTable) -> TokenBatch:
    """The newest tokens of 32 requests that begin at different places, each behind a prompt of ``context`` tokens."""
    parts = []
    for row, prompt in enumerate(spread_prompts(ids, context + 1)):
        batch = sequence_batch(prompt, prompt_len=context, row=row, token_types=types)
        parts.append(batch.select(torch.tensor([context])))
    return TokenBatch(
        **{
            name: torch.cat([getattr(part, name) for part in parts])
            for name in TokenBatch.__slots__
            if name != "hidden_TE"
        }
    )


def some_ids(bench: Bench) -> list[int]:
    """Enough tokens for every prompt; a short text begins again."""
    sizes, text = bench.sizes, bench.texts[0]
    own = [token for window in text.windows for token in window]
    wanted = max(
        sizes.context + 1 + max(DECODE_BATCH, sizes.decode_batch),
        sizes.chunk_tokens,
        *sizes.prompt_lengths,
    )
    return own * -(-wanted // len(own))


def spread_prompts(ids: Sequence[int], length: int, count: int = DECODE_BATCH) -> list[list[int]]:
    """``count`` prompts that begin at different places."""
    gap = (len(ids) - length) // count
    return [list(ids[row * gap : row * gap + length]) for row in range(count)]


def _call_s(router: Router, batch: TokenBatch, types: TokenTypeTable, calls: int) -> float:
    """Features and route of a batch, the median call."""
    extractor = _extractor(router, batch, types)
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        router.route(extractor.extract(batch))
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _extractor(router: Router, batch: TokenBatch, types: TokenTypeTable) -> FeatureExtractor:
    """With ones in place of what logits say, which an engine has: reading them costs the same."""
    ones_N = torch.ones(int(batch.positions_T.max()) + 1)
    signals = TextSignals(types, dict.fromkeys(LOGIT_SIGNALS, ones_N))
    return router.extractor(types, signals)


def _decode_s(llm: LLM, ids: Sequence[int], sizes: Sizes) -> tuple[float, float]:
    """Executors' seconds per token where 32 requests decode, and the engine's own overhead."""
    prompts = spread_prompts(ids, sizes.context)
    with timing.DecodeBatch(llm, prompts, num_steps=sizes.decode_steps) as batch:
        stats = llm.engine.stats
        stats.reset()
        batch.stretch_s()
        return stats.executor_s / stats.decode_tokens, stats.overhead_frac


def _prefill_s(llm: LLM, ids: Sequence[int], sizes: Sizes) -> tuple[float, float]:
    """Executors' seconds per token of a prompt, and the engine's own overhead."""
    stats = llm.engine.stats
    stats.reset()
    once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([list(ids[: sizes.chunk_tokens])], once)
    return stats.executor_s / stats.prefill_tokens, stats.overhead_frac
