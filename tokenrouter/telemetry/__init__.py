"""What a run leaves behind: folder, provenance, decision log, percentiles, peak memory."""

from tokenrouter.telemetry.decisions import DecisionLog, write_decisions
from tokenrouter.telemetry.memory import peak_process_bytes, reset_peak_process_bytes
from tokenrouter.telemetry.provenance import Provenance, collect_provenance
from tokenrouter.telemetry.runfolder import SECTIONS, RunFolder
from tokenrouter.telemetry.stats import Spread, percentiles, spread

__all__ = [
    "SECTIONS",
    "DecisionLog",
    "Provenance",
    "RunFolder",
    "Spread",
    "collect_provenance",
    "peak_process_bytes",
    "percentiles",
    "reset_peak_process_bytes",
    "spread",
    "write_decisions",
]
