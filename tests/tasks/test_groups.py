"""Guards the parts of conf/ that have no target: a key that nothing reads, or that has to be written in many files."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from tests.tasks.jobs import ROOT, compose_config
from tokenrouter import EngineOptions
from tokenrouter.evaluation.quality import QualitySettings
from tokenrouter.kvcache.retention import Full, RetentionOptions
from tokenrouter.tasks import build, groups
from tokenrouter.tasks.checks import check_config

KVCACHE = ROOT / "conf" / "kvcache"
SCHEDULE = OmegaConf.load(KVCACHE / "schedule" / "default.yaml")


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


def _content(path: Path) -> DictConfig:
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)
    return content


POLICIES = [n for n in _choices("kvcache") if _content(KVCACHE / f"{n}.yaml").get("retention")]


@pytest.mark.parametrize(
    ("group", "name"),
    [(g, n) for g in groups.KEYS if g != "kernels" for n in _choices(g)] + [("kernels", None)],
)
def test_every_key_of_a_config_is_read_and_every_key_that_is_read_is_there(
    group: str, name: str | None
) -> None:
    """A key in a file that no task looks at, or an option that is only found by reading code."""
    cfg = compose_config(*([f"{group}={name}"] if name else []))
    assert set(cfg[group]) == set(groups.KEYS[group])
    check_config(cfg)


def test_every_option_of_the_engine_has_a_key() -> None:
    """An option that only the library's users can set, or one that two keys set."""
    keys = [option for group in groups.ENGINE.values() for option in group.values()]
    names = {field.name for field in fields(EngineOptions)}
    elsewhere = {"seed", "log_decisions", "observe"}
    assert len(set(keys)) == len(keys) and set(keys) <= names
    assert not names - set(keys) - elsewhere
    assert set(groups.QUALITY) <= {field.name for field in fields(QualitySettings)}


@pytest.mark.parametrize(
    ("override", "option", "value"),
    [
        ("scheduler.policy=priority", "scheduler", "priority"),
        ("scheduler.max_num_seqs=5", "max_num_seqs", 5),
        ("scheduler.max_overtaken=3", "max_overtaken", 3),
        ("kvcache.num_slots=900", "num_kv_slots", 900),
        ("kvcache.num_host_slots=7", "num_host_slots", 7),
        ("kvcache.dtype=int8", "kv_cache_dtype", "int8"),
    ],
)
def test_a_key_sets_its_own_option(override: str, option: str, value: object) -> None:
    """A line of the table that names another option."""
    expected = replace(EngineOptions(), **{option: value})  # type: ignore[arg-type]
    assert build.engine_options(compose_config(override)) == expected


@pytest.mark.parametrize("name", POLICIES)
def test_the_schedule_stands_in_one_file_and_is_the_librarys(name: str) -> None:
    """Seven copies of a schedule, one of which was forgotten in a change; a default that differs from the library's."""
    own = _content(KVCACHE / f"{name}.yaml").retention
    assert not [key for key in own if key in SCHEDULE and own[key] == SCHEDULE[key]]
    retention = build.engine_options(compose_config(f"kvcache={name}")).retention
    assert retention is not None and retention.policy.name == name
    differs = {key: own[key] for key in own if key != "policy"}
    assert replace(retention, policy=Full()) == RetentionOptions(policy=Full(), **differs)


@pytest.mark.parametrize("name", POLICIES)
def test_the_schedule_of_every_policy_is_one_override(name: str) -> None:
    """A shared file whose keys lie elsewhere in the config, or that takes misspelt ones."""
    cfg = compose_config(f"kvcache={name}", "kvcache.retention.interval=64")
    retention = build.engine_options(cfg).retention
    assert retention is not None and retention.interval == 64
    with pytest.raises(ConfigCompositionException, match="intervall"):
        compose_config(f"kvcache={name}", "kvcache.retention.intervall=64")
    added = compose_config(f"kvcache={name}", "+kvcache.retention.intervall=64")
    with pytest.raises(ValueError, match=r"did you mean kvcache\.retention\.interval\?"):
        check_config(added)


def test_there_are_policies() -> None:
    """Lists that came out empty would let everything above pass."""
    assert {"heavy_hitter", "threshold", "route"} <= set(POLICIES)
