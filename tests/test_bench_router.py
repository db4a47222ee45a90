"""Guards the benchmark of routers: shares that are not what they say, KL of other routes, a baseline that is too weak.

N tokens of a window, L layers, W windows.
"""

import io
import json
import math
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.router_bench import app
from scripts.router_bench.asking import calibrated, logit_signals
from scripts.router_bench.cost import decode_batch
from scripts.router_bench.measures import TextMeasured, kl_nats, means, measure_text
from scripts.router_bench.routings import Routing, all_low, asked, layer_order, routings
from scripts.router_bench.setup import EXECUTORS, LOCAL_TEXTS, TEXTS, Bench, build, trained_in
from scripts.router_bench.sizes import QUICK
from scripts.router_bench.summary import rows_of
from tests.router_bench_cases import SPEEDS, tiny_bench, tiny_routers, write_router
from tokenrouter.executors.calibration import Calibration
from tokenrouter.features import sequence_batch
from tokenrouter.models import tiny_random
from tokenrouter.routers import EntropyRouter
from tokenrouter.routers.layer_groups import LayerGroups
from tokenrouter.training.labels.divergence import kl_nats as kl_of_rows
from tokenrouter.types import Phase

CLAIMS = (
    *("mlp_oracle_gain_frac_python_docs", "mlp_kl_vs_random_python_docs"),
    *("smooth5_kl_vs_plain_low", "smooth5_vs_all_high"),
    *("router_overhead_frac", "router_us_per_token"),
    *("router_prefill_overhead_frac", "router_prefill_us_per_token"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_routers(tmp_path_factory.mktemp("routers"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bench(folder: Path, cache: Path) -> Bench:
    return tiny_bench(folder, cache)


@pytest.fixture(scope="module")
def measured(bench: Bench) -> TextMeasured:
    return measure_text(bench, bench.texts[0])


@pytest.fixture(scope="module")
def printed(folder: Path, cache: Path) -> list[str]:
    """What the script prints with ``--quick`` on a tiny model, in lines; it also writes the JSON object."""
    shown = io.StringIO()
    given = ["--quick", "--texts", "python_docs", "--routers", str(folder), "--plots", str(cache)]
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
    shown = [line.split()[:3] for line in printed]
    keys = ("phase", "router", "pick")
    assert all([row[key] for key in keys] in shown for row in result["rows"])
    assert (cache / "python_docs_int8.png").read_bytes().startswith(b"\x89PNG")


def test_the_claims_are_the_rows(printed: list[str]) -> None:
    """KL over random's at another share, or of the picked ranks; the best share of the gain for the least."""
    result = json.loads(printed[-1])
    rows = [row for row in result["rows"] if row["phase"] == "prefill"]
    own = [r for r in rows if (r["router"], r["pick"]) == ("mlp", "threshold")]
    assert [row["share"] for row in own] == list(QUICK.shares)
    gains = [row["gain_frac"]["value"] for row in own]
    assert result[CLAIMS[0]] == (None if None in gains else min(gains))
    random = next(r for r in rows if (r["router"], r["share"]) == ("random", QUICK.shares[-1]))
    wanted = own[-1]["kl_mean_nats"]["value"] / random["kl_mean_nats"]["value"]
    assert result[CLAIMS[1]] == pytest.approx(wanted, rel=1e-3)  # numbers are rounded


def test_shares_are_exact_where_they_say_so(bench: Bench, measured: TextMeasured) -> None:
    """A random or an oracle that goes high more often than the routers, a map of layers with less high work."""
    for (phase, router, pick, share), found in measured.by_key.items():
        length = len(bench.texts[0].windows[0]) - (phase == Phase.DECODE)
        assert found.kl_WN.shape == (3, length)
        if router == "layerwise":
            assert (found.high_frac_W >= share).all()
        elif pick in ("rank", "exact"):
            wanted = round(share * length) / length
            assert found.high_frac_W.tolist() == pytest.approx([wanted] * 3)
        if router == "oracle":
            assert (found.recall_W == 1).all() and (found.auroc_W == 1).all()
    names = {key[:3] for key in measured.by_key}
    for phase in Phase:
        both = {(phase, "mlp", "threshold"), (phase, "mlp", "rank"), (phase, "rule", "threshold")}
        assert both <= names
    assert {key[0] for key in names if key[1] == "entropy"} == {Phase.DECODE}
    rows = {
        (r["phase"], r["router"], r["pick"], r["share"]): r
        for r in rows_of("python_docs", measured.by_key, dict.fromkeys(Phase, SPEEDS))
    }
    for phase, buckets in (("prefill", ["0_1", "1_16", "16_256"]), ("decode", ["1_16", "16_256"])):
        oracle, random = (rows[phase, name, "exact", 0.2] for name in ("oracle", "random"))
        assert random["vs_random"]["value"] == 1.0 == oracle["gain_frac"]["value"]
        assert random["gain_frac"]["value"] == 0.0
        assert list(oracle["gain_frac_by_position"]) == buckets
        assert "tok_s_vs_all_high" in oracle
    assert not any("tok_s_vs_all_high" in rows[key] for key in rows if key[1] == "entropy")


def test_in_decode_the_first_token_is_a_prompt_that_runs_high(bench: Bench) -> None:
    """A share that counts the prompt, a choice that is shifted by it, or a map of layers that forgets it."""
    ids, label_NL = bench.texts[0].windows[0], torch.rand(64, 4)
    signals = logit_signals(bench, ids)
    window = asked(bench, ids, label_NL, signals, Phase.DECODE)
    routers = {0.2: {"mlp": calibrated(bench, bench.texts[0])[0.2]["mlp"]}}
    answers = list(routings(bench, window, routers, [3, 1, 0, 2]))
    assert not any(answer.is_low_LN[:, 0].any() for answer in answers)
    by_router = {a.router: a for a in answers if a.pick == "exact"}
    assert torch.equal(~by_router["oracle"].is_low_LN[0, 1:], top(label_NL[1:].sum(1), 13))
    assert by_router["layerwise"].is_low_LN[:, 5].tolist() == [True, True, True, False]
    assert by_router["all_low"].is_low_LN[0, 1:].all() and by_router["all_low"].high_frac == 0
    assert sum(a.router == "random" for a in answers) == QUICK.seeds


def top(value_N: Tensor, count: int) -> Tensor:
    return value_N >= value_N.topk(count).values[-1]


def test_entropy_is_asked_with_the_logits_before_each_token(bench: Bench) -> None:
    """The logits behind a token, which are not known yet, or thresholds of another measure than what is judged."""
    ids, decoder = bench.texts[0].windows[1], bench.decoders["int8"]
    router = calibrated(bench, bench.texts[0])[0.2]["entropy"]
    assert isinstance(router, EntropyRouter) and not router.needs_calibration
    window = asked(bench, ids, torch.rand(64, 4), logit_signals(bench, ids), Phase.DECODE)
    score_1M, is_high_1M = window.answer(router)
    logits_NV = decoder.logits(decoder.trace(torch.tensor(ids)).inputs[-1])
    expected_N = torch.distributions.Categorical(logits=logits_NV).entropy()
    torch.testing.assert_close(score_1M[0], expected_N[:-1], atol=1e-4, rtol=1e-4)
    assert 0.05 < float(is_high_1M.float().mean()) < 0.5


def test_a_router_with_a_decode_head_of_its_own_is_asked_in_both_phases(bench: Bench) -> None:
    """Thresholds of one phase only, or logits that prompt tokens are said to have."""
    smooth = replace(bench, executor="int8_smooth")
    router, text = calibrated(smooth, bench.texts[0])[0.2]["mlp"], bench.texts[0]
    label_NL, signals = torch.rand(64, 4), logit_signals(smooth, text.windows[0])
    for phase in Phase:
        window = asked(smooth, text.windows[0], label_NL, signals, phase)
        assert 0 < int(window.answer(router)[1].sum()) < 40


def test_groups_of_layers_are_chosen_by_shares_of_the_work(bench: Bench, tmp_path: Path) -> None:
    """Tokens that count as low where some of their layers are high; a share of pairs, whatever their layers."""
    path = write_router(
        tmp_path, bench.model, "int8", groups=LayerGroups(((1, 3), (0, 2)), (0.5, -0.5))
    )
    grouped, text = replace(bench, trained={"int8": {"mlp": path}}), bench.texts[0]
    routers = {0.2: {"mlp": calibrated(grouped, text)[0.2]["mlp"]}}
    signals = logit_signals(bench, text.windows[0])
    window = asked(grouped, text.windows[0], torch.rand(64, 4), signals, Phase.PREFILL)
    found = {(a.router, a.pick): a for a in routings(grouped, window, routers, [0, 1, 2, 3])}
    assert found["mlp", "rank"].high_frac == pytest.approx(0.2, abs=1 / 256)
    low_LN = found["mlp", "threshold"].is_low_LN
    assert torch.equal(low_LN[0], low_LN[2]) and torch.equal(low_LN[1], low_LN[3])
    assert (low_LN[0] >= low_LN[1]).all() and not torch.equal(low_LN[0], low_LN[1])
    assert math.isnan(found["mlp", "rank"].auroc)
    assert 0.05 < found["mlp", "threshold"].high_frac < 0.4


def test_random_does_not_live_on_the_luck_of_the_first_token(bench: Bench) -> None:
    """Seeds that by chance all hold the token that is worth most, or one that counts as often as the others."""
    ids, share = bench.texts[0].windows[0], QUICK.shares[-1]
    label_NL = torch.rand(len(ids), 4)
    window = asked(bench, ids, label_NL, logit_signals(bench, ids), Phase.PREFILL)
    drawn = [a for a in routings(bench, window, {share: {}}, [0]) if a.router == "random"]
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
    common: dict[str, Any] = {"phase": Phase.PREFILL, "router": "x", "pick": "exact", "share": 0.5}
    answers = [Routing(**common, is_low_LN=m) for m in masks]
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
        (["--decode-batch", "0"], "--decode-batch must be at least 1"),
        (["--turns", "0"], "--turns must be at least 1"),
        (["--texts", "python_docs", "python_docs"], "--texts names a text twice"),
        (["--texts", "novels"], "invalid choice: 'novels'"),
        (["--executor", "int4"], "invalid choice: 'int4'"),
        (["--routers", "no/such"], "--routers no/such: there is no such folder"),
        (["--json", "no/such/out.json"], "there is no folder no/such"),
        (["--plots", "no/such"], "--plots no/such: there is no such folder: make it first"),
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
