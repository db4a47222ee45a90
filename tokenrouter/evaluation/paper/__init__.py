"""Tables and figures for a paper, built from run folders alone."""

from .intervals import Estimate, Verdict, estimate, verdict
from .reading import read_spec
from .runs import Run, read_run
from .spec import Column, Figure, TableSpec
from .table import Row, Table, build_table

__all__ = [
    "Column",
    "Estimate",
    "Figure",
    "Row",
    "Run",
    "Table",
    "TableSpec",
    "Verdict",
    "build_table",
    "estimate",
    "read_run",
    "read_spec",
    "verdict",
]
