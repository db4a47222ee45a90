"""Requests in an arena full of NaN, and dense attention over them in double: what attention is tested against.

T tokens, H query heads, G key heads, D head size, S slots, P planes, K keys of a request, R rows of the slot table.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.testing import assert_close

from tokenrouter.kernels import AttentionPlan, Int8Entries, KernelSet
from tokenrouter.kernels.rope_store_kv.reference import store_int8
from tokenrouter.types import AttentionBatch

SCALE = 0.3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request: it holds ``num_keys`` entries and asks with its last ``num_queries`` tokens.

    ``kept`` are the original positions of its entries when some were evicted. ``gap`` moves its queries on, away from
    the entries.
    """

    num_keys: int
    num_queries: int = 1
    scattered: bool = False
    kept: tuple[int, ...] | None = None
    gap: int = 0

    @property
    def query_start(self) -> int:
        last = self.kept[-1] if self.kept else self.num_keys - 1
        return last + 1 - self.num_queries + self.gap


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Query heads, key heads and their size."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """A forward's queries, arena and requests; every slot but the requests' own and the null slot holds NaN."""

    q_THD: Tensor
    kv_SPD: Tensor
    batch: AttentionBatch
    heads: Heads
    int8: Int8Entries | None = None
    read_SPD: Tensor | None = None  # what int8 entries stand for, at the slots of
    read_table_RN: Tensor | None = None

    def entries(self, row: int, num_keys: int) -> Tensor:
        """What attention reads of a row: int8 ones as the numbers that they stand for."""
        if self.read_SPD is None or self.read_table_RN is None:
            return self.kv_SPD[self.batch.slots_RN[row, :num_keys]]
        return self.read_SPD[self.read_table_RN[row, :num_keys]]

    def to(self, dtype: torch.dtype) -> "Step":
        """The same with queries and entries rounded to ``dtype``."""
        q_THD, kv_SPD = self.q_THD.to(dtype), self.kv_SPD.to(dtype)
        return Step(q_THD=q_THD, kv_SPD=kv_SPD, batch=self.batch, heads=self.heads)

    def in_int8(self, share: float) -> "Step":
        """The same with that share of the entries in int8, behind the null slot."""
        num_full = len(self.kv_SPD)
        is_int8_S = torch.rand(num_full, generator=torch.Generator().manual_seed(2)) < share
        is_int8_S &= self.kv_SPD.isfinite().all(-1).all(-1)
        is_int8_S[-1] = False
        moved_J = is_int8_S.nonzero().flatten()
        int8 = Int8Entries(
            torch.full((num_full + 5, *self.kv_SPD.shape[1:]), 99, dtype=torch.int8),
            torch.full((num_full + 5, self.kv_SPD.shape[1]), float("nan")),
        )
        place_S = torch.randperm(num_full + 5, generator=torch.Generator().manual_seed(3))[
            :num_full
        ]
        store_int8(self.kv_SPD[moved_J], place_S[moved_J], int8)
        read_SPD, rest_SPD = self.kv_SPD.clone(), self.kv_SPD.clone()
        scale_JP1 = int8.scale_SP[place_S[moved_J]].unsqueeze(-1)
        read_SPD[moved_J] = (int8.q_SPD[place_S[moved_J]] * scale_JP1).to(self.kv_SPD.dtype)
        rest_SPD[moved_J] = float("nan")
        table_RN = self.batch.slots_RN
        used_RN = table_RN.clamp_min(0)
        moved_RN = torch.where(is_int8_S[used_RN], num_full + place_S[used_RN], table_RN)
        return replace(
            self,
            kv_SPD=rest_SPD,
            read_SPD=read_SPD,
            read_table_RN=table_RN,
            batch=replace(self.batch, slots_RN=moved_RN),
            int8=int8,
        )

    def plan(
        self, kernels: KernelSet, window: int | None = None, observe_queries: int = 1
    ) -> AttentionPlan:
        """The step's plan; ``observe_queries`` of each request."""
        counts = torch.full_like(self.batch.row_B, observe_queries)
        return self.plan_observing(kernels, counts, window)

    def plan_observing(
        self, kernels: KernelSet, num_observed_B: Tensor | None, window: int | None = None
    ) -> AttentionPlan:
        """The step's plan, with a number of observed queries for each request."""
        return kernels.plan_attention(
            self.batch,
            num_slots=len(self.kv_SPD) + (0 if self.int8 is None else len(self.int8.q_SPD)),
            num_int8=0 if self.int8 is None else len(self.int8.q_SPD),
            num_heads=self.heads.num_heads,
            num_kv_heads=self.heads.num_kv_heads,
            head_dim=self.heads.head_dim,
            scale=SCALE,
            dtype=self.kv_SPD.dtype,
            window=window,
            num_observed_B=num_observed_B,
        )


def _slots(cases: list[Case], total: int, first: int, generator: torch.Generator) -> list[Tensor]:
    """Runs first, so that scattered requests take what is left between."""
    free = torch.randperm(total, generator=generator).tolist()
    runs, at = {}, first
    for index, case in enumerate(cases):
        if not case.scattered:
            runs[index] = torch.arange(at, at + case.num_keys)
            at += case.num_keys
    taken = {slot for run in runs.values() for slot in run.tolist()}
    rest = iter([slot for slot in free if slot not in taken])
    return [
        runs[index]
        if index in runs
        else torch.tensor([next(rest) for _ in range(case.num_keys)], dtype=torch.int64)
        for index, case in enumerate(cases)
    ]


def lay_out(cases: list[Case], heads: Heads = Heads(), *, seed: int = 0, spare: int = 13) -> Step:
    """Requests in rows of a larger slot table, in another order; their queries' rows interleaved."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(case.num_keys for case in cases) + spare
    slots = _slots(cases, total, spare // 2, generator)
    num_queries = sum(case.num_queries for case in cases)
    planes, head_dim = 2 * heads.num_kv_heads, heads.head_dim
    kv_SPD = torch.full((total + 1, planes, head_dim), float("nan"))
    kv_SPD[-1] = 0
    width, num_rows = max(case.num_keys for case in cases) + 3, len(cases) + 2
    table_RN = torch.full((num_rows, width), -7)  # beyond a request's entries anything may stand
    positions_RN = torch.arange(width).repeat(num_rows, 1)
    row_B = torch.randperm(num_rows, generator=generator)[: len(cases)]
    for row, case, slots_K in zip(row_B.tolist(), cases, slots, strict=True):
        kv_SPD[slots_K] = torch.randn(case.num_keys, planes, head_dim, generator=generator)
        table_RN[row, : case.num_keys] = slots_K
        if case.kept:
            positions_RN[row, : case.num_keys] = torch.tensor(case.kept)
    moved = any(case.kept for case in cases)
    batch = AttentionBatch(
        query_rows_T=torch.randperm(num_queries, generator=generator),
        num_queries_B=torch.tensor([case.num_queries for case in cases]),
        query_start_B=torch.tensor([case.query_start for case in cases]),
        row_B=row_B,
        num_keys_B=torch.tensor([case.num_keys for case in cases]),
        slots_RN=table_RN,
        positions_RN=positions_RN if moved else None,
    )
    q_THD = torch.randn(num_queries, heads.num_heads, head_dim, generator=generator)
    return Step(q_THD=q_THD, kv_SPD=kv_SPD, batch=batch, heads=heads)


def dense(step: Step, window: int | None, observe_queries: int = 1) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys, query by query, in double: outputs ``[T, H D]``, attention received per entry."""
    heads, batch, out_THD = step.heads, step.batch, step.q_THD.double() * float("nan")
    repeat, all_received, at = heads.num_heads // heads.num_kv_heads, [], 0
    for index, row in enumerate(batch.row_B.tolist()):
        num_keys, num_queries = int(batch.num_keys_B[index]), int(batch.num_queries_B[index])
        positions_K = torch.arange(num_keys)
        if batch.positions_RN is not None:
            positions_K = batch.positions_RN[row, :num_keys]
        entries_KPD = step.entries(row, num_keys).double()
        keys_KGD, values_KGD = entries_KPD.chunk(2, dim=1)
        keys_KHD, values_KHD = (x.repeat_interleave(repeat, 1) for x in (keys_KGD, values_KGD))
        received_K = torch.zeros(num_keys, dtype=torch.float64)
        for offset, query_row in enumerate(batch.query_rows_T[at : at + num_queries].tolist()):
            query = int(batch.query_start_B[index]) + offset
            seen_K = positions_K <= query
            if window is not None:
                seen_K &= positions_K > query - window
            q_HD = step.q_THD[query_row].double()
            scores_HK = torch.einsum("hd,khd->hk", q_HD, keys_KHD[seen_K]) * SCALE
            weights_HK = scores_HK.softmax(-1)
            out_THD[query_row] = torch.einsum("hk,khd->hd", weights_HK, values_KHD[seen_K])
            if offset >= num_queries - observe_queries:
                received_K[seen_K] += weights_HK.mean(0)
        all_received.append(received_K)
        at += num_queries
    return out_THD.flatten(1), torch.cat(all_received)


def check(
    kernels: KernelSet,
    step: Step,
    window: int | None = None,
    observe_queries: int = 1,
    tolerance: float | None = None,
) -> None:
    """Outputs and attention received equal the dense ones; nothing but the two results is written."""
    before_SPD, before_THD = step.kv_SPD.clone(), step.q_THD.clone()
    plan = step.plan(kernels, window, observe_queries)
    expected_TA, expected = dense(step, window, observe_queries)
    before = torch.arange(plan.received_size) % 3 / 8  # what earlier layers have added
    received = before.clone()
    half = step.kv_SPD.dtype != torch.float32
    rtol, atol = (0.02, 0.02) if half else (1e-4, tolerance or 1e-5)
    watched_TA = kernels.attention(step.q_THD, step.kv_SPD, plan, received=received, int8=step.int8)
    plain_TA = kernels.attention(step.q_THD, step.kv_SPD, plan, int8=step.int8)
    for result_TA in (watched_TA, plain_TA):
        assert result_TA.dtype == step.q_THD.dtype
        assert_close(result_TA.double(), expected_TA, rtol=rtol, atol=atol)
    assert_close((received - before).double(), expected, rtol=rtol, atol=atol / 10)
    assert_close(step.kv_SPD, before_SPD, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(step.q_THD, before_THD)
