"""Routers that decide about groups of layers: scores, routes, shares of work, and the files that say so."""

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
from tokenrouter.routers.layer_groups import check_groups, group_routes
from tokenrouter.types import LayerSpan, Phase

GROUPS = ((0, 2), (2, 12), (12, 15))
IDS = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def path(tmp_path: Path) -> str:
    stored = {"0.1": {"prefill": 0.5, "decode": 1.0}}
    artifact = replace(drawn_artifact(groups=GROUPS), thresholds=stored)
    return str(write_artifact(artifact, tmp_path / "router"))


def test_scores_are_the_networks(path: str) -> None:
    """Guards against a group that is scored by another group's or another phase's numbers."""
    router, tensors = MLPRouter(path=path), drawn_artifact(groups=GROUPS).tensors
    inputs = see(router, IDS, prompt_len=200)
    score_TG = router.score(inputs)
    assert score_TG.shape == (400, 3)
    for index in (0, 1, 50, 199, 200, 399):
        position, kind = inputs.values_TF[index].tolist()
        rows = [0 if position < 1 else 1 if position < 4 else 2, 3 + int(kind)]
        rows.append(11 + {4: 0, 9: 1, 28: 2}.get(IDS[index], 3))
        units = tensors["table"][rows].sum(0)
        for group in range(3):
            output = 3 * int(inputs.phase_T[index]) + group
            expected = units[5 + output] + units[:5].relu() @ tensors["head"][output]
            torch.testing.assert_close(score_TG[index, group], expected)


def test_scores_do_not_depend_on_the_company(path: str) -> None:
    """Guards against sums over hidden units whose order changes with the number of tokens."""
    router = MLPRouter(path=path)
    whole_TG = router.score(see(router, IDS))
    for length in (1, 2, 3, 7, 16, 33):
        assert torch.equal(router.score(see(router, IDS[:length])), whole_TG[:length])


def test_a_route_per_subset_of_groups() -> None:
    """Guards against an index whose bits mean other groups, and names that others do not find: high, low."""
    table = group_routes(GROUPS, 15)
    assert table.names == (
        *("high", "high_2_12+12_15", "high_0_2+12_15", "high_12_15"),
        *("high_0_2+2_12", "high_2_12", "high_0_2", "low"),
    )
    assert table.routes[0].spans == (LayerSpan(0, 15, "high"),)
    assert table.routes[2].spans == (
        LayerSpan(0, 2, "high"),
        LayerSpan(2, 12, "low"),
        LayerSpan(12, 15, "high"),
    )
    assert table.routes[3].spans == (LayerSpan(0, 12, "low"), LayerSpan(12, 15, "high"))
    assert group_routes(GROUPS, 1024).names == table.names


def test_layers_before_the_decision_are_high_in_all_routes() -> None:
    """Guards against a low layer that has run before the router is asked."""
    for route in group_routes(((4, 6), (6, 9)), 9).routes:
        assert {route.executor_at(layer) for layer in range(4)} == {"high"}


def test_a_group_goes_high_where_its_score_reaches_the_threshold(path: str) -> None:
    """Guards against a token's mean score, and against a threshold of its own for each group."""
    router = MLPRouter(path=path, thresholds="shipped")
    inputs = see(router, IDS, prompt_len=200)
    ranked_TG = router.score(inputs) - 1e-6 * inputs.positions_T[:, None]
    limit_T1 = torch.where(inputs.phase_T == Phase.PREFILL, 0.5, 1.0)[:, None]
    answer = router.route(inputs)
    table = router.routes(15)
    assert len(answer.route_T.unique()) >= 7, "subsets of all kinds"
    for group, (start, _) in enumerate(GROUPS):
        is_high_R = torch.tensor([r.executor_at(start) == "high" for r in table.routes])
        assert torch.equal(is_high_R[answer.route_T], (ranked_TG >= limit_T1)[:, group])
    assert torch.equal(answer.score_T, ranked_TG.amax(1))
    words = {table.names[r]: answer.reasons[w] for r, w in zip(*by_token(answer), strict=True)}
    assert words["high"] == "score over the threshold"
    assert words["high_12_15"] == "score over the threshold in some layers"
    assert words["low"] == "score under the threshold"


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


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_the_file_keeps_the_groups(tmp_path: Path, kind: Kind) -> None:
    """Guards against a router that comes back with other groups, or as the same version without them."""
    artifact = drawn_artifact(kind, groups=GROUPS)
    path = write_artifact(artifact, tmp_path / "router")
    assert json.loads(path.read_text())["format_version"] == 3
    read = read_artifact(path, kind)
    assert read.trained_for == artifact.trained_for and read.version == artifact.version
    others = [drawn_artifact(kind, groups=g) for g in (None, ((0, 2), (2, 11), (11, 15)))]
    assert len({a.version for a in (artifact, *others)}) == 3


@pytest.mark.parametrize("kind", ["mlp", "linear", "trees"])
def test_files_without_groups_stay_what_they_are(tmp_path: Path, kind: Kind) -> None:
    """Guards against shipped routers of another version, and new files that older versions no longer read."""
    for path in shipped(kind).values():
        assert read_artifact(path, kind).version == json.loads(path.read_text())["version"]
    header = json.loads(write_artifact(drawn_artifact(kind), tmp_path / "router").read_text())
    assert header["format_version"] == 2
    assert not {"layer_groups", "after_layer"} & set(header["trained_for"])


def spoil(**facts: object) -> Callable[[dict], dict]:
    return lambda header: header | {"trained_for": header["trained_for"] | facts}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil(layer_groups=[[0, 2], [3, 15]]), r"no layer_groups that fit: .*follow each other"),
        (spoil(layer_groups=[[0, 15]]), "has 1 groups, and 2 to 4 are allowed"),
        (spoil(layer_groups=[]), "no layer_groups that fit"),
        (spoil(layer_groups=5), "no layer_groups that fit"),
        (spoil(layer_groups=[[0, "2"], ["2", 15]]), "something else than pairs of layer numbers"),
        (spoil(after_layer=1), "follow each other from layer 1 to 15"),
        (
            spoil(layer_groups=[[0, 2], [2, 15]]),
            r"table has shape \[15, 11\] and should have \[15, 9\]",
        ),
        (spoil(layer_groups=None), r"table has shape \[15, 11\] and should have \[15, 7\]"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict], dict], message: str
) -> None:
    """Guards against scores that are read as those of other layers."""
    path = write_artifact(drawn_artifact(groups=GROUPS), tmp_path / "router")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message) as error:
        read_artifact(path, "mlp")
    assert "task=train_router" in str(error.value)


def test_trees_with_groups_are_refused(tmp_path: Path) -> None:
    artifact = drawn_artifact("trees")
    for_groups = replace(artifact.trained_for, layer_groups=GROUPS)
    path = write_artifact(replace(artifact, trained_for=for_groups), tmp_path / "router")
    with pytest.raises(ValueError, match="trees have one score for all layers"):
        read_artifact(path, "trees")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 10], [10, 20]], "follow each other from layer 0 to 30"),
        ([[0, 10], [12, 30]], "follow each other"),
        ([[1, 10], [10, 30]], "follow each other"),
        ([[0, 10], [10, 10], [10, 30]], "follow each other"),
        ([[0, 20], [20, 10], [10, 30]], "follow each other"),
        ([[0, 1], [1, 2], [2, 3], [3, 4], [4, 30]], "has 5 groups, and 2 to 4 are allowed"),
        ([[0, 10, 20], [20, 30]], "something else than pairs"),
        ([[0, 10.0], [10, 30]], "something else than pairs"),
    ],
)
def test_groups_are_ranges_of_all_layers(groups: list[list[int]], message: str) -> None:
    """Guards against layers of no group, which would have no route, and of two."""
    with pytest.raises(ValueError, match=message):
        check_groups(groups, first=0, stop=30)
