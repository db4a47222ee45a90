"""Guards the learned router's score: another row or order of sums than the definition's, and reads beyond a table.

T tokens, F features, E edges, K rows, C columns, P phases, H hidden units.
"""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.conftest import LEVELS
from tokenrouter.kernels import BinRows, KernelSet, NativeKernels, ReferenceKernels, RouterTable
from tokenrouter.kernels.router_mlp.reference import sum_by_halves

INF, NAN = math.inf, math.nan


class Tokens(NamedTuple):
    """What is scored."""

    values_TF: Tensor
    ids_T: Tensor
    phase_T: Tensor

    def take(self, index: Tensor | slice) -> "Tokens":
        return Tokens(*(part[index] for part in self))


def drawn_table(seed: int, num_edges: list[int], *, hidden: int, vocab: int | None) -> RouterTable:
    """Features with so many edges, few ids with a row, and with ``vocab`` a row for each of so many ids and before."""
    draw = torch.Generator().manual_seed(seed)
    edges_FE = torch.full((len(num_edges), max(num_edges, default=0) + 1), INF)
    for feature, count in enumerate(num_edges):
        edges_FE[feature, :count] = torch.randn(count, generator=draw).round(decimals=1).sort()[0]
    counts_F = torch.tensor(num_edges, dtype=torch.int64) + 1
    counts_F[::3] += 1  # a bin of tokens without the feature
    starts_F = counts_F.cumsum(0) - counts_F
    first_id = int(counts_F.sum())
    id_rows_I = torch.full((30,), first_id + 3)
    id_rows_I[[4, 9, 28]] = torch.arange(3) + first_id
    own = first_id + 4
    num_rows = own if vocab is None else own + 2 * (vocab + 1)
    return RouterTable(
        bins=BinRows(edges_FE, starts_F, counts_F - 1, id_rows_I),
        table_KC=torch.randn(num_rows, hidden + 2, generator=draw),
        head_PH=torch.randn(2, hidden, generator=draw),
        vocab_row=None if vocab is None else own,
        previous_column=-1 if vocab is None else len(num_edges) - 1,
    )


def drawn_tokens(seed: int, num_tokens: int, num_features: int) -> Tokens:
    """Values on and between edges, infinite ones and NaN; ids beyond the tables, in the last column -1 for none."""
    draw = torch.Generator().manual_seed(seed)
    values_FT = torch.randn(num_features, num_tokens, generator=draw).round(decimals=1)
    odd_FT = torch.rand(num_features, num_tokens, generator=draw)
    for share, odd in ((0.2, NAN), (0.1, INF), (0.05, -INF)):
        values_FT[odd_FT < share] = odd
    values_FT[-1:] = torch.randint(-1, 70, (num_tokens,), generator=draw).float()
    return Tokens(
        values_TF=values_FT.t(),  # as features come: columns are contiguous
        ids_T=torch.randint(0, 70, (num_tokens,), generator=draw),
        phase_T=torch.randint(0, 2, (num_tokens,), generator=draw),
    )


@pytest.mark.parametrize("isa", LEVELS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.sampled_from([0, 1, 2, 3, 15, 16, 17, 33, 300, 1000]),
    num_edges=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    hidden=st.sampled_from([0, 1, 2, 5, 14, 15, 16, 17, 31, 33, 64, 100]),
    vocab=st.sampled_from([None, 0, 1, 50]),
)
def test_the_same_bits_as_the_reference(
    native: NativeKernels,
    isa: str,
    seed: int,
    num_tokens: int,
    num_edges: list[int],
    hidden: int,
    vocab: int | None,
) -> None:
    """A bin off by one, the row of another id, sums in another order, or a product fused with its sum."""
    native.limit_isa(isa)
    table = drawn_table(seed, num_edges, hidden=hidden, vocab=vocab)
    tokens = drawn_tokens(seed, num_tokens, len(num_edges))
    found_T = native.router_mlp(*tokens, table)
    expected_T = ReferenceKernels().router_mlp(*tokens, table)
    assert found_T.shape == (num_tokens,) and found_T.dtype == torch.float32
    assert torch.equal(found_T, expected_T)


def by_hand(tokens: Tokens, table: RouterTable, index: int) -> Tensor:
    """The score of a token, a float64 scalar, look-up by look-up."""
    values_F, id_, phase = (part[index] for part in tokens)
    rows = []
    for feature, value in enumerate(values_F.tolist()):
        edges = table.bins.edges_FE[feature].tolist()
        exceeded = sum(not value <= edge for edge in edges)
        rows.append(
            int(table.bins.starts_F[feature]) + min(exceeded, int(table.bins.lasts_F[feature]))
        )
    rows.append(int(table.bins.id_rows_I[min(int(id_), len(table.bins.id_rows_I) - 1)]))
    if table.vocab_row is not None:
        size = (len(table.table_KC) - table.vocab_row) // 2
        previous = int(values_F[table.previous_column])
        rows.append(table.vocab_row + min(int(id_), size - 1))
        rows.append(table.vocab_row + size + min(previous if previous >= 0 else size, size - 1))
    sum_C = table.table_KC[rows].double().sum(0)
    hidden = table.head_PH.shape[1]
    return sum_C[hidden + phase] + table.head_PH[phase].double() @ sum_C[:hidden].relu()


@pytest.mark.parametrize(("hidden", "vocab"), [(0, None), (7, None), (24, 50)])
def test_the_score_is_the_networks(kernels: KernelSet, hidden: int, vocab: int | None) -> None:
    """A definition that is wrong in itself: the same, by hand, in float64."""
    table = drawn_table(3, [2, 7, 0], hidden=hidden, vocab=vocab)
    tokens = drawn_tokens(4, 60, 3)
    tokens.values_TF[:, 2].nan_to_num_(-1.0)
    score_T = kernels.router_mlp(*tokens, table)
    for index in range(60):
        expected = by_hand(tokens, table, index).float()
        torch.testing.assert_close(score_T[index], expected, rtol=1e-5, atol=1e-5)


def test_threads_and_batch_mates_change_nothing(kernels: KernelSet) -> None:
    """Sums whose order changes with the number of tokens: a route would change with the batch."""
    table = drawn_table(5, [20, 7, 8, 0, 1, 23, 0], hidden=64, vocab=50)
    tokens = drawn_tokens(6, 1100, 7)
    torch.set_num_threads(1)
    expected_T = kernels.router_mlp(*tokens, table)
    for num_threads, size in ((1, 1), (1, 7), (2, 1100), (3, 600), (2, 33)):
        torch.set_num_threads(num_threads)
        parts = [tokens.take(slice(i, i + size)) for i in range(0, 1100, size)]
        found_T = torch.cat([kernels.router_mlp(*part, table) for part in parts])
        assert torch.equal(found_T, expected_T), (num_threads, size)


def test_any_strides(kernels: KernelSet) -> None:
    """Values of neighbouring tokens, or ids of every second one, read as if they were contiguous."""
    table = drawn_table(7, [3, 5, 0], hidden=8, vocab=20)
    tokens = drawn_tokens(8, 50, 3)
    every_second = tokens.take(slice(None, None, 2))
    expected_T = kernels.router_mlp(*tokens, table)[::2]
    by_row = Tokens(every_second.values_TF.contiguous(), *(x.clone() for x in every_second[1:]))
    assert torch.equal(kernels.router_mlp(*every_second, table), expected_T)
    assert torch.equal(kernels.router_mlp(*by_row, table), expected_T)


def test_gradients_reach_the_table_and_the_head(kernels: KernelSet) -> None:
    """Training on scores that no gradient comes back from."""
    table = drawn_table(9, [3, 5, 0], hidden=8, vocab=20)
    tokens = drawn_tokens(10, 50, 3)
    plain_T = kernels.router_mlp(*tokens, table)
    table.table_KC.requires_grad_()
    table.head_PH.requires_grad_()
    score_T = kernels.router_mlp(*tokens, table)
    assert torch.equal(score_T, plain_T)
    score_T.sum().backward()
    for numbers in (table.table_KC, table.head_PH):
        assert numbers.grad is not None and (numbers.grad != 0).any()
    with torch.no_grad():
        assert torch.equal(kernels.router_mlp(*tokens, table), plain_T)


def test_sums_by_halves() -> None:
    """Another order than the one that is written down; units behind a power of two that are lost."""
    x = torch.tensor([1e8, 1.0, -1e8, 1.0, 0.5, 0.25])
    low = (x[0] + x[4]) + x[2], (x[1] + x[5]) + x[3]
    assert sum_by_halves(x[None]).item() == low[0] + low[1]
    assert sum_by_halves(torch.tensor([[3.0], [4.0]])).tolist() == [3.0, 4.0]


TABLE = drawn_table(11, [3, 0], hidden=4, vocab=5)
TOKENS = drawn_tokens(12, 6, 2)
BEYOND = torch.full_like(TABLE.bins.starts_F, 10**9)


def with_bins(**changes: Tensor) -> RouterTable:
    return TABLE._replace(bins=TABLE.bins._replace(**changes))


REFUSED: dict[str, tuple[Tokens, RouterTable, type[Exception], str]] = {
    "float64 values": (
        TOKENS._replace(values_TF=TOKENS.values_TF.double()),
        TABLE,
        ValueError,
        "values must be Float",
    ),
    "int32 ids": (TOKENS._replace(ids_T=TOKENS.ids_T.int()), TABLE, ValueError, "ids must be Long"),
    "a negative id": (TOKENS._replace(ids_T=TOKENS.ids_T - 100), TABLE, IndexError, "is negative"),
    "a third phase": (
        TOKENS._replace(phase_T=TOKENS.phase_T + 1),
        TABLE,
        IndexError,
        "phase 2 is outside of 0 to 1",
    ),
    "a bin without a row": (TOKENS, with_bins(starts_F=BEYOND), IndexError, "first row 1000000000"),
    "a bin before the first": (
        TOKENS,
        with_bins(lasts_F=-TABLE.bins.lasts_F - 1),
        IndexError,
        "bin -",
    ),
    "too many bins": (TOKENS, with_bins(lasts_F=BEYOND), IndexError, "bin 1000000000"),
    "an id without a row": (TOKENS, with_bins(id_rows_I=BEYOND), IndexError, "row 1000000000"),
    "no row for ids": (TOKENS, with_bins(id_rows_I=BEYOND[:0]), ValueError, "id_rows must be"),
    "edges of other features": (
        TOKENS,
        with_bins(edges_FE=TABLE.bins.edges_FE[:1]),
        ValueError,
        "values must have",
    ),
    "a strided table": (
        TOKENS,
        TABLE._replace(table_KC=TABLE.table_KC.t().contiguous().t()),
        ValueError,
        "table must be contiguous",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(native: NativeKernels, name: str) -> None:
    """A read outside of a table."""
    tokens, table, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        native.router_mlp(*tokens, table)
