"""The contract of a router, for every config in conf/router, as it is and with a budget."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from torch.testing import assert_close

from tests.contracts.drawn_signals import DrawnSignals
from tests.contracts.router_inputs import (
    NUM_TAILS,
    TABLE,
    another_tail,
    concat,
    grouped_router,
    label_file,
    rows_of,
    sequences,
)
from tokenrouter.features import FEATURES, sequence_batch
from tokenrouter.routers import RequestLevelRouter, Router
from tokenrouter.routers.artifact import Kind, shipped
from tokenrouter.types import Phase, RouteInput, RoutingDecision, TokenBatch

CONF = Path(__file__).resolve().parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "router").glob("*.yaml"))
NUM_LAYERS = 30
SIGNALS = DrawnSignals(1, TABLE)


def config(name: str, *overrides: str) -> DictConfig:
    needed = [f"router.path={label_file(0)}"] if name == "oracle" else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(overrides=[f"+router={name}", *needed, *overrides]).router


def with_budgets(names: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Every config as it is, and those that have a budget, or a part with one, also with it set."""
    paths = ("budget", "inner.budget", "precision.budget", "retention.budget")
    found = {
        name: tuple(
            f"router.{path}.high_frac=0.3"
            for path in paths
            if OmegaConf.select(config(name), path) is not None
        )
        for name in names
    }
    return [(name, ()) for name in names] + [(name, set_) for name, set_ in found.items() if set_]


GROUPED = ("mlp", (f"router.path={grouped_router()}", "router.budget.high_frac=0.3"))
CASES = [*with_budgets(NAMES), GROUPED]
IDS = [" ".join((name, *more)) for name, more in CASES[:-1]]
every_router = pytest.mark.parametrize(
    ("name", "overrides"), CASES, ids=[*IDS, "mlp with layer groups"]
)
few_examples = settings(max_examples=25, deadline=None)


def make(name: str, overrides: tuple[str, ...] = ()) -> Router:
    """The router of a config, ready to decide."""
    return ready(instantiate(config(name, *overrides)))


@cache
def prepared(name: str, overrides: tuple[str, ...]) -> Router:
    """One router for all of a property's examples."""
    return make(name, overrides)


def ready(router: Router) -> Router:
    if isinstance(router, RequestLevelRouter) and router.high_frac is None:
        router.set_target(0.5)
    if router.needs_calibration:
        router.calibrate([see(router, batch) for batch in sequences()])
    assert not router.needs_calibration
    return router


def see(router: Router, batch: TokenBatch) -> RouteInput:
    if Phase.PREFILL not in router.phases:
        batch = replace(batch, phase_T=torch.full_like(batch.phase_T, int(Phase.DECODE)))
    return router.extractor(TABLE, SIGNALS).extract(batch)


def decide(router: Router, batch: TokenBatch) -> RoutingDecision:
    return router.route(see(router, batch))


def assert_same(a: RoutingDecision, b: RoutingDecision) -> None:
    assert torch.equal(a.route_T, b.route_T)
    assert torch.equal(a.reason_T, b.reason_T)
    assert_close(a.score_T, b.score_T, rtol=0, atol=0, equal_nan=True)
    assert a.reasons == b.reasons


def test_the_group_is_there() -> None:
    """Guards against a moved folder, which would leave the contract without a single case."""
    assert {"all_high", "all_low", "random", "rule", "request_level", "layerwise"} <= set(NAMES)
    assert {"batched", "cached", "interval", "composite", "oracle", "entropy"} <= set(NAMES)
    assert ("rule", ("router.budget.high_frac=0.3",)) in CASES
    assert ("cached", ("router.inner.budget.high_frac=0.3",)) in CASES


@every_router
def test_declarations(name: str, overrides: tuple[str, ...]) -> None:
    """Guards against features nobody computes and a name that does not lead back to the config."""
    router = make(name, overrides)
    assert router.name == name
    assert set(router.features) <= set(FEATURES)
    assert router.level in ("token", "request")
    router.check()
    assert router.phases <= set(Phase)
    for feature in router.features:
        assert FEATURES[feature].depends_on <= router.depends_on
    for route in router.routes(NUM_LAYERS).routes:
        assert route.spans[-1].stop == NUM_LAYERS
        assert route.executors <= {"high", "low"}


@every_router
def test_answer_is_well_formed(name: str, overrides: tuple[str, ...]) -> None:
    """Guards against a wrong dtype or an index outside the tables, and against modified input."""
    router = make(name, overrides)
    batch = concat(sequences())
    inputs = see(router, batch)
    before = {field: getattr(inputs, field) for field in inputs.__slots__}
    copies = {f: v.clone() for f, v in before.items() if isinstance(v, torch.Tensor)}
    decision = router.route(inputs)
    for tensor_T, dtype in (
        (decision.route_T, torch.int64),
        (decision.reason_T, torch.int64),
        (decision.score_T, torch.float32),
    ):
        assert tensor_T.shape == (len(batch),) and tensor_T.dtype == dtype
    assert 0 <= decision.route_T.min()
    assert decision.route_T.max() < len(router.routes(NUM_LAYERS))
    assert 0 <= decision.reason_T.min() and decision.reason_T.max() < len(decision.reasons)
    assert len(set(decision.reasons)) == len(decision.reasons)
    for field, copy in copies.items():
        assert torch.equal(getattr(inputs, field), copy), field


@every_router
def test_only_route_is_all_that_it_answers(name: str, overrides: tuple[str, ...]) -> None:
    """Guards against a router that is taken for a fixed one: its dispatch would weigh nothing."""
    router = make(name, overrides)
    answers = set(decide(router, concat(sequences())).route_T.tolist())
    if router.only_route is None:
        assert len(answers) > 1, "say so with only_route"
    else:
        assert answers == {router.only_route}


@every_router
def test_no_tokens(name: str, overrides: tuple[str, ...]) -> None:
    """Guards against a crash in a step whose tokens are all decided already."""
    none = sequences()[0].select(torch.empty(0, dtype=torch.int64))
    decision = decide(make(name, overrides), none)
    assert decision.route_T.shape == decision.score_T.shape == decision.reason_T.shape == (0,)


@every_router
def test_deterministic(name: str, overrides: tuple[str, ...]) -> None:
    """Guards against state in the router: a replay, a second router or a second call differ."""
    router, batch = make(name, overrides), concat(sequences())
    first = decide(router, batch)
    torch.manual_seed(99)
    assert_same(first, decide(router, batch))
    assert_same(first, decide(make(name, overrides), batch))


@every_router
@few_examples
@given(data=st.data())
def test_chunks_do_not_matter(name: str, overrides: tuple[str, ...], data: st.DataObject) -> None:
    """Guards against answers that change with the chunk size or with the batch mates.

    The tokens come in any order and any chunks; a router of level request gets whole requests.
    """
    router = prepared(name, overrides)
    batch = concat(sequences())
    n = len(batch)
    if router.level == "request":
        rows = data.draw(st.permutations(batch.row_T.unique().tolist()))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(rows) - 1))))
        groups = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
        chunks = [
            torch.cat([(batch.row_T == row).nonzero().flatten() for row in group])
            for group in groups
        ]
    else:
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
        order_T = torch.randperm(n, generator=generator)
        cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=12)))
        chunks = list(order_T.tensor_split(cuts))
    whole = decide(router, batch)
    for index_T in chunks:
        assert_same(decide(router, batch.select(index_T)), rows_of(whole, index_T))


@every_router
@few_examples
@given(keep=st.integers(1, 79), seed=st.integers(0, NUM_TAILS - 1))
def test_causal(name: str, overrides: tuple[str, ...], keep: int, seed: int) -> None:
    """Guards against a look at later tokens (for level request: at generated ones)."""
    router = prepared(name, overrides)
    prompt_len = 50
    if router.level == "request":
        keep = max(keep, prompt_len)
    ids = sequences()[3].ids_T.tolist()
    before = decide(router, sequence_batch(ids, prompt_len=prompt_len))
    after = decide(router, sequence_batch(another_tail(ids, keep, seed), prompt_len=prompt_len))
    kept_T = torch.arange(keep)
    assert_same(rows_of(before, kept_T), rows_of(after, kept_T))


def test_a_request_level_answer_is_one_per_request() -> None:
    """Guards against a request that changes its path on the way."""
    routers = [router for case in CASES if (router := prepared(*case)).level == "request"]
    assert routers
    batch = concat(sequences())
    for router in routers:
        route_T = decide(router, batch).route_T
        for row in batch.row_T.unique():
            assert len(route_T[batch.row_T == row].unique()) == 1
        assert len(route_T.unique()) == 2, "the case must tell requests apart"


@pytest.mark.parametrize("name", NAMES)
def test_a_misspelt_option_is_refused(name: str) -> None:
    """Guards against **kwargs: the experiment would run with the default."""
    with pytest.raises(
        InstantiationException, match=r"unexpected keyword argument 'high_fraq'|no arguments"
    ):
        instantiate(config(name, "+router.high_fraq=0.2"))


@pytest.mark.parametrize("name", NAMES)
def test_version_follows_every_option(name: str) -> None:
    """Guards against stored decisions reused for a router with other options."""
    base = config(name)
    versions = {"as it is": instantiate(base).version}
    another = {"shipped": str(shipped(name)["int8_smooth"])} if name in get_args(Kind) else {}
    for path, value in changed_options(OmegaConf.to_container(base, resolve=True), another):
        changed = base.copy()
        OmegaConf.update(changed, path, value)
        versions[f"{path}={value}"] = instantiate(changed).version
    assert len(set(versions.values())) == len(versions), versions
    assert all(version.startswith(name) for version in versions.values())
    assert instantiate(base).version == versions["as it is"]


OTHER = {
    "low": "high",
    "high": "low",
    "pattern": "exact",
    "entropy": "surprise",
    "protect": "drop_first",
    "normal": "compress",
    "calibrated": "shipped",
}


def changed_options(options: Any, another: dict[str, str], path: str = "") -> list[tuple[str, Any]]:
    """Another value for every option, one at a time; ``another``: of some of them."""
    if isinstance(options, dict):
        parts = [(f"{path}.{key}" if path else key, value) for key, value in options.items()]
        return [
            change
            for key, value in parts
            if not key.endswith("_target_")
            for change in changed_options(value, another, key)
        ]
    if isinstance(options, list):
        return [(path, options[:-1])]
    if isinstance(options, bool):
        return [(path, not options)]
    if isinstance(options, str):
        return [(path, (OTHER | another).get(options) or label_file(1))]
    if options is None:
        return [(path, 0.37)]
    return [(path, options + 1 if isinstance(options, int) else options / 2 + 0.2)]


def test_version_follows_calibration() -> None:
    """Guards against decisions of one threshold reused for another."""
    router = instantiate(config("rule", "router.budget.high_frac=0.3"))
    before = router.version
    ready(router)
    assert router.version != before
