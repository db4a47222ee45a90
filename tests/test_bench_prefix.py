"""Guards the prefix benchmark: prompts that have less in common, a cache that is full before a turn, other ratios."""

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from scripts.prefix_bench import app
from scripts.prefix_bench.measures import COLUMNS, RATIOS, as_values, format_found, measure
from scripts.prefix_bench.setup import PLAIN, QUICK, SHARED, Bench, Sizes, build, make_requests
from tokenrouter.models import LoadedModel, tiny_random

CLAIMS = {f"prefix_{key}_vs_plain" for key in RATIOS}


def tiny(name: str, *, dtype: str) -> LoadedModel:
    assert name == app.MODEL
    return tiny_random(dtype=dtype)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the script prints with ``--quick`` on a tiny model, in lines."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr("sys.argv", ["bench_prefix.py", "--quick", "--repeats", "2"])
        patch.setattr(app, "load_model", tiny)
        app.main("")
    return shown.getvalue().splitlines()


@pytest.fixture(scope="module")
def result(printed: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed[-1])
    return found


@pytest.fixture(scope="module")
def bench() -> Bench:
    return build(tiny_random(dtype="bfloat16"), QUICK, repeats=2)


def test_every_key_that_others_read_is_there(result: dict[str, Any], printed: list[str]) -> None:
    facts = {"shared_tokens", "ranges", "systems", "sizes", "repeats", "quick", "provenance"}
    assert set(result) == CLAIMS | facts and set(result["ranges"]) == CLAIMS
    assert result["quick"] and result["repeats"] == 2 and result["provenance"]["model_hash"]
    assert list(result["systems"]) == [PLAIN, SHARED]
    for numbers in result["systems"].values():
        assert set(numbers) == set(COLUMNS)
    for claim, (smallest, largest) in result["ranges"].items():
        assert 0.0 < smallest <= result[claim] <= largest, claim
    assert [line.split()[0] for line in printed[-4:-1]] == [PLAIN, SHARED, "ratio"]


def test_prompts_have_exactly_the_beginning_in_common() -> None:
    """More in common than stated flatters sharing: a part of the text that two requests have alike."""
    requests = make_requests(range(512 + 32 * 60), Sizes())
    prompts = [request.prompt_ids for request in requests]
    assert len(prompts) == 32 and {len(ids) for ids in prompts} == {572}
    assert len({ids[:512] for ids in prompts}) == 1
    assert len({token for ids in prompts for token in ids[512:]}) == 32 * 60
    assert {request.max_output_tokens for request in requests} == {32}


def test_every_turn_starts_with_an_empty_cache(bench: Bench) -> None:
    """The second turn found all prompts of the first, and measured no prefill at all."""
    found = measure(bench)
    assert found[PLAIN]["shared_tokens"] == [0, 0]
    first, second = found[SHARED]["shared_tokens"]
    at_once = -(-1024 // QUICK.common_tokens)  # begin in the first step
    assert first == second == (QUICK.requests - at_once) * QUICK.common_tokens > 0
    for llm in bench.systems.values():
        assert llm.router.name == "all_high" and llm.options.max_num_seqs == QUICK.requests
    assert max(found[SHARED]["peak_live_bytes"]) < min(found[PLAIN]["peak_live_bytes"])


def test_ratios_are_shared_over_plain_turn_by_turn() -> None:
    """A ratio of medians, upside down, or of other turns."""
    plain = {key: [4.0, 2.0, 8.0] for key in COLUMNS}
    shared = {key: [1.0, 1.0, 1.0] for key in COLUMNS}
    found = {PLAIN: plain, SHARED: shared | {"shared_tokens": [7.0] * 3}}
    values = as_values(found)
    assert values["prefix_forward_s_vs_plain"] == 0.25
    assert values["ranges"]["prefix_ttft_ms_p99_vs_plain"] == [0.125, 0.5]
    assert values["shared_tokens"] == 7.0
    assert values["systems"][PLAIN]["forward_s"] == {"median": 4.0, "min": 2.0, "max": 8.0}
    lines = format_found(found).splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1 and "0.25 [0.12, 0.50]" in lines[-1]


def test_wrong_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It came up after the requests were built, under another option's name."""
    monkeypatch.setattr("sys.argv", ["bench_prefix.py", "--repeats", "0"])
    with pytest.raises(SystemExit):
        app.parse_arguments("")
    assert "--repeats must be at least 1, got 0" in capsys.readouterr().err
