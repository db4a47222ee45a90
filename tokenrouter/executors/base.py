"""The contract of an executor: the token-wise operators of one numeric path, for any contiguous slice of tokens.

An executor knows weights and numbers; it knows nothing of features, routers, requests or the KV pool. T tokens of a
slice, E hidden size, O fused q, k, v outputs, A attention outputs (H D), V vocabulary, D head size.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from tokenrouter.executors.packing import PackedModel


class Executor(ABC):
    """Token-wise operators over all layers. A token's result never depends on the other tokens of the slice.

    Norms belong to the executor, so that a path may fold its own scales into them and leave the others untouched.
    An implementation is one file, with ``PackedModel`` for its weights. The decoder calls ``qkv`` in the first of the
    layers that an executor runs in a row, ``finish_layer`` in each of them, and ``logits``.
    """

    name: str

    def __init__(self, packed: PackedModel) -> None:
        """Takes what it needs of ``packed`` (read only), which packs a format when it is first asked for."""
        model = packed.model
        self._kernels = packed.kernels
        self._layers = model.weights.layers
        self._final_norm_E = model.weights.final_norm_E
        self._eps = model.config.rms_norm_eps
        self._head_dim = model.config.head_dim
        self._num_heads = model.config.num_heads
        self._num_kv_heads = model.config.num_kv_heads

    @abstractmethod
    def qkv(self, layer: int, hidden_TE: Tensor, out_TO: Tensor) -> None:
        """Input norm, fused q, k, v projection and head norms.

        Args:
            layer: 0 .. L-1.
            hidden_TE: the residual stream, not modified.
            out_TO: is overwritten with query heads, key heads, value heads side by side, before RoPE.
        """

    @abstractmethod
    def finish_layer(
        self, layer: int, heads_TA: Tensor, hidden_TE: Tensor, next_qkv_TO: Tensor | None = None
    ) -> None:
        """What follows attention: the output projection, norm and gated MLP, then the next layer's q, k, v.

        Args:
            layer: 0 .. L-1.
            heads_TA: attention's result, not modified.
            hidden_TE: the residual stream; both are added to it in place.
            next_qkv_TO: None, or overwritten with what ``qkv`` of ``layer + 1`` gives for the new ``hidden_TE``.
        """

    @abstractmethod
    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Final norm and lm_head: a new ``[T, V]`` tensor in the model's dtype."""

    @property
    def version(self) -> str:
        """Name, and what beside model and backend its numbers come from, such as a calibration: for provenance."""
        return self.name

    @property
    @abstractmethod
    def packed_weights(self) -> list[Tensor]:
        """The weight tensors that every decode step of this path streams, lm_head included."""

    def _norm_heads(self, layer: int, qkv_TO: Tensor) -> None:
        """RMS norm of each query and key head (Qwen3), in place."""
        q_norm_D, k_norm_D = self._layers[layer].q_norm_D, self._layers[layer].k_norm_D
        if q_norm_D is None or k_norm_D is None:
            return
        heads_THD = qkv_TO.unflatten(-1, (-1, self._head_dim))
        keys = slice(self._num_heads, self._num_heads + self._num_kv_heads)
        for where, weight_D in ((slice(0, self._num_heads), q_norm_D), (keys, k_norm_D)):
            part_THD = heads_THD[:, where]
            self._kernels.rms_norm(part_THD, weight_D, self._eps, out=part_THD)
