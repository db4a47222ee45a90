"""Guards the benchmark of routers: shares that are not what they say, KL of other routes, a baseline that is too weak.

N tokens of a window, L layers, W windows.
"""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.router_bench import app
from scripts.router_bench.cost import decode_batch
from scripts.router_bench.measures import kl_nats, means, measure_text
from scripts.router_bench.routings import Routing, all_low, layer_order, routings
from scripts.router_bench.setup import EXECUTORS, LOCAL_TEXTS, TEXTS, Bench, build, trained_in
from scripts.router_bench.sizes import QUICK
from scripts.router_bench.summary import rows_of
from tokenrouter.executors.calibration import Calibration
from tokenrouter.features import sequence_batch
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.routers.artifact import Artifact, TrainedFor, write_artifact
from tokenrouter.routers.lookup import NUM_PHASES, Bins
from tokenrouter.training.labels.divergence import kl_nats as kl_of_rows
from tokenrouter.types import Phase

HIDDEN = 4
CLAIMS = (
    *("mlp_oracle_gain_frac_python_docs", "mlp_kl_vs_random_python_docs"),
    *("smooth5_kl_vs_plain_low", "smooth5_vs_all_high"),
    *("router_overhead_frac", "router_us_per_token"),
    *("router_prefill_overhead_frac", "router_prefill_us_per_token"),
)


def write_router(folder: Path, model: LoadedModel, executor: str, name: str = "tiny") -> Path:
    """An mlp with drawn weights."""
    bins = Bins(("position", "token_type"), ((3.5, 15.5), (0.5, 1.5, 2.5)), (35, 104))
    draw = torch.Generator().manual_seed(3)
    tensors = {
        "table": torch.randn(bins.num_rows, HIDDEN + NUM_PHASES, generator=draw),
        "head": torch.randn(NUM_PHASES, HIDDEN, generator=draw),
    }
    of = TrainedFor(
        model=model.name, model_hash=model.model_hash, executor=executor, label="fisher"
    )
    artifact = Artifact(kind="mlp", bins=bins, trained_for=of, hidden=HIDDEN, tensors=tensors)
    return write_artifact(artifact, folder / f"{name}_{executor}_mlp.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("routers")
    for executor in EXECUTORS:
        write_router(found, tiny_random(), executor)
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bench(folder: Path, cache: Path) -> Bench:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "_folder", lambda _: cache)
        return build(
            tiny_random(),
            replace(QUICK, windows=3),
            executor="int8",
            texts=("python_docs",),
            data_dir=None,
            routers=folder,
        )


@pytest.fixture(scope="module")
def printed(folder: Path, cache: Path) -> list[str]:
    """What the script prints with ``--quick`` on a tiny model, in lines; it also writes the JSON object."""
    shown = io.StringIO()
    given = ["--quick", "--texts", "python_docs", "--routers", str(folder)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr(Calibration, "_folder", lambda _: cache)
        patch.setattr("sys.argv", ["bench_router.py", *given, "--json", str(cache / "out.json")])
        patch.setattr(app, "load_model", lambda name, dtype: tiny_random(dtype=dtype))
        app.main("")
    return shown.getvalue().splitlines()


def test_every_key_that_others_read_is_there_and_is_a_number(
    printed: list[str], cache: Path
) -> None:
    """A number that is missing or null, or NaN, which JSON does not have."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    result: dict[str, Any] = json.loads(printed[-1], parse_constant=refuse)
    for key in CLAIMS[1:]:
        assert isinstance(result[key], float) and result[key] > 0, key
    assert CLAIMS[0] in result and result["executor"] == "int8" and result["quick"]
    assert result["window_tokens"] == {"python_docs": QUICK.window_tokens}
    assert json.loads((cache / "out.json").read_text()) == result
    assert result["provenance"]["model_hash"]
    shown = [line.split()[:2] for line in printed]
    assert all([row["router"], row["pick"]] in shown for row in result["rows"])


def test_the_claims_are_the_rows(printed: list[str]) -> None:
    """KL over random's at another share, or of the picked ranks; the best share of the gain for the least."""
    result = json.loads(printed[-1])
    own = [r for r in result["rows"] if (r["router"], r["pick"]) == ("mlp", "threshold")]
    assert [row["share"] for row in own] == list(QUICK.shares)
    gains = [row["gain_frac"]["value"] for row in own]
    assert result[CLAIMS[0]] == (None if None in gains else min(gains))
    random = next(
        r for r in result["rows"] if (r["router"], r["share"]) == ("random", QUICK.shares[-1])
    )
    wanted = own[-1]["kl_mean_nats"]["value"] / random["kl_mean_nats"]["value"]
    assert result[CLAIMS[1]] == pytest.approx(wanted)


def test_shares_are_exact_where_they_say_so(bench: Bench) -> None:
    """A random or an oracle that goes high more often than the routers, a map of layers with less high work."""
    found = measure_text(bench, bench.texts[0])
    length = len(bench.texts[0].windows[0])
    for (router, pick, share), measured in found.items():
        if router == "layerwise":
            assert (measured.high_frac_W >= share).all()
        elif pick in ("rank", "exact"):
            wanted = round(share * length) / length
            assert measured.high_frac_W.tolist() == pytest.approx([wanted] * 3)
        if router == "oracle":
            assert (measured.recall_W == 1).all() and (measured.auroc_W == 1).all()
    names = {key[:2] for key in found}
    assert {("mlp", "threshold"), ("mlp", "rank"), ("rule", "threshold")} <= names
    rows = {(r["router"], r["pick"], r["share"]): r for r in rows_of("python_docs", found)}
    oracle, random = (rows[name, "exact", 0.2] for name in ("oracle", "random"))
    assert random["vs_random"]["value"] == 1.0 == oracle["gain_frac"]["value"]
    assert random["gain_frac"]["value"] == 0.0
    assert list(oracle["gain_frac_by_position"]) == ["0_1", "1_16", "16_256"]


def test_random_does_not_live_on_the_luck_of_the_first_token(bench: Bench) -> None:
    """Seeds that by chance all hold the token that is worth most, or one that counts as often as the others."""
    ids, share = bench.texts[0].windows[0], QUICK.shares[-1]
    label_NL = torch.rand(len(ids), 4)
    drawn = [a for a in routings(bench, ids, label_NL, {share: {}}, [0]) if a.router == "random"]
    assert len(drawn) == 2 * QUICK.seeds
    assert [(bool(a.is_low_LN[0, 0]), a.weight) for a in drawn[:2]] == [
        (True, 1 - share),
        (False, share),
    ]
    kl_BN = torch.arange(2 * QUICK.seeds, dtype=torch.float32)[:, None].expand(-1, len(ids))
    (random,) = means(drawn, kl_BN).values()
    chances = torch.tensor([1 - share, share] * QUICK.seeds) / QUICK.seeds
    assert float(random.kl_WN[0]) == pytest.approx(float(chances @ kl_BN[:, 0]))


def test_kl_is_that_of_each_routing_and_in_its_place(bench: Bench) -> None:
    """Batches of routings that are put together in another order, a map of layers taken for one of tokens."""
    ids, decoder = bench.texts[0].windows[0], bench.decoders["int8"]
    first_L1 = torch.ones(4, 1, dtype=torch.bool)
    first_L1[0] = False
    even_1N = (torch.arange(len(ids)) % 2 == 0)[None]
    masks = [even_1N, first_L1, ~even_1N, torch.zeros(1, 1).bool(), first_L1 | even_1N]
    answers = [Routing(router="x", pick="exact", share=0.5, is_low_LN=m) for m in masks]
    found_BN = kl_nats(decoder, ids, [*answers, all_low()])
    high_NE = decoder.trace(torch.tensor(ids)).inputs[-1]
    for kl_N, mask_LN in zip(found_BN, [*masks, torch.ones(1, 1).bool()], strict=True):
        alone_NE = decoder.routed(torch.tensor(ids), mask_LN[None])[0]
        expected_N = kl_of_rows(decoder, high_NE, alone_NE)
        torch.testing.assert_close(kl_N, expected_N, atol=1e-5, rtol=1e-3)
    assert float(found_BN[3].max()) < 1e-5 < float(found_BN[0].mean())
    assert float(found_BN[-1].mean()) > float(found_BN[1].mean())


def test_the_map_of_layers_keeps_the_neediest(bench: Bench) -> None:
    """The layers that need it least, which any router beats."""
    labels_NL: list[Tensor] = [torch.tensor([[1.0, 5.0, 0.0]]), torch.tensor([[1.0, 0.0, 9.0]])]
    assert layer_order(labels_NL) == [2, 1, 0]


def test_decode_tokens_are_32_requests_newest(bench: Bench) -> None:
    """One request's tokens, whose features are cheaper to find, or tokens of a prompt."""
    ids = bench.texts[0].windows[0]
    batch = decode_batch(ids, 20, bench.types)
    assert batch.row_T.tolist() == list(range(32))
    assert (batch.phase_T == Phase.DECODE).all() and (batch.positions_T == 20).all()
    own = sequence_batch(ids[1:22], prompt_len=20, token_types=bench.types)
    assert batch.prefix_hash_T[1] == own.prefix_hash_T[20]


def test_a_folder_without_the_router_or_with_two_is_refused(folder: Path, tmp_path: Path) -> None:
    """A traceback after minutes of loading, or a router that was chosen by the order of file names."""
    assert {executor: list(kinds) for executor, kinds in trained_in(folder).items()} == {
        executor: ["mlp"] for executor in EXECUTORS
    }
    model = tiny_random()
    options = {"texts": ("python_docs",), "data_dir": None, "routers": tmp_path}
    with pytest.raises(ValueError, match=r"no trained mlp for executor int8 in .*--routers"):
        build(model, QUICK, executor="int8", **options)
    for name in ("one", "two"):
        write_router(tmp_path, model, "int8", name)
    with pytest.raises(ValueError, match="two routers of kind mlp for executor int8"):
        trained_in(tmp_path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--windows", "1"], "--windows must be at least 2"),
        (["--texts", "python_docs", "python_docs"], "--texts names a text twice"),
        (["--texts", "novels"], "invalid choice: 'novels'"),
        (["--executor", "int4"], "invalid choice: 'int4'"),
        (["--routers", "no/such"], "--routers no/such: there is no such folder"),
        (["--json", "no/such/out.json"], "there is no folder no/such"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    """They came up after minutes of loading, or after hours of measuring."""
    monkeypatch.setattr("sys.argv", ["bench_router.py", *given])
    with pytest.raises(SystemExit):
        app.parse_arguments("")
    assert says in capsys.readouterr().err


def test_the_default_texts_are_those_of_conf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that was renamed in conf/data; local texts asked for where there are none."""
    assert set(LOCAL_TEXTS) <= set(TEXTS)
    monkeypatch.setattr("sys.argv", ["bench_router.py", "--windows", "4"])
    monkeypatch.delenv("TOKENROUTER_DATA_DIR", raising=False)
    args = app.parse_arguments("")
    assert args.texts == ("python_docs",) and args.sizes.windows == 4
    monkeypatch.setenv("TOKENROUTER_DATA_DIR", "somewhere")
    assert app.parse_arguments("").texts == LOCAL_TEXTS
