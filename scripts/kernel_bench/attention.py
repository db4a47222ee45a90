"""Attention of a decode step and of a prompt that runs in one piece.

B requests, T tokens, H query heads, G key heads, D head size, K keys of a request, L layers, S slots, P = 2 G planes.
Every request's slots lie in a row, as the pool gives them to new requests; the arenas of the layers rotate.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels import KernelSet
from tokenrouter.types import AttentionBatch

from .case import LIBRARY, Call, Case
from .roofline import Work
from .shapes import Shapes, Sizes


def attention_cases(
    backends: Sequence[KernelSet], shapes: Shapes, sizes: Sizes, *, cached: bool
) -> Iterator[Case]:
    """Decode and prefill, each without and with ``received``; ``cached``: one layer's arena."""
    layers = 1 if cached else shapes.layers
    for batch in sizes.decode_batches:
        yield from _cases(backends, shapes, layers, batch, 1, sizes.decode_context, 1)
    for tokens in sizes.prefill_tokens:
        yield from _cases(backends, shapes, layers, 1, tokens, tokens, sizes.observe_queries)


def _cases(
    backends: Sequence[KernelSet],
    shapes: Shapes,
    layers: int,
    num_requests: int,
    num_queries: int,
    num_keys: int,
    observe_queries: int,
) -> Iterator[Case]:
    q_THD = torch.randn(num_requests * num_queries, shapes.heads, shapes.head_dim).bfloat16()
    entries_SPD = torch.randn(num_requests * num_keys + 1, 2 * shapes.kv_heads, shapes.head_dim)
    entries_SPD[-1] = 0
    kv_LSPD = entries_SPD.bfloat16().repeat(layers, 1, 1, 1)
    title = f"prefill of {num_keys}" if num_queries > 1 else f"decode {num_requests} x {num_keys}"
    for received in (False, True):
        calls: dict[str, Sequence[Call]] = {
            k.name: _calls(k, q_THD, kv_LSPD, num_requests, received, observe_queries)
            for k in backends
        }
        if not received:
            calls[LIBRARY] = _library_calls(q_THD, kv_LSPD, num_requests)
        label = f", received of the last {observe_queries}" if received else ""
        yield Case(
            operator="attention",
            size=title + label,
            work=_work(q_THD, kv_LSPD, num_requests, received=received),
            calls=calls,
        )


def _calls(
    kernels: KernelSet,
    q_THD: Tensor,
    kv_LSPD: Tensor,
    num_requests: int,
    received: bool,
    observe_queries: int,
) -> list[Call]:
    """One per layer, on one plan."""
    num_slots, num_heads, head_dim = kv_LSPD.shape[1], q_THD.shape[1], q_THD.shape[2]
    plan = kernels.plan_attention(
        make_batch(num_requests, q_THD.shape[0] // num_requests, (num_slots - 1) // num_requests),
        num_slots=num_slots,
        num_heads=num_heads,
        num_kv_heads=kv_LSPD.shape[2] // 2,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=q_THD.dtype,
        num_observed_B=torch.full((num_requests,), observe_queries),
    )
    run: Callable[..., Tensor] = kernels.attention
    sums = torch.zeros(plan.received_size) if received else None
    out_TA = q_THD.new_empty(q_THD.shape[0], num_heads * head_dim)
    return [partial(run, q_THD, kv_SPD, plan, out=out_TA, received=sums) for kv_SPD in kv_LSPD]


def make_batch(num_requests: int, num_queries: int, num_keys: int) -> AttentionBatch:
    """Requests that ask with their last ``num_queries`` tokens, slots in a row."""

    def each(value: int) -> Tensor:
        return torch.full((num_requests,), value)

    return AttentionBatch(
        query_rows_T=torch.arange(num_requests * num_queries),
        num_queries_B=each(num_queries),
        query_start_B=each(num_keys - num_queries),
        row_B=torch.arange(num_requests),
        num_keys_B=each(num_keys),
        slots_RN=torch.arange(num_requests * num_keys).view(num_requests, num_keys),
    )


def _library_calls(q_THD: Tensor, kv_LSPD: Tensor, num_requests: int) -> list[Call]:
    """``scaled_dot_product_attention`` on keys and values gathered for it beforehand, all requests in one call."""
    q_BHTD = q_THD.unflatten(0, (num_requests, -1)).transpose(1, 2).contiguous()
    entries_LBKPD = kv_LSPD[:, :-1].unflatten(1, (num_requests, -1))
    keys_LBGKD, values_LBGKD = (
        planes.transpose(2, 3).contiguous() for planes in entries_LBKPD.chunk(2, dim=3)
    )
    causal = q_BHTD.shape[2] > 1
    return [
        partial(_sdpa, q_BHTD, keys, values, causal)
        for keys, values in zip(keys_LBGKD, values_LBGKD, strict=True)
    ]


def _sdpa(q_BHTD: Tensor, keys_BGKD: Tensor, values_BGKD: Tensor, causal: bool) -> Tensor:
    result_BHTD = F.scaled_dot_product_attention(
        q_BHTD,
        keys_BGKD,
        values_BGKD,
        is_causal=causal,
        enable_gqa=q_BHTD.shape[1] != keys_BGKD.shape[1],
    )
    return result_BHTD.transpose(1, 2).flatten(0, 1).flatten(1)


def _work(q_THD: Tensor, kv_LSPD: Tensor, num_requests: int, *, received: bool) -> Work:
    """Two products per query head and visible key; entries, queries and slots once."""
    layers, num_slots, planes, head_dim = kv_LSPD.shape
    num_keys, num_queries = (num_slots - 1) // num_requests, q_THD.shape[0] // num_requests
    visible = num_queries * num_keys - num_queries * (num_queries - 1) // 2
    entry_bytes = num_requests * num_keys * planes * head_dim * 2
    other_bytes = q_THD.numel() * 2 + num_requests * num_keys * 8
    written_bytes = q_THD.numel() * 2 + (num_requests * num_keys * 4 if received else 0)
    return Work(
        read_bytes=entry_bytes + other_bytes,
        written_bytes=written_bytes,
        bf16_ops=4 * num_requests * visible * q_THD.shape[1] * head_dim,
        working_set_bytes=layers * entry_bytes + other_bytes + written_bytes,
    )
