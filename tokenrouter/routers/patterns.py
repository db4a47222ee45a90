"""What a router's answer for a token is computed from, as one row of integers: equal rows, equal answers.

Shape letters: T tokens, F features, C columns of a key.
"""

import math
from collections.abc import Set
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tokenrouter.features import feature_specs
from tokenrouter.routers.answers import IntArray, hash_rows
from tokenrouter.routers.base import Seen
from tokenrouter.types import RouteInput

_LARGEST = 1 << 40


class Rounding:
    """Numbers without a bound, to steps that grow with them.

    Args:
        exact_below: numbers nearer to 0 than this stay as they are; at least 1.
        steps_per_octave: from there on, so many steps from a number to its double; at least 1.

    Raises:
        ValueError: one of them is below 1.
    """

    def __init__(self, exact_below: int, steps_per_octave: int) -> None:
        for name, value in (("exact_below", exact_below), ("steps_per_octave", steps_per_octave)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        octaves = math.log2(_LARGEST / exact_below)
        exponent = np.arange(math.ceil(octaves * steps_per_octave)) / steps_per_octave
        edges = np.unique(np.floor(exact_below * np.exp2(exponent)))
        self._exact_below = exact_below
        self._edges = torch.from_numpy(edges)

    def __call__(self, x_T: Tensor) -> Tensor:
        """``x_T`` (float32 or int64), towards 0 to the next step; what is not finite stays."""
        size_T = x_T.abs().double()
        edges = self._edges.to(x_T.device)
        step_T = torch.bucketize(size_T, edges, right=True).sub_(1).clamp_min_(0)
        stays_T = ~(size_T >= self._exact_below) | (size_T == math.inf)
        rounded_T = (edges[step_T] * x_T.sign()).to(x_T.dtype)
        return torch.where(stays_T, x_T, rounded_T)


def masked(inputs: RouteInput, sees: Set[Seen]) -> RouteInput:
    """``inputs`` without what the router does not see: zeros stand there, as for the row."""
    blank_T = torch.zeros_like(inputs.ids_T)
    return replace(
        inputs,
        ids_T=inputs.ids_T if "ids" in sees else blank_T,
        positions_T=inputs.positions_T if "positions" in sees else blank_T,
        prefix_hash_T=inputs.prefix_hash_T if "prefix_hash" in sees else blank_T,
        row_T=blank_T,
    )


def rounded(inputs: RouteInput, sees: Set[Seen], rounding: Rounding) -> RouteInput:
    """The pattern of every token, as a router's input in its own right.

    Positions and quantities without a bound are rounded, classes such as ids are not, and the prefix
    hash is that of the pattern, so that a draw is the pattern's own. Tokens of one pattern become one
    and the same input.
    """
    columns = [
        rounding(value_T) if math.inf in (-spec.low, spec.high) and not spec.is_class else value_T
        for value_T, spec in zip(inputs.values_TF.t(), feature_specs(inputs.names), strict=True)
    ]
    values_TF = torch.stack(columns).t() if columns else inputs.values_TF
    pattern = masked(inputs, sees - {"prefix_hash"})
    pattern = replace(pattern, values_TF=values_TF, positions_T=rounding(pattern.positions_T))
    hash_T = torch.from_numpy(hash_rows(key_of(pattern))).to(inputs.ids_T.device)
    return replace(pattern, prefix_hash_T=hash_T)


def key_of(inputs: RouteInput) -> IntArray:
    """Everything in ``inputs`` besides the row, int64 [T, C]; equal for equal inputs alone."""
    values_TF = inputs.values_TF + 0.0  # -0.0 is 0.0
    columns = [
        inputs.ids_T,
        inputs.positions_T,
        inputs.phase_T,
        inputs.prefix_hash_T,
        *values_TF.contiguous().view(torch.int32).long().unbind(1),
    ]
    key_TC: IntArray = torch.stack(columns, 1).cpu().numpy()
    return key_TC
