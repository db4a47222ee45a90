"""The first and the last tokens (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453)."""

from dataclasses import dataclass

from torch import Tensor

from tokenrouter.kvcache.retention.base import Entries, ScoredPolicy


@dataclass(kw_only=True)
class SinkWindow(ScoredPolicy):
    """The newest entries stay; the first ones do as the guard ``sinks`` says."""

    name = "sink_window"
    unused = frozenset({"groups"})  # it decides alike in all

    def score(self, entries: Entries) -> Tensor:
        """See ScoredPolicy."""
        return entries.positions_N.float()
