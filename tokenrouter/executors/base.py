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
    layers that an executor runs in a row, ``finish_layer`` in each, and ``logits``.
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
    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """Adds the output projection of ``heads_TA`` to ``hidden_TE`` in place."""

    @abstractmethod
    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """Adds the gated MLP of the normed ``hidden_TE`` to ``hidden_TE`` in place."""

    def finish_layer(
        self, layer: int, heads_TA: Tensor, hidden_TE: Tensor, next_qkv_TO: Tensor | None = None
    ) -> None:
        """``attention_out``, ``mlp``, and where ``next_qkv_TO`` is given ``qkv`` of ``layer + 1``.

        A path may do it in fewer calls, with the same result bit for bit.
        """
        self.attention_out(layer, heads_TA, hidden_TE)
        self.mlp(layer, hidden_TE)
        if next_qkv_TO is not None:
            self.qkv(layer + 1, hidden_TE, next_qkv_TO)

    @abstractmethod
    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Final norm and lm_head: a new ``[T, V]`` tensor in the model's dtype."""

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
