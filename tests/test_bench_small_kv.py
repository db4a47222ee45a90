"""Guards conf/experiment/small_kv: a config that is not what was measured, or that saves nothing where it runs."""

import json
from pathlib import Path

from scripts.memory_bench import app
from scripts.memory_bench.settings import make_settings
from scripts.memory_bench.sizes import Sizes
from scripts.schedule_bench.setup import small_kv
from tests.tasks.jobs import compose_config, run_in
from tokenrouter.evaluation.systems import BASELINES
from tokenrouter.kvcache.retention import Full, RetentionOptions
from tokenrouter.tasks.build import engine_options


def test_it_is_the_row_of_the_benchmark() -> None:
    """An option that was changed in one of two places: the numbers beside the config are another one's."""
    schedule = RetentionOptions(policy=Full(), **app.default_schedule())
    settings = make_settings(schedule, Sizes(), ("heavy_hitter",))
    measured = next(setting for setting in settings if setting.strength == "to 2944 int8")
    assert measured.retention is not None
    timed = small_kv(30)
    retention = engine_options(compose_config("experiment=small_kv")).retention
    assert retention is not None
    for name in RetentionOptions.__slots__:
        if name != "policy":
            ours = getattr(retention, name)
            assert ours == getattr(measured.retention, name) == getattr(timed, name), name
    policies = retention.policy, measured.retention.policy, timed.policy
    assert vars(policies[0]) == vars(policies[1]) == vars(policies[2])


def test_its_requests_are_longer_than_what_stays() -> None:
    """The default workload ends before 2,944 tokens: nothing would be evicted, and nothing shown."""
    cfg = compose_config("experiment=small_kv")
    assert cfg.workload.prompt_tokens > cfg.kvcache.retention.policy.max_entries
    assert cfg.evaluation.window_tokens > cfg.kvcache.retention.policy.max_entries
    chosen = compose_config("experiment=small_kv", "router=rule", "executor=int8")
    assert chosen.router._target_.endswith("RuleRouter") and chosen.executor.low is not None


def test_it_evicts_and_compresses(tmp_path: Path) -> None:
    """A job that composes and then refuses its own options."""
    folder = run_in(
        tmp_path,
        *("experiment=small_kv", "task=benchmark", "model=tiny_random", "logger=none"),
        *("kvcache.retention.groups=2", "kvcache.retention.policy.max_entries=160"),
        *("workload.num_requests=2", "workload.prompt_tokens=400", "workload.output_tokens=8"),
        "evaluation.num_repeats=1",
    )
    found = json.loads((folder / "metrics.json").read_text())
    assert found["kv"]["evicted_tokens"] > 0 and found["kv"]["int8_tokens"] > 0
    assert found["kv"]["saved_frac"] > 0.3
    assert set(found["baselines"]) <= set(BASELINES) and "all_high" in found["baselines"]
