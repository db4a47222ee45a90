"""Guards task=bisect: a dimension blamed for what another did, a wrong token, decision or eviction named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tasks.jobs import compose_config, run_in
from tokenrouter import EngineOptions, SamplingParams
from tokenrouter.engine.sampler import SampledTokens, Sampler
from tokenrouter.executors import build_pool
from tokenrouter.models import tiny_random
from tokenrouter.routers import AllHighRouter, AllLowRouter, RandomRouter
from tokenrouter.scheduler.request import NEVER
from tokenrouter.tasks import bisect, build
from tokenrouter.tasks.bisect_differences import unseen_entries
from tokenrouter.tasks.bisect_systems import make_systems
from tokenrouter.workloads import RequestSpec

BISECT = ("debug=tiny", "task=bisect")
EVICTING = (
    "kvcache=sink_window",
    "kvcache.retention.interval=16",
    "kvcache.retention.sinks=1",
    "kvcache.retention.recent=4",
)


def _bisect(path: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    run_in(path, *BISECT, *overrides)
    steps = json.loads((path / "bisect.json").read_text())["steps"]
    return {step["dimension"]: step for step in steps}, (path / "bisect.md").read_text()


def test_what_is_off_is_not_blamed(tmp_path: Path) -> None:
    steps, text = _bisect(tmp_path, "router=all_high", "executor=full")
    assert list(steps) == ["schedule", "precision", "attention", "memory"]
    assert steps["schedule"]["verdict"] in ("no output changes", "near-ties only")
    assert steps["precision"]["verdict"] == steps["memory"]["verdict"] == "not used"
    assert "No dimension changes an output, but for near-ties." in text


def test_attention_is_told_from_precision(tmp_path: Path) -> None:
    """Sparse attention was put down to precision, which was switched on with it."""
    sparse = [f"executor.low_attention.{name}" for name in ("sinks=1", "window=4", "top_blocks=0")]
    steps, text = _bisect(
        tmp_path, "router=all_low", "executor=sparse", *sparse, "executor.low_attention.block=4"
    )
    assert steps["precision"]["verdict"] in ("no output changes", "near-ties only")
    assert steps["attention"]["verdict"] == "changes outputs"
    assert "low tokens see 1+4+0x4" in text and "Outputs change most by attention" in text


def test_precision_is_named_with_the_first_token_and_its_decision(tmp_path: Path) -> None:
    """A token one too early or too late, or the decision of another token: compared with runs of their own."""
    steps, text = _bisect(tmp_path, "router=rule", "router.first_positions=3")
    assert steps["precision"]["verdict"] == "changes outputs"
    assert steps["memory"]["verdict"] == "not used"
    cfg = compose_config(*BISECT, "router=rule", "router.first_positions=3")
    setup = bisect.prepare(cfg)
    outputs = {}
    for router in (AllHighRouter(), setup.router):
        llm = setup.builder.llm(router, EngineOptions(max_num_seqs=1, dispatch="mixed"))
        prompts = [list(request.prompt_ids) for request in setup.builder.requests]
        params = [request.params for request in setup.builder.requests]
        outputs[router.name] = [out.outputs[0] for out in llm.generate(prompts, params)]
    found = steps["precision"]["differences"]
    assert found and len(found) == steps["precision"]["num_changed"]
    for difference in found:
        number, token = difference["request"], difference["output_token"]
        high, rule = outputs["all_high"][number], outputs["rule"][number]
        assert high.token_ids[:token] == rule.token_ids[:token]
        assert difference["before_id"] == high.token_ids[token] != rule.token_ids[token]
        assert difference["after_id"] == rule.token_ids[token]
        position = difference["position"]
        assert position == len(setup.builder.requests[number].prompt_ids) + token - 1
        routes = rule.routes[: position + 1]
        assert difference["routes_seen"] == {"high": routes.count(0), "low": routes.count(1)}
        assert difference["executed"] == ("high", "low")[routes[-1]] == difference["requested"]
        assert difference["num_evicted"] == 0
    unchanged = set(range(4)) - {difference["request"] for difference in found}
    assert all(outputs["all_high"][n].token_ids == outputs["rule"][n].token_ids for n in unchanged)
    shown = next((d for d in found if not d["is_near_tie"]), found[0])
    assert f"Request {shown['request']} " in text and "precision" in text.split("Outputs change")[1]
    assert f"went {shown['requested']} ({shown['reason']}, score" in text


def test_memory_is_named_with_what_was_evicted(tmp_path: Path) -> None:
    """Evictions that came after the token, a pool that holds the longest request only with eviction."""
    slots = ("kvcache.num_slots=72", "router=all_high", "executor=full")
    steps, text = _bisect(tmp_path, *EVICTING, *slots)
    memory = steps["memory"]
    assert memory["verdict"] == "changes outputs" and steps["precision"]["verdict"] == "not used"
    for difference in memory["differences"]:
        position, evicted_at = difference["position"], difference["evicted_at"]
        assert evicted_at and len(evicted_at) == min(5, difference["num_evicted"])
        assert all(int(at) < when <= position for at, when in evicted_at.items())
        assert all(when % 16 == 0 and int(at) >= 1 for at, when in evicted_at.items())
        last = position // 16 * 16
        assert difference["num_evicted"] >= last - (last // 2 + 1 + 4)
    assert "entries had been evicted by then (position " in text
    assert "Outputs change most by memory" in text
    assert "the steps before memory have so many, and the run has 72." in text


def test_a_pool_that_the_run_itself_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A clean bill for a config that cannot run: the steps without eviction had a larger pool."""
    with pytest.raises(ValueError, match=r"needs \d+ KV slots, and the pool has 20: raise kvcache"):
        _bisect(tmp_path, "router=all_high", "executor=full", "kvcache.num_slots=20")


def test_a_schedule_that_changes_outputs_is_called_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a batch mixed up: the difference was put down to precision, which was on as well."""
    sample = Sampler.sample

    def mixed_up(
        self: Sampler, logits_BV: torch.Tensor, *arguments: Any, **options: Any
    ) -> SampledTokens:
        return sample(self, logits_BV.roll(1, 0), *arguments, **options)

    monkeypatch.setattr(Sampler, "sample", mixed_up)
    steps, text = _bisect(tmp_path, "router=all_high", "executor=full")
    assert steps["schedule"]["verdict"] == "BUG" and steps["schedule"]["num_changed"] >= 2
    assert "This is a bug: which requests run together" in text
    assert "At fault: schedule, which must change nothing" in text


def test_a_near_tie_is_called_one(tmp_path: Path) -> None:
    """Differences that the order of a sum explains, shown as changes."""
    steps, text = _bisect(tmp_path, "router=all_low", "task.near_tie_logits=1000")
    found = steps["precision"]["differences"]
    ties = [d for d in found if d["is_near_tie"]]
    assert ties and ties == [d for d in found if d["swap_gap_logits"] is not None]
    assert steps["precision"]["num_near_ties"] == len(ties)
    assert all(d["swap_gap_logits"] >= d["best_gap_logits"] >= 0 for d in ties)
    [paragraph] = [line for line in text.splitlines() if line.startswith("precision (")]
    assert ("a near-tie." in paragraph) == (len(ties) == len(found))


def test_dimensions_are_switched_on_one_after_the_other() -> None:
    """Two at once: a difference belongs to neither."""
    pool = build_pool("int8", tiny_random())
    cfg = compose_config(
        *EVICTING,
        "kvcache.num_slots=72",
        "scheduler=static_batch",
        "kvcache.num_host_slots=9",
        "kvcache.prefix_sharing=true",
    )
    options = replace(build.engine_options(cfg), static_batch_size=4, max_decode_tokens=4)
    prompt = RequestSpec(prompt_ids=tuple(range(100)), params=SamplingParams(max_tokens=7))
    router = RandomRouter(0.5)
    off, schedule, precision, attention, memory = make_systems(router, pool, options, [prompt])
    assert off.router.name == schedule.router.name == "all_high"
    assert precision.router is memory.router is router
    assert memory.options == replace(options, log_decisions=True)
    assert precision.options == schedule.options
    without_memory = replace(
        memory.options, retention=None, num_kv_slots=107, num_host_slots=0, prefix_sharing=False
    )
    assert schedule.options == without_memory
    assert [s.is_lossless for s in (schedule, precision, memory)] == [True, False, False]
    assert off.options.max_num_seqs == 1 and off.options.scheduler == "fcfs"
    assert off.options.max_num_batched_tokens == 100 and off.options.dispatch == "mixed"
    assert all(system.is_used for system in (off, schedule, precision, memory))
    assert not attention.is_used


@pytest.mark.parametrize(
    ("router", "executors", "overrides", "used"),
    [
        (AllHighRouter(), "int8", (), {"schedule"}),
        (AllLowRouter(), "full", (), {"schedule"}),
        (AllLowRouter(), "int8", (), {"schedule", "precision"}),
        (AllHighRouter(), "full", ("kvcache=int8",), {"schedule", "memory"}),
        (AllHighRouter(), "full", ("kvcache.num_host_slots=9",), {"schedule", "memory"}),
        (AllHighRouter(), "full", ("kvcache.prefix_sharing=true",), {"schedule", "memory"}),
    ],
)
def test_a_dimension_counts_as_used_where_it_can_change_anything(
    router: Any, executors: str, overrides: tuple[str, ...], used: set[str]
) -> None:
    options = build.engine_options(compose_config(*overrides))
    prompt = RequestSpec(prompt_ids=(5, 6, 7), params=SamplingParams(max_tokens=2))
    systems = make_systems(router, build_pool(executors, tiny_random()), options, [prompt])
    assert {s.dimension for s in systems if s.is_used} - {None} == used
    assert systems[-1].is_lossless == ("kvcache=int8" not in overrides)


@pytest.mark.parametrize("router", ["request_level", "random", "rule"])
def test_routers_that_are_calibrated_are_bisected(tmp_path: Path, router: str) -> None:
    """RequestLevelRouter without a threshold on these requests; a budget that was never set."""
    budget = ["router.budget.high_frac=0.3"] if router == "rule" else ["router.high_frac=0.3"]
    steps, _ = _bisect(tmp_path, f"router={router}", *budget)
    assert steps["precision"]["verdict"] != "not used"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert set(metrics) == {"router", "routes", "kv", "memory"}
    assert 0.0 < metrics["routes"]["high"]["token_frac"] < 1.0


@pytest.mark.parametrize(("position", "unseen"), [(15, {}), (16, {1: 16}), (32, {1: 16, 0: 32})])
def test_an_entry_is_unseen_from_the_query_at_its_eviction_on(
    position: int, unseen: dict[int, int]
) -> None:
    """The first query after an eviction still counted as seeing the entry."""
    assert unseen_entries(np.array([32, 16, NEVER], np.int32), position) == unseen
    assert unseen_entries(None, position) == {}


@pytest.mark.parametrize("value", ["-1", "few", ".inf"])
def test_a_limit_that_is_none_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(build, "load", load)
    message = r"task\.near_tie_logits must be 0 or more .* bfloat16: 0\.25.* got "
    with pytest.raises(ValueError, match=message):
        run_in(tmp_path, *BISECT, f"task.near_tie_logits={value}")
