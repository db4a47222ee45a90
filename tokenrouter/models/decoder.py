"""The one layer loop. Token-wise operators come from executors, on contiguous slices; attention joins all tokens.

T tokens of a forward (sorted by route), E hidden size, O fused q, k, v outputs, A attention outputs, V vocabulary,
L layers, S slots, P planes (key heads, then value heads), D head size.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tokenrouter.kernels import AttentionPlan, KernelSet
from tokenrouter.models.loader import LoadedModel
from tokenrouter.types import ForwardBatch, Segment


class TokenOps(Protocol):
    """The token-wise operators of one executor: what ``tokenrouter.executors.base`` implements."""

    def qkv(self, layer: int, hidden_TE: Tensor) -> Tensor:
        """Input norm, fused projection, head norms: a new ``[T, O]``."""

    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """Adds the output projection to ``hidden_TE`` in place."""

    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """Adds the gated MLP of the normed ``hidden_TE`` to it in place."""

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Final norm and lm_head: a new ``[T, V]``."""


@dataclass(slots=True)
class ForwardTimes:
    """Where forwards spent their time, in seconds: token-wise operators per executor, and attention."""

    by_executor: dict[str, float] = field(default_factory=dict)
    attention_s: float = 0.0

    def add(self, executor: str, seconds: float) -> None:
        """Adds to one executor's share."""
        self.by_executor[executor] = self.by_executor.get(executor, 0.0) + seconds


class Decoder:
    """Runs forwards of a Llama-family model over a KV arena."""

    def __init__(self, model: LoadedModel, kernels: KernelSet) -> None:
        self.config = model.config
        self._weights = model.weights
        self._kernels = kernels
        self._scale = model.config.head_dim**-0.5

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        executors: Mapping[str, TokenOps],
        arena_LSPD: Tensor,
        times: ForwardTimes,
    ) -> Tensor:
        """Runs all layers and writes each token's KV to its slot.

        Args:
            batch: tokens sorted by route, with the segments of every layer.
            executors: token-wise operators by the names that the segments use.
            arena_LSPD: the KV arena; its last slot is the null slot. Rows ``batch.slots_T`` are overwritten.
            times: this forward's times are added to it.

        Returns:
            Hidden states ``[T, E]`` after the last layer, before the final norm.
        """
        weights = self._weights
        hidden_TE = weights.embed_VE[batch.ids_T]
        cos_TD, sin_TD = weights.cos_ND[batch.positions_T], weights.sin_ND[batch.positions_T]
        plans = self._plan(batch, arena_LSPD)
        for layer, segments in enumerate(batch.segments):
            kv_SPD = arena_LSPD[layer]
            qkv_TO = self._qkv(layer, hidden_TE, segments, executors, times)
            started = time.perf_counter()
            q_THD = self._kernels.rope_store_kv(qkv_TO, cos_TD, sin_TD, batch.slots_T, kv_SPD)
            heads_TA = self._kernels.attention(q_THD, kv_SPD, plans[self.config.windows[layer]])
            times.attention_s += time.perf_counter() - started
            for start, stop, name in segments:
                started = time.perf_counter()
                executors[name].attention_out(layer, heads_TA[start:stop], hidden_TE[start:stop])
                executors[name].mlp(layer, hidden_TE[start:stop])
                times.add(name, time.perf_counter() - started)
        return hidden_TE

    def _plan(self, batch: ForwardBatch, arena_LSPD: Tensor) -> dict[int | None, AttentionPlan]:
        """One plan per distinct sliding window; the arena's last slot is the null slot."""
        return {
            window: self._kernels.plan_attention(
                batch.spans,
                null_slot=arena_LSPD.shape[1] - 1,
                scale=self._scale,
                dtype=arena_LSPD.dtype,
                window=window,
            )
            for window in set(self.config.windows)
        }

    def _qkv(
        self,
        layer: int,
        hidden_TE: Tensor,
        segments: tuple[Segment, ...],
        executors: Mapping[str, TokenOps],
        times: ForwardTimes,
    ) -> Tensor:
        parts = []
        for start, stop, name in segments:
            started = time.perf_counter()
            parts.append(executors[name].qkv(layer, hidden_TE[start:stop]))
            times.add(name, time.perf_counter() - started)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
