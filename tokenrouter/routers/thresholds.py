"""Thresholds of a learned router as a file: what task=calibrate writes and ``router.thresholds`` takes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenrouter.files import replace_file
from tokenrouter.types import Phase

FORMAT = "tokenrouter thresholds 1"


def write_thresholds(
    path: Path,
    artifact: str,
    values: Mapping[Phase, float],
    about: Mapping[str, Any],
    *,
    has_groups: bool,
) -> None:
    """Stores thresholds.

    Args:
        path: of the json file.
        artifact: version of the trained router whose scores they belong to.
        values: by phase.
        about: where they come from: plain values that no router reads.
        has_groups: whether groups of layers are decided about one by one.
    """
    content = {
        "format": FORMAT,
        "artifact": artifact,
        "layer_groups": has_groups,
        "thresholds": {phase.name.lower(): value for phase, value in values.items()},
        "about": about,
    }
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def read_thresholds(path: Path | str, artifact: str, *, has_groups: bool) -> dict[Phase, float]:
    """The thresholds in a file of ``write_thresholds``.

    Args:
        path: of the json file.
        artifact: version of the trained router whose scores they must belong to.
        has_groups: whether groups of layers are decided about one by one.

    Raises:
        ValueError: no such file, another kind of file, thresholds of another trained router, or with groups of layers
            where they must be without, and the other way round.
    """
    again = "write one with `python run.py task=calibrate`, or choose router.thresholds=calibrated"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise KeyError("format")
        found = {Phase[name.upper()]: float(v) for name, v in content["thresholds"].items()}
        of_groups = bool(content.get("layer_groups", False))
        known = content["artifact"]
    except OSError as error:
        raise ValueError(
            f"router.thresholds={path} cannot be read ({error.strerror}): {again}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"router.thresholds={path} is no file of thresholds ({error}): {again}"
        ) from None
    if known != artifact:
        raise ValueError(
            f"router.thresholds={path} belongs to the trained router {known}, and this one is {artifact}: {again}"
        )
    if of_groups != has_groups:
        said = {True: "groups of layers one by one", False: "all layers of a token at once"}
        raise ValueError(
            f"router.thresholds={path} is for decisions about {said[of_groups]}, and this router decides about "
            f"{said[has_groups]}: set router.layer_groups={str(of_groups).lower()}, or {again}"
        )
    return found
