"""Guards task=collect from the command to the rows, and the labels that oracles ask for. N tokens, F features."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.jobs import run_in
from tests.training.conftest import random_ids
from tokenrouter.executors import POOLS, PoolSpec
from tokenrouter.features import FEATURES, TokenTypeTable, sequence_batch
from tokenrouter.models import LoadedModel
from tokenrouter.training import collect as collecting
from tokenrouter.training import entropies
from tokenrouter.training.collect import CollectOptions, stored_features
from tokenrouter.training.entropies import FOLDER, load_entropies, next_token_entropy
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels import Fisher, OwnKL
from tokenrouter.training.low_path import low_path
from tokenrouter.training.oracle import labels_of
from tokenrouter.training.storage import LabelStore

JOB = (
    "task=collect",
    "debug=tiny",
    "kernels.backend=reference",
    "collect.window_tokens=64",
    "collect.entropy_tokens=128",
)


def collect_into(tmp_path: Path, job: str, *overrides: str) -> tuple[LabelStore, dict[str, int]]:
    output = f"paths.output_dir={tmp_path}"
    folder = run_in(tmp_path / job, *JOB, output, "collect.num_tokens=256", *overrides)
    summary = json.loads((folder / "collected.json").read_text())
    return LabelStore(summary["path"]), summary


def test_rows_are_the_labels_and_features_of_their_tokens(
    tmp_path: Path, model: LoadedModel
) -> None:
    """Labels beside another token's features, or of another window."""
    store, summary = collect_into(tmp_path, "job", "labels=own_kl")
    assert (summary["num_tokens"], summary["new_windows"], summary["kept_windows"]) == (256, 4, 0)
    about = store.about
    assert (about["label"], about["executor"], about["kind"]) == ("own_kl", "int8", "precision")
    assert about["model_hash"] == model.model_hash and about["label_columns"] == ["all_layers"]
    found = store.load("valid").with_format("torch")
    ids_N, prompt_len = found["token_id"][:].long(), int(found["prompt_len"][0])
    table = TokenTypeTable.from_tokenizer(model.tokenizer, model.config.vocab_size)
    batch = sequence_batch(ids_N.tolist(), prompt_len=prompt_len, token_types=table)
    assert torch.equal(found["prefix_hash"][:], batch.prefix_hash_T)
    assert torch.equal(found["phase"][:].long(), batch.phase_T)
    features_NF = found["features"][:]
    position = about["features"].index("position")
    token_type = about["features"].index("token_type")
    assert features_NF[:, position].tolist() == list(range(64))
    assert torch.equal(features_NF[:, token_type], table.types_V[ids_N].float())
    [label_N1] = labels_of([ids_N.tolist()], model=model, spec=POOLS["int8"], maker=OwnKL())
    decoder = DifferentiableDecoder(model, low_path(POOLS["int8"], model))
    before_N = features_NF[:, about["features"].index("entropy")]
    assert 0 < prompt_len < 64, "the window must have both phases"
    assert before_N[:prompt_len].isnan().all()
    behind_N = next_token_entropy(decoder, ids_N)
    torch.testing.assert_close(before_N[prompt_len:], behind_N[prompt_len - 1 : -1])
    logp_NV = decoder.logits(decoder.trace(ids_N).inputs[-1]).log_softmax(-1)
    surprise_N = features_NF[prompt_len:, about["features"].index("surprise")]
    expected_N = -logp_NV[:-1].gather(1, ids_N[1:, None])[prompt_len - 1 :, 0]
    torch.testing.assert_close(surprise_N, expected_N, atol=1e-4, rtol=1e-4)
    difference_N1 = found["label"][:] - label_N1
    assert difference_N1.norm() < 0.1 * label_N1.norm()


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption that costs everything, or a repeat that makes everything again."""
    make_rows, calls = collecting.make_rows, []

    def interrupted(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return make_rows(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(collecting, "make_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect_into(tmp_path, "first")
    store, summary = collect_into(tmp_path, "second")
    assert (summary["kept_windows"], summary["new_windows"]) == (2, 2)
    assert len(store.load()) == 256
    again, summary = collect_into(tmp_path, "third", "collect.num_tokens=320")
    assert again.path == store.path and summary["kept_windows"] == 4


def test_entropies_are_of_text_that_has_no_labels(tmp_path: Path, model: LoadedModel) -> None:
    """Statistics that hold the tokens that are learned from, and entropies of other tokens than those beside them."""
    store, summary = collect_into(tmp_path, "job")
    assert summary["num_entropy_tokens"] == 128
    names = {path.stem for path in (store.path / FOLDER).iterdir()}
    assert len(names) == 2 and not names & store.finished()
    assert all(name.startswith("train-") for name in names)
    found = load_entropies(store.path, without=())
    decoder = DifferentiableDecoder(model, low_path(POOLS["int8"], model))
    ids_N = found.ids_N[:64]
    p_NV = decoder.logits(decoder.trace(ids_N).inputs[-1]).double().softmax(-1)
    expected_N = -(p_NV * p_NV.log()).sum(1)
    torch.testing.assert_close(found.entropy_N[:64].double(), expected_N, atol=1e-4, rtol=1e-4)
    assert found.previous_N[[0, 64]].tolist() == [-1, -1]
    assert torch.equal(found.previous_N[1:64], ids_N[:-1])
    [one, _] = sorted(names)
    assert len(load_entropies(store.path, without={one}).ids_N) == 64


def test_entropies_that_are_there_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption that costs everything, and a damaged file that is taken for a good one."""
    store, _ = collect_into(tmp_path, "first")
    [kept, removed] = sorted((store.path / FOLDER).iterdir())
    before = removed.read_bytes()
    removed.unlink()
    calls = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return next_token_entropy(*arguments)

    monkeypatch.setattr(entropies, "next_token_entropy", counted)
    collect_into(tmp_path, "second")
    assert len(calls) == 1 and removed.read_bytes() == before
    kept.write_bytes(before[:-9])
    with pytest.raises(ValueError, match=r"is damaged .*task=collect makes it again"):
        load_entropies(store.path, without=())


def test_without_entropies_the_way_to_them_is_named(tmp_path: Path) -> None:
    store, summary = collect_into(tmp_path, "job", "collect.entropy_tokens=0")
    assert "num_entropy_tokens" not in summary
    with pytest.raises(ValueError, match=r"no entropies .*collect.entropy_tokens above 0"):
        load_entropies(store.path, without=())


@pytest.mark.data
def test_several_texts_in_equal_parts(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A source that is left out, or that fills the data set."""
    import os

    if not os.environ.get("TOKENROUTER_DATA_DIR"):
        pytest.skip("needs the folder of local data sets (TOKENROUTER_DATA_DIR)")
    sources = "collect.sources=[wikitext2,c4_web,python_docs]"
    store, summary = collect_into(tmp_path, "job", sources, "collect.num_tokens=768")
    texts = store.load()["text"]
    assert {name: list(texts).count(name) for name in set(texts)} == {
        "wikitext2": 256,
        "c4_web": 256,
        "python_docs": 256,
    }
    assert summary["c4_web_valid_tokens"] == 64


def test_another_label_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    """Rows of two labels side by side in one folder."""
    first, _ = collect_into(tmp_path, "a")
    second, _ = collect_into(tmp_path, "b", "labels=own_loss")
    assert first.path != second.path and second.path.name.startswith("own_loss_int8_")
    assert len(second.load()) == 4 * 63
    with pytest.raises(ValueError, match="label='fisher', and this run has label='own_loss'"):
        collect_into(tmp_path, "c", "labels=own_loss", f"collect.path={first.path}")


def test_retention_labels(tmp_path: Path) -> None:
    """A horizon that does not fit taken for 0."""
    store, _ = collect_into(tmp_path, "job", "labels=future_attention", "labels.horizons=[16,48]")
    label_NC = store.load("train").with_format("torch")["label"][:]
    assert store.about["label_columns"] == ["after_16", "after_48"]
    assert len(label_NC) == 3 * 48 and label_NC[:, 1].isnan().sum() == 3 * 32


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("collect.num_tokens=0", r"collect\.num_tokens=0 must be an integer"),
        ("collect.num_tokens=63", "would give an empty data set: set it"),
        ("collect.window_tokens=8192", "longer than the model's length of 4096"),
        ("collect.features=[positon]", "positon"),
        ("collect.sources=[nothing]", "no text 'nothing'; texts: "),
        ("executor=full", "set executor=int8, executor=int4"),
        (
            "collect.entropy_tokens=-1",
            r"collect\.entropy_tokens=-1 must be an integer of at least 0",
        ),
        ("labels.draws=0", "draws=0 must be an integer of at least 1"),
        ("+collect.num_token=3", r"did you mean collect\.num_tokens\?"),
        ("+labels.draw=3", r"did you mean labels\.draws\?"),
    ],
)
def test_bad_input_leaves_no_data_set(tmp_path: Path, override: str, message: str) -> None:
    """A mistake that shows after minutes, or that leaves half a data set behind."""
    more = ["collect.num_tokens=9000"] if "window" in override else []
    with pytest.raises(Exception, match=message):
        collect_into(tmp_path, "job", *more, override)
    assert not list(tmp_path.glob("labels/*/windows/*"))


def test_features_that_need_an_engine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of zeros where attention should be."""
    for name, spec in FEATURES.items():
        if spec.depends_on & {"history", "load", "random"}:
            with pytest.raises(
                ValueError, match=rf"{name} cannot be stored with text .*these can: "
            ):
                stored_features([name])
    assert {"position", "entropy"} <= set(stored_features(None))
    assert stored_features(["repeats", "position"]) == ("repeats", "position")


def test_options_by_themselves() -> None:
    """A bool or a fraction that counts as a number of tokens."""
    for value in (True, 64.0, "64"):
        with pytest.raises(ValueError, match=r"collect\.window_tokens=.* must be an integer"):
            CollectOptions(num_tokens=128, window_tokens=value)  # type: ignore[arg-type]


def test_an_oracle_gets_labels_of_every_window(model: LoadedModel) -> None:
    """Windows that share their draws, or come back in another order."""
    windows = [random_ids(30).tolist(), random_ids(40).tolist(), random_ids(30).tolist()]
    done: list[int] = []
    found = labels_of(windows, model=model, spec=POOLS["int8"], maker=Fisher(), on_done=done.append)
    assert [tuple(x.shape) for x in found] == [(30, 4), (40, 4), (30, 4)] and done == [0, 1, 2]
    assert not torch.equal(found[0], found[2])
    with pytest.raises(ValueError, match="no windows to label"):
        labels_of([], model=model, spec=POOLS["int8"], maker=Fisher())
    with pytest.raises(ValueError, match="has none"):
        labels_of(windows, model=model, spec=PoolSpec(), maker=Fisher())
