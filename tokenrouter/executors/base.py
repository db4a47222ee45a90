"""The contract of an executor: the token-wise operators of one numeric path, for any contiguous slice of tokens.

An executor knows weights and numbers; it knows nothing of features, routers, requests or the KV pool. T tokens of a
slice, E hidden size, O fused q, k, v outputs, A attention outputs (H D), V vocabulary, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from tokenrouter.kernels import KernelSet
from tokenrouter.models import LoadedModel


class _Packed(Protocol):
    @property
    def weight(self) -> Tensor: ...


P = TypeVar("P", bound=_Packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinears(Generic[P]):
    """The linears of all layers and lm_head, each as one kernel's packed weight."""

    qkv: list[P]
    out: list[P]
    gate_up: list[P]
    down: list[P]
    lm_head: P

    @classmethod
    def of(
        cls, model: LoadedModel, pack: Callable[[Tensor, Tensor | None], P]
    ) -> "PackedLinears[P]":
        """Packs every linear of ``model`` with ``pack(weight, bias)``."""
        layers = model.weights.layers
        return cls(
            qkv=[pack(layer.qkv_OE, layer.qkv_bias_O) for layer in layers],
            out=[pack(layer.out_EA, layer.out_bias_E) for layer in layers],
            gate_up=[pack(layer.gate_up_JE, layer.gate_up_bias_J) for layer in layers],
            down=[pack(layer.down_EI, layer.down_bias_E) for layer in layers],
            lm_head=pack(model.weights.lm_head_VE, None),
        )

    @property
    def weights(self) -> list[Tensor]:
        """All packed weight tensors."""
        packed = [*self.qkv, *self.out, *self.gate_up, *self.down, self.lm_head]
        return [p.weight for p in packed]


class Executor(ABC):
    """Token-wise operators over all layers. A token's result never depends on the other tokens of the slice.

    Norms belong to the executor, so that a path may fold its own scales into them and leave the others untouched.
    An implementation is one file, with ``PackedLinears`` for its weights; the decoder calls the four methods.
    """

    name: str

    def __init__(self, model: LoadedModel, kernels: KernelSet) -> None:
        """Packs what it needs of ``model`` (read only)."""
        self._kernels = kernels
        self._layers = model.weights.layers
        self._final_norm_E = model.weights.final_norm_E
        self._eps = model.config.rms_norm_eps
        self._head_dim = model.config.head_dim
        self._num_heads = model.config.num_heads
        self._num_kv_heads = model.config.num_kv_heads

    @abstractmethod
    def qkv(self, layer: int, hidden_TE: Tensor) -> Tensor:
        """Input norm, fused q, k, v projection and head norms.

        Args:
            layer: 0 .. L-1.
            hidden_TE: the residual stream, not modified.

        Returns:
            A new ``[T, O]`` tensor: query heads, key heads, value heads side by side, before RoPE.
        """

    @abstractmethod
    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """Adds the output projection of ``heads_TA`` to ``hidden_TE`` in place."""

    @abstractmethod
    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """Adds the gated MLP of the normed ``hidden_TE`` to ``hidden_TE`` in place."""

    @abstractmethod
    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Final norm and lm_head: a new ``[T, V]`` tensor in the model's dtype."""

    @property
    @abstractmethod
    def packed_weights(self) -> list[Tensor]:
        """The weight tensors that every decode step of this path streams, lm_head included."""

    def _norm_heads(
        self, qkv_TO: Tensor, q_norm_D: Tensor | None, k_norm_D: Tensor | None
    ) -> Tensor:
        """RMS norm of each query and key head (Qwen3), in place; returns ``qkv_TO``."""
        if q_norm_D is None or k_norm_D is None:
            return qkv_TO
        heads_THD = qkv_TO.unflatten(-1, (-1, self._head_dim))
        keys = slice(self._num_heads, self._num_heads + self._num_kv_heads)
        for where, weight_D in ((slice(0, self._num_heads), q_norm_D), (keys, k_norm_D)):
            heads_THD[:, where] = self._kernels.rms_norm(heads_THD[:, where], weight_D, self._eps)
        return qkv_TO
