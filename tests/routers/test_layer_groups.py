"""Routers that decide about groups of layers: routes, shares of work, thresholds, and the files that say so."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.routers.trained import drawn_artifact, see
from tokenrouter.routers import Budget, CachedRouter, MLPRouter, RequestLevelRouter, RuleRouter
from tokenrouter.routers.artifact import Kind, read_artifact, shipped, write_artifact
from tokenrouter.routers.layer_groups import LayerGroups, layer_groups
from tokenrouter.routers.thresholds import write_thresholds
from tokenrouter.types import LayerSpan, Phase

GROUPS = LayerGroups(((14,), (0, 1, *range(8, 14)), tuple(range(2, 8))), (1.5, 0.25, -1.0))
IDS = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_artifact(drawn_artifact(groups=GROUPS), tmp_path / "router"))


def test_a_route_per_number_of_groups_that_run_high() -> None:
    """Guards against a group that goes low before a less needy one, and names that others do not find: high, low."""
    table = GROUPS.routes(15)
    assert table.names == ("high", "high_9_layers", "high_1_layers", "low")
    spans = [tuple(route.spans) for route in table.routes]
    assert spans[0] == (LayerSpan(0, 15, "high"),) and spans[3] == (LayerSpan(0, 15, "low"),)
    assert spans[1] == (
        LayerSpan(0, 2, "high"),
        LayerSpan(2, 8, "low"),
        LayerSpan(8, 15, "high"),
    )
    assert spans[2] == (LayerSpan(0, 14, "low"), LayerSpan(14, 15, "high"))


@pytest.mark.parametrize("num_layers", [3, 15, 1024])
def test_another_depth_has_the_same_routes(num_layers: int) -> None:
    """Guards against routes that are named for one depth and looked up for another; the rest is needy least."""
    table = GROUPS.routes(num_layers)
    assert table.names == GROUPS.routes(15).names
    assert table.routes[0].executors == {"high"} and table.routes[3].executors == {"low"}
    assert table.routes[1].executor_at(1) == "high"
    assert table.routes[1].executor_at(num_layers - 1) == ("high" if num_layers == 15 else "low")


def test_layers_before_the_decision_are_high_in_all_routes() -> None:
    """Guards against a low layer that has run before the router is asked."""
    for route in LayerGroups(((5, 8), (4, 6, 7)), (1.0, -1.0)).routes(9).routes:
        assert {route.executor_at(layer) for layer in range(4)} == {"high"}


def test_a_group_goes_high_where_score_and_offset_reach_the_threshold(path: str) -> None:
    """Guards against offsets of other layers, and against a threshold of its own for each group."""
    router = MLPRouter(path=path, thresholds="shipped")
    inputs = see(router, IDS, prompt_len=200)
    ranked_T = router.score(inputs) - 1e-6 * inputs.positions_T
    limit_T = torch.where(inputs.phase_T == Phase.PREFILL, 0.5, 1.0)
    answer = router.route(inputs)
    table = router.routes(15)
    assert len(answer.route_T.unique()) == 4, "routes of all kinds"
    for layers, offset in zip(GROUPS.layers, GROUPS.offsets, strict=True):
        for layer in layers:
            is_high_R = torch.tensor([r.executor_at(layer) == "high" for r in table.routes])
            assert torch.equal(is_high_R[answer.route_T], ranked_T + offset >= limit_T)
    score_TL = router.layer_scores(inputs)
    assert torch.equal(score_TL[:, 14], ranked_T + 1.5) and score_TL.shape == (400, 15)
    assert torch.equal(answer.score_T, ranked_T)
    words = {table.names[r]: answer.reasons[w] for r, w in zip(*by_token(answer), strict=True)}
    assert words == {
        "high": "score over the threshold",
        "high_9_layers": "score over the threshold in some layers",
        "high_1_layers": "score over the threshold in some layers",
        "low": "score under the threshold",
    }


def by_token(answer: Any) -> tuple[list[int], list[int]]:
    return answer.route_T.tolist(), answer.reason_T.tolist()


def test_the_budget_is_of_the_work(path: str) -> None:
    """Guards against a share of (token, group) pairs, where ten layers count as much as two."""
    router = MLPRouter(path=path, budget=Budget(high_frac=0.3))
    inputs = see(router, IDS, prompt_len=200)
    router.calibrate([inputs])
    route_T = router.route(inputs).route_T
    layers_R = [
        sum(span.stop - span.start for span in route.spans if span.executor == "high") / 15
        for route in router.routes(15).routes
    ]
    high_T = torch.tensor(layers_R, dtype=torch.float64)[route_T]
    torch.testing.assert_close(router.high_work(route_T), high_T)
    for phase in Phase:
        assert float(high_T[inputs.phase_T == phase].mean()) == pytest.approx(0.3, abs=0.01)


def test_groups_can_be_switched_off(path: str, tmp_path: Path) -> None:
    """Guards against a switch that leaves other routes, thresholds or versions than a router without groups has."""
    off = MLPRouter(path=path, thresholds="shipped", layer_groups=False)
    plain_path = str(write_artifact(drawn_artifact(), tmp_path / "plain"))
    plain = MLPRouter(path=plain_path, thresholds="shipped")
    inputs = see(off, IDS, prompt_len=200)
    assert off.routes(15) == plain.routes(15) and off.thresholds == plain.thresholds
    assert torch.equal(off.route(inputs).route_T, plain.route(inputs).route_T)
    on = MLPRouter(path=path, thresholds="shipped")
    assert on.thresholds == {Phase.PREFILL: 0.5, Phase.DECODE: 1.0} != off.thresholds
    assert on.version != off.version
    with pytest.raises(ValueError, match=r"router\.layer_groups must be true or false, got 'yes'"):
        MLPRouter(path=path, layer_groups="yes")  # type: ignore[arg-type]


def test_thresholds_of_the_other_kind_of_decision_are_refused(path: str, tmp_path: Path) -> None:
    """Guards against a share of tokens that is taken for one of work."""
    file, router = tmp_path / "thresholds.json", MLPRouter(path=path)
    write_thresholds(file, router.artifact.version, {Phase.PREFILL: 0.25}, {}, has_groups=True)
    assert MLPRouter(path=path, thresholds=str(file)).thresholds == {Phase.PREFILL: 0.25}
    with pytest.raises(ValueError, match=r"groups of layers.*set router.layer_groups=true"):
        MLPRouter(path=path, thresholds=str(file), layer_groups=False)


def test_a_request_is_as_needy_as_its_high_work(path: str) -> None:
    """Guards against a token that counts as low where most of its layers are high."""
    inner = CachedRouter(inner=MLPRouter(path=path, thresholds="shipped"))
    router = RequestLevelRouter(inner=inner, high_frac=0.5)
    inputs = see(inner, IDS)
    expected = float(inner.high_work(inner.route(inputs).route_T).mean())
    only_high = float((inner.route(inputs).route_T == 0).double().mean())
    assert router.prompt_shares(inputs)[0] == pytest.approx(expected) != only_high


def test_routers_without_groups_send_all_or_nothing_high() -> None:
    route_T = torch.tensor([0, 1, 0])
    assert RuleRouter().high_work(route_T).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", ["mlp", "linear", "trees"])
def test_the_file_keeps_the_groups(tmp_path: Path, kind: Kind) -> None:
    """Guards against a router that comes back with other groups, or as the same version without them."""
    artifact = drawn_artifact(kind, groups=GROUPS)
    path = write_artifact(artifact, tmp_path / "router")
    assert json.loads(path.read_text())["format_version"] == 4
    read = read_artifact(path, kind)
    assert read.layer_groups == GROUPS and read.version == artifact.version
    assert read.group_thresholds == artifact.group_thresholds
    other = LayerGroups(GROUPS.layers, (1.5, 0.5, -1.0))
    others = [drawn_artifact(kind, groups=g) for g in (None, other)]
    others.append(replace(artifact, group_thresholds={}))
    assert len({a.version for a in (artifact, *others)}) == 4


@pytest.mark.parametrize("kind", ["mlp", "linear", "trees"])
def test_shipped_routers_have_groups_and_files_without_stay_what_they_are(
    tmp_path: Path, kind: Kind
) -> None:
    """Guards against shipped routers of another version, and new files that older versions no longer read."""
    for path in shipped(kind).values():
        artifact = read_artifact(path, kind)
        assert artifact.version == json.loads(path.read_text())["version"]
        assert artifact.layer_groups is not None and artifact.group_thresholds
    header = json.loads(write_artifact(drawn_artifact(kind), tmp_path / "router").read_text())
    assert header["format_version"] == 2 and "layer_groups" not in header


def spoil(**facts: object) -> Callable[[dict], dict]:
    return lambda header: header | {"layer_groups": header["layer_groups"] | facts}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil(layers=[[0, 1], [3]]), "do not hold each layer from 0 on once"),
        (spoil(layers=[[0, 1], [1, 2]]), "do not hold each layer from 0 on once"),
        (spoil(layers=[[0, 1], []]), "do not hold each layer from 0 on once"),
        (spoil(layers=[[1, 0], [2]]), "in another than their order"),
        (spoil(layers=[[0, 1, 2]]), "there are 1 groups, and 2 to 8 are allowed"),
        (spoil(layers=[]), "there are 0 groups"),
        (spoil(layers=5), "no layer_groups that fit"),
        (spoil(layers=[["0"], [1]]), "something else than layer numbers"),
        (spoil(layers=[[0.0], [1]]), "something else than layer numbers"),
        (spoil(offsets=[1.0, 0.0]), "not an offset for each of 3 groups"),
        (spoil(offsets=[1.0, 2.0, 0.0]), "do not descend"),
        (spoil(offsets=[1.0, float("nan"), 0.0]), "not an offset for each"),
        (spoil(offsets="abc"), "no layer_groups that fit"),
        (lambda header: header | {"layer_groups": [1]}, "no layer_groups that fit"),
        (
            lambda header: header | {"trained_for": header["trained_for"] | {"after_layer": 1}},
            "do not hold each layer from 1 on once",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict], dict], message: str
) -> None:
    """Guards against scores that are read as those of other layers, and against layers that have no route."""
    path = write_artifact(drawn_artifact(groups=GROUPS), tmp_path / "router")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message) as error:
        read_artifact(path, "mlp")
    assert "task=train_router" in str(error.value)


def test_groups_as_they_are_stored_come_back() -> None:
    stored = [list(group) for group in GROUPS.layers]
    assert layer_groups(stored, list(GROUPS.offsets), 0) == GROUPS
    assert GROUPS.widths == (1, 8, 6)
    assert GROUPS.layer_offsets == (0.25, 0.25, *[-1.0] * 6, *[0.25] * 6, 1.5)
