"""Guards the learned retention policy: what it knows of an entry, what its files are, and what it refuses."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kvcache.test_retention import entries, nothing
from tests.kvcache.trained_retention import drawn_model, drawn_policy
from tokenrouter import LLM, EngineOptions
from tokenrouter.kvcache.retention import Learned, RetentionOptions
from tokenrouter.kvcache.retention.checkpoint import read_model, shipped, write_model
from tokenrouter.kvcache.retention.entry_features import ENTRY_FEATURES, RECENT, entry_features
from tokenrouter.models import tiny_random


def column(name: str, **fields: Tensor) -> list[float]:
    """One feature of entries whose ids or attention a test gives."""
    given = entries(len(next(iter(fields.values()))), **fields)
    return entry_features(given)[:, ENTRY_FEATURES.index(name)].tolist()


def test_repeats_are_counted_where_they_stand() -> None:
    """A count of the tokens before instead of after, or one place beside."""
    ids_S = torch.tensor([7, 8, 9, 7, 8, 5])
    one, two = torch.tensor([1.0, 2.0]).log1p().tolist()
    assert column("later", ids_S=ids_S) == pytest.approx([one, one, 0, 0, 0, 0])
    assert column("count", ids_S=ids_S) == pytest.approx(
        torch.tensor([2.0, 2, 1, 2, 2, 1]).log().tolist()
    )
    assert column("follows_recent", ids_S=ids_S) == pytest.approx([0, two, two, one, two, two])
    assert column("follows_recent_pair", ids_S=ids_S) == pytest.approx([0, 0, two, one, one, two])
    assert column("ends_recent_pair", ids_S=ids_S) == pytest.approx([0, two, one, one, two, one])
    assert column("follows_recent_triple", ids_S=ids_S) == pytest.approx([0, 0, 0, one, one, one])


def test_what_was_read_long_ago_is_not_recent() -> None:
    """A window over all tokens: every repeat then looks as if it were read at present."""
    ids_S = torch.cat([torch.tensor([900, 901]), torch.arange(RECENT)])
    one = math.log(2)
    assert column("recent", ids_S=ids_S)[:3] == pytest.approx([0, 0, one])
    found = column("follows_recent", ids_S=torch.cat([ids_S, torch.tensor([900])]))
    assert found[1] == pytest.approx(one), "900 is read again, and 901 followed it"


def test_only_kept_entries_have_rows_and_all_tokens_count() -> None:
    """Ids indexed by the entry's number instead of its position, once something was evicted."""
    ids_S = torch.tensor([4, 5, 6, 4, 5, 6, 4, 9])
    whole = entry_features(entries(8, ids_S=ids_S))
    at_N = torch.tensor([0, 3, 7])
    part = entry_features(replace(entries(3, 8, ids_S=ids_S), positions_N=at_N))
    names = ("count", "later", "recent", "follows_recent_pair", "age", "age_frac")
    of = [ENTRY_FEATURES.index(name) for name in names]
    assert torch.equal(part[:, of], whole[at_N][:, of])


def test_attention_is_relative_to_an_even_share() -> None:
    """A model that sees another request length in the same pattern of attention."""
    short = entry_features(entries(10, last_N=torch.full((10,), 0.1)))
    long = entry_features(entries(40, last_N=torch.full((40,), 0.025)))
    of = ENTRY_FEATURES.index("last")
    assert short[:, of].tolist() == pytest.approx(long[:10, of].tolist())


def test_the_model_says_what_stays(tmp_path: Path) -> None:
    """A score that is not used, or its wrong end."""
    path = write_model(drawn_model(), tmp_path / "m")
    given = entries(40)
    score_N = drawn_model()(entry_features(given))
    kept_N = Learned(path=str(path)).keep(given, nothing(40))
    assert set(kept_N.nonzero().flatten().tolist()) == set(score_N.topk(20).indices.tolist())


def test_values_beyond_training_are_those_at_its_edge() -> None:
    """A request longer than any in training, judged by numbers that a straight line makes up."""
    trained, far = drawn_model(), torch.full((1, len(ENTRY_FEATURES)), 1e4)
    assert torch.equal(trained(far), trained(far.clamp(max=9.0)))


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    """A number or a version that changes on the way."""
    made = replace(drawn_model(), about={"seed": 3})
    path = write_model(made, tmp_path / "deep" / "m")
    for given in (path, path.with_suffix(""), path.with_suffix(".safetensors")):
        read = read_model(given)
        assert (read.version, read.model_hash, read.about) == (
            made.version,
            made.model_hash,
            made.about,
        )
    assert made.version != drawn_model(seed=1).version != drawn_model("b" * 16).version
    assert len(list(path.parent.iterdir())) == 2
    assert Learned(path=str(path)) == Learned(path=str(path)), (
        "tensors have no equality of their own"
    )


def change(key: str, value: object) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return apply


def drop(path: Path) -> None:
    header = json.loads(path.read_text())
    del header["model_hash"]
    path.write_text(json.dumps(header))


def cut(suffix: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path.with_suffix(suffix)
        file.write_bytes(file.read_bytes()[:-10])

    return apply


def remove(suffix: str) -> Callable[[Path], None]:
    return lambda path: path.with_suffix(suffix).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove(".json"), "no trained retention policy at .*task=train_retention"),
        (remove(".safetensors"), r"needs m\.safetensors beside it"),
        (cut(".json"), "is damaged or cut short"),
        (cut(".safetensors"), "cut short or of another training than m.json"),
        (change("format", "tokenrouter router"), "is no trained retention policy"),
        (change("format_version", 9), "format version 9, and this version of tokenrouter reads 1"),
        (change("features", ["mood"]), "trained on the features mood, and this version has last"),
        (drop, "lacks model_hash"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    """A policy that evicts by numbers that are half there or mean something else."""
    path = write_model(drawn_model(), tmp_path / "m")
    spoil(path)
    with pytest.raises(ValueError, match=message):
        Learned(path=str(path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("out_P", torch.tensor([float("nan"), 0, 0]), "out_P holds NaN"),
        ("hidden_bias_P", torch.zeros(2), "its tensors are"),
        ("scale_F", torch.zeros(len(ENTRY_FEATURES)), "scale_F holds a zero"),
    ],
)
def test_what_no_reader_takes_is_not_written(
    tmp_path: Path, name: str, value: Tensor, message: str
) -> None:
    """A training that went wrong, found out by who serves it; a good file that it has replaced."""
    path, good = tmp_path / "m", drawn_model()
    write_model(good, path)
    wrong = replace(good, tensors={**good.tensors, name: value})
    with pytest.raises(ValueError, match=message):
        write_model(wrong, path)
    assert read_model(path).version == good.version


def test_attention_that_is_not_finite_is_refused() -> None:
    """NaN scores, by which any entry may go."""
    policy = drawn_policy("a" * 16)
    last_N = torch.rand(20)
    last_N[3] = float("nan")
    with pytest.raises(ValueError, match=r"last, .* of an entry is not finite"):
        policy.keep(entries(20, last_N=last_N), nothing(20))


def test_an_engine_of_another_model_refuses_it() -> None:
    """A policy that judges the entries of a model which it has never seen."""
    model = tiny_random()

    def llm(model_hash: str) -> LLM:
        policy = drawn_policy(model_hash, evicted_frac=0.5)
        retention = RetentionOptions(policy=policy, interval=8, window=4, layers=2, recent=2)
        return LLM(model, router="all_high", options=EngineOptions(retention=retention))

    with pytest.raises(ValueError, match=r"trained for the model tiny .* and this is"):
        llm("b" * 16)
    fits = llm(model.model_hash)
    fits.generate([[5, 6, 7, 5, 6, 7, 5, 6, 7] * 4])
    assert fits.engine.stats.evicted_entries > 0


def test_the_shipped_policy_is_small_and_says_where_it_comes_from() -> None:
    """A data set that was packed by mistake; a file that nobody could train again."""
    (path,) = shipped()
    files = [path, path.with_suffix(".safetensors")]
    assert sum(file.stat().st_size for file in files) < 1_000_000
    about = read_model(path).about
    assert about["data"]["texts"] and about["train"]["label"] and about["num_rows"]["train"] > 0


def test_a_policy_without_a_path_is_refused() -> None:
    """An empty path, that is a file in the working directory."""
    with pytest.raises(ValueError, match="path='' must be the path"):
        Learned(path="")
