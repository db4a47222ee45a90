"""Attention statistics: how much attention each token of a request receives, as a by-product of a step's attention.

L layers, N entries (tokens) of one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokenrouter.models import Observation
from tokenrouter.scheduler import Chunk

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


class Observer:
    """Says what a forward has to report, and hands it out by request."""

    def __init__(self, options: ObserveOptions, num_layers: int) -> None:
        """Raises ValueError when a layer does not exist."""
        if beyond := [layer for layer in options.prefill_layers if layer >= num_layers]:
            raise ValueError(
                f"prefill_layers names layer {beyond[0]}; the model has layers 0 to {num_layers - 1}"
            )
        self._options = options
        self._num_layers = num_layers
        self._parts: list[tuple[list[Chunk], Observation]] = []

    def start_step(self) -> None:
        """Forgets the step before."""
        self._parts = []

    def observe(self, chunks: Sequence[Chunk]) -> Observation | None:
        """What a forward of ``chunks`` reports; None: nothing."""
        options = self._options
        num_queries: dict[int, int] = {}
        if options.decode and any(chunk.length == 1 for chunk in chunks):
            num_queries = dict.fromkeys(range(self._num_layers), 1)
        if any(chunk.length > 1 for chunk in chunks):
            num_queries |= dict.fromkeys(options.prefill_layers, options.prefill_queries)
        if not num_queries:
            return None
        observation = Observation(num_queries=num_queries)
        self._parts.append((list(chunks), observation))
        return observation

    def received(self) -> Received:
        """Of the last step: per request that reports and layer, float32 ``[N]``.

        Summed over the observed queries of the request, mean over heads: one decode token gives 1 in all.
        """
        found: Received = {}
        for chunks, observation in self._parts:
            sizes = [chunk.start + chunk.length for chunk in chunks]
            for layer, all_N in observation.received.items():
                for chunk, own_N in zip(chunks, all_N.split(sizes), strict=True):
                    if self._reports(chunk, layer):
                        found.setdefault(chunk.request.request_id, {})[layer] = own_N
        return found

    def _reports(self, chunk: Chunk, layer: int) -> bool:
        if chunk.length == 1:
            return self._options.decode
        return layer in self._options.prefill_layers
