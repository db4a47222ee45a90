"""The one layer loop. Token-wise operators come from executors, on contiguous slices; attention joins all tokens.

T tokens of a forward (sorted by route), E hidden size, O fused q, k, v outputs, A attention outputs, V vocabulary,
L layers, S slots, P planes (key heads, then value heads), D head size.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tokenrouter.kernels import AttentionPlan, Int8Entries, KernelSet
from tokenrouter.models.loader import LoadedModel
from tokenrouter.types import BlockMeans, ForwardBatch, Segment, SparseRows


class TokenOps(Protocol):
    """The token-wise operators of one executor: what ``tokenrouter.executors.base`` implements."""

    def qkv(self, layer: int, hidden_TE: Tensor, out_TO: Tensor) -> None:
        """Input norm, fused projection, head norms, written to ``out_TO``."""

    def finish_layer(
        self, layer: int, heads_TA: Tensor, hidden_TE: Tensor, next_qkv_TO: Tensor | None = None
    ) -> None:
        """Adds the output projection and the gated MLP to ``hidden_TE`` in place; then ``qkv`` of the next layer."""

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


@dataclass(slots=True)
class Observation:
    """Attention that a request's entries receive in a forward.

    Attributes:
        num_observed: per layer that reports: int64 ``[B]``, how many of the last queries of each request count, 0 for
            none. Layers that ask for the same share one tensor.
        received: filled by the forward, per layer group with such a layer: float32, the visible entries of all
            requests side by side, in the order of the forward's AttentionBatch; summed over queries and layers, mean
            over heads.
    """

    num_observed: Mapping[int, Tensor]
    received: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Slice:
    """One executor's rows of the forward's buffers, and the seconds that they took."""

    name: str
    ops: TokenOps
    hidden_TE: Tensor
    qkv_TO: Tensor
    heads_TA: Tensor
    seconds: float = 0.0


class _Clock:
    """Seconds from one reading to the next."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap_s(self) -> float:
        before, self._last = self._last, time.perf_counter()
        return self._last - before


class Decoder:
    """Runs forwards of a Llama-family model over a KV arena."""

    def __init__(
        self, model: LoadedModel, kernels: KernelSet, layer_groups: Sequence[int] | None = None
    ) -> None:
        """``layer_groups``: per layer, which of a forward's slot tables it uses; None: all share one."""
        self.config = model.config
        self._weights = model.weights
        self._kernels = kernels
        self._groups = tuple(layer_groups or [0] * model.config.num_layers)
        self._scale = model.config.head_dim**-0.5

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        executors: Mapping[str, TokenOps],
        layers_SPD: Sequence[Tensor],
        times: ForwardTimes,
        observation: Observation | None = None,
        int8: Sequence[Int8Entries] | None = None,
        means: Sequence[BlockMeans] | None = None,
        layers: range | None = None,
        hidden_TE: Tensor | None = None,
    ) -> Tensor:
        """Runs all layers, or those that are asked for, and writes each token's KV to its slot.

        Args:
            batch: tokens sorted by route, with the segments of every layer.
            executors: token-wise operators by the names that the segments use.
            layers_SPD: the KV arena, a tensor per layer; the last slot is the null slot. Rows of the batch's slots
                are overwritten, also those in ``int8``.
            times: this forward's times are added to it.
            observation: which layers report the attention that entries receive, and where to.
            int8: entries in int8, per layer; slots behind the null slot.
            means: mean keys of the rows of the slot table, per layer, which sparse rows use and bring up to date; None:
                they are found anew.
            layers: that run, neighbours in ascending order; None: all.
            hidden_TE: what the layer before them brought, overwritten; None: the tokens' embeddings.

        Returns:
            Hidden states ``[T, E]`` after the last of them, before the final norm.
        """
        weights, config = self._weights, self.config
        layers = range(config.num_layers) if layers is None else layers
        hidden_TE = weights.embed_VE[batch.ids_T] if hidden_TE is None else hidden_TE
        cos_TD, sin_TD = weights.cos_ND[batch.positions_T], weights.sin_ND[batch.positions_T]
        qkv_TO = hidden_TE.new_empty(len(batch), config.qkv_size)
        heads_TA = hidden_TE.new_empty(len(batch), config.num_heads * config.head_dim)
        num_int8 = len(int8[0].q_SPD) if int8 else 0
        plans = self._plan(batch, layers, layers_SPD[0], observation, num_int8)
        pattern: tuple[Segment, ...] | None = None
        slices: list[_Slice] = []
        clock = _Clock()
        for layer in layers:
            segments = batch.segments[layer]
            if segments is not pattern:
                pattern = segments
                _add_up(times, slices)
                slices = _slices(segments, executors, hidden_TE, qkv_TO, heads_TA)
                for part in slices:
                    part.ops.qkv(layer, part.hidden_TE, part.qkv_TO)
                    part.seconds += clock.lap_s()
            slots_T, kv_SPD = batch.kv[self._groups[layer]].slots_T, layers_SPD[layer]
            received = None
            if observation is not None and layer in observation.num_observed:
                received = observation.received[self._groups[layer]]
            self._kernels.attend(
                qkv_TO,
                cos_TD,
                sin_TD,
                slots_T,
                kv_SPD,
                plans[layer],
                out=heads_TA,
                received=received,
                int8=int8[layer] if int8 else None,
                means=means[layer] if means else None,
            )
            times.attention_s += clock.lap_s()
            goes_on = layer + 1 in layers and batch.segments[layer + 1] is pattern
            for part in slices:
                following = part.qkv_TO if goes_on else None
                part.ops.finish_layer(layer, part.heads_TA, part.hidden_TE, following)
                part.seconds += clock.lap_s()
        _add_up(times, slices)
        return hidden_TE

    def _plan(
        self,
        batch: ForwardBatch,
        layers: range,
        kv_SPD: Tensor,
        observation: Observation | None,
        num_int8: int,
    ) -> dict[int, AttentionPlan]:
        """Each layer's plan: one for all layers of a group, window, observed queries and sparse rows.

        A layer with a window of its own has no sparse rows.

        Makes room for what they report. All layers of the arena are like ``kv_SPD``.
        """
        config = self.config
        observed = observation.num_observed if observation else {}
        plans: dict[int, AttentionPlan] = {}
        made: dict[tuple[int, int | None, int, int], AttentionPlan] = {}
        for layer in layers:
            group, window = self._groups[layer], config.windows[layer]
            num_observed_B = observed.get(layer)
            sparse = batch.sparse[layer] if batch.sparse and window is None else None
            key = group, window, id(num_observed_B), id(sparse)
            if key not in made:
                made[key] = self._plan_layer(
                    batch, group, kv_SPD, window, num_observed_B, num_int8, sparse
                )
            plans[layer] = made[key]
            if observation and num_observed_B is not None and group not in observation.received:
                observation.received[group] = torch.zeros(made[key].received_size)
        return plans

    def _plan_layer(
        self,
        batch: ForwardBatch,
        group: int,
        kv_SPD: Tensor,
        window: int | None,
        num_observed_B: Tensor | None,
        num_int8: int,
        sparse: SparseRows | None,
    ) -> AttentionPlan:
        config = self.config
        return self._kernels.plan_attention(
            batch.kv[group].attention,
            num_slots=kv_SPD.shape[0] + num_int8,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=self._scale,
            dtype=kv_SPD.dtype,
            window=window,
            num_observed_B=num_observed_B,
            num_int8=num_int8,
            sparse=sparse,
        )


def _slices(
    segments: Sequence[Segment],
    executors: Mapping[str, TokenOps],
    hidden_TE: Tensor,
    qkv_TO: Tensor,
    heads_TA: Tensor,
) -> list[_Slice]:
    return [
        _Slice(name, executors[name], hidden_TE[a:b], qkv_TO[a:b], heads_TA[a:b])
        for a, b, name in segments
    ]


def _add_up(times: ForwardTimes, slices: Sequence[_Slice]) -> None:
    """The seconds of slices that are done."""
    for part in slices:
        times.add(part.name, part.seconds)
