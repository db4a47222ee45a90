"""Guards rotation and the KV write against transformers' own rotation."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.kernels.conftest import Typed
from tokenrouter.kernels import Int8Entries, KernelSet, NativeKernels, ReferenceKernels
from tokenrouter.kernels.rope_store_kv.reference import signed_sin, spread

NUM_SLOTS, HEAD_DIM = 40, 16


def angles(positions_T: Tensor) -> tuple[Tensor, Tensor]:
    inv_freq = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle_TD = torch.outer(positions_T.float(), inv_freq).repeat(1, 2)
    return angle_TD.cos(), angle_TD.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_equals_transformers(
    kernels: KernelSet, dtype: torch.dtype, num_heads: int, num_kv_heads: int, num_tokens: int
) -> None:
    """Interleaved instead of half-split rotation, the wrong sign, values rotated too."""
    torch.manual_seed(0)
    positions_T = torch.randperm(500)[:num_tokens]
    slots_T = torch.randperm(NUM_SLOTS)[:num_tokens]
    cos_TD, sin_TD = angles(positions_T)
    qkv_TO = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM).to(dtype)
    q_THD, k_TGD, v_TGD = (
        qkv_TO.clone()
        .unflatten(-1, (-1, HEAD_DIM))
        .split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    )
    expected_q, expected_k = apply_rotary_pos_emb(
        q_THD, k_TGD, cos_TD.to(dtype), sin_TD.to(dtype), unsqueeze_dim=1
    )
    kv_SPD = torch.full((NUM_SLOTS + 1, 2 * num_kv_heads, HEAD_DIM), float("nan"), dtype=dtype)
    before_TO = qkv_TO.clone()
    rotated_THD = kernels.rope_store_kv(
        qkv_TO, cos_TD.to(dtype), signed_sin(sin_TD).to(dtype), slots_T, kv_SPD
    )
    assert torch.equal(qkv_TO, before_TO), "the input was modified"
    tolerance = (
        {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.03}
    )
    assert_close(rotated_THD, expected_q, **tolerance)
    assert_close(kv_SPD[slots_T, :num_kv_heads], expected_k, **tolerance)
    assert torch.equal(kv_SPD[slots_T, num_kv_heads:], v_TGD), "values are copied, not rotated"
    untouched_S = torch.ones(NUM_SLOTS + 1, dtype=torch.bool)
    untouched_S[slots_T] = False
    assert kv_SPD[untouched_S].isnan().all(), "a slot of another token was written"


def test_position_zero_rotates_nothing(kernels: KernelSet) -> None:
    """Positions that start at 1."""
    torch.manual_seed(1)
    cos_TD, sin_TD = angles(torch.zeros(1))
    qkv_TO = torch.randn(1, 4 * HEAD_DIM)
    kv_SPD = torch.zeros(3, 2, HEAD_DIM)
    q_THD = kernels.rope_store_kv(qkv_TO, cos_TD, signed_sin(sin_TD), torch.tensor([1]), kv_SPD)
    assert torch.equal(q_THD.flatten(), qkv_TO[0, : 2 * HEAD_DIM])
    assert torch.equal(kv_SPD[1].flatten(), qkv_TO[0, 2 * HEAD_DIM :])


def test_scores_depend_on_the_distance_alone(kernels: KernelSet) -> None:
    """Query and key rotated differently: what RoPE is for no longer holds."""
    torch.manual_seed(2)
    q_D, k_D = torch.randn(HEAD_DIM), torch.randn(HEAD_DIM)
    scores = []
    for shift in (0, 7, 100):
        cos_TD, sin_TD = angles(torch.tensor([5 + shift, 2 + shift]))
        qkv_TO = torch.stack((torch.cat((q_D, k_D, k_D)), torch.cat((q_D, k_D, k_D))))
        kv_SPD = torch.zeros(3, 2, HEAD_DIM)
        slots_T, sin_TD = torch.tensor([0, 1]), signed_sin(sin_TD)
        q_THD = kernels.rope_store_kv(qkv_TO, cos_TD, sin_TD, slots_T, kv_SPD)
        scores.append(float(q_THD[0, 0] @ kv_SPD[1, 0]))
    assert_close(torch.tensor(scores), torch.full((3,), scores[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [2, 6, 20, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 67])
def test_native_equals_the_reference(level: NativeKernels, head_dim: int, num_tokens: int) -> None:
    """A half that is no multiple of a vector; a projection that is a slice of a wider tensor; threads."""
    torch.manual_seed(head_dim)
    heads, groups = 3, 2
    slots_T = torch.randperm(80)[:num_tokens]
    for dtype in (torch.float32, torch.bfloat16):
        wide_TX = torch.randn(num_tokens, (heads + 2 * groups) * head_dim + 11).to(dtype)
        qkv_TO = wide_TX[:, 7:-4]
        cos_TD, sin_TD = torch.randn(2, num_tokens, head_dim).to(dtype)
        results = []
        for kernels, threads in ((ReferenceKernels(), 1), (level, 1), (level, 2), (level, 3)):
            torch.set_num_threads(threads)
            kv_SPD = torch.full((80, 2 * groups, head_dim), 9.0).to(dtype)
            plain_TO = qkv_TO.contiguous() if kernels.name == "reference" else qkv_TO
            q_THD = kernels.rope_store_kv(plain_TO, cos_TD, sin_TD, slots_T, kv_SPD)
            results.append((q_THD, kv_SPD))
        half = dtype == torch.bfloat16
        for ours, theirs in zip(results[1], results[0], strict=True):
            assert_close(ours, theirs, rtol=2**-7 if half else 1e-5, atol=2**-6 if half else 1e-5)
        values_TGD = qkv_TO.unflatten(1, (heads + 2 * groups, head_dim))[:, heads + groups :]
        assert torch.equal(results[1][1][slots_T, groups:], values_TGD)
        for result in results[2:]:
            assert all(torch.equal(x, y) for x, y in zip(result, results[1], strict=True))


@pytest.mark.parametrize("head_dim", [20, 64])
def test_an_int8_store(typed: Typed, head_dim: int) -> None:
    """A scale per token instead of per head, values quantised with the keys' scale, another slot written."""
    kernels, dtype = typed
    torch.manual_seed(3)
    qkv_TO = torch.randn(5, 7 * head_dim).to(dtype)
    qkv_TO[:, -head_dim:] *= 100
    cos_TD, sin_TD = torch.randn(2, 5, head_dim).to(dtype)
    slots_T = torch.tensor([8, 0, 3, 11, 4])
    plain_SPD = torch.zeros(13, 4, head_dim, dtype=dtype)
    expected_THD = kernels.rope_store_kv(qkv_TO, cos_TD, sin_TD, slots_T, plain_SPD)
    kv_SPD = torch.full((4, 4, head_dim), 77.0).to(dtype)  # slots 0 .. 3; int8 from slot 4 on
    int8 = Int8Entries(
        torch.full((9, 4, head_dim), 99, dtype=torch.int8), torch.full((9, 4), float("nan"))
    )
    out_THD = torch.empty(5, 3, head_dim, dtype=dtype)
    given = kernels.rope_store_kv(qkv_TO, cos_TD, sin_TD, slots_T, kv_SPD, int8=int8, out=out_THD)
    assert given is out_THD and torch.equal(out_THD, spread(expected_THD))
    plain_SPD[:, :2] = spread(plain_SPD[:, :2])
    quantised_N = slots_T[slots_T >= 4]
    rows = ReferenceKernels().quantize_rows(plain_SPD[quantised_N].flatten(0, 1))
    assert torch.equal(int8.q_SPD[quantised_N - 4].flatten(0, 1), rows.q_TK)
    assert torch.equal(int8.scale_SP[quantised_N - 4].flatten(), rows.scale_T1.flatten().float())
    untouched_S = torch.ones(13, dtype=torch.bool)
    untouched_S[slots_T] = False
    assert (kv_SPD[untouched_S[:4]] == 77).all()
    assert torch.equal(kv_SPD[[0, 3]], plain_SPD[[0, 3]])
    assert (int8.q_SPD[untouched_S[4:]] == 99).all()
    assert int8.scale_SP[untouched_S[4:]].isnan().all()


@pytest.mark.parametrize("head_dim", [1, 6, 20, 64, 80, 96, 128])
def test_spreading_keeps_scores_and_levels_channels(head_dim: int) -> None:
    """A matrix that is not orthonormal, blocks that overlap, an outlier that stays where it was."""
    torch.manual_seed(head_dim)
    q_TD, k_TD = torch.randn(2, 50, head_dim)
    block = head_dim & -head_dim
    k_TD[:, 0] += 30
    assert_close(spread(q_TD) @ spread(k_TD).t(), q_TD @ k_TD.t(), rtol=1e-4, atol=1e-3)
    assert_close(spread(spread(k_TD)), k_TD, rtol=1e-5, atol=1e-4)
    largest = spread(k_TD)[:, :block].abs().amax(-1)
    assert (largest <= 30 / block**0.5 + 6).all()
