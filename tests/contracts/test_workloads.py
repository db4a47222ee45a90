"""The contract of a workload, for every config in conf/workload."""

import os
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tokenrouter.workloads import LengthMix, RequestSet, Workload

CONF = Path(__file__).resolve().parents[2] / "conf"
CONFIGS = {path.stem: OmegaConf.load(path) for path in sorted((CONF / "workload").glob("*.yaml"))}
TRACES = [name for name, cfg in CONFIGS.items() if "data_dir" in cfg]
TIMED = [name for name, cfg in CONFIGS.items() if "num_requests" in cfg]
TEXT = [3 + (i * i + i // 7) % 49_000 for i in range(30_000)]
MODEL_LEN = 8192
PREFILL_TOK_S, OUTPUT_TOK_S, LONGEST_PASS_S = 5_000, 500, 6  # of the default model on two cores


def _params(names: list[str]) -> list[Any]:
    """Traces are read from the folder of local data sets."""
    return [pytest.param(n, marks=pytest.mark.data) if n in TRACES else n for n in names]


every_workload = pytest.mark.parametrize("name", _params(list(CONFIGS)))
every_timed = pytest.mark.parametrize("name", _params(TIMED))


@pytest.fixture
def build(name: str) -> Any:
    """Builds the requests of a config with changed options."""
    folder = os.environ.get("TOKENROUTER_DATA_DIR")
    if name in TRACES and not folder:
        pytest.skip("TOKENROUTER_DATA_DIR is not set: no folder of local data sets")

    def make(*overrides: str, text: list[int] = TEXT, max_model_len: int = MODEL_LEN) -> RequestSet:
        return _workload(name, *overrides).build(_encode, text, max_model_len=max_model_len)

    return make


def _workload(name: str, *overrides: str) -> Workload:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[f"workload={name}", *overrides])
    workload: Workload = instantiate(cfg.workload)
    return workload


def _encode(text: str) -> list[int]:
    return list(text.encode())


def _lengths(built: RequestSet) -> list[tuple[int, int]]:
    return [(len(r.prompt_ids), r.max_output_tokens) for r in built.requests]


def test_every_family_is_there() -> None:
    expected = {"azure_code", "azure_conv", "mooncake", "poisson", "gamma", "uniform", "seed_mix"}
    assert {"mixed_lengths", "tiny"} | expected <= set(CONFIGS)
    assert set(TRACES) == {"azure_code", "azure_conv", "mooncake"} and expected == set(TIMED)


@every_workload
def test_requests_are_the_same_work_for_every_system(name: str, build: Any) -> None:
    """Outputs that end at EOS, or differ from pass to pass, are other work for other systems."""
    built = build()
    assert built == build() and built.requests
    assert all(r.params.greedy and r.params.ignore_eos and r.prompt_ids for r in built.requests)
    assert all(r.max_output_tokens >= 1 for r in built.requests)
    assert _workload(name).requests(_encode, TEXT)[0] == built.requests[0]


@every_workload
def test_another_seed_is_another_workload(name: str, build: Any) -> None:
    first, second = build("seed=0"), build("seed=1")
    assert first.requests != second.requests
    if name in TRACES:  # other text, the same trace
        assert first.requests[0].prompt_ids != second.requests[0].prompt_ids
        assert _lengths(first) == _lengths(second)


@every_workload
def test_requests_come_in_the_order_of_arrival_and_the_first_at_zero(build: Any) -> None:
    arrivals = [r.arrival_s for r in build().requests]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0.0


@every_timed
def test_arrivals_scale_exactly_and_alone(name: str, build: Any) -> None:
    changes = ["workload.gap_s=0.3"] if name == "uniform" else []
    base, fast = (build(*changes, f"workload.rate_scale={scale}") for scale in (1, 4))
    assert base.arrival_span_s > 0.0
    assert [4 * r.arrival_s for r in fast.requests] == [r.arrival_s for r in base.requests]
    assert [r.prompt_ids for r in fast.requests] == [r.prompt_ids for r in base.requests]
    assert _lengths(fast) == _lengths(base)


@every_timed
def test_the_number_of_requests_is_an_option(build: Any) -> None:
    assert len(build("workload.num_requests=5").requests) == 5


@every_timed
def test_what_is_clipped_is_counted(build: Any) -> None:
    """Requests cut to the model's length without a word are another workload than the config says."""
    unlimited = ("workload.max_prompt_tokens=null", "workload.max_output_tokens=null")
    asked = build(*unlimited, max_model_len=10**6)
    assert asked.clipped_requests == 0
    limits = ("workload.max_prompt_tokens=70", "workload.max_output_tokens=30")
    built = build(*limits, max_model_len=90)
    before, after = _lengths(asked), _lengths(built)
    assert all(prompt + output <= 90 and prompt <= 70 and output <= 30 for prompt, output in after)
    assert built.clipped_requests == sum(a != b for a, b in zip(before, after, strict=True)) > 0
    assert built.clipped_prompt_tokens == asked.prompt_tokens - built.prompt_tokens
    assert built.clipped_output_tokens == asked.output_tokens - built.output_tokens


@every_timed
def test_a_short_text_changes_no_length(name: str, build: Any) -> None:
    built = build(text=TEXT[:40])
    assert _lengths(built) == _lengths(build())
    pieces = [32 if name == "mooncake" else prompt for prompt, _ in _lengths(built)]
    assert built.wrapped_requests == sum(piece > 40 for piece in pieces)


@every_workload
def test_a_pass_is_short_enough_for_two_slow_cores(build: Any) -> None:
    """Five systems serve a workload several times: a pass of a minute makes a run of a quarter of an hour."""
    built = build()
    seconds = built.prompt_tokens / PREFILL_TOK_S + built.output_tokens / OUTPUT_TOK_S
    assert seconds <= LONGEST_PASS_S


@every_workload
def test_the_default_model_takes_nearly_all_of_it_whole(build: Any) -> None:
    built = build()
    assert built.clipped_requests <= len(built.requests) // 10
    assert built.wrapped_requests == 0


@pytest.mark.parametrize("name", TRACES)
def test_without_its_trace_a_workload_says_how_to_get_it(name: str) -> None:
    with pytest.raises(ValueError, match="needs a folder of local data sets: set TOKENROUTER_DATA"):
        _workload(name, "paths.data_dir=null").check()
    with pytest.raises(ValueError, match=r"no trace /nowhere/trace_.*; set TOKENROUTER_DATA_DIR"):
        _workload(name, "paths.data_dir=/nowhere").check()


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in TRACES])
def test_what_needs_no_trace_needs_no_folder(name: str) -> None:
    workload = _workload(name, "paths.data_dir=null")
    workload.check()
    assert isinstance(workload, LengthMix) is (name not in TIMED)
