"""What a comparison measures beside KL and throughput, where it is asked for."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Part(NamedTuple):
    """One such measurement.

    Attributes:
        name: of its section in ``quality`` of metrics.json.
        tables: markdown, as ``evaluation.tables.markdown`` makes it.
        notes: one line each.
        section: of the run's system.
        by_system: numbers that join each system's row of systems.json, by names that begin with the part's.
    """

    name: str
    tables: tuple[str, ...]
    notes: tuple[str, ...]
    section: Mapping[str, Any]
    by_system: Mapping[str, Mapping[str, float]]
