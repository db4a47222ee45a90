"""Guards every label maker: its contract, and that it measures what it says. N tokens, L layers, H horizons."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from tests.training.conftest import random_ids
from tokenrouter.models import LoadedModel
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels import (
    FirstOrder,
    Fisher,
    FutureAttention,
    LabelMaker,
    LeaveOneOut,
    OwnKL,
    OwnLoss,
)

CONF = Path(__file__).resolve().parents[2] / "conf" / "labels"
CHOICES = sorted(path.stem for path in CONF.glob("*.yaml"))
PARTLY_KNOWN = ("own_loss", "future_attention")


def rank_correlation(a: Tensor, b: Tensor) -> float:
    ranks = [x.flatten().argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


@pytest.mark.parametrize("name", CHOICES)
def test_the_contract(name: str, decoder: DifferentiableDecoder, ids_N: Tensor) -> None:
    """A label of another shape or dtype, a negative or unrepeatable one, a config that hides or renames options."""
    cfg = OmegaConf.load(CONF / f"{name}.yaml")
    maker = instantiate(cfg, _convert_="object")
    assert isinstance(maker, LabelMaker) and maker.name == name
    assert set(cfg) - {"_target_"} == {f.name for f in fields(maker)}  # type: ignore[arg-type]
    label_NC = maker(decoder, ids_N, 5)
    assert label_NC.dtype == torch.float32
    assert label_NC.shape == (len(ids_N), len(maker.columns(decoder.config)))
    known_NC = label_NC[~label_NC.isnan()]
    assert (known_NC >= 0).all() and known_NC.isfinite().all() and known_NC.max() > 0
    assert label_NC.isnan().any() == (name in PARTLY_KNOWN)
    assert torch.equal(maker(decoder, ids_N, 5).nan_to_num(), label_NC.nan_to_num())


def test_there_is_one_config_for_every_maker() -> None:
    """A maker that no command reaches; a list that came out empty would let the contract pass."""
    makers = (FirstOrder, Fisher, FutureAttention, LeaveOneOut, OwnKL, OwnLoss)
    assert sorted(maker.name for maker in makers) == CHOICES


def test_fisher_predicts_what_one_layer_of_one_token_costs(
    decoder: DifferentiableDecoder, ids_N: Tensor
) -> None:
    """Squares of the wrong inner product: exact KL, one forward per token and layer, is the yardstick."""
    exact_NL = LeaveOneOut(per_layer=True, batch=16)(decoder, ids_N, 0)
    fisher_NL = Fisher(draws=200)(decoder, ids_N, 0)
    assert rank_correlation(fisher_NL, exact_NL) > 0.9
    assert float(fisher_NL.sum() / exact_NL.sum()) == pytest.approx(1, abs=0.15)


def test_fisher_is_better_than_first_order_and_own_kl(
    decoder: DifferentiableDecoder, ids_N: Tensor
) -> None:
    """A default that a simpler label beats on the tokens themselves."""
    exact_N = LeaveOneOut(batch=16)(decoder, ids_N, 0)[:, 0]
    fisher, first_order, own_kl = (
        rank_correlation(maker(decoder, ids_N, 0).sum(1), exact_N)
        for maker in (Fisher(draws=50), FirstOrder(), OwnKL())
    )
    assert fisher > max(first_order, own_kl) and fisher > 0.65


def test_seeds_draw_different_tokens(decoder: DifferentiableDecoder, ids_N: Tensor) -> None:
    """A seed that has no effect: all windows would share their luck."""
    a, b = (Fisher()(decoder, ids_N, seed) for seed in (0, 1))
    assert not torch.equal(a, b) and rank_correlation(a, b) > 0.6


def test_more_draws_less_noise(decoder: DifferentiableDecoder, ids_N: Tensor) -> None:
    """A draw that is counted twice, or a mean that only takes the first."""
    truth = Fisher(draws=100)(decoder, ids_N, 9)
    few, many = (rank_correlation(Fisher(draws=n)(decoder, ids_N, 2), truth) for n in (1, 16))
    assert many > few


def test_labels_of_a_token_do_not_depend_on_what_comes_before_the_window(
    decoder: DifferentiableDecoder, ids_N: Tensor
) -> None:
    """A decoder that keeps something of the last window."""
    first = OwnKL()(decoder, ids_N, 0)
    Fisher()(decoder, random_ids(50, seed=7), 0)
    assert torch.equal(OwnKL()(decoder, ids_N, 0), first)


def test_own_loss_is_the_change_of_the_loss(decoder: DifferentiableDecoder, ids_N: Tensor) -> None:
    """A target that is one token off."""
    all_low = torch.ones(1, 1, 1, dtype=torch.bool)
    high_NV = decoder.logits(decoder.trace(ids_N).inputs[-1]).log_softmax(-1)
    low_NV = decoder.logits(decoder.routed(ids_N, all_low)[0]).log_softmax(-1)
    token = 17
    change = (low_NV - high_NV)[token, ids_N[token + 1]].abs()
    label_N1 = OwnLoss()(decoder, ids_N, 0)
    assert float(label_N1[token, 0]) == pytest.approx(float(change), abs=1e-5)
    assert label_N1[:-1].isfinite().all() and label_N1[-1].isnan()


def test_future_attention_is_the_mean_relative_weight(
    decoder: DifferentiableDecoder, model: LoadedModel
) -> None:
    """Queries that are too near, a mean over the wrong number of them, a weight that is not relative."""
    ids_N = random_ids(300)
    label_NH = FutureAttention(horizons=(32, 256))(decoder, ids_N, 0)
    relative_NN = torch.zeros(300, 300, dtype=torch.float64)
    for q_HNK, k_GNK in decoder.queries_keys(decoder.trace(ids_N)):
        k_HNK = k_GNK.double().repeat_interleave(2, 0)
        scores = q_HNK.double() @ k_HNK.transpose(1, 2) * model.config.head_dim**-0.5
        scores += torch.full((300, 300), -torch.inf).triu(1)
        relative_NN += scores.softmax(-1).mean(0) / 4
    relative_NN *= torch.arange(1, 301)[:, None]
    for token, column, horizon in ((5, 0, 32), (40, 1, 256), (200, 0, 32)):
        expected = relative_NN[token + horizon :, token].mean().log1p()
        assert float(label_NH[token, column]) == pytest.approx(float(expected), abs=1e-4)
    assert label_NH[:44].isfinite().all() and label_NH[44:, 1].isnan().all()
    assert label_NH[:268, 0].isfinite().all() and label_NH[268:].isnan().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fisher(draws=0), r"labels=fisher: draws=0 must be an integer of at least 1"),
        (lambda: Fisher(draws=True), "draws=True must be an integer"),
        (lambda: LeaveOneOut(batch=-1), "labels=leave_one_out: batch=-1"),
        (lambda: LeaveOneOut(per_layer=1), "per_layer=1 must be true or false"),  # type: ignore[arg-type]
        (lambda: FutureAttention(horizons=()), r"horizons=\[\] must be ascending"),
        (lambda: FutureAttention(horizons=(64, 32)), r"horizons=\[64, 32\] must be ascending"),
        (lambda: FutureAttention(horizons=(0,)), "horizons=0 must be an integer"),
    ],
)
def test_bad_options_are_refused(make: object, message: str) -> None:
    """An option that fails later in torch's words."""
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_that_a_maker_does_not_take(decoder: DifferentiableDecoder) -> None:
    """An hour of forwards by mistake; labels that are unknown for every token."""
    with pytest.raises(ValueError, match=r"60 tokens are more than labels\.max_tokens=32"):
        LeaveOneOut(max_tokens=32)(decoder, random_ids(60), 0)
    with pytest.raises(ValueError, match="holds no query 32 tokens after"):
        FutureAttention()(decoder, random_ids(32), 0)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        OwnLoss()(decoder, random_ids(1), 0)
