"""Guards the native operators' checks: what does not fit is refused by name, before any memory is touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import Case, Heads, Step, lay_out
from tokenrouter.kernels import Int8Entries, NativeKernels, QuantizedRows

BF16 = torch.bfloat16
W8 = torch.ones(8)
ROWS = torch.ones(3, 8)
Call = Callable[[NativeKernels], Any]


def overlapping(num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows that start one value apart."""
    return torch.zeros(num_rows + width, dtype=dtype).as_strided((num_rows, width), (1, 1))


def quantised(q: Tensor | None = None, scale: Tensor | None = None) -> QuantizedRows:
    q = torch.zeros(3, 8, dtype=torch.int8) if q is None else q
    return QuantizedRows(q, torch.zeros(3, 1) if scale is None else scale, torch.float32)


def product(x: Tensor, **options: Any) -> Call:
    return lambda k: k.matmul(x, k.pack_matmul(torch.ones(5, 8, dtype=BF16), None), **options)


def int8(rows: QuantizedRows, **options: Any) -> Call:
    return lambda k: k.int8_matmul(rows, k.pack_int8(torch.ones(5, 8), None), **options)


def int4(rows: QuantizedRows, **options: Any) -> Call:
    return lambda k: k.int4_matmul(rows, k.pack_int4(torch.ones(5, 8), None), **options)


def weight(x: Tensor, **options: Any) -> Call:
    return lambda k: k.int8_weight_matmul(x, k.pack_int8(torch.ones(5, 8), None), **options)


def routed(out: Tensor, low_out: int = 5) -> Call:
    def call(k: NativeKernels) -> Tensor:
        high, low = k.pack_int8(torch.ones(5, 8), None), k.pack_int8(torch.ones(low_out, 8), None)
        return k.routed_matmul(ROWS, high, quantised(), low, out=out)

    return call


BF = ROWS.to(BF16)
REFUSED: dict[str, tuple[Call, str]] = {
    "norm of float64": (lambda k: k.rms_norm(ROWS.double(), W8.double(), 1e-5), "x .*Double"),
    "norm of float16": (lambda k: k.rms_norm(ROWS.half(), W8.half(), 1e-5), "x .*Half"),
    "norm with another weight": (lambda k: k.rms_norm(BF, W8, 1e-5), "weight"),
    "norm with a short weight": (lambda k: k.rms_norm(ROWS, W8[:7], 1e-5), "weight"),
    "norm with a strided weight": (
        lambda k: k.rms_norm(ROWS, torch.ones(16)[::2], 1e-5),
        "weight",
    ),
    "norm of columns": (lambda k: k.rms_norm(torch.ones(8, 3).t(), W8, 1e-5), "x "),
    "norm of a vector": (lambda k: k.rms_norm(W8, W8, 1e-5), "x "),
    "norm of four dimensions": (lambda k: k.rms_norm(torch.ones(2, 2, 2, 8), W8, 1e-5), "x "),
    "norm into fewer rows": (lambda k: k.rms_norm(ROWS, W8, 1e-5, out=torch.ones(2, 8)), "out"),
    "norm into another dtype": (lambda k: k.rms_norm(ROWS, W8, 1e-5, out=BF.clone()), "out"),
    "norm into one row": (
        lambda k: k.rms_norm(ROWS, W8, 1e-5, out=torch.ones(1, 8).expand(3, 8)),
        "out",
    ),
    "norm into overlapping rows": (
        lambda k: k.rms_norm(ROWS, W8, 1e-5, out=overlapping(3, 8)),
        "out",
    ),
    "residual of fewer rows": (
        lambda k: k.rms_norm(ROWS, W8, 1e-5, residual_TE=torch.ones(2, 8)),
        "residual",
    ),
    "residual of another dtype": (
        lambda k: k.rms_norm(ROWS, W8, 1e-5, residual_TE=BF.clone()),
        "residual",
    ),
    "residual with overlapping rows": (
        lambda k: k.rms_norm(ROWS, W8, 1e-5, residual_TE=overlapping(3, 8)),
        "residual",
    ),
    "gate of an odd width": (lambda k: k.silu_mul(torch.ones(3, 7)), "gate_up"),
    "gate of float16": (lambda k: k.silu_mul(ROWS.half()), "gate_up"),
    "gate into a wide out": (lambda k: k.silu_mul(ROWS, out=torch.ones(3, 8)), "out"),
    "gate into overlapping rows": (lambda k: k.silu_mul(ROWS, out=overlapping(3, 4)), "out"),
    "quantise float64": (
        lambda k: k.quantize_rows(ROWS.double(), out=quantised()),
        "x .*Double",
    ),
    "quantise columns": (lambda k: k.quantize_rows(torch.ones(8, 3).t()), "x "),
    "quantise into uint8": (
        lambda k: k.quantize_rows(ROWS, out=quantised(torch.zeros(3, 8, dtype=torch.uint8))),
        "q ",
    ),
    "quantise into overlapping rows": (
        lambda k: k.quantize_rows(ROWS, out=quantised(overlapping(3, 8, torch.int8))),
        "q ",
    ),
    "quantise into fewer scales": (
        lambda k: k.quantize_rows(ROWS, out=quantised(scale=torch.zeros(2, 1))),
        "scale",
    ),
    "quantise with bfloat16 scales": (
        lambda k: k.quantize_rows(ROWS, out=quantised(scale=torch.zeros(3, 1, dtype=BF16))),
        "scale",
    ),
    "quantise into strided scales": (
        lambda k: k.quantize_rows(ROWS, out=quantised(scale=torch.zeros(3, 2)[:, :1])),
        "scale",
    ),
    "product with a wide row": (product(torch.ones(3, 9, dtype=BF16)), "rows"),
    "product with float16": (product(ROWS.half()), "rows"),
    "product with columns": (product(torch.ones(8, 3, dtype=BF16).t()), "rows"),
    "product into fewer rows": (product(BF, out=torch.ones(2, 5, dtype=BF16)), "out"),
    "product into overlapping rows": (product(BF, out=overlapping(3, 5, BF16)), "out"),
    "product into float16": (product(BF, out=torch.ones(3, 5).half()), "out"),
    "int8 product with a wide row": (
        int8(quantised(torch.zeros(3, 9, dtype=torch.int8))),
        "rows",
    ),
    "int8 product with plain rows": (int8(quantised(BF.clone())), "rows"),
    "int8 product with fewer scales": (int8(quantised(scale=torch.zeros(2, 1))), "scale"),
    "int8 product with integer scales": (int8(quantised(scale=torch.zeros(3, 1).int())), "scale"),
    "int8 product into columns": (int8(quantised(), out=torch.ones(5, 3).t()), "out"),
    "int4 product with a padded row": (int4(quantised(torch.zeros(3, 32).char())), "rows"),
    "int4 product with integer scales": (int4(quantised(scale=torch.zeros(3, 1).int())), "scale"),
    "int4 product into columns": (int4(quantised(), out=torch.ones(5, 3).t()), "out"),
    "int8 weights with a vector": (weight(W8), "rows"),
    "int8 weights with a short out": (weight(ROWS, out=torch.ones(3, 4)), "out"),
    "routed into too few rows": (routed(torch.ones(5, 5)), "out"),
    "routed with another low width": (routed(torch.ones(6, 5), low_out=4), "out"),
    "packing a vector": (lambda k: k.pack_matmul(torch.ones(8, dtype=BF16), None), "weight"),
    "packing another bias": (
        lambda k: k.pack_matmul(torch.ones(5, 8, dtype=BF16), torch.ones(4)),
        "bias",
    ),
    "packing another gated bias": (
        lambda k: k.pack_matmul(torch.ones(6, 8, dtype=BF16), torch.ones(5), gated=True),
        "bias",
    ),
    "int8 packing another bias": (lambda k: k.pack_int8(torch.ones(5, 8), torch.ones(6)), "bias"),
    "an unknown instruction set": (lambda k: k.limit_isa("avx1024"), "avx1024.*plain, avx2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(native: NativeKernels, name: str) -> None:
    """A read or write outside a tensor, or numbers taken for another dtype's."""
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(native)


def rope(**changed: Any) -> Call:
    """Three tokens, 2 query heads, one key head of size 8, with one argument changed."""
    given: dict[str, Any] = {
        "qkv_TO": torch.ones(3, 32),
        "cos_TD": ROWS,
        "sin_TD": ROWS,
        "slots_T": torch.tensor([0, 1, 2]),
        "kv_SPD": torch.full((4, 2, 8), 5.0),
        "out": torch.full((3, 2, 8), 5.0),
    } | changed
    return lambda k: k.rope_store_kv(**given)


ROPE: dict[str, tuple[dict[str, Any], str]] = {
    "float16": ({"qkv_TO": torch.ones(3, 32).half()}, "qkv"),
    "a narrow projection": ({"qkv_TO": torch.ones(3, 24)}, "qkv"),
    "columns": ({"qkv_TO": torch.ones(32, 3).t()}, "qkv"),
    "fewer cosines": ({"cos_TD": torch.ones(2, 8)}, "cos"),
    "sines of another dtype": ({"sin_TD": BF}, "sin"),
    "strided cosines": ({"cos_TD": torch.ones(3, 16)[:, ::2]}, "cos"),
    "int32 slots": ({"slots_T": torch.tensor([0, 1, 2], dtype=torch.int32)}, "slots"),
    "fewer slots": ({"slots_T": torch.tensor([0, 1])}, "slots"),
    "strided slots": ({"slots_T": torch.arange(6)[::2]}, "slots"),
    "an arena of another dtype": ({"kv_SPD": torch.ones(4, 2, 8, dtype=BF16)}, "kv"),
    "an int8 arena without scales": ({"kv_SPD": torch.ones(4, 2, 8, dtype=torch.int8)}, "kv"),
    "an arena that is a slice": ({"kv_SPD": torch.ones(4, 4, 8)[:, :2]}, "kv"),
    "an odd number of planes": ({"kv_SPD": torch.ones(4, 3, 8)}, "kv"),
    "a flat arena": ({"kv_SPD": torch.ones(4, 16)}, "kv"),
    "an odd head size": (
        {
            "qkv_TO": torch.ones(3, 28),
            "kv_SPD": torch.ones(4, 2, 7),
            "cos_TD": torch.ones(3, 7),
            "sin_TD": torch.ones(3, 7),
            "out": torch.ones(3, 2, 7),
        },
        "head size",
    ),
    "a strided out": ({"out": torch.ones(3, 4, 8)[:, :2]}, "q_out"),
    "an out of fewer rows": ({"out": torch.ones(2, 2, 8)}, "q_out"),
    "a flat out": ({"out": torch.ones(3, 16)}, "q_out"),
    "scales of another shape": (
        {"int8": Int8Entries(torch.ones(4, 2, 8, dtype=torch.int8), torch.ones(3, 2))},
        "int8 scales",
    ),
    "bfloat16 scales": (
        {"int8": Int8Entries(torch.ones(4, 2, 8, dtype=torch.int8), torch.ones(4, 2, dtype=BF16))},
        "int8 scales",
    ),
    "int8 entries of another size": (
        {"int8": Int8Entries(torch.ones(4, 2, 4, dtype=torch.int8), torch.ones(4, 2))},
        "int8 entries",
    ),
    "float entries as int8": (
        {"int8": Int8Entries(torch.ones(4, 2, 8), torch.ones(4, 2))},
        "int8 entries",
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_rope_refuses(native: NativeKernels, name: str) -> None:
    """The KV write goes to memory that every request shares: nothing wrong may reach it."""
    changed, message = ROPE[name]
    with pytest.raises(ValueError, match=message):
        rope(**changed)(native)


@pytest.mark.parametrize("slot", [-1, 4, 2**62, -(2**63)])
def test_slots_outside_the_arena(native: NativeKernels, slot: int) -> None:
    """A freed slot table's padding used as a slot; the tokens before it must not be written either."""
    kv_SPD, out_THD = torch.full((4, 2, 8), 5.0), torch.full((3, 2, 8), 5.0)
    with pytest.raises(IndexError, match=f"slot {slot} is outside the arena's 4 slots"):
        rope(slots_T=torch.tensor([0, 1, slot]), kv_SPD=kv_SPD, out=out_THD)(native)
    assert (kv_SPD == 5).all() and (out_THD == 5).all()


def step_with(**changed: Any) -> Step:
    """Two requests, one of three queries, with fields of the batch changed."""
    step = lay_out([Case(num_keys=6, num_queries=3), Case(num_keys=4)], Heads())
    for name, value in changed.items():
        object.__setattr__(step.batch, name, value)
    return step


def tensor(*values: int) -> Tensor:
    return torch.tensor(values)


BATCHES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a row twice": ({"query_rows_T": tensor(0, 1, 1, 2)}, ValueError, "query row 1"),
    "a row too large": ({"query_rows_T": tensor(0, 1, 4, 2)}, IndexError, "query row 4"),
    "a negative row": ({"query_rows_T": tensor(0, 1, -1, 2)}, IndexError, "query row -1"),
    "no queries": ({"num_queries_B": tensor(4, 0)}, ValueError, "request 1 has 0 queries"),
    "too many queries": ({"num_queries_B": tensor(3, 2)}, ValueError, "request 1 has 2 queries"),
    "too few queries": ({"num_queries_B": tensor(2, 1)}, ValueError, "have 3 queries.*4 rows"),
    "negative queries": ({"num_queries_B": tensor(5, -1)}, ValueError, "request 0 has 5"),
    "a negative start": ({"query_start_B": tensor(-1, 3)}, ValueError, "position -1"),
    "a row outside the table": ({"row_B": tensor(4, 0)}, IndexError, "row 4 is outside"),
    "a negative table row": ({"row_B": tensor(-1, 0)}, IndexError, "row -1 is outside"),
    "too many keys": ({"num_keys_B": tensor(6, 1000)}, IndexError, "1000 keys"),
    "negative keys": ({"num_keys_B": tensor(-1, 4)}, IndexError, "-1 keys"),
    "fewer counts": ({"num_keys_B": tensor(6)}, ValueError, "num_keys"),
    "int32 counts": ({"num_keys_B": tensor(6, 4).int()}, ValueError, "num_keys"),
    "int32 rows": ({"query_rows_T": tensor(0, 1, 2, 3).int()}, ValueError, "query_rows"),
    "strided rows": ({"query_rows_T": torch.arange(8)[::2]}, ValueError, "query_rows"),
    "a flat table": ({"slots_RN": tensor(0, 1, 2)}, ValueError, "slots"),
    "an int32 table": ({"slots_RN": torch.zeros(4, 9).int()}, ValueError, "slots"),
    "a strided table": ({"slots_RN": torch.zeros(9, 4).long().t()}, ValueError, "slots"),
    "a slot too large": ({"slots_RN": torch.full((4, 9), 24)}, IndexError, "slot 24"),
    "a negative slot": ({"slots_RN": torch.full((4, 9), -1)}, IndexError, "slot -1"),
    "fewer positions": (
        {"positions_RN": torch.zeros(3, 9).long()},
        ValueError,
        "positions",
    ),
    "float positions": ({"positions_RN": torch.zeros(4, 9)}, ValueError, "positions"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_plan_refuses(native: NativeKernels, name: str) -> None:
    """Everything that a run reads through an index is checked once, when the plan is made."""
    changed, error, message = BATCHES[name]
    step = step_with(**changed)
    with pytest.raises(error, match=message):
        step.plan(native)


def test_a_run_refuses_other_tensors_than_the_plan_was_made_for(native: NativeKernels) -> None:
    """The checks of the plan hold for one arena and one number of tokens."""
    step = lay_out([Case(num_keys=6, num_queries=3), Case(num_keys=4)], Heads())
    plan, q_THD, kv_SPD = step.plan(native), step.q_THD, step.kv_SPD
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("kv", {"kv_SPD": kv_SPD[:-1]}),
        ("kv", {"kv_SPD": kv_SPD.to(BF16)}),
        ("kv", {"kv_SPD": kv_SPD.transpose(0, 1).contiguous().transpose(0, 1)}),
        ("q ", {"q_THD": q_THD[:3]}),
        ("q ", {"q_THD": q_THD.to(BF16)}),
        ("q ", {"q_THD": q_THD.transpose(0, 1).contiguous().transpose(0, 1)}),
        ("out", {"out": torch.empty(4, 31)}),
        ("out", {"out": torch.empty(4, 32, dtype=BF16)}),
        ("out", {"out": torch.empty(4, 40)[:, :32]}),
        ("received", {"received": torch.empty(9)}),
        ("received", {"received": torch.empty(20)[::2]}),
        ("received", {"received": torch.empty(10, dtype=BF16)}),
    ]
    for name, changed in wrong:
        given = {"q_THD": q_THD, "kv_SPD": kv_SPD, "out": torch.empty(4, 32)} | changed
        with pytest.raises(ValueError, match=name):
            native.attention(given.pop("q_THD"), given.pop("kv_SPD"), plan, **given)
