"""Guards operators that do two things in one pass: each is what the two do one after the other.

T rows, E features, J = 2 I fused gate and up, H heads, D head size.
"""

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.conftest import NATIVE_DTYPES, Typed
from tokenrouter.kernels import KernelSet, NativeKernels, QuantizedRows, ReferenceKernels

WIDTHS = (1, 16, 31, 64, 97, 576)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def room(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, QuantizedRows]:
    """Rows of a wider buffer for a quantised result, and that buffer."""
    wide_TX = torch.full((num_rows, width + 9), 99, dtype=torch.int8)
    scale_T1 = QuantizedRows.empty(num_rows, 1, dtype).scale_T1.fill_(float("nan"))
    return wide_TX, QuantizedRows(wide_TX[:, 4 : 4 + width], scale_T1, dtype)


def same(ours: QuantizedRows, theirs: QuantizedRows) -> bool:
    return torch.equal(ours.q_TK, theirs.q_TK) and torch.equal(ours.scale_T1, theirs.scale_T1)


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_adds_the_residual_first(typed: Typed, width: int) -> None:
    """The residual stream not updated, or the norm taken of the part that was added."""
    kernels, dtype = typed
    torch.manual_seed(width)
    x_TE, weight_E = torch.randn(11, width).to(dtype), torch.randn(width).to(dtype)
    wide_TX = torch.full((11, width + 8), float("nan"), dtype=dtype)
    residual_TE = wide_TX[:, 3 : 3 + width].copy_(torch.randn(11, width))
    sum_TE, before_TE = residual_TE + x_TE, x_TE.clone()
    normed_TE = kernels.rms_norm(x_TE, weight_E, 1e-5, residual_TE=residual_TE)
    assert torch.equal(residual_TE, sum_TE) and torch.equal(x_TE, before_TE)
    assert wide_TX[:, :3].isnan().all() and wide_TX[:, 3 + width :].isnan().all()
    assert torch.equal(normed_TE, kernels.rms_norm(sum_TE, weight_E, 1e-5))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_and_quantisation(typed: Typed, width: int, with_residual: bool) -> None:
    """Quantising a value before it was rounded to the dtype: int8 then depends on which operator was fused."""
    kernels, dtype = typed
    torch.manual_seed(width)
    x_TE, weight_E = torch.randn(23, width).to(dtype), torch.randn(width).to(dtype)
    x_TE[3] = 0
    added_TE = torch.randn(23, width).to(dtype) if with_residual else None
    residuals = [None if added_TE is None else added_TE.clone() for _ in range(3)]
    normed_TE = kernels.rms_norm(x_TE, weight_E, 1e-5, residual_TE=residuals[0])
    expected = kernels.quantize_rows(normed_TE)
    fused = kernels.rms_norm_quantize(x_TE, weight_E, 1e-5, residual_TE=residuals[1])
    assert same(fused, expected) and fused.dtype == dtype
    wide_TX, out = room(23, width, dtype)
    got = kernels.rms_norm_quantize(x_TE, weight_E, 1e-5, residual_TE=residuals[2], out=out)
    assert got is out and same(out, expected)
    assert (wide_TX[:, :4] == 99).all() and (wide_TX[:, 4 + width :] == 99).all()
    for residual_TE in residuals[1:]:
        assert residual_TE is None or torch.equal(residual_TE, residuals[0])


def test_norm_of_heads_in_place(typed: Typed) -> None:
    """Qwen3's head norms on a part of the fused projection: the other heads are left alone."""
    kernels, dtype = typed
    torch.manual_seed(1)
    qkv_TO, weight_D = torch.randn(6, 8 * 20).to(dtype), torch.randn(20).to(dtype)
    heads_THD, before_THD = qkv_TO.view(6, 8, 20), qkv_TO.clone().view(6, 8, 20)
    part_THD = heads_THD[:, 2:5]
    assert kernels.rms_norm(part_THD, weight_D, 1e-6, out=part_THD) is part_THD
    expected_THD = ReferenceKernels().rms_norm(before_THD[:, 2:5].contiguous(), weight_D, 1e-6)
    rounding = ROUNDING[dtype]
    assert_close(part_THD, expected_THD, rtol=2 * rounding, atol=rounding)
    assert torch.equal(heads_THD[:, :2], before_THD[:, :2])
    assert torch.equal(heads_THD[:, 5:], before_THD[:, 5:])


def test_out_between_other_features(typed: Typed) -> None:
    """Norm and gate into a slice of a wider tensor."""
    kernels, dtype = typed
    x_TE, weight_E = torch.randn(5, 34).to(dtype), torch.ones(34, dtype=dtype)
    for name in ("norm", "gate"):
        wide_TX = torch.full((5, 50), float("nan"), dtype=dtype)
        if name == "norm":
            out = kernels.rms_norm(x_TE, weight_E, 1e-5, out=wide_TX[:, 9:43])
            assert torch.equal(out, kernels.rms_norm(x_TE, weight_E, 1e-5))
        else:
            out = kernels.silu_mul(x_TE, out=wide_TX[:, 9:26])
            assert torch.equal(out, kernels.silu_mul(x_TE))
        assert wide_TX[:, :9].isnan().all() and wide_TX[:, 43:].isnan().all(), name


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_native_is_close_to_the_reference(level: NativeKernels, dtype: torch.dtype) -> None:
    """A fused operator that is consistent with itself and wrong."""
    torch.manual_seed(2)
    theirs = ReferenceKernels()
    x_TE, weight_E = (10 * torch.randn(67, 577)).to(dtype), torch.randn(577).to(dtype)
    rounding = ROUNDING[dtype]
    pairs = {
        "norm": [k.rms_norm(x_TE, weight_E, 1e-5) for k in (level, theirs)],
        "gate": [k.silu_mul(x_TE[:, :574]) for k in (level, theirs)],
    }
    for name, (ours, reference) in pairs.items():
        assert_close(ours, reference, rtol=3 * rounding, atol=rounding, msg=name)
    quantised = [k.rms_norm_quantize(x_TE, weight_E, 1e-5) for k in (level, theirs)]
    assert_close(quantised[0].scale_T1, quantised[1].scale_T1, rtol=2 * rounding, atol=0)
    assert (quantised[0].q_TK.int() - quantised[1].q_TK.int()).abs().max() <= 1


def test_threads_change_no_bit(level: NativeKernels) -> None:
    """Rows are divided among threads: a scratch row shared by two of them."""
    x_TE, weight_E = torch.randn(300, 577).bfloat16(), torch.randn(577).bfloat16()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        quantised = level.rms_norm_quantize(x_TE, weight_E, 1e-5)
        norm_TE = level.rms_norm(x_TE, weight_E, 1e-5)
        results.append((norm_TE, *quantised[:2], level.silu_mul(x_TE[:, :576])))
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0], strict=True))


def test_no_rows(kernels: KernelSet) -> None:
    """A route without tokens in a step."""
    weight_E = torch.ones(16)
    assert kernels.rms_norm_quantize(torch.zeros(0, 16), weight_E, 1e-5).q_TK.shape == (0, 16)
    residual_TE = torch.zeros(0, 16)
    out = kernels.rms_norm(torch.zeros(0, 16), weight_E, 1e-5, residual_TE=residual_TE)
    assert out.shape == (0, 16)
