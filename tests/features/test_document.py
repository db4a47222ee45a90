"""docs/features.md and conf/features say what the code does."""

import math
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from tokenrouter.features import FEATURES, FeatureSpec, check_features, needs_signals
from tokenrouter.types import Phase

ROOT = Path(__file__).resolve().parents[2]
SETS = sorted(path.stem for path in (ROOT / "conf" / "features").glob("*.yaml"))
PHASES = {"static": frozenset(Phase), "decode": frozenset({Phase.DECODE})}


def bound(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else ("-∞" if value < 0 else "∞")


def row(spec: FeatureSpec) -> str:
    """The feature's line of the table."""
    what = " ".join((spec.compute.__doc__ or "").split()).replace("``", "`").rstrip(".")
    cells = (
        f"`{spec.name}`",
        what,
        f"{bound(spec.low)} to {bound(spec.high)}",
        " and ".join(phase.name.lower() for phase in sorted(spec.phases)),
        ", ".join(sorted(spec.decision_points)),
        ", ".join(sorted(spec.depends_on)),
    )
    return f"| {' | '.join(cells)} |"


def test_the_table_is_that_of_the_code() -> None:
    """Guards against a page that promises a feature, a range or a phase that is not there, or leaves one out."""
    lines = (ROOT / "docs" / "features.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert rows == [row(spec) for spec in FEATURES.values()]


def names(group: str) -> list[str]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return list(compose(overrides=[f"+features={group}"]).features.names)


@pytest.mark.parametrize("group", SETS)
def test_every_set_can_be_asked_for(group: str) -> None:
    """Guards against a set with a misspelt feature, or with one that the set's phase does not have."""
    check_features(names(group), phases=PHASES[group], decision_point="pre_forward", who=group)
    assert needs_signals(names(group)) == (group == "decode")


def test_the_static_set_is_complete() -> None:
    """Guards against a new feature that learned routers never see."""
    static = {name for name, spec in FEATURES.items() if not spec.needs_signals}
    assert set(names("static")) == static
    assert set(names("decode")) == static - {"is_decode"} | {
        name for name, spec in FEATURES.items() if "logits" in spec.depends_on
    }
