"""Attention statistics: how much attention each token of a request receives, as a by-product of a step's attention.

B requests of a forward, N entries (tokens) of one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.models import Observation

Received = dict[str, dict[int, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveOptions:
    """Which queries report the attention that they give.

    Attributes:
        decode: every token that is fed one at a time, in all layers: exact and cheap.
        prefill_layers: in these layers also the last queries of each chunk of a prompt, at the price of a second pass
            over their keys.
        prefill_queries: so many of them, at least 1.

    Raises:
        ValueError: a count below 1, a negative layer, or options that observe nothing.
    """

    decode: bool = True
    prefill_layers: tuple[int, ...] = ()
    prefill_queries: int = 64

    def __post_init__(self) -> None:
        if self.prefill_queries < 1:
            raise ValueError(f"prefill_queries must be at least 1, got {self.prefill_queries}")
        if any(layer < 0 for layer in self.prefill_layers):
            raise ValueError(f"prefill_layers={self.prefill_layers} holds a negative layer")
        if not self.decode and not self.prefill_layers:
            raise ValueError(
                "nothing is observed: set decode=True, name prefill_layers, or leave observe out"
            )


class Watcher(Protocol):
    """What a runner asks what forwards have to report."""

    def start_step(self) -> None:
        """The step's forwards are about to run."""

    def observe(self, step: PackedStep, of: IntArray) -> Observation | None:
        """What a forward of some of the step's chunks reports; it is filled by the forward. None: nothing."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a forward reported of the chunks ``of`` of a step."""

    step: PackedStep
    of: IntArray
    observation: Observation

    @property
    def stop_B(self) -> IntArray:
        """Of each chunk's request the tokens that its last query can see, if none is evicted."""
        stop_B: IntArray = (self.step.start_C + self.step.length_C)[self.of]
        return stop_B


class Observer:
    """Says what a forward has to report, and hands it out by request."""

    def __init__(self, options: ObserveOptions, layer_groups: Sequence[int]) -> None:
        """``layer_groups``: per layer the number of its group. Raises ValueError when a layer does not exist."""
        num_layers = len(layer_groups)
        if beyond := [layer for layer in options.prefill_layers if layer >= num_layers]:
            raise ValueError(
                f"prefill_layers names layer {beyond[0]}; the model has layers 0 to {num_layers - 1}"
            )
        self._options = options
        self._layer_groups = layer_groups
        self._reports: list[Report] = []

    def start_step(self) -> None:
        """Forgets the step before."""
        self._reports = []

    def observe(self, step: PackedStep, of: IntArray) -> Observation | None:
        """See Watcher."""
        options = self._options
        is_decode_B = torch.from_numpy(step.length_C[of] == 1)
        decode_B = is_decode_B.long() * options.decode
        prompts_B = decode_B + ~is_decode_B * options.prefill_queries
        num_observed: dict[int, Tensor] = {}
        if options.decode and bool(is_decode_B.any()):
            num_observed = dict.fromkeys(range(len(self._layer_groups)), decode_B)
        if not bool(is_decode_B.all()):
            num_observed |= dict.fromkeys(options.prefill_layers, prompts_B)
        if not num_observed:
            return None
        observation = Observation(num_observed=num_observed)
        self._reports.append(Report(step, of, observation))
        return observation

    @property
    def reports(self) -> Sequence[Report]:
        """Of the last step's forwards, those that had something to report."""
        return self._reports

    def received(self) -> Received:
        """Of the last step: per request that reports and layer group, float32 ``[N]``.

        Summed over the observed queries of the request, mean over heads and over the layers that report for it: one
        decode token gives 1 in all.
        """
        found: Received = {}
        for report in self._reports:
            requests = [report.step.requests[c] for c in report.of.tolist()]
            for group, all_N in report.observation.received.items():
                sums = all_N.split(report.stop_B.tolist())
                layers_B = self._num_layers(report.observation, group)
                parts = zip(requests, sums, layers_B.tolist(), strict=True)
                for request, sum_N, num_layers in parts:
                    if num_layers:
                        own = found.setdefault(request.request_id, {})
                        own[group] = sum_N / num_layers
        return found

    def _num_layers(self, observation: Observation, group: int) -> Tensor:
        """How many layers of ``group`` report for each request."""
        counts_LB = [
            num_observed_B > 0
            for layer, num_observed_B in observation.num_observed.items()
            if self._layer_groups[layer] == group
        ]
        return torch.stack(counts_LB).sum(0)
