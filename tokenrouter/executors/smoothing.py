"""Smoothing: scales that move a layer's outlying activations into its weights, for paths that round both.

SmoothQuant (Xiao et al. 2023, arXiv:2211.10438): input channel k of a linear is divided by
``s_k = activation_k^alpha / weight_k^(1 - alpha)``, both the channel's largest magnitude, and its weights are
multiplied by it. The division costs nothing at run time: for q, k, v and for gate, up it is in the weight of the norm
in front of them, for down in the rows of up. The output projection has no such place and stays as it is.

Two things differ from the paper, for output channels with scales of their own: a weight's magnitude is relative to the
largest of its output channel, which decides how it is rounded; and down has an alpha of its own.

K inputs and N outputs of a linear, E hidden size, J fused gate and up, I intermediate.
"""

import hashlib
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tokenrouter.executors.activations import InputMaxima
from tokenrouter.executors.calibration import Calibration
from tokenrouter.executors.packing import Folded
from tokenrouter.models import LoadedModel
from tokenrouter.models.weights import LayerWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoothing:
    """How much is moved, and what it is measured on.

    Attributes:
        alpha: from 0 to 1, for the inputs of q, k, v and of gate, up: the higher, the more the weights take. 0.5 is the
            paper's.
        down_alpha: the same for the input of down, a product of two activations, whose outliers are larger.
        calibration: where the activations' largest magnitudes come from.

    Raises:
        ValueError: ``alpha`` or ``down_alpha`` is not a number from 0 to 1.
    """

    alpha: float = 0.5
    down_alpha: float = 0.3
    calibration: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        for name in ("alpha", "down_alpha"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or math.isnan(value) or not 0 <= value <= 1:
                raise ValueError(
                    f"smoothing {name}={value!r} must be a number from 0 (inputs are evened out least) to 1 (weights "
                    "take all of it): 0.5 is a good start"
                )

    def fold(self, model: LoadedModel) -> Folded:
        """Smoothed layers of ``model``, made one at a time; raises ValueError where it cannot be calibrated."""
        found = self.calibration.statistics(model)
        layers = zip(model.weights.layers, found.maxima, strict=True)
        text = f"{float(self.alpha)} {float(self.down_alpha)} {found.key}"
        return Folded(
            layers=(smooth(layer, maxima, self.alpha, self.down_alpha) for layer, maxima in layers),
            version=hashlib.sha256(text.encode()).hexdigest()[:10],
        )


def smooth(
    layer: LayerWeights, maxima: InputMaxima, alpha: float, down_alpha: float
) -> LayerWeights:
    """``layer`` with smoothed inputs of q, k, v, of gate, up and of down; the same function but for rounding.

    Args:
        layer: of any dtype; not modified.
        maxima: of the inputs of its linears.
        alpha: from 0 (all channels of the weights become equally large) to 1 (all channels of the inputs do).
        down_alpha: the same for down.

    Returns:
        Norms in the layer's dtype; the linears and the bias of gate and up, which are still to be rounded, in float32.
    """
    qkv_OE, gate_up_JE, down_EI = (
        w.float() for w in (layer.qkv_OE, layer.gate_up_JE, layer.down_EI)
    )
    input_norm_E, qkv_scale_E = _fold(layer.input_norm_E, factors(maxima.qkv_E, qkv_OE, alpha))
    post_norm_E, gate_up_scale_E = _fold(
        layer.post_norm_E, factors(maxima.gate_up_E, gate_up_JE, alpha)
    )
    down_scale_I = factors(maxima.down_I, down_EI, down_alpha)
    rows_J = torch.cat([torch.ones_like(down_scale_I), 1 / down_scale_I])
    bias_J = layer.gate_up_bias_J
    return replace(
        layer,
        input_norm_E=input_norm_E,
        qkv_OE=qkv_OE * qkv_scale_E,
        post_norm_E=post_norm_E,
        gate_up_JE=gate_up_JE * gate_up_scale_E * rows_J[:, None],
        gate_up_bias_J=None if bias_J is None else bias_J.float() * rows_J,
        down_EI=down_EI * down_scale_I,
    )


def factors(maxima_K: Tensor, weight_NK: Tensor, alpha: float) -> Tensor:
    """``s`` of each input channel, float32 ``[K]``, above 0 and finite; their geometric mean is 1.

    The scale of an output channel has no influence, so that rows may be scaled before or after. A common factor changes
    nothing, as rows and output channels have scales of their own. A channel that is 0 in all activations or all weights
    has factor 1.
    """
    size_NK = weight_NK.abs()
    largest_N1 = size_NK.amax(1, keepdim=True)
    weight_K = size_NK.div(largest_N1.where(largest_N1 > 0, 1.0)).amax(0)
    is_used_K = (maxima_K > 0) & (weight_K > 0)
    log_K = alpha * maxima_K.log() - (1 - alpha) * weight_K.log()
    log_K = log_K.where(is_used_K, 0.0)
    mean = log_K.sum() / is_used_K.sum().clamp_min(1)
    return (log_K - mean).where(is_used_K, 0.0).exp()


def _fold(norm_E: Tensor, factor_E: Tensor) -> tuple[Tensor, Tensor]:
    """``norm / factor`` rounded to the norm's dtype, and in float32 by what that really divides.

    The weights are multiplied by the latter, so that the rounding of the norm costs nothing.
    """
    folded_E = (norm_E.float() / factor_E).to(norm_E.dtype)
    holds_E = (folded_E != 0) & folded_E.isfinite()
    folded_E = folded_E.where(holds_E, norm_E)
    scale_E = (norm_E.float() / folded_E.float()).where(folded_E != 0, 1.0)
    return folded_E, scale_E
