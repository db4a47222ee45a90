"""The operators without products: norms, quantisation, gate, tokens from logits, routers' scores, RoPE and write of KV.

T rows, K features, E hidden size, O fused q, k, v, L layers, S slots, P planes, D head size. In a forward the rows come
from the operator before and lie in a cache; so they do here. Entries of the KV arena rotate over the layers.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenrouter.kernels import BinRows, Cut, KernelSet, QuantizedRows, RouterTable

from .case import NATIVE, Case
from .roofline import Work
from .shapes import Shapes, Sizes

EPS = 1e-5
MAX_LOGITS = 64  # rows of a step that are due at once
Backends = Sequence[KernelSet]
Operator = Callable[[KernelSet, Tensor, Any], object]


def row_cases(backends: Backends, shapes: Shapes, sizes: Sizes, *, cached: bool) -> Iterator[Case]:
    """The row-wise operators, then rope_store_kv; ``cached``: one layer's arena."""
    norm_E = torch.rand(shapes.hidden).bfloat16()
    operators: dict[str, tuple[int, int | None, Operator]] = {
        "rms_norm": (
            shapes.hidden,
            shapes.hidden,
            lambda k, x_TE, out: k.rms_norm(x_TE, norm_E, EPS, out=out),
        ),
        "rms_norm_quantize": (
            shapes.hidden,
            None,
            lambda k, x_TE, out: k.rms_norm_quantize(x_TE, norm_E, EPS, out=out),
        ),
        "quantize_rows": (
            shapes.inter,
            None,
            lambda k, x_TI, out: k.quantize_rows(x_TI, out=out),
        ),
        "silu_mul": (
            2 * shapes.inter,
            shapes.inter,
            lambda k, x_TJ, out: k.silu_mul(x_TJ, out=out),
        ),
    }
    for name, (width, out_width, run) in operators.items():
        for num_rows in sizes.rows:
            yield _row_case(name, num_rows, width, out_width, run, backends)
    for num_rows in sizes.rows:
        if num_rows <= MAX_LOGITS:
            yield from _token_cases(backends, shapes, num_rows)
    for num_rows in sizes.rows:
        yield _score_case(backends, shapes, num_rows)
    for num_rows in sizes.rows:
        yield _rope_case(backends, shapes, num_rows, 1 if cached else shapes.layers)


def _row_case(
    name: str,
    num_rows: int,
    width: int,
    out_width: int | None,
    run: Operator,
    backends: Backends,
) -> Case:
    """``out_width`` None: the result is quantised rows. Only native is given ``out``: torch is faster without."""
    x_TK = torch.randn(num_rows, width).bfloat16()
    out: Tensor | QuantizedRows
    if out_width is None:
        out = QuantizedRows.empty(num_rows, width, x_TK.dtype)
        written_bytes = num_rows * (width + 2)
    else:
        out = x_TK.new_empty(num_rows, out_width)
        written_bytes = num_rows * out_width * 2
    read_bytes = x_TK.numel() * 2
    return Case(
        operator=name,
        size=f"{num_rows} rows of {width}",
        work=Work(
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            working_set_bytes=read_bytes + written_bytes,
        ),
        calls={
            k.name: [partial(run, k, x_TK, out if k.name == NATIVE else None)] for k in backends
        },
    )


def _token_cases(backends: Backends, shapes: Shapes, num_rows: int) -> Iterator[Case]:
    """The greedy tokens of a step, random ones, then those of the likeliest."""
    x_TV = torch.randn(num_rows, shapes.vocab).bfloat16()
    inverse_temperature_T = torch.ones(num_rows)
    uniform_T = torch.rand(num_rows, dtype=torch.float64)
    random = (x_TV, inverse_temperature_T, uniform_T)
    read_bytes = x_TV.numel() * 2
    for name, options, arguments in (
        ("row_max", "", (x_TV,)),
        ("draw", "", random),
        ("draw_cut", ", top_p 0.9", (*random, _cut(num_rows, top_p=0.9))),
        ("draw_cut", ", top_k 50", (*random, _cut(num_rows, top_k=50))),
    ):
        yield Case(
            operator=name,
            size=f"{num_rows} rows of {shapes.vocab}{options}",
            work=Work(read_bytes=read_bytes, written_bytes=0, working_set_bytes=read_bytes),
            calls={k.name: [partial(getattr(k, name), *arguments)] for k in backends},
        )


def _cut(num_rows: int, *, top_k: int = 0, top_p: float = 1.0) -> Cut:
    return Cut(
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p, dtype=torch.float64),
        torch.zeros(num_rows, dtype=torch.float64),
    )


def _score_case(backends: Backends, shapes: Shapes, num_rows: int) -> Case:
    """The learned router that comes with the package: 7 features of 25 bins, a row per id, 64 hidden units."""
    features, bins, hidden = 7, 25, 64
    first_id = features * bins
    table = RouterTable(
        bins=BinRows(
            edges_FE=torch.randn(features, bins).sort()[0],
            starts_F=torch.arange(features) * bins,
            lasts_F=torch.full((features,), bins - 1),
            id_rows_I=torch.tensor([first_id]),
        ),
        table_KC=torch.randn(first_id + 1 + 2 * (shapes.vocab + 1), hidden + 2),
        head_PH=torch.randn(2, hidden),
        vocab_row=first_id + 1,
        previous_column=features - 1,
    )
    values_TF = torch.randn(features, num_rows).t()
    values_TF[:, -1] = torch.randint(shapes.vocab, (num_rows,))
    tokens = values_TF, torch.randint(shapes.vocab, (num_rows,)), torch.arange(num_rows) % 2
    looked_up_bytes = num_rows * (features + 3) * table.table_KC.shape[1] * 4
    return Case(
        operator="router_mlp",
        size=f"{num_rows} tokens",
        work=Work(
            read_bytes=looked_up_bytes + num_rows * (features * 4 + 16),
            written_bytes=num_rows * 4,
            working_set_bytes=looked_up_bytes,
        ),
        calls={k.name: [partial(k.router_mlp, *tokens, table)] for k in backends},
    )


def _rope_case(backends: Backends, shapes: Shapes, num_rows: int, num_arenas: int) -> Case:
    """Tokens of a forward take neighbouring slots of every layer's arena."""
    planes, head_dim = 2 * shapes.kv_heads, shapes.head_dim
    qkv_TO = torch.randn(num_rows, shapes.qkv).bfloat16()
    angles_TD = torch.rand(num_rows, head_dim // 2).repeat(1, 2)
    cos_TD, sin_TD = angles_TD.cos().bfloat16(), angles_TD.sin().bfloat16()
    kv_LSPD = torch.zeros(num_arenas, num_rows + 1, planes, head_dim, dtype=torch.bfloat16)
    slots_T, out_THD = torch.arange(num_rows), qkv_TO.new_empty(num_rows, shapes.heads, head_dim)
    entry_bytes = num_rows * planes * head_dim * 2
    read_bytes = (qkv_TO.numel() + 2 * cos_TD.numel()) * 2 + num_rows * 8
    written_bytes = out_THD.numel() * 2 + entry_bytes
    return Case(
        operator="rope_store_kv",
        size=f"{num_rows} rows of {shapes.qkv}",
        work=Work(
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            working_set_bytes=read_bytes + written_bytes + (num_arenas - 1) * entry_bytes,
        ),
        calls={
            k.name: [
                partial(
                    k.rope_store_kv,
                    qkv_TO,
                    cos_TD,
                    sin_TD,
                    slots_T,
                    kv_SPD,
                    out=out_THD if k.name == NATIVE else None,
                )
                for kv_SPD in kv_LSPD
            ]
            for k in backends
        },
    )
