"""What a text showed, kept in a file, so that an interrupted measurement does not begin anew."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from tokenrouter.files import replace_file
from tokenrouter.routers.artifact import read_artifact
from tokenrouter.telemetry.provenance import ROOT, git_state
from tokenrouter.types import Phase

from .measures import Measured, Smoothed, TextMeasured, measure_smoothed, measure_text
from .setup import Bench, Text
from .sizes import OF_KL


def kept_or_measured(
    bench: Bench, text: Text, folder: Path | None
) -> tuple[TextMeasured, Smoothed | None]:
    """KL of a text's routings and of the smoothed path, from ``folder`` where the same was measured before.

    The same: commit, model, windows, routers, phases and sizes of KL.

    Args:
        bench: what is measured.
        text: of ``bench``.
        folder: of the files, one per text; None: nothing is kept.
    """
    if folder is None:
        return measure_text(bench, text), measure_smoothed(bench, text)
    path = folder / f"{text.name}_{bench.executor}_{_fingerprint(bench, text)}.pt"
    if path.exists():
        return _read(path)
    found = measure_text(bench, text), measure_smoothed(bench, text)
    _write(path, *found)
    return found


def _fingerprint(bench: Bench, text: Text) -> str:
    trained = {
        f"{executor} {kind}": read_artifact(path, kind).version
        for executor, kinds in bench.trained.items()
        for kind, path in kinds.items()
    }
    facts: dict[str, Any] = {
        "commit": git_state(ROOT),
        "model": bench.model.model_hash,
        "windows": text.windows,
        "calibration": text.held_out.text_ids,
        "executor": bench.executor,
        "trained": trained,
        "phases": [phase.name for phase in bench.phases],
        "compared": list(bench.compared),
        "sizes": [getattr(bench.sizes, name) for name in OF_KL],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _write(path: Path, found: TextMeasured, smoothed: Smoothed | None) -> None:
    plain = {
        "layers": list(found.layers),
        "by_key": [
            ((phase.name, *key), {name: getattr(own, name) for name in Measured.__slots__})
            for (phase, *key), own in found.by_key.items()
        ],
        "smoothed": smoothed and {name: getattr(smoothed, name) for name in Smoothed.__slots__},
    }
    unfinished = path.with_suffix(".part")
    torch.save(plain, unfinished)
    replace_file(path, unfinished.read_bytes())
    unfinished.unlink()


def _read(path: Path) -> tuple[TextMeasured, Smoothed | None]:
    plain = torch.load(path, weights_only=True)
    by_key = {
        (Phase[phase], router, pick, share): Measured(**own)
        for (phase, router, pick, share), own in plain["by_key"]
    }
    smoothed = plain["smoothed"]
    return (
        TextMeasured(by_key=by_key, layers=plain["layers"]),
        None if smoothed is None else Smoothed(**smoothed),
    )
