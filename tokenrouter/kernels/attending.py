"""The contract of the operators that store and read KV entries.

T rows (tokens), O = (H + 2 G) D fused q, k, v, H query heads, G key heads, D head size, S slots, P = 2 G planes of an
entry (key heads, then value heads).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tokenrouter.kernels.values import AttentionPlan, Int8Entries
from tokenrouter.types import AttentionBatch, BlockMeans, SparseRows


class AttentionKernels(ABC):
    """The part of ``KernelSet`` that attends."""

    @abstractmethod
    def rope_store_kv(
        self,
        qkv_TO: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        slots_T: Tensor,
        kv_SPD: Tensor,
        *,
        int8: Int8Entries | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rotates q and k, writes k and v to their slots, returns the rotated queries ``[T, H, D]``.

        Slots from ``len(kv_SPD)`` on are those of ``int8``, with a scale per token and plane. Where ``int8`` is given,
        queries and all keys, full ones too, are multiplied by a Hadamard matrix, which leaves scores as they are.
        """

    @abstractmethod
    def plan_attention(
        self,
        batch: AttentionBatch,
        *,
        num_slots: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        window: int | None = None,
        num_observed_B: Tensor | None = None,
        num_int8: int = 0,
        sparse: SparseRows | None = None,
    ) -> AttentionPlan:
        """Prepares one forward's attention, for all layers of one slot table and window.

        Args:
            batch: the requests of the forward; the plan copies what it needs, so that a later change has no effect.
            num_slots: rows of the arena, the null slot included, which is the last full one: zero, for padding; those
                in int8 behind it.
            num_int8: how many of them are in int8.
            num_heads: query heads.
            num_kv_heads: key heads.
            head_dim: size of a head.
            scale: softmax scale.
            dtype: of queries and arena.
            window: a query sees only keys with ``query - key < window``, 1 or more; None: all earlier keys. It never
                sees a later one, also where it is the request's only query.
            num_observed_B: int64, the last queries of each request whose attention ``attention`` can report, 0 for
                none; None: none of any request.
            sparse: which rows of the forward see what ``SparseAttention`` says; None: none.

        Raises:
            ValueError: a window below 1, or one beside sparse rows; no full slot.
        """

    @abstractmethod
    def attention(
        self,
        q_THD: Tensor,
        kv_SPD: Tensor,
        plan: AttentionPlan,
        *,
        out: Tensor | None = None,
        received: Tensor | None = None,
        int8: Int8Entries | None = None,
        means: BlockMeans | None = None,
    ) -> Tensor:
        """Attention of every query over its request's entries.

        Args:
            q_THD: rotated queries, heads side by side.
            kv_SPD: one layer of the arena, contiguous.
            plan: of this forward.
            out: ``[T, H * D]``.
            received: float32 ``[plan.received_size]``; the attention that each entry receives is added to it:
                summed over the request's observed queries, mean over heads.
            int8: one layer's entries in int8; as many as the plan was made for.
            means: this layer's mean keys of the slot table's rows, of at least ``plan.num_blocks`` blocks, which a
                backend may use and add to; None: it finds those that sparse rows need anew.

        Returns:
            A ``[T, H * D]`` tensor of the queries' dtype.

        Raises:
            ValueError: the arena has other numbers of full and int8 entries than the plan is for.
        """

    def attend(
        self,
        qkv_TO: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        slots_T: Tensor,
        kv_SPD: Tensor,
        plan: AttentionPlan,
        *,
        out: Tensor | None = None,
        received: Tensor | None = None,
        int8: Int8Entries | None = None,
        means: BlockMeans | None = None,
    ) -> Tensor:
        """``rope_store_kv``, then ``attention`` of its queries; a backend may do both in one call."""
        q_THD = self.rope_store_kv(qkv_TO, cos_TD, sin_TD, slots_T, kv_SPD, int8=int8)
        return self.attention(
            q_THD, kv_SPD, plan, out=out, received=received, int8=int8, means=means
        )
