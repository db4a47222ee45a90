"""Guards the options by which the benchmark of routers runs in parts: one phase, some routers, groups switched off."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.router_bench import app, kept
from scripts.router_bench.asking import calibrated
from scripts.router_bench.measures import measure_text
from scripts.router_bench.setup import COMPARED, TOKENS_ONLY, Bench, trained_order
from tests.router_bench_cases import tiny_bench, tiny_routers, write_router
from tokenrouter.executors.calibration import Calibration
from tokenrouter.models import tiny_random
from tokenrouter.routers.artifact import read_artifact, write_artifact
from tokenrouter.routers.layer_groups import LayerGroups
from tokenrouter.types import Phase

GROUPS = LayerGroups(((3,), (0, 2), (1,)), (1.0, 0.0, -1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_routers(tmp_path_factory.mktemp("routers"))


@pytest.fixture(scope="module")
def bench(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return tiny_bench(folder, tmp_path_factory.mktemp("cache"))


def printed(folder: Path, cache: Path, *more: str) -> dict[str, Any]:
    shown = io.StringIO()
    given = ["--quick", "--texts", "python_docs", "--routers", str(folder), *more]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr(Calibration, "_folder", lambda _: cache)
        patch.setattr("sys.argv", ["bench_router.py", *given])
        patch.setattr(app, "load_model", lambda name, dtype: tiny_random(dtype=dtype))
        app.main("")
    found: dict[str, Any] = json.loads(shown.getvalue().splitlines()[-1])
    return found


def test_one_phase_and_some_routers(folder: Path, tmp_path: Path) -> None:
    """Guards against work that was not asked for, and claims about what was not run."""
    decode = printed(folder, tmp_path, "--phases", "decode", "--compared", "entropy")
    assert {row["phase"] for row in decode["rows"]} == {"decode"} == set(decode["phases"])
    names = {row["router"] for row in decode["rows"]}
    assert names == {"all_low", "random", "oracle", "layerwise", "mlp", "entropy"}
    assert "prefill" not in decode and "mlp_at_equal_tok_s_python_docs" not in decode
    assert "mlp_decode_vs_layerwise_at_equal_tok_s_python_docs" in decode
    assert "mlp_decode_oracle_gain_frac_python_docs" in decode
    assert "mlp_oracle_gain_frac_python_docs" not in decode
    prefill = printed(
        folder, tmp_path, "--phases", "prefill", "--compared", "mlp", "--plots", str(tmp_path)
    )
    assert {row["phase"] for row in prefill["rows"]} == {"prefill"}
    assert "mlp_vs_layerwise_at_equal_tok_s_python_docs" in prefill
    assert "mlp_vs_rule_at_equal_tok_s_python_docs" not in prefill
    assert (tmp_path / "python_docs_int8.png").stat().st_size > 0


def test_costs_alone(folder: Path, tmp_path: Path) -> None:
    """Guards against minutes of KL where a quiet machine was wanted for seconds of a router."""
    found = printed(folder, tmp_path, "--only-costs", "--compared", "rule")
    assert set(found["costs"]) == {"rule", "mlp"} and "rows" not in found
    assert found["router_overhead_frac"] > 0 and found["smooth5_vs_all_high"] > 0


def test_an_mlp_with_groups_is_judged_without_them_too(bench: Bench, tmp_path: Path) -> None:
    """Guards against a row that says tokens only and has groups, or that shows up where there are none to leave out."""
    assert TOKENS_ONLY not in bench.scored(0.2)
    path = write_router(tmp_path, bench.model, "int8", groups=GROUPS)
    grouped = replace(bench, trained={"int8": {"mlp": path}})
    routers = grouped.scored(0.2)
    assert list(routers) == ["rule", "mlp", TOKENS_ONLY]
    assert len(routers["mlp"].routes(4).routes) == 4
    assert len(routers[TOKENS_ONLY].routes(4).routes) == 2
    few = replace(grouped, compared=("rule",))
    assert list(few.scored(0.2)) == ["rule", "mlp"]
    assert "entropy" not in calibrated(few, bench.texts[0])[0.2]


def test_the_map_of_layers_is_by_the_training_labels(bench: Bench, tmp_path: Path) -> None:
    """Guards against a map that is chosen by the labels of the windows it is judged on, where others are not."""
    assert bench.layer_order is None, "these routers do not say what layers need"
    path = write_router(tmp_path, bench.model, "int8", groups=GROUPS)
    artifact = replace(read_artifact(path, "mlp"), about={"layer_need": [0.1, 0.5, 3.0, 0.4]})
    write_artifact(artifact, path)
    assert trained_order(path) == [2, 1, 3, 0]
    known = replace(bench, layer_order=trained_order(path), phases=(Phase.PREFILL,), compared=())
    assert measure_text(known, bench.texts[0]).layers == [2, 1, 3, 0]


def test_compared_are_all_that_there_are() -> None:
    assert COMPARED == ("rule", "entropy", "mlp", "linear", "trees", "mlp_tokens")


def test_what_was_measured_is_kept(
    bench: Bench, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an hour that is lost with the process, and against another router's KL."""
    text = bench.texts[0]
    found, smoothed = kept.kept_or_measured(bench, text, tmp_path)
    assert smoothed is not None and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(kept, "measure_text", lambda *_: pytest.fail("measured again"))
    timed_more = replace(bench, sizes=replace(bench.sizes, turns=9, decode_batch=1))
    again, smoothed_again = kept.kept_or_measured(timed_more, text, tmp_path)
    assert again.layers == found.layers and again.by_key.keys() == found.by_key.keys()
    for key, own in found.by_key.items():
        assert torch.equal(again.by_key[key].kl_WN, own.kl_WN)
        assert torch.equal(again.by_key[key].high_frac_W, own.high_frac_W)
    assert smoothed_again is not None and torch.equal(smoothed_again.kl_W, smoothed.kl_W)
    other = write_router(tmp_path, bench.model, "int8", groups=GROUPS)
    for changed in (
        replace(bench, trained={"int8": {"mlp": other}}),
        replace(bench, compared=()),
        replace(bench, phases=(Phase.DECODE,)),
        replace(bench, sizes=replace(bench.sizes, draws=9)),
    ):
        with pytest.raises(pytest.fail.Exception, match="measured again"):
            kept.kept_or_measured(changed, text, tmp_path)
