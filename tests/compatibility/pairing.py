"""Settings by name, and every two of them that can be asked for together."""

from functools import cache
from itertools import combinations

from tests.compatibility.features import FEATURES
from tests.compatibility.setting import Setting

SETTINGS: dict[str, Setting] = {
    f"{feature.key}.{name}": setting
    for feature in FEATURES
    for name, setting in feature.settings.items()
}


def shared_option(a: str, b: str) -> str | None:
    """The option to which two settings give different values, if there is one."""
    ours, theirs = SETTINGS[a].options, SETTINGS[b].options
    return next((name for name in ours if name in theirs and ours[name] != theirs[name]), None)


@cache
def pairs() -> tuple[tuple[str, str], ...]:
    """Every two settings of different features that can be asked for together."""
    return tuple(
        (a, b)
        for a, b in combinations(SETTINGS, 2)
        if a.split(".")[0] != b.split(".")[0] and shared_option(a, b) is None
    )
