"""Guards against attention that turns a broken model's NaN into plausible numbers."""

import pytest
import torch

from tokenrouter.kernels import NativeKernels
from tokenrouter.types import AttentionBatch


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "amx"])
@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("num_keys", [5, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_nan_scores_is_nan(
    native: NativeKernels, isa: str, num_queries: int, num_keys: int, dtype: torch.dtype
) -> None:
    """All scores NaN has no maximum, like a row that sees nothing: its head silently gave 0.

    Not of the reference: torch's own attention loses such rows below 16 keys.
    """
    kernels, best = native, native.isa
    native.limit_isa(isa)
    heads, dim = 4, 32
    kv_SPD = torch.randn(num_keys + 1, 2 * heads, dim).to(dtype)
    q_THD = torch.randn(num_queries, heads, dim).to(dtype)
    q_THD[-1, 2] = float("nan")
    batch = AttentionBatch(
        query_rows_T=torch.arange(num_queries),
        num_queries_B=torch.tensor([num_queries]),
        query_start_B=torch.tensor([num_keys - num_queries]),
        row_B=torch.tensor([0]),
        num_keys_B=torch.tensor([num_keys]),
        slots_RN=torch.arange(num_keys)[None].contiguous(),
    )
    plan = kernels.plan_attention(
        batch,
        num_slots=num_keys + 1,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        scale=0.2,
        dtype=dtype,
    )
    out_THD = kernels.attention(q_THD, kv_SPD, plan).view(num_queries, heads, dim)
    native.limit_isa(best)
    assert out_THD[-1, 2].isnan().all()
    out_THD[-1, 2] = 0
    assert out_THD.isfinite().all(), "other rows and heads are untouched"
