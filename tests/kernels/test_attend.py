"""Guards RoPE, the KV write and attention in one call: bit for bit what the two operators give one after the other.

T tokens, O fused q, k, v, D head size, S slots, P planes of an entry, A attention outputs.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import Case, Heads, Step, lay_out
from tests.kernels.conftest import NATIVE_DTYPES
from tokenrouter.kernels import KernelSet, NativeKernels, ReferenceKernels

DECODE = [Case(num_keys=1), Case(num_keys=70, scattered=True), Case(num_keys=600), Case(num_keys=3)]
PREFILL = [Case(num_keys=90, num_queries=40), Case(num_keys=7, num_queries=7, scattered=True)]
EVICTED = [
    Case(num_keys=6, num_queries=2, kept=(0, 1, 5, 20, 21, 22)),
    Case(num_keys=12, kept=tuple(range(0, 60, 5)), scattered=True),
]
STEPS = {"decode": DECODE, "prefill": PREFILL, "mixed": [*PREFILL, *DECODE], "evicted": EVICTED}


class Inputs(NamedTuple):
    """What the layers of a forward are given: new tokens' projections, their rotation and their slots."""

    qkv_TO: Tensor
    cos_TD: Tensor
    sin_TD: Tensor
    slots_T: Tensor


def inputs_of(step: Step, seed: int) -> Inputs:
    """Random rows of a wider tensor; the queries' tokens are their requests' last entries."""
    generator = torch.Generator().manual_seed(seed)
    heads, batch, dtype = step.heads, step.batch, step.kv_SPD.dtype
    num_tokens, width = (
        len(batch.query_rows_T),
        (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim,
    )
    wide_TX = torch.randn(num_tokens, width + 5, generator=generator).to(dtype)
    angles_TD = torch.rand(num_tokens, heads.head_dim // 2, generator=generator).repeat(1, 2)
    slots_T = torch.empty(num_tokens, dtype=torch.int64)
    slots_T[batch.query_rows_T] = torch.cat(
        [
            batch.slots_RN[row, keys - queries : keys]
            for row, keys, queries in zip(
                batch.row_B.tolist(),
                batch.num_keys_B.tolist(),
                batch.num_queries_B.tolist(),
                strict=True,
            )
        ]
    )
    return Inputs(
        wide_TX[:, 3 : 3 + width], angles_TD.cos().to(dtype), angles_TD.sin().to(dtype), slots_T
    )


def same(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, where NaN equals NaN."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", STEPS)
def test_attend_is_its_parts(
    level: NativeKernels, name: str, window: int | None, dtype: torch.dtype
) -> None:
    """Queries rotated into rows of another token, keys written after they are read, and what a layer left in the
    plan's scratch read by the next."""
    step = lay_out(STEPS[name], Heads(num_heads=6, num_kv_heads=2, head_dim=16)).to(dtype)
    plan = step.plan(level, window, observe_queries=2)
    before_SPD, at_once_SPD, apart_SPD = (step.kv_SPD.clone() for _ in range(3))
    received, expected = (torch.zeros(plan.received_size) for _ in range(2))
    for layer, watched in enumerate((True, False, True)):
        inputs = inputs_of(step, layer)
        given = {name: value.clone() for name, value in inputs._asdict().items()}
        out_TA = torch.full((len(inputs.slots_T), 6 * 16), float("nan"), dtype=dtype)
        got_TA = level.attend(
            *inputs, at_once_SPD, plan, out=out_TA, received=received if watched else None
        )
        expected_TA = KernelSet.attend(
            level,
            *inputs,
            apart_SPD,
            step.plan(level, window, observe_queries=2),
            received=expected if watched else None,
        )
        assert got_TA is out_TA and torch.equal(out_TA, expected_TA)
        assert same(at_once_SPD, apart_SPD) and torch.equal(received, expected)
        assert all(torch.equal(value, given[name]) for name, value in inputs._asdict().items())
        assert torch.equal(level.attend(*inputs, at_once_SPD, plan), expected_TA)
    others = torch.ones(len(before_SPD), dtype=torch.bool)
    others[inputs.slots_T] = False
    assert not same(at_once_SPD, before_SPD)
    assert same(at_once_SPD[others], before_SPD[others])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(), Heads(num_heads=9, num_kv_heads=3, head_dim=64)])
def test_attend_is_close_to_the_reference(
    level: NativeKernels, heads: Heads, dtype: torch.dtype
) -> None:
    """One call that is consistent with native's own parts and wrong."""
    step = lay_out(STEPS["mixed"], heads).to(dtype)
    results = []
    for kernels in (level, ReferenceKernels()):
        kv_SPD, plan = step.kv_SPD.clone(), step.plan(kernels, observe_queries=3)
        received = torch.zeros(plan.received_size)
        out_TA = kernels.attend(*inputs_of(step, 0), kv_SPD, plan, received=received)
        results.append((out_TA.float(), received, kv_SPD.nan_to_num().float()))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_threads_change_no_bit(level: NativeKernels) -> None:
    """A query that one thread reads before another has rotated it."""
    step = lay_out(STEPS["mixed"], Heads(num_heads=6, num_kv_heads=2, head_dim=16))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        kv_SPD = step.kv_SPD.clone()
        out_TA = level.attend(*inputs_of(step, 0), kv_SPD, step.plan(level))
        results.append((out_TA, kv_SPD.nan_to_num()))
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0], strict=True))


def test_no_tokens(level: NativeKernels) -> None:
    """A forward of nothing but cached tokens."""
    kept = lay_out([Case(num_keys=5)])
    none = torch.empty(0, dtype=torch.int64)
    for name in ("query_rows_T", "num_queries_B", "query_start_B", "row_B", "num_keys_B"):
        object.__setattr__(kept.batch, name, none)
    rows = torch.empty(0, 8)
    kv_SPD = kept.kv_SPD.clone()
    out_TA = level.attend(torch.empty(0, 64), rows, rows, none, kv_SPD, kept.plan(level))
    assert out_TA.shape == (0, 32) and same(kv_SPD, kept.kv_SPD)


NUM_TOKENS, NUM_SLOTS = 4, 24
Q64 = torch.ones(NUM_TOKENS, 64)
ROTATION = torch.ones(NUM_TOKENS, 8)
HALF = torch.bfloat16
KV = torch.ones(NUM_SLOTS, 4, 8)
REFUSED: dict[str, tuple[str, Tensor, str]] = {
    "an out of fewer rows": ("out", torch.ones(3, 32), "out "),
    "a narrow out": ("out", torch.ones(4, 31), "out "),
    "an out of heads": ("out", torch.ones(4, 4, 8), "out "),
    "an out of another dtype": ("out", torch.ones(4, 32, dtype=HALF), "out "),
    "a strided out": ("out", torch.ones(4, 40)[:, :32], "out "),
    "a short received": ("received", torch.ones(9), "received "),
    "a strided received": ("received", torch.ones(20)[::2], "received "),
    "a received of another dtype": ("received", torch.ones(10, dtype=HALF), "received "),
    "a smaller arena": ("kv_SPD", KV[:-1], "kv "),
    "a larger arena": ("kv_SPD", torch.ones(NUM_SLOTS + 1, 4, 8), "kv "),
    "an arena of more planes": ("kv_SPD", torch.ones(NUM_SLOTS, 6, 8), "kv "),
    "an arena of fewer planes": ("kv_SPD", torch.ones(NUM_SLOTS, 2, 8), "kv "),
    "an arena of smaller heads": ("kv_SPD", torch.ones(NUM_SLOTS, 4, 6), "kv "),
    "an arena of another dtype": ("kv_SPD", KV.to(HALF), "kv "),
    "an int8 arena": ("kv_SPD", KV.to(torch.int8), "kv "),
    "a strided arena": ("kv_SPD", KV.transpose(0, 1).contiguous().transpose(0, 1), "kv "),
    "fewer projections": ("qkv_TO", Q64[:3], "qkv "),
    "more projections": ("qkv_TO", torch.ones(5, 64), "qkv "),
    "wide projections": ("qkv_TO", torch.ones(4, 72), "qkv "),
    "narrow projections": ("qkv_TO", Q64[:, :56], "qkv "),
    "projections of another dtype": ("qkv_TO", Q64.to(HALF), "qkv "),
    "projections in columns": ("qkv_TO", torch.ones(64, 4).t(), "qkv "),
    "fewer cosines": ("cos_TD", ROTATION[:3], "cos "),
    "cosines of another dtype": ("cos_TD", ROTATION.to(HALF), "cos "),
    "strided sines": ("sin_TD", torch.ones(4, 16)[:, ::2], "sin "),
    "wide sines": ("sin_TD", torch.ones(4, 16), "sin "),
    "fewer slots": ("slots_T", torch.arange(3), "slots "),
    "int32 slots": ("slots_T", torch.arange(4).int(), "slots "),
    "a slot outside the arena": ("slots_T", torch.tensor([0, 1, 2, NUM_SLOTS]), "slot 24 "),
    "a negative slot": ("slots_T", torch.tensor([0, -1, 2, 3]), "slot -1 "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_writes_nothing(native: NativeKernels, name: str) -> None:
    """Entries that every request shares overwritten by a call that then fails, or an error that names a tensor which
    the caller never gave."""
    argument, value, message = REFUSED[name]
    step = lay_out([Case(num_keys=6, num_queries=3), Case(num_keys=4)], spare=13)
    assert len(step.kv_SPD) == NUM_SLOTS
    plan, inputs = step.plan(native), inputs_of(step, 0)
    given: dict[str, Any] = {
        **inputs._asdict(),
        "kv_SPD": step.kv_SPD,
        "out": torch.full((4, 32), 5.0),
        "received": torch.full((10,), 5.0),
    }
    given[argument] = value
    before = {key: tensor.clone() for key, tensor in given.items()}
    with pytest.raises((ValueError, IndexError), match=f"^{message}"):
        native.attend(**given, plan=plan)
    assert all(same(tensor, before[key]) for key, tensor in given.items())
    apart_SPD = step.kv_SPD.clone()
    expected_TA = KernelSet.attend(native, *inputs, apart_SPD, step.plan(native))
    assert torch.equal(native.attend(*inputs, step.kv_SPD, plan), expected_TA), "the plan is broken"


@pytest.mark.parametrize("width", [0, 24, 56, 72])
def test_a_wrong_width_is_refused_without_an_out(native: NativeKernels, width: int) -> None:
    """An ``out`` made of a wrong width, so that the error is about a tensor which the caller never gave."""
    step = lay_out([Case(num_keys=6, num_queries=3), Case(num_keys=4)])
    inputs = inputs_of(step, 0)._replace(qkv_TO=torch.ones(4, width))
    before_SPD = step.kv_SPD.clone()
    with pytest.raises(ValueError, match="qkv "):
        native.attend(*inputs, step.kv_SPD, step.plan(native))
    assert same(step.kv_SPD, before_SPD)
