"""Learned routers: what they compute, budgets and thresholds, and what they were not trained for."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.routers.trained import TABLE, drawn_artifact, see, trained_for, with_entropy
from tokenrouter.features import TextSignals
from tokenrouter.kernels import ReferenceKernels, select
from tokenrouter.routers import (
    Budget,
    CompositeRouter,
    IntervalRouter,
    MLPRouter,
    RequestLevelRouter,
)
from tokenrouter.routers.artifact import write_artifact
from tokenrouter.routers.thresholds import write_thresholds
from tokenrouter.types import Phase

IDS = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_artifact(drawn_artifact(), tmp_path / "router"))


def test_the_score_is_the_networks(path: str) -> None:
    """Guards against a bin, an id's row or a head that is off by one: the same, by hand, from one-hot inputs."""
    router = MLPRouter(path=path)
    inputs = see(router, IDS, prompt_len=200)
    artifact = drawn_artifact()
    table, head = artifact.tensors["table"], artifact.tensors["head"]
    for index in (0, 1, 3, 4, 50, 199, 200, 399):
        position, kind = inputs.values_TF[index].tolist()
        one_hot = torch.zeros(len(table))
        one_hot[0 if position < 1 else 1 if position < 4 else 2] = 1
        one_hot[3 + int(kind)] = 1
        one_hot[11 + {4: 0, 9: 1, 28: 2}.get(IDS[index], 3)] = 1
        phase = int(inputs.phase_T[index])
        units = one_hot @ table
        expected = units[5 + phase] + units[:5].relu() @ head[phase]
        torch.testing.assert_close(router.score(inputs)[index], expected)


def test_what_only_decode_tokens_have_has_rows_of_its_own(tmp_path: Path) -> None:
    """Guards against prompt tokens that share a bin with the most or the least unsure decode tokens."""
    artifact = with_entropy(drawn_artifact())
    router = MLPRouter(path=str(write_artifact(artifact, tmp_path / "router")))
    router.check()
    plain = MLPRouter(path=str(write_artifact(drawn_artifact(), tmp_path / "plain")))
    entropy_N = torch.linspace(0, 4, len(IDS))
    inputs = see(router, IDS, prompt_len=200, signals=TextSignals(TABLE, {"entropy": entropy_N}))
    assert inputs.feature("entropy")[:200].isnan().all()
    assert torch.equal(inputs.feature("entropy")[200:], entropy_N[200:])
    table_KC, head_PH = artifact.tensors["table"], artifact.tensors["head"]
    first, own = drawn_artifact().bins.first_id_row, see(plain, IDS, prompt_len=200)
    plain_table_KC = drawn_artifact().tensors["table"]
    for index, bin_ in ((0, 2), (199, 2), (200, 1), (399, 1)):
        row_2 = own.values_TF[index]
        rows = [0 if row_2[0] < 1 else 1 if row_2[0] < 4 else 2, 3 + int(row_2[1])]
        rows.append(11 + {4: 0, 9: 1, 28: 2}.get(IDS[index], 3))
        units_C = plain_table_KC[rows].sum(0) + table_KC[first + bin_]
        phase = int(inputs.phase_T[index])
        expected = units_C[5 + phase] + units_C[:5].relu() @ head_PH[phase]
        torch.testing.assert_close(router.score(inputs)[index], expected)
    sure = see(router, IDS, 200, TextSignals(TABLE, {"entropy": torch.zeros(len(IDS))}))
    differs_T = router.score(sure) != router.score(inputs)
    assert not differs_T[:200].any() and differs_T[200:].all()


def test_an_id_beyond_the_known_ones_is_an_unknown_one(path: str) -> None:
    """Guards against an index out of range for a large id."""
    router = MLPRouter(path=path)
    inputs = see(router, [59, 29, 29, 29])
    score_T = router.score(inputs)
    assert score_T.isfinite().all()


def test_the_budget_is_met_in_both_phases(path: str) -> None:
    router = MLPRouter(path=path, budget=Budget(high_frac=0.3))
    assert router.needs_calibration
    inputs = see(router, IDS, prompt_len=200)
    with pytest.raises(ValueError, match=r"no threshold for prefill and decode tokens"):
        router.route(inputs)
    before = router.version
    router.calibrate([inputs])
    assert router.version != before and not router.needs_calibration
    is_high_T = router.route(inputs).route_T == 0
    for phase in Phase:
        share = float(is_high_T[inputs.phase_T == phase].float().mean())
        assert share == pytest.approx(0.3, abs=0.01), "equal scores are told apart"


def test_stored_thresholds(path: str) -> None:
    """Guards against thresholds of another share, or of the other phase."""
    router = MLPRouter(path=path, thresholds="shipped")
    assert router.thresholds == {Phase.PREFILL: 1.5, Phase.DECODE: 2.5}
    inputs = see(router, IDS, prompt_len=200)
    ranked_T = router.score(inputs) - 1e-6 * inputs.positions_T
    limit_T = torch.where(inputs.phase_T == Phase.PREFILL, 1.5, 2.5)
    assert torch.equal(router.route(inputs).route_T == 0, ranked_T >= limit_T)
    with pytest.raises(ValueError, match=r"high_frac=0.2 is stored .*; stored: 0.1"):
        MLPRouter(path=path, thresholds="shipped", budget=Budget(high_frac=0.2))


def test_thresholds_from_a_file(path: str, tmp_path: Path) -> None:
    """Guards against thresholds for the scores of another router."""
    router, file = MLPRouter(path=path), tmp_path / "thresholds.json"
    values = {Phase.PREFILL: 0.25, Phase.DECODE: -1.0}
    write_thresholds(file, router.artifact.version, values, {}, has_groups=False)
    chosen = MLPRouter(path=path, thresholds=str(file), budget=Budget())
    assert chosen.thresholds == {Phase.PREFILL: 0.25, Phase.DECODE: -1.0}
    assert not chosen.needs_calibration and chosen.version != router.version
    write_thresholds(
        file, drawn_artifact(seed=1).version, {Phase.PREFILL: 0.25}, {}, has_groups=False
    )
    with pytest.raises(ValueError, match=r"belongs to the trained router .*task=calibrate"):
        MLPRouter(path=path, thresholds=str(file))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": "zip"}'])
def test_files_that_hold_no_thresholds(path: str, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "thresholds.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"router.thresholds=.*(cannot be read|is no file of)"):
        MLPRouter(path=path, thresholds=str(file))


def test_a_share_is_needed(path: str) -> None:
    with pytest.raises(
        ValueError, match=r"needs a share to route high: set router.budget.high_frac"
    ):
        MLPRouter(path=path, budget=Budget())
    with pytest.raises(ValueError, match=r"budget.high_frac=1.5 is outside 0 to 1"):
        MLPRouter(path=path, budget=Budget(high_frac=1.5))


def test_it_refuses_what_it_was_not_trained_for(path: str) -> None:
    """Guards against scores for one model's errors that route another's tokens."""
    router = MLPRouter(path=path)
    router.use_for(model="small", model_hash="a" * 16, low="int8")
    router.use_for(model="small", model_hash="a" * 16, low=None)
    with pytest.raises(
        ValueError, match=r"trained for the model small .*this is other .*task=train_router"
    ):
        router.use_for(model="other", model_hash="b" * 16, low="int8")
    with pytest.raises(
        ValueError, match=r"trained for the low path 'int8', and this pool has 'int4'"
    ):
        router.use_for(model="small", model_hash="a" * 16, low="int4")


def test_what_is_around_it_hands_the_refusal_on(path: str) -> None:
    """Guards against a wrapper that lets a router loose on a model that it does not know."""
    wrapped = (
        IntervalRouter(inner=MLPRouter(path=path)),
        CompositeRouter(precision=MLPRouter(path=path)),
        RequestLevelRouter(inner=MLPRouter(path=path), high_frac=0.1),
    )
    for router in wrapped:
        with pytest.raises(ValueError, match=r"task=train_router"):
            router.use_for(model="other", model_hash="b" * 16, low="int8")


class Counting(ReferenceKernels):
    """Counts scores."""

    num_scores = 0

    def router_mlp(self, *arguments: Any) -> Tensor:
        self.num_scores += 1
        return super().router_mlp(*arguments)


def test_what_is_around_it_hands_the_kernels_on(path: str) -> None:
    """Guards against a wrapper whose inner router stays on the slow operators."""
    inputs = see(MLPRouter(path=path), IDS, prompt_len=200)
    for wrap in (
        lambda inner: IntervalRouter(inner=inner),
        lambda inner: CompositeRouter(precision=inner),
        lambda inner: RequestLevelRouter(inner=inner, high_frac=0.1),
    ):
        router, kernels = MLPRouter(path=path, thresholds="shipped"), Counting()
        wrap(router).use_kernels(kernels)
        router.score(inputs)
        assert kernels.num_scores == 1


def test_another_backend_is_no_other_router(path: str) -> None:
    """Guards against routes, or a version of kept decisions, that depend on where the engine runs."""
    router = MLPRouter(path=path, thresholds="shipped")
    inputs = see(router, IDS, prompt_len=200)
    before, version = router.route(inputs), router.version
    router.use_kernels(select("native"))
    assert torch.equal(router.route(inputs).route_T, before.route_T)
    assert torch.equal(router.route(inputs).score_T, before.score_T)
    assert router.version == version
    copied = deepcopy(router)  # as for thresholds of other text
    assert torch.equal(copied.route(inputs).route_T, before.route_T)


def test_the_shipped_router_is_the_low_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the scores of int8 on the smoothed path, and against thresholds that survive the change."""
    for name, seed in (("int8", 0), ("int8_smooth", 1)):
        artifact = trained_for(drawn_artifact(seed=seed), executor=name)
        write_artifact(artifact, tmp_path / f"small_{name}_mlp")
    monkeypatch.setattr("tokenrouter.routers.artifact.PRETRAINED", tmp_path)
    router = MLPRouter()
    router.use_for(model="small", model_hash="a" * 16, low="int8_smooth")
    assert router.artifact.trained_for.executor == "int8_smooth"
    router.calibrate([see(router, IDS, prompt_len=200)])
    with pytest.raises(ValueError, match=r"calibrated with the scores for int8_smooth"):
        router.use_for(model="small", model_hash="a" * 16, low="int8")


def test_without_a_shipped_router_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenrouter.routers.artifact.PRETRAINED", tmp_path)
    with pytest.raises(ValueError, match=r"no trained router of kind mlp is shipped: .*task=train"):
        MLPRouter()


def test_scores_do_not_depend_on_the_company(path: str) -> None:
    """Guards against sums whose order changes with the number of tokens: a route would change with the batch."""
    router = MLPRouter(path=path)
    inputs = see(router, IDS, prompt_len=200)
    whole_T = router.score(inputs)
    for length in (1, 2, 3, 7, 16, 33):
        part = see(router, IDS[:length], prompt_len=200 if length > 200 else length)
        assert torch.equal(router.score(part), whole_T[:length])
