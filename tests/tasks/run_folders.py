"""Folders of finished runs, written by hand: healthy but for what a test changes."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

Patch = dict[str, Any]

STATUS = {"status": "ok", "job": "task=benchmark", "started_at": "2026-01-01T00:00:00+00:00"}
PROVENANCE = {"commit": "0123456789abcdef", "dirty": False}
CONFIG = {
    "task._target_": "tokenrouter.tasks.benchmark.run",
    "router._target_": "tokenrouter.routers.rule.RuleRouter",
    "executor.low._target_": "tokenrouter.executors.int8.Int8Executor",
    "scheduler.dispatch": "auto",
    "scheduler.min_batch": 4,
    "scheduler.max_wait_steps": 4,
    "kvcache.retention": None,
    "evaluation.num_repeats": 2,
}
METRICS = {
    "throughput.workload.num_requests": 60,
    "latency.ttft_ms.p99": 90.0,
    "latency.queue_ms.mean": 200.0,
    "latency.e2e_ms.mean": 900.0,
    "router.us_per_token": 3.0,
    "router.overhead_frac": 0.05,
    "router.decided_frac": 1.0,
    **{f"routes.high.{phase}_token_frac": 0.1 for phase in ("prefill", "decode")},
    **{f"routes.low.{phase}_token_frac": 0.9 for phase in ("prefill", "decode")},
    "routes.low.degraded_frac": 0.0,
    "kv.peak_live_bytes": 20_000_000,
    "kv.peak_allocated_bytes": 30_000_000,
    "kv.saved_frac": 0.0,
    "kv.evicted_tokens": 0.0,
    "kv.int8_tokens": 0,
    "kv.compactions": 0,
    "baselines.all_high.output_tok_s": 100.0,
    "baselines.static_batch.output_tok_s": 70.0,
}


def nested(flat: Patch) -> Patch:
    tree: Patch = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def make_run(path: Path, config: Patch, metrics: Patch, files: Patch) -> Path:
    """A run folder of task=benchmark, healthy but for what is given.

    Args:
        path: of the folder.
        config, metrics: values by dotted path.
        files: ``status``, ``provenance`` and ``steps`` in place of healthy ones; ``raw``: by name what a file
            holds, None: it is not there.
    """
    path.mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create(nested(CONFIG | config)), path / "config.yaml")
    (path / "metrics.json").write_text(json.dumps(nested(METRICS | metrics)))
    (path / "status.json").write_text(json.dumps(files.get("status", STATUS)))
    (path / "provenance.json").write_text(json.dumps(files.get("provenance", PROVENANCE)))
    steps = files.get("steps", [{"num_preemptions": 4}])
    (path / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    for name in ("table.md", "systems.json"):
        (path / name).write_text("")
    for name, text in files.get("raw", {}).items():
        (path / name).unlink()
        if text is not None:
            (path / name).write_text(text)
    return path
