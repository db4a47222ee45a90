"""Guards evaluation=retrieval: systems that were left out, keys nobody can look up, mistakes that show late."""

import csv
import json
import warnings
from pathlib import Path

import pytest

from tests.tasks.jobs import ROOT, compose_config, run_in
from tokenrouter.tasks.checks import check_config

TINY = ("debug=tiny", "task=evaluate", "evaluation=retrieval", "evaluation.window_tokens=128")
SMALL = ("evaluation.retrieval.lengths=[400]", "evaluation.retrieval.num_examples=2")
KEYS = (
    "n",
    "exact_frac",
    "exact_stderr_pp",
    "exact_drop_pp",
    "exact_drop_stderr_pp",
    "only_high_right",
    "only_own_right",
    "mcnemar_p",
    "by_length",
    "by_depth_pct",
)


def test_every_system_is_asked(tmp_path: Path) -> None:
    """With a policy that evicts, whose pool holds less than a prompt, while the baselines need it whole."""
    evicts = ("kvcache=sink_window", "kvcache.retention.interval=16", "kvcache.retention.recent=4")
    depths = "evaluation.retrieval.depths=[0.0,1.0]"
    run = run_in(tmp_path, *TINY, *SMALL, depths, *evicts, "kvcache.num_slots=390")
    with (run / "retrieval.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["system"] for row in rows} == {"all_high", "all_low", "request_level", "rule"}
    assert len(rows) == 2 * 4 * (1 + 1 + 2 + 2)
    assert {(row["length_tokens"], row["depth_frac"]) for row in rows} == {
        ("", ""),
        ("400", ""),
        ("", "0.0"),
        ("", "1.0"),
        ("400", "0.0"),
        ("400", "1.0"),
    }
    section = json.loads((run / "metrics.json").read_text())["quality"]["retrieval"]
    assert list(section) == ["passkey", "key_value"]
    assert all(set(task) == set(KEYS) for task in section.values())
    assert section["passkey"]["n"] == 4
    systems = json.loads((run / "systems.json").read_text())["rows"]
    (chosen,) = (system for system in systems if system["chosen"])
    assert chosen["retrieval.passkey.exact_frac"] == section["passkey"]["exact_frac"]
    assert all("retrieval.key_value.exact_frac" in system for system in systems)
    body = (ROOT / "docs" / "metrics.md").read_text().split("## `quality`")[1].split("\n## ")[0]
    assert all(f"`{name}`" in body for name in ("retrieval", "passkey", "key_value", *KEYS))
    table = (run / "table.md").read_text()
    assert "| passkey   | 400    | **rule**" in table and "depth 1 |" in table
    assert "request_level's answers are computed, not run" in table


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["evaluation.retrieval.tasks=[needle]"], "no task 'needle'; choose of passkey"),
        (["evaluation.retrieval.depths=[2]"], "depths=2 must be a number of 0 to 1"),
        (["evaluation.retrieval.num_examples=0"], "num_examples must be at least 1"),
        (["+evaluation.retrieval.length=[256]"], "did you mean evaluation.retrieval.lengths"),
        (["evaluation.retrieval=yes"], "must hold options or be null, got 'yes'"),
        (
            ["model=smollm2_135m", "model.max_model_len=512"],
            "lengths holds 1024, and the model's length is 512 tokens",
        ),
    ],
)
def test_mistakes_show_before_a_model_is_loaded(
    tmp_path: Path, overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of KL first, and then the depth that was misspelt."""
    monkeypatch.setattr("tokenrouter.tasks.build.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(Exception, match="retrieval") as refused:
        run_in(tmp_path, *TINY, *overrides)
    cause = refused.value.__cause__ or refused.value
    assert isinstance(cause, ValueError) and says in str(cause)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["evaluation.retrieval.lengths=[4096]"], "holds 4096, and the model's length is 4096"),
        (["kvcache.num_slots=300", *SMALL], "choose shorter evaluation.retrieval.lengths"),
        (["evaluation.retrieval.lengths=[50]"], "an item of passkey lacks"),
    ],
)
def test_a_prompt_that_no_engine_takes_is_refused_before_anything_is_measured(
    tmp_path: Path, overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tokenrouter.tasks.prepare.build_pool", lambda *_, **__: pytest.fail("quantised")
    )
    with pytest.raises(ValueError, match=says):
        run_in(tmp_path, *TINY, *overrides)


def test_what_nothing_reads_is_named() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_config(compose_config("task=benchmark", "evaluation=retrieval"))
    [said] = [str(w.message) for w in caught if "options without effect" in str(w.message)]
    assert "evaluation.retrieval (this task asks nothing" in said
