"""Routers by name, for users of the library without Hydra."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from tokenrouter.routers import make_router

CONF = Path(__file__).resolve().parents[2] / "conf"
NAMES = (
    "all_high",
    "all_low",
    "random",
    "rule",
    "request_level",
    "layerwise",
    "entropy",
    "batched",
    "cached",
    "interval",
    "mlp",
    "linear",
    "trees",
)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_the_config(name: str) -> None:
    """Guards against a default changed in one place only."""
    router = make_router(name)
    more = ["router.high_frac=0.1"] if name == "request_level" else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(overrides=[f"+router={name}", *more]).router
    assert instantiate(cfg).version == router.version
    assert router.name == name


def test_an_unknown_name_lists_the_choices() -> None:
    """Guards against a KeyError for a typing mistake."""
    with pytest.raises(ValueError, match=r"no router 'rules'; routers: all_high, all_low, random"):
        make_router("rules")


@pytest.mark.parametrize("name", ["composite", "oracle"])
def test_what_has_no_defaults_says_so(name: str) -> None:
    """Guards against a TypeError about a missing argument, or a composite of nothing."""
    with pytest.raises(ValueError, match=f"'{name}' has no defaults: build it"):
        make_router(name)


def test_the_run_seed_reaches_the_draws() -> None:
    """Guards against a sweep over seeds that draws the same tokens each time."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        seeds = [
            compose(overrides=["+router=random", f"+seed={seed}"]).router.seed for seed in (0, 7)
        ]
    assert seeds == [0, 7]
