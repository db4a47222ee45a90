"""Guards the 4-bit product: codes that mean what the format says, and the exact int8 product of what they expand to.

T rows, K inputs, N outputs, G groups.
"""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.kernels.conftest import LEVELS, NATIVE_DTYPES
from tokenrouter.kernels import KernelSet, NativeKernels, QuantizedRows, ReferenceKernels
from tokenrouter.kernels.int4_matmul.reference import GROUP, Codes, expand, quantize_weight

SHAPES = (
    (1, 1, 1),
    (1, 97, 53),
    (3, 33, 2),
    (1, 1536, 576),
    (40, 31, 129),
    (37, 7, 5000),
    (70, 192, 1536),
    (40, 300, 4001),  # more than one group of panels
)


def values(codes: Codes, num_inputs: int) -> Tensor:
    """What codes stand for, number by number from the definition, in units of the scale: int64 [N, K]."""
    step_NK = codes.step_NG.long().repeat_interleave(GROUP, 1)
    offset_NK = codes.offset_NG.long().repeat_interleave(GROUP, 1)
    return (codes.code_NC.long() * step_NK + offset_NK)[:, :num_inputs]


def exact(rows: QuantizedRows, weight_NK: Tensor) -> Tensor:
    """The product, whose sums double holds exactly."""
    codes = quantize_weight(weight_NK)
    sums_TN = rows.q_TK.double() @ values(codes, weight_NK.shape[1]).double().t()
    return sums_TN * codes.scale_N.double() * rows.scale_T1.double()


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_exact_sums(kernels: KernelSet, shape: tuple[int, int, int]) -> None:
    """Nibbles in another order, a step or an offset of another group, half a tile, codes beyond K that count."""
    num_rows, num_out, num_in = shape
    torch.manual_seed(num_in)
    weight_NK = torch.randn(num_out, num_in) * torch.logspace(-2, 1, num_out)[:, None]
    weight_NK += torch.linspace(-3, 3, num_in)  # groups with offsets of their own
    rows = kernels.quantize_rows(torch.randn(num_rows, num_in) * 5)
    result_TN = kernels.int4_matmul(rows, kernels.pack_int4(weight_NK, None))
    expected_TN = exact(rows, weight_NK)
    atol = 1e-6 * float(expected_TN.abs().max())
    assert_close(result_TN.double(), expected_TN, rtol=3e-7, atol=atol)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_processor_gives_the_references_bits(
    native: NativeKernels, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """A result that depends on the machine, so that a cached decision or a table cannot be repeated elsewhere."""
    num_rows, num_out, num_in = shape
    torch.manual_seed(num_in)
    weight_NK, bias_N = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
    reference = ReferenceKernels()
    rows = reference.quantize_rows(torch.randn(num_rows, num_in).to(dtype))
    expected_TN = reference.int4_matmul(rows, reference.pack_int4(weight_NK, bias_N))
    packed = native.pack_int4(weight_NK, bias_N)
    for name in LEVELS:
        native.limit_isa(name)
        assert torch.equal(native.int4_matmul(rows, packed), expected_TN), name


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), [(192, 576), (67, 83)])
def test_a_token_has_the_same_bits_in_any_batch(
    kernels: KernelSet, dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    """Panels that are expanded for few rows and panels that are expanded for many."""
    torch.manual_seed(5)
    packed = kernels.pack_int4(torch.randn(num_out, num_in).to(dtype), None)
    rows = kernels.quantize_rows(torch.randn(300, num_in).to(dtype))

    def product(part: slice) -> Tensor:
        part_rows = QuantizedRows(rows.q_TK[part], rows.scale_T1[part], dtype)
        return kernels.int4_matmul(part_rows, packed)

    alone_TN = torch.cat([product(slice(t, t + 1)) for t in range(9)])
    for size in (2, 3, 17, 32, 33, 64, 100, 300):
        assert torch.equal(product(slice(0, size))[:9], alone_TN[:size]), f"{size} rows"
    assert torch.equal(product(slice(0, 300))[299:], product(slice(299, 300)))


@pytest.mark.parametrize("num_in", [32, 64, 1537])
def test_extreme_codes(kernels: KernelSet, num_in: int) -> None:
    """A code times a step that leaves its byte; -128; sums of 127 by 127 that leave 16 bits."""
    value_K = (torch.arange(num_in) % 15 * 17 - 127).float()
    value_K[GROUP - 1 :: GROUP] = 127
    weight_NK = torch.stack([value_K, -value_K, value_K.sign(), torch.ones(num_in)]).repeat(9, 1)
    codes = quantize_weight(weight_NK)
    assert int(codes.step_NG.max()) == 17 and int((codes.step_NG[0] * 14).max()) == 238
    x_TK = torch.stack([value_K.sign(), -value_K.sign(), torch.ones(num_in)])
    rows = kernels.quantize_rows(x_TK)
    assert (rows.q_TK.abs() == 127).all()
    result_TN = kernels.int4_matmul(rows, kernels.pack_int4(weight_NK, None))
    assert_close(result_TN.double(), exact(rows, weight_NK), rtol=1e-6, atol=1e-6 * num_in)


def test_codes_are_within_their_bits() -> None:
    """A value beyond int8, which wraps round; padding that widens the last group."""
    torch.manual_seed(0)
    for scale in (0.0, 1e-40, 1.0, 1e30):
        for num_in in (1, 31, 77):
            weight_NK = torch.distributions.StudentT(2.0).sample((500, num_in)) * scale
            codes = quantize_weight(weight_NK)
            assert int(codes.code_NC.max()) <= 15 and int(codes.step_NG.max()) <= 17
            value_NK = values(codes, codes.code_NC.shape[1])
            assert int(value_NK.abs().max()) <= 127
            assert torch.equal(expand(codes, num_in).long(), value_NK[:, :num_in])
            wide_NK = weight_NK / codes.scale_N[:, None]
            error_NK = (value_NK[:, :num_in] - wide_NK).abs()
            half_NK = codes.step_NG.float().repeat_interleave(GROUP, 1)[:, :num_in] / 2
            # The two ends of a range may lie beyond the last code: by what the step below is short of it.
            assert bool((error_NK <= half_NK + 8.6).all())
    assert torch.equal(quantize_weight(torch.ones(1, 33)).step_NG, torch.zeros(1, 2).byte())


def test_rows_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows lost or doubled where one part of a large matrix ends."""
    weight_NK = torch.randn(11, 70)
    whole = quantize_weight(weight_NK)
    monkeypatch.setattr("tokenrouter.kernels.int4_matmul.reference.WEIGHTS_AT_ONCE", 200)
    for one, other in zip(quantize_weight(weight_NK), whole, strict=True):
        assert torch.equal(one, other)


def test_weights_on_an_integer_grid_come_back() -> None:
    """Codes around another middle, steps that are only near the best ones."""
    generator = torch.Generator().manual_seed(1)
    code_NGK = torch.randint(0, 16, (64, 6, GROUP), generator=generator)
    code_NGK[:, :, 0], code_NGK[:, :, 1] = 0, 15
    step_NG1 = torch.randint(1, 9, (64, 6, 1), generator=generator)
    value_NK = (code_NGK * step_NG1 - step_NG1 * 8 + 2).flatten(1)
    value_NK[:, 64:96] = torch.linspace(-127, 128, 16).round().repeat(2).clamp(-127, 127)
    weight_NK = value_NK * 0.25
    found_NK = expand(quantize_weight(weight_NK), value_NK.shape[1])
    on_grid = [*range(64), *range(96, 192)]
    assert torch.equal(found_NK[:, on_grid].long(), value_NK[:, on_grid].long())


def test_gaussian_weights_lose_less_than_symmetric_codes() -> None:
    """The reason for asymmetric groups, and for integer steps: measured, not believed."""
    weight_NK = torch.randn(512, 576, generator=torch.Generator().manual_seed(2))
    group_NGK = weight_NK.unflatten(1, (-1, GROUP))
    codes = quantize_weight(weight_NK)
    ours_NK = expand(codes, 576) * codes.scale_N[:, None]
    step_NG1 = group_NGK.gather(2, group_NGK.abs().argmax(2, keepdim=True)) / -8
    symmetric_NK = ((group_NGK / step_NG1).round().clamp(-8, 7) * step_NG1).flatten(1)
    low_NG1 = group_NGK.amin(2, keepdim=True)
    step_NG1 = (group_NGK.amax(2, keepdim=True) - low_NG1) / 15
    floats_NK = (((group_NGK - low_NG1) / step_NG1).round() * step_NG1 + low_NG1).flatten(1)

    def error(found_NK: Tensor) -> float:
        return float((found_NK - weight_NK).norm() / weight_NK.norm())

    assert error(ours_NK) < 0.93 * error(symmetric_NK)
    assert error(ours_NK) < 1.01 * error(floats_NK)


def test_zero_rows_and_zero_channels(kernels: KernelSet) -> None:
    """A dead channel or an all-zero token gives NaN."""
    weight_NK, x_TK = torch.randn(16, 40), torch.randn(4, 40)
    weight_NK[5], x_TK[2], bias_N = 0, 0, torch.arange(16.0)
    rows = kernels.quantize_rows(x_TK)
    result_TN = kernels.int4_matmul(rows, kernels.pack_int4(weight_NK, bias_N))
    assert result_TN.isfinite().all() and torch.equal(result_TN[2], bias_N)
    assert torch.equal(result_TN[:, 5], torch.full((4,), 5.0))


def test_packing_leaves_the_weights_alone(kernels: KernelSet) -> None:
    """In-place rounding of weights that the high path shares."""
    for shape in ((24, 16), (24, 64)):
        weight_NK, bias_N = torch.randn(shape), torch.randn(24)
        copies = weight_NK.clone(), bias_N.clone()
        kernels.pack_int4(weight_NK, bias_N)
        assert torch.equal(weight_NK, copies[0]) and torch.equal(bias_N, copies[1])
