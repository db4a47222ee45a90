"""Guards options that change nothing beside the others: a run that sets one is told so, once, and no other run is."""

import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.test_configs import GROUPS
from tests.engine.tools import plain_llm
from tests.tasks.jobs import ROOT, compose_config, run_in
from tokenrouter import EngineOptions
from tokenrouter.kvcache.retention import (
    HeavyHitter,
    KeyNorm,
    ObservationWindow,
    RetentionOptions,
    SinkWindow,
)
from tokenrouter.tasks import build
from tokenrouter.tasks.checks import check_config

SAYS = "options without effect"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"static_batch_size": 4}, "only scheduler static_batch"),
        ({"max_overtaken": 3}, "scheduler fcfs lets no request pass"),
        ({"max_overtaken": 3, "scheduler": "static_batch"}, "scheduler static_batch lets no"),
        ({"max_phase_wait_steps": 3}, "phase_order mixed"),
        ({"min_batch": 2, "dispatch": "mixed"}, "dispatch mixed"),
        ({"max_wait_steps": 2, "dispatch": "mixed"}, "dispatch mixed"),
        ({"prefix_block": 16}, "prefix_sharing is off"),
        (
            {
                "prefix_block": 16,
                "prefix_sharing": True,
                "retention": RetentionOptions(policy=SinkWindow()),
            },
            "its interval is the block",
        ),
    ],
)
def test_what_has_no_effect_is_named_with_its_reason(options: dict[str, Any], why: str) -> None:
    """A sweep over an option that nothing reads: equal numbers, taken for a finding."""
    [(name, reason)] = EngineOptions(**options).ignored().items()
    assert name == next(iter(options)) and why in reason
    with pytest.warns(UserWarning, match=rf"{SAYS}: {name} \(.*{why}"):
        plain_llm(EngineOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"static_batch_size": 4, "scheduler": "static_batch"},
        {"max_overtaken": 3, "scheduler": "priority"},
        {"max_overtaken": 3, "scheduler": "shortest_first"},
        {"max_phase_wait_steps": 3, "phase_order": "decode_first"},
        {"min_batch": 2, "max_wait_steps": 2, "dispatch": "queued"},
        {"min_batch": 2, "max_wait_steps": 2},
        {"prefix_block": 16, "prefix_sharing": True},
    ],
)
def test_what_has_an_effect_is_left_alone(options: dict[str, Any]) -> None:
    """A warning of an option that works, which is then taken out."""
    made = EngineOptions(**options)
    assert made.ignored() == {} and made.without_ignored() == made


def test_the_observation_belongs_to_policies_that_look_at_attention() -> None:
    """window, layers and decay swept for a policy that never sees them."""
    given: dict[str, Any] = {"window": 8, "layers": (0, 1), "decay": 0.5}
    for policy in (SinkWindow(), KeyNorm()):
        assert list(RetentionOptions(policy=policy, **given).ignored()) == sorted(given)
    assert list(RetentionOptions(policy=ObservationWindow(), **given).ignored()) == ["decay"]
    assert RetentionOptions(policy=HeavyHitter(), **given).ignored() == {}
    options = EngineOptions(retention=RetentionOptions(policy=SinkWindow(), window=8))
    assert list(options.ignored()) == ["retention.window"]


def test_a_short_interval_needs_no_window_where_nothing_looks() -> None:
    """Refused without ``window``, and warned of with it: no way to write it."""
    assert RetentionOptions(policy=SinkWindow(), interval=8).ignored() == {}
    for policy, window in ((HeavyHitter(), 32), (SinkWindow(), 16)):
        with pytest.raises(ValueError, match=f"window={window} must be at most interval=8"):
            RetentionOptions(policy=policy, interval=8, window=window)


def test_without_them_an_engine_does_the_same() -> None:
    """An option left out that is not among the ignored ones."""
    given = EngineOptions(max_overtaken=3, prefix_block=16, min_batch=2, max_num_seqs=5)
    plain = given.without_ignored()
    changed = {f.name for f in fields(given) if getattr(given, f.name) != getattr(plain, f.name)}
    assert changed == {"max_overtaken", "prefix_block"} == set(given.ignored())


@pytest.mark.parametrize("group", ["kvcache", "scheduler"])
def test_no_shipped_config_is_warned_of(group: str) -> None:
    """A warning that everybody gets is read by nobody."""
    for name in GROUPS[group]:
        assert build.engine_options(compose_config(f"{group}={name}")).ignored() == {}, name


def _said(path: Path, *overrides: str) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_in(path, "debug=tiny", "router=all_high", *overrides)
    return {str(w.message) for w in caught if SAYS in str(w.message)}


def test_a_comparison_warns_of_what_the_user_set_and_of_no_baseline(tmp_path: Path) -> None:
    """Baselines have other schedulers and no retention: what works in the run looked idle in them."""
    works = (
        "scheduler=priority",
        "scheduler.max_overtaken=3",
        "scheduler.static_batch_size=2",
        "scheduler.min_batch=2",
        "kvcache.prefix_sharing=true",
        "kvcache.prefix_block=16",
    )
    assert _said(tmp_path / "works", *works) == set()
    idle = ("scheduler.max_overtaken=3", "kvcache.prefix_block=16", "task=benchmark")
    [said] = _said(tmp_path / "idle", *idle)
    assert "max_overtaken (" in said and "prefix_block (" in said
    assert "static_batch_size" in _said(tmp_path / "x", "task=generate", works[2]).pop()


def test_a_bisection_warns_of_what_the_user_set_alone(tmp_path: Path) -> None:
    """Its systems run one after the other what the configuration does together."""
    works = ("scheduler=priority", "scheduler.max_overtaken=3", "kvcache.prefix_sharing=true")
    assert _said(tmp_path, "task=bisect", *works, "kvcache.prefix_block=16") == set()


def test_the_static_baseline_keeps_its_size(
    tmp_path: Path, setups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of its batches lost with the warning that it has none."""
    run_in(tmp_path, "debug=tiny", "scheduler.static_batch_size=2")
    [setup] = setups
    assert setup.systems.llms["static_batch"].engine.scheduler.batch_size == 2
    assert setup.builder.options.static_batch_size is None


@pytest.mark.parametrize("trainer", GROUPS["trainer"])
def test_a_set_of_features_is_what_is_collected_and_trained_on(trainer: str) -> None:
    """A set that was given by name and read by nobody, so that the router learned from the default."""
    train = ("task=train_router", "train.data=some", f"trainer={trainer}")
    static, given = compose_config("features=static").features.names, compose_config(*train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for overrides in ((*train, "features=static"), ("task=collect", "features=static")):
            cfg = compose_config(*overrides)
            check_config(cfg)
            assert (cfg.trainer if "trainer" in cfg else cfg.collect).features == static
        check_config(given)
    assert given.trainer.features != static and "position" in given.trainer.features


@pytest.mark.parametrize("others", [("router=mlp",), ("task=train_router", "trainer.features=[a]")])
def test_a_set_of_features_that_nothing_reads_is_named(others: tuple[str, ...]) -> None:
    """A sweep over sets of features with equal numbers, taken for a finding."""
    cfg = compose_config("features=static", *others, "+train.data=some")
    with pytest.warns(UserWarning, match=f"{SAYS}: features .*task=collect"):
        check_config(cfg)


@pytest.mark.parametrize("max_entries", [1, 35, 36, None])
def test_guards_that_are_larger_than_the_budget_are_named(max_entries: int | None) -> None:
    """max_entries=1 that leaves 36, for which no run gave a reason."""
    kept = RetentionOptions(policy=HeavyHitter(max_entries=max_entries))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plain_llm(EngineOptions(retention=kept))
    texts = [str(warning.message) for warning in said]
    expected = (
        f"max_entries={max_entries} leaves 36 entries: the first sinks=4 and the last recent=32"
    )
    assert any(expected in text for text in texts) == (max_entries in (1, 35))


def test_the_page_names_the_policies_that_read_an_option() -> None:
    """A new policy that the table of the page does not know."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = dict(
        re.findall(r"^\| (`kvcache\.retention\.\w+`.*?) \| (.*) \|$", page, flags=re.MULTILINE)
    )
    policies = {}
    for path in (ROOT / "conf" / "kvcache").glob("*.yaml"):
        retention = build.engine_options(compose_config(f"kvcache={path.stem}")).retention
        if retention is not None:
            policies[path.stem] = retention.policy
    looks = {name for name, policy in policies.items() if "attention" in policy.needs}
    alike = {name for name, policy in policies.items() if "groups" in policy.unused}
    named = {option: set(re.findall(r"\w+", text)) & set(policies) for option, text in rows.items()}
    assert named["`kvcache.retention.window`, `decay`, `layers`"] == looks
    assert named["`kvcache.retention.groups`"] == alike


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["scheduler=priority"], "scheduler=priority serves as fcfs does.*workload.priorities"),
        (["scheduler=priority", "workload.priorities=[1,1]"], "serves as fcfs does"),
        (["workload.priorities=[0,1]"], f"{SAYS}: workload.priorities .scheduler fcfs ignores"),
        (["scheduler=priority", "workload.priorities=[0,1]"], None),
    ],
)
def test_priorities_and_their_scheduler_need_each_other(
    overrides: list[str], says: str | None
) -> None:
    """A comparison of schedulers that could not differ."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_config(compose_config(*overrides))
    texts = [str(warning.message) for warning in said]
    assert len(texts) == (says is not None)
    assert says is None or re.search(says, texts[0])
