"""Streams one completion to the terminal and says which routes its tokens took."""

import time
from dataclasses import replace
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tokenrouter import LLM, RequestOutput, SamplingParams
from tokenrouter.evaluation.metrics import serving_sections, throughput_section
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.throughput import Repeat, Throughput, make_repeat
from tokenrouter.executors import build_pool
from tokenrouter.tasks import build, checks
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.decisions import write_log
from tokenrouter.telemetry import collect_provenance, peak_process_bytes


def run(job: Job) -> None:
    """``task=generate``."""
    cfg = job.cfg
    router, spec = instantiate(cfg.router), instantiate(cfg.executor)
    options = replace(build.engine_options(cfg), log_decisions=cfg.log_decisions)
    params = _sampling_params(cfg)
    with progress("set-up", 3, unit="stages") as advance:
        model = build.load(cfg, cfg.model.dtype)
        build.check_tokenizer(model.tokenizer)
        advance("model")
        pool = build_pool(spec, model, kernels=cfg.kernels.backend)
        advance("executors")
        llm = LLM(model, router=router, executors=pool, options=options)
        advance("engine")
    extra = {"executors": llm.pool.description}
    provenance = collect_provenance(
        seed=cfg.seed, model=model.name, model_hash=model.model_hash, extra=extra
    )
    job.folder.write_json("provenance.json", provenance.as_dict())
    done = _stream(llm, _prompt(llm, cfg), params)
    completion = done.outputs[0].outputs[0]
    job.folder.write_text("completion.txt", completion.text)
    if cfg.log_decisions:
        write_log(llm, job.folder.path)
    served = Throughput(repeats=(done,))
    sections = serving_sections(llm, served.repeats)
    _print_summary(done, sections["routes"], completion.finish_reason or "")
    latency = {name: value for name, value in served.latency().items() if value is not None}
    memory = {"peak_process_bytes": peak_process_bytes()}
    throughput = throughput_section(served, {})
    job.finish({"throughput": throughput, "latency": latency, "memory": memory} | sections)


def _sampling_params(cfg: DictConfig) -> SamplingParams:
    """``sampling`` of conf/task/generate; raises ValueError for an unknown option or a value out of range."""
    options: Any = OmegaConf.to_container(cfg.sampling, resolve=True)
    checks.check_options("sampling", options, SamplingParams)
    return SamplingParams(**options)


def _prompt(llm: LLM, cfg: DictConfig) -> str | list[int]:
    """The prompt, as the user's message of a conversation where the model has a chat template."""
    if cfg.chat and getattr(llm.tokenizer, "chat_template", None):
        return llm.render_chat([{"role": "user", "content": str(cfg.prompt)}])[0]
    return str(cfg.prompt)


def _stream(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Repeat:
    """Prints the text as it comes, which shows the progress.

    Raises:
        ValueError: the prompt is refused.
    """
    llm.engine.stats.reset()
    start = time.perf_counter()
    last: RequestOutput | None = None
    for last in llm.stream([prompt], params):
        print(last.outputs[0].delta, end="", flush=True)
    print()
    assert last is not None
    return make_repeat(llm, (last,), time.perf_counter() - start)


def _print_summary(done: Repeat, routes: dict[str, dict[str, float]], reason: str) -> None:
    shares = ", ".join(
        f"{name} {entry['token_frac']:.1%} (prompt {entry['prefill_token_frac']:.1%}, "
        f"output {entry['decode_token_frac']:.1%})"
        for name, entry in routes.items()
    )
    print(
        f"\n[{done.prompt_tokens} tokens in, {done.output_tokens} out ({reason}), "
        f"{done.output_tokens / done.wall_s:.1f} tok/s; routes: {shares}]"
    )
