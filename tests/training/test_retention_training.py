"""Guards how the learned retention policy comes about: sums of a window, the data set, the fit, and what is refused.

G layer groups, I intervals, N tokens.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException

from tests.tasks.jobs import run_in, wandb_exit_codes, wandb_records
from tests.training.conftest import random_ids
from tokenrouter.kvcache.retention import HeavyHitter, Learned
from tokenrouter.kvcache.retention.checkpoint import read_model, write_model
from tokenrouter.models import LoadedModel
from tokenrouter.tasks.common import root_cause
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.retention.fit import RetentionTraining, fit, read_rows
from tokenrouter.training.retention.judge import lost_frac
from tokenrouter.training.retention.store import SummedWindow, SumsStore
from tokenrouter.training.retention.sums import WindowSums, window_sums

INTERVAL = 16
ABOUT = {"model": "tiny", "model_hash": "a" * 16, "interval": INTERVAL, "groups": 2}


def made_window(seed: int, num_intervals: int = 8) -> SummedWindow:
    """Attention that says nothing: what is needed are tokens whose id comes again and again."""
    num_tokens = num_intervals * INTERVAL
    drawn_N = random_ids(num_tokens, seed)
    ids_N = torch.where(drawn_N % 3 == 0, drawn_N % 2, 1000 + torch.arange(num_tokens))
    shape = 2, num_intervals, num_tokens
    received_GIN, needed_GIN = torch.zeros(shape), torch.zeros(shape)
    for index in range(num_intervals):
        stop = (index + 1) * INTERVAL
        received_GIN[:, index, :stop] = INTERVAL / stop
        needed_GIN[:, index, :stop] = 0.01 + (ids_N[:stop] < 1000).float()
    return SummedWindow(ids_N=ids_N, sums=WindowSums(received_GIN, needed_GIN))


def write_set(path: Path, **about: object) -> Path:
    store = SumsStore(path)
    store.open({**ABOUT, **about})
    for split, seeds in (("train", (1, 2, 3)), ("valid", (4,))):
        for seed in seeds:
            store.write(f"{split}-made-{seed:05d}", made_window(seed))
    return path


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("sums") / "set")


def options(path: Path, **changed: object) -> RetentionTraining:
    given = {
        "data": str(path),
        "sinks": 0,
        "recent": 1,
        "horizon": 32,
        "batch_size": 128,
        **changed,
    }
    return RetentionTraining(**given)  # type: ignore[arg-type]


def last_apart(decoder: DifferentiableDecoder) -> tuple[int, ...]:
    """The last layer is a group of its own."""
    return (0,) * (decoder.config.num_layers - 1) + (1,)


def test_sums_are_those_of_a_causal_softmax(decoder: DifferentiableDecoder) -> None:
    """Weights of later tokens, of half an interval, or of a group that is counted once per layer."""
    apart = last_apart(decoder)
    sums = window_sums(decoder, random_ids(70), layer_groups=apart, interval=INTERVAL, seed=1)
    assert sums.received_GIN.shape == sums.needed_GIN.shape == (2, 4, 64)
    assert torch.allclose(sums.received_GIN.sum(2), torch.tensor(float(INTERVAL)), rtol=1e-2)
    for index in range(4):
        later = slice((index + 1) * INTERVAL, None)
        assert not sums.received_GIN[:, index, later].any()
        assert not sums.needed_GIN[:, index, later].any()
        assert bool((sums.needed_GIN[:, index, : index * INTERVAL] > 0).all())


def test_what_is_needed_is_what_an_entry_would_take_away(decoder: DifferentiableDecoder) -> None:
    """The wrong sign, a weight that is not scaled up again, a value of another head: against a result computed anew."""
    ids_N = random_ids(32)
    generator = torch.Generator().manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        trace = decoder.trace(ids_N)
        gradient_NE = decoder.drawn_gradients(trace, 1, generator)[0]
        layers = {found.layer: found for found in decoder.attention(trace, gradient_NE)}
    found = layers[decoder.config.num_layers - 1]
    q, k, v, gradient = (
        x.float() for x in (found.q_HNK, found.k_GNK, found.v_GNK, found.gradient_HNK)
    )
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    is_later_NN = torch.ones(32, 32, dtype=torch.bool).triu(1)
    scores_HNN = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(is_later_NN, -torch.inf)
    gone = 4
    without_HNN = scores_HNN.clone()
    without_HNN[:, :, gone] = -torch.inf
    change_HNK = (without_HNN.softmax(-1) - scores_HNN.softmax(-1)) @ v
    square_N = (change_HNK * gradient).sum((0, 2)).square()
    square_Q = square_N[INTERVAL:]
    expected = float((square_Q / (1 + square_Q)).sum())
    apart = last_apart(decoder)
    sums = window_sums(decoder, ids_N, layer_groups=apart, interval=INTERVAL, seed=5)
    assert float(sums.needed_GIN[1, 1, gone]) == pytest.approx(expected, rel=0.1)


def test_a_policy_learns_what_attention_does_not_tell(data_path: Path, tmp_path: Path) -> None:
    """Labels beside their rows, or a score that falls with the loss."""
    chosen = options(data_path)
    trained = fit(read_rows(chosen), chosen, folder=tmp_path)
    path = write_model(trained, tmp_path / "m")
    windows = SumsStore(data_path).load("valid")
    learned, attention = (
        lost_frac(policy, windows, sinks=0, recent=1)
        for policy in (Learned(path=str(path)), HeavyHitter())
    )
    assert learned < 0.8 * attention
    again = fit(read_rows(chosen), chosen, folder=tmp_path / "again")
    assert again.version == trained.version


def test_the_task_trains_and_says_what_it_is_worth(data_path: Path, tmp_path: Path) -> None:
    """A run that leaves no curve, in its folder or at the tracker, or a file that cannot be read."""
    target = tmp_path / "out" / "policy.json"
    folder = run_in(
        tmp_path / "run",
        "task=train_retention",
        f"train.data={data_path}",
        f"train.path={target}",
        "train.max_epochs=1",
        "logger=wandb",
    )
    wanted = {"train/loss", "valid/loss"}
    header = (folder / "training" / "metrics.csv").read_text().splitlines()[0]
    assert wanted <= set(header.split(",")) and wandb_exit_codes(folder) == [0]
    logged = [r.history.item for r in wandb_records(folder) if r.HasField("history")]
    assert wanted <= {"/".join(item.nested_key) or item.key for items in logged for item in items}
    about = read_model(target).about
    assert about["data"]["interval"] == INTERVAL and "path" not in about["train"]


def test_sums_are_collected_and_kept(tmp_path: Path) -> None:
    """Windows that are made again, or that another command's are mixed with."""
    job = ("debug=tiny", "task=collect_retention", "logger=none", "collect.num_tokens=256")
    job += ("collect.window_tokens=64", "sums.interval=16", "sums.groups=2")
    path = tmp_path / "set"
    run_in(tmp_path / "one", *job, f"collect.path={path}")
    names = SumsStore(path).finished()
    assert any(n.startswith("train-") for n in names) and any(n.startswith("valid-") for n in names)
    before = {f.name: f.stat().st_mtime_ns for f in (path / "windows").iterdir()}
    run_in(tmp_path / "two", *job, f"collect.path={path}")
    assert before == {f.name: f.stat().st_mtime_ns for f in (path / "windows").iterdir()}
    with pytest.raises(ValueError, match="collected with groups=2, and this run has groups=1"):
        run_in(tmp_path / "three", *job[:-1], "sums.groups=1", f"collect.path={path}")


def empty(path: Path) -> None:
    for file in (path / "windows").iterdir():
        file.unlink()


def only_valid(path: Path) -> None:
    for file in (path / "windows").glob("train-*"):
        file.unlink()


def cut(path: Path) -> None:
    file = next((path / "windows").glob("train-*"))
    file.write_bytes(file.read_bytes()[:-100])


def with_nan(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = next((path / "windows").glob("valid-*"))
    tensors = load_file(file)
    tensors["needed_GIN"][0, 0, 0] = float("nan")
    save_file(tensors, file)


def without_labels(path: Path) -> None:
    store = SumsStore(path)
    for name in store.finished():
        made = made_window(1)
        sums = made.sums._replace(needed_GIN=torch.zeros_like(made.sums.needed_GIN))
        store.write(name, replace(made, sums=sums))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (empty, "has no windows of the split 'train' yet"),
        (only_valid, "has no windows of the split 'train' yet"),
        (cut, "is damaged or cut short .*task=collect_retention makes it again"),
        (with_nan, "holds NaN or infinity"),
        (without_labels, "have no labels that differ"),
        (lambda path: (path / "about.json").unlink(), "holds no data set of labels"),
    ],
)
def test_a_data_set_that_cannot_be_learned_from_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    """A policy of noise that is written over a good one."""
    path = write_set(tmp_path / "set")
    spoil(path)
    target = tmp_path / "policy.json"
    job = ("task=train_retention", f"train.data={path}", f"train.path={target}", "logger=none")
    with pytest.raises((ValueError, InstantiationException)) as error:
        run_in(tmp_path / "run", *job)
    assert re.search(message, str(root_cause(error.value)))
    assert not target.exists() and not target.with_suffix(".safetensors").exists()


def test_sums_that_are_not_finite_are_not_stored(tmp_path: Path, model: LoadedModel) -> None:
    """A window of NaN that stops the training much later."""
    store = SumsStore(tmp_path / "set")
    store.open({**ABOUT, "model": model.name})
    made = made_window(1)
    made.sums.received_GIN[0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="a sum is not finite; nothing is stored"):
        store.write("train-made-00001", made)
    assert not store.finished()


@pytest.mark.parametrize(
    "wrong",
    [{"label": "mood"}, {"horizon": 0}, {"power": 0.0}, {"hidden": 1.5}, {"learning_rate": -1.0}],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(wrong: dict[str, object]) -> None:
    """A training that runs to its end on an option that means nothing."""
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=rf"train\.{name}"):
        options(Path("somewhere"), **wrong)
