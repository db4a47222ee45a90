"""Guards the draw from what top_k, top_p and min_p leave: a token too many or too few, another order, ties, broken
rows, results that threads, batch mates or the width of a row change.

T rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.conftest import Typed
from tokenrouter.kernels import Cut, KernelSet, NativeKernels, ReferenceKernels

INF, NAN = math.inf, math.nan
LAST = 1 - 2**-53  # the largest float64 below 1
WIDTHS = [1, 2, 15, 16, 17, 63, 64, 65, 700, 4097]
NEAR = 3e-6  # numbers, shares and masses so near to a border may fall on either side


class Cuts(NamedTuple):
    """The options of one row, as a user gives them."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def cut_of(rows: Sequence[Cuts]) -> Cut:
    return Cut(
        torch.tensor([each.top_k for each in rows], dtype=torch.int64),
        torch.tensor([each.top_p for each in rows], dtype=torch.float64),
        torch.tensor([each.min_p for each in rows], dtype=torch.float64),
    )


def draw_each(
    kernels: KernelSet, x_V: Tensor, cuts: Cuts, uniform: Sequence[float], inverse: float = 1.0
) -> list[int]:
    """One draw from the row per number."""
    uniform_T = torch.tensor(uniform, dtype=torch.float64)
    x_TV = x_V.expand(len(uniform_T), -1)
    inverse_T = torch.full((len(uniform_T),), inverse)
    return kernels.draw_cut(x_TV, inverse_T, uniform_T, cut_of([cuts] * len(uniform_T))).tolist()


def middles(num: int) -> list[float]:
    """The middles of ``num`` equal shares."""
    return [(i + 0.5) / num for i in range(num)]


def kept_by_a_loop(
    x: Sequence[float], cuts: Cuts, inverse: float
) -> tuple[list[int], list[float], float]:
    """Kept ids in their order, their masses, and how near the nearest other choice is."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    mass = [math.exp((v - x[order[0]]) * inverse) for v in x]
    distances = [abs(m / cuts.min_p - 1) for m in mass if m < 1] if cuts.min_p else []
    kept = [i for i in order if mass[i] >= cuts.min_p and mass[i] > 0]
    kept = kept[: cuts.top_k or None]
    total, seen, nucleus = sum(mass[i] for i in kept), 0.0, []
    for i in kept:
        if cuts.top_p < 1:
            distances.append(abs(seen / total - cuts.top_p))
            if nucleus and seen >= cuts.top_p * total:
                break
        nucleus.append(i)
        seen += mass[i]
    return nucleus, [mass[i] for i in nucleus], min(distances, default=1.0)


def row_of_kind(kind: str, width: int, seed: int) -> Tensor:
    """Float32 logits ``[V]``."""
    generator = torch.Generator().manual_seed(seed)
    x_V = torch.randn(width, generator=generator) * 3
    if kind == "ties":
        return x_V.round()
    if kind == "neighbours":  # that differ in the last bits alone
        return 1 + torch.randperm(width, generator=generator) * 2**-20
    if kind == "flat":
        return x_V.sign() * 0.0
    if kind == "one":
        return torch.full((width,), -INF).index_fill(0, torch.tensor(width // 3), -7.0)
    if kind == "masked":
        x_V[torch.rand(width, generator=generator) < 0.6] = -INF
        x_V[width // 2] = 1.0
    return x_V


KINDS = ("normal", "ties", "neighbours", "flat", "one", "masked")


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_every_kept_token_in_its_order_and_no_other(typed: Typed, data: st.DataObject) -> None:
    """A tie cut on the wrong side, top_p taken before top_k or min_p, a bucket lost, an order by rounded numbers."""
    width = data.draw(st.sampled_from([1, 2, 5, 64, 65, 300]))
    x_V = row_of_kind(
        data.draw(st.sampled_from(KINDS)), width, data.draw(st.integers(0, 10_000))
    ).to(typed.dtype)
    cuts = Cuts(
        data.draw(st.sampled_from([0, 1, 2, 7, 100, width, width + 1, 2**40])),
        data.draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-4, 1e-300])),
        data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
    )
    inverse = data.draw(st.sampled_from([0.25, 1.0, 4.0]))
    kept, mass, distance = kept_by_a_loop(x_V.float().tolist(), cuts, inverse)
    assume(distance > NEAR)
    total, seen, uniform, expected = sum(mass), 0.0, [0.0], kept[:1]
    for i, m in zip(kept, mass, strict=True):
        if m > 4 * NEAR * total:
            uniform.append((seen + m / 2) / total)
            expected.append(i)
        seen += m
    assert draw_each(typed.kernels, x_V, cuts, uniform, inverse) == expected
    assert draw_each(typed.kernels, x_V, cuts, [LAST], inverse)[0] in kept


@pytest.mark.parametrize("value", [0.0, -2.5, 7.0])
def test_a_flat_row_is_cut_by_id(typed: Typed, value: float) -> None:
    """Which of equal logits a selection returns is arbitrary; zeros of both signs are equal."""
    x_V = torch.full((1000,), value).to(typed.dtype)
    x_V[::3] *= -1 if value == 0 else 1
    for cuts, num in (
        (Cuts(top_k=7), 7),
        (Cuts(top_p=0.25), 250),
        (Cuts(top_k=40, top_p=0.5), 20),
        (Cuts(min_p=1.0), 1000),
        (Cuts(top_k=500, min_p=0.5), 500),
    ):
        assert draw_each(typed.kernels, x_V, cuts, middles(num)) == list(range(num))


def test_ties_beside_a_larger_logit(typed: Typed) -> None:
    """A cut among equals that starts behind others, which a count from the tie's own start gets wrong."""
    x_V = torch.zeros(200).to(typed.dtype)
    x_V[[150, 20]] = 30.0
    x_V[190] = 31.0
    assert draw_each(typed.kernels, x_V, Cuts(top_k=2), [0.0, LAST]) == [190, 20]
    assert draw_each(typed.kernels, x_V, Cuts(top_k=3), [0.0, 0.7, LAST]) == [190, 20, 150]


@pytest.mark.parametrize("inverse", [1e-30, 1e-4])
def test_a_high_temperature_keeps_the_order_of_the_logits(typed: Typed, inverse: float) -> None:
    """Scaled logits that round to the same number are no ties: top_k=1 is greedy at any temperature."""
    x_V = (torch.arange(400) % 200 / 8).to(typed.dtype)
    assert draw_each(typed.kernels, x_V, Cuts(top_k=1), [0.0, LAST], inverse) == [199, 199]
    expected = [199, 399, 198, 398, 197]
    assert draw_each(typed.kernels, x_V, Cuts(top_k=5), middles(5), inverse) == expected


def random_step(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of ``draw_cut``, every row with its own cut; strided logits."""
    generator = torch.Generator().manual_seed(width)
    wide_TX = torch.full((num_rows, width + 7), 1e4).to(dtype)
    x_TV = wide_TX[:, 3 : 3 + width]
    for t in range(num_rows):
        x_TV[t] = row_of_kind(KINDS[t % len(KINDS)], width, t)
    inverse_T = torch.rand(num_rows, generator=generator) * 2.7 + 0.3
    uniform_T = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    options = [
        Cuts(top_p=0.9),
        Cuts(top_k=50),
        Cuts(min_p=0.05),
        Cuts(top_k=3, top_p=0.7),
        Cuts(min_p=0.01, top_k=20, top_p=0.8),
        Cuts(top_k=width),
        Cuts(top_p=0.999, min_p=0.001),
    ]
    cut = cut_of([options[t % len(options)] for t in range(num_rows)])
    return x_TV, inverse_T, uniform_T, cut


def near_a_border(x_TV: Tensor, inverse_T: Tensor, uniform_T: Tensor, cut: Cut) -> list[bool]:
    """Whether rounding may choose another index."""
    near = []
    for t, x in enumerate(x_TV.float().tolist()):
        cuts = Cuts(int(cut.top_k_T[t]), float(cut.top_p_T[t]), float(cut.min_p_T[t]))
        _, mass, distance = kept_by_a_loop(x, cuts, float(inverse_T[t]))
        ups_K = torch.tensor(mass, dtype=torch.float64).cumsum(dim=0)
        distance = min(distance, float((ups_K / ups_K[-1] - uniform_T[t]).abs().min()))
        near.append(distance < NEAR)
    return near


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [*WIDTHS, 49152])
def test_the_same_index_as_the_reference(
    level: NativeKernels, width: int, dtype: torch.dtype
) -> None:
    """Another choice than the definition's, but for what rounding moves over a border; a neighbour's parameters."""
    step = random_step(21 if width > 5000 else 84, width, dtype)
    before_TV = step[0].clone()
    found_T = level.draw_cut(*step)
    assert found_T.dtype == torch.int64 and torch.equal(step[0], before_TV)
    same_T = found_T == ReferenceKernels().draw_cut(*step)
    near_T = torch.tensor(near_a_border(*step))
    assert (same_T | near_T).all(), (same_T | near_T).logical_not().nonzero().flatten().tolist()
    assert near_T.float().mean() < 0.4


def test_threads_and_batch_mates_change_nothing(level: NativeKernels) -> None:
    """Sums by threads, or work space of the row before: a seeded request draws other tokens beside other requests."""
    x_TV, inverse_T, uniform_T, cut = random_step(28, 20_001, torch.bfloat16)
    weights_TV = (x_TV.double() * inverse_T.double().unsqueeze(1)).softmax(dim=-1)
    ranks_T1 = torch.arange(28).unsqueeze(1)  # shares that end just before or behind a token
    ups_TV = weights_TV.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    cut.top_p_T.copy_(ups_TV.gather(1, ranks_T1).squeeze(1).clamp(max=1))
    torch.set_num_threads(1)
    expected_T = level.draw_cut(x_TV, inverse_T, uniform_T, cut)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 5, 28):
            parts = zip(
                *(t.split(num_rows) for t in (x_TV, inverse_T, uniform_T, *cut)), strict=True
            )
            found = [level.draw_cut(x, i, u, Cut(*part)) for x, i, u, *part in parts]
            assert torch.equal(torch.cat(found), expected_T), (num_threads, num_rows)


def test_masked_values_behind_a_row_change_nothing(typed: Typed) -> None:
    """A mass that depends on how a row is split, or a cut that reaches the padding."""
    for width in (20, 256, 700):
        x_TV, inverse_T, uniform_T, cut = random_step(42, width, typed.dtype)
        expected_T = typed.kernels.draw_cut(x_TV, inverse_T, uniform_T, cut)
        for more in (1, 16, 500, 9000):
            wide_TV = torch.nn.functional.pad(x_TV, (0, more), value=-INF)
            assert torch.equal(
                typed.kernels.draw_cut(wide_TV, inverse_T, uniform_T, cut), expected_T
            )


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 17, 600, 9001, 9009])
def test_a_broken_row_gives_no_index(typed: Typed, bad: float, place: int) -> None:
    """Comparisons with NaN are false: it is below every cut, and the others are drawn from as if all were well."""
    x_V = torch.randn(9010, generator=torch.Generator().manual_seed(place))
    x_TV = x_V.repeat(3, 1).to(typed.dtype)
    x_TV[1, place] = bad
    x_TV[2] = -INF
    uniform_T = torch.full((3,), 0.5, dtype=torch.float64)
    for cuts in (Cuts(top_k=5), Cuts(top_p=0.9), Cuts(min_p=0.1), Cuts(9010), Cuts(3, 0.5, 0.2)):
        ids_T = typed.kernels.draw_cut(x_TV, torch.ones(3), uniform_T, cut_of([cuts] * 3))
        assert ids_T[0] >= 0 and ids_T[1:].tolist() == [-1, -1], cuts


def test_extreme_logits(typed: Typed) -> None:
    """Differences that overflow, and weights that are zero."""
    big = torch.finfo(typed.dtype).max * 0.9
    x_V = torch.tensor([-big, big, -INF, -200.0]).to(typed.dtype)
    for cuts in (Cuts(top_k=3), Cuts(top_p=LAST), Cuts(min_p=5e-324), Cuts(top_p=5e-324)):
        assert draw_each(typed.kernels, x_V, cuts, [0.0, 0.5, LAST]) == [1] * 3


def test_no_rows(typed: Typed) -> None:
    """A step in which nothing is due."""
    no_rows_TV = torch.zeros(0, 8).to(typed.dtype)
    none_T = torch.zeros(0, dtype=torch.float64)
    ids_T = typed.kernels.draw_cut(no_rows_TV, torch.zeros(0), none_T, cut_of([]))
    assert ids_T.shape == (0,) and ids_T.dtype == torch.int64


CUT = cut_of([Cuts()] * 2)
REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "int32 counts": ({"top_k_T": CUT.top_k_T.int()}, "top_k must be Long"),
    "float shares": ({"top_p_T": CUT.top_p_T.float()}, "top_p must be Double"),
    "float masses": ({"min_p_T": CUT.min_p_T.float()}, "min_p must be Double"),
    "too few counts": ({"top_k_T": CUT.top_k_T[:1]}, "top_k must have shape"),
    "too many shares": ({"top_p_T": CUT.top_p_T.repeat(2)}, "top_p must have shape"),
    "strided masses": ({"min_p_T": CUT.min_p_T.repeat(2)[::2]}, "min_p must be contiguous"),
    "a negative count": ({"top_k_T": CUT.top_k_T - 1}, r"top_k .* got -1 in row 0"),
    "no share": ({"top_p_T": CUT.top_p_T * 0}, r"top_p .* got 0 in row 0"),
    "more than all": ({"top_p_T": CUT.top_p_T + 0.5}, r"top_p .* got 1.5 in row 0"),
    "a share of NaN": ({"top_p_T": CUT.top_p_T * NAN}, r"top_p .* got nan in row 0"),
    "a negative mass": ({"min_p_T": CUT.min_p_T - 0.5}, r"min_p .* got -0.5 in row 0"),
    "a mass above 1": ({"min_p_T": CUT.min_p_T + 2}, r"min_p .* got 2 in row 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(native: NativeKernels, name: str) -> None:
    """A read outside of a tensor, or a cut that leaves nothing."""
    changed, message = REFUSED[name]
    uniform_T = torch.full((2,), 0.5, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        native.draw_cut(torch.zeros(2, 8), torch.ones(2), uniform_T, CUT._replace(**changed))
