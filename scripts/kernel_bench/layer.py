"""What a layer of the engine calls: q, k, v with the norm, RoPE, KV write and attention, and all that follows it.

Native does each in one call, the reference in its operators one after the other. T tokens, E hidden size, I
intermediate, J = 2 I, O fused q, k, v, D head size, A attention outputs, S slots, P planes. Weights, and entries of the
KV arena, rotate over the layers.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from tokenrouter.kernels import KernelSet, LayerTail, Norm, PackedWeights, Product, TailWeights

from .attention import make_batch
from .case import NATIVE, Case
from .products import pack_copies, size_label, variants_of, weight_bytes_of
from .roofline import Work
from .shapes import Linear, Shapes, Sizes

EPS = 1e-5
Backends = Sequence[KernelSet]


def layer_cases(
    backends: Backends, shapes: Shapes, sizes: Sizes, *, cached: bool
) -> Iterator[Case]:
    """project (q, k, v with the norm) and layer_tail by every product, then attend; ``cached``: one layer's memory."""
    qkv = shapes.linears[0]
    norm = Norm(torch.rand(shapes.hidden).bfloat16(), EPS)
    for product in Product:
        yield from _project_cases(backends, product, norm, qkv, shapes, sizes, cached=cached)
    for product in Product:
        yield from _tail_cases(backends, product, norm, shapes, sizes, cached=cached)
    layers = 1 if cached else shapes.layers
    for batch in sizes.decode_batches:
        yield _attend_case(backends, shapes, layers, batch, 1, sizes.decode_context)
    for tokens in sizes.prefill_tokens:
        yield _attend_case(backends, shapes, layers, 1, tokens, tokens)


def _project_cases(
    backends: Backends,
    product: Product,
    norm: Norm,
    linear: Linear,
    shapes: Shapes,
    sizes: Sizes,
    *,
    cached: bool,
) -> Iterator[Case]:
    copies = 1 if cached else shapes.copies(linear)
    packed = _pack(backends, product, linear, copies)
    for num_rows in sizes.rows:
        x_TE = torch.randn(num_rows, shapes.hidden).bfloat16()
        out_TO = x_TE.new_empty(num_rows, linear.width)
        yield Case(
            operator="project",
            size=size_label(linear, f"normed, {product.value}, {num_rows} rows"),
            work=_work(product, (linear,), num_rows, linear.width, copies),
            calls={
                k.name: [
                    partial(
                        k.project,
                        product,
                        x_TE,
                        each,
                        norm=norm,
                        out=out_TO if k.name == NATIVE else None,
                    )
                    for each in packed[k.name]
                ]
                for k in backends
            },
        )


def _tail_cases(
    backends: Backends,
    product: Product,
    norm: Norm,
    shapes: Shapes,
    sizes: Sizes,
    *,
    cached: bool,
) -> Iterator[Case]:
    """Every implementation adds to hidden states of its own, call after call."""
    copies = 1 if cached else shapes.copies(*shapes.linears)
    tails = _tails(backends, product, norm, shapes, copies)
    for num_rows in sizes.rows:
        heads_TA = torch.randn(num_rows, shapes.heads * shapes.head_dim).bfloat16()
        x_TE = torch.randn(num_rows, shapes.hidden).bfloat16()
        calls = {}
        for name, each in tails.items():
            own_TE, qkv_TO = x_TE.clone(), x_TE.new_empty(num_rows, shapes.qkv)
            calls[name] = [partial(tail, heads_TA, own_TE, qkv_TO) for tail in each]
        yield Case(
            operator="layer_tail",
            size=f"{shapes.hidden} to {shapes.inter}, {product.value}, {num_rows} rows",
            work=_work(product, shapes.linears, num_rows, shapes.hidden + shapes.qkv, copies),
            calls=calls,
        )


def _tails(
    backends: Backends, product: Product, norm: Norm, shapes: Shapes, copies: int
) -> dict[str, list[LayerTail]]:
    """``copies`` of a layer's tail by every backend."""
    packed = [_pack(backends, product, linear, copies) for linear in shapes.linears]
    tails: dict[str, list[LayerTail]] = {}
    for k in backends:
        layers = zip(*(each[k.name] for each in packed), strict=True)
        tails[k.name] = [
            k.layer_tail(
                product,
                TailWeights(
                    out=out,
                    norm=norm,
                    gate_up=gate_up,
                    down=down,
                    next_norm=norm,
                    next_qkv=qkv,
                ),
            )
            for qkv, out, gate_up, down in layers
        ]
    return tails


def _pack(
    backends: Backends, product: Product, linear: Linear, copies: int
) -> dict[str, list[PackedWeights]]:
    """``copies`` of the weights in each backend's layout."""
    variants = variants_of(product.value, backends)
    return pack_copies({k.name: variants[k.name] for k in backends}, linear, copies)


def _work(
    product: Product, linears: Sequence[Linear], num_rows: int, width: int, copies: int
) -> Work:
    """Weights once, bf16 rows once, the bf16 result of ``width`` features once; what lies between stays in a cache."""
    num_weights = sum(linear.num_weights for linear in linears)
    weight_bytes = weight_bytes_of(product, num_weights)
    rows_bytes = 2 * num_rows * linears[0].num_inputs
    written_bytes, ops = 2 * num_rows * width, 2 * num_rows * num_weights
    int8 = product.quantizes_rows
    return Work(
        read_bytes=weight_bytes + rows_bytes,
        written_bytes=written_bytes,
        bf16_ops=0 if int8 else ops,
        int8_ops=ops if int8 else 0,
        working_set_bytes=copies * weight_bytes + rows_bytes + written_bytes,
    )


def _attend_case(
    backends: Backends,
    shapes: Shapes,
    layers: int,
    num_requests: int,
    num_queries: int,
    num_keys: int,
) -> Case:
    """The queries' tokens are their requests' last entries; the slots of a request lie in a row."""
    batch = make_batch(num_requests, num_queries, num_keys)
    num_tokens, num_slots, head_dim = (
        num_requests * num_queries,
        num_requests * num_keys + 1,
        shapes.head_dim,
    )
    qkv_TO = torch.randn(num_tokens, shapes.qkv).bfloat16()
    angles_TD = torch.rand(num_tokens, head_dim // 2).repeat(1, 2)
    cos_TD, sin_TD = angles_TD.cos().bfloat16(), angles_TD.sin().bfloat16()
    slots_T = batch.slots_RN[:, -num_queries:].flatten().contiguous()
    entries_SPD = torch.randn(num_slots, 2 * shapes.kv_heads, head_dim).bfloat16()
    entries_SPD[-1] = 0
    kv_LSPD = entries_SPD.repeat(layers, 1, 1, 1)
    calls = {}
    for k in backends:
        plan = k.plan_attention(
            batch,
            num_slots=num_slots,
            num_heads=shapes.heads,
            num_kv_heads=shapes.kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            dtype=qkv_TO.dtype,
        )
        out_TA = qkv_TO.new_empty(num_tokens, shapes.heads * head_dim)
        calls[k.name] = [
            partial(k.attend, qkv_TO, cos_TD, sin_TD, slots_T, kv_SPD, plan, out=out_TA)
            for kv_SPD in kv_LSPD
        ]
    title = f"prefill of {num_keys}" if num_queries > 1 else f"decode {num_requests} x {num_keys}"
    work = _attend_work(shapes, layers, num_requests, num_queries, num_keys)
    return Case(operator="attend", size=title, work=work, calls=calls)


def _attend_work(
    shapes: Shapes, layers: int, num_requests: int, num_queries: int, num_keys: int
) -> Work:
    """Earlier entries are read once and new ones written once; two products per query head and visible key."""
    num_tokens, num_entries = num_requests * num_queries, num_requests * num_keys
    entry_bytes = 2 * 2 * shapes.kv_heads * shapes.head_dim
    other_bytes = 2 * num_tokens * (shapes.qkv + 2 * shapes.head_dim) + 8 * (
        num_tokens + num_entries
    )
    out_bytes = 2 * num_tokens * shapes.heads * shapes.head_dim
    visible = num_queries * num_keys - num_queries * (num_queries - 1) // 2
    return Work(
        read_bytes=(num_entries - num_tokens) * entry_bytes + other_bytes,
        written_bytes=num_tokens * entry_bytes + out_bytes,
        bf16_ops=4 * num_requests * visible * shapes.heads * shapes.head_dim,
        working_set_bytes=layers * num_entries * entry_bytes + other_bytes + out_bytes,
    )
