"""Guards the package's types: without the marker, type checkers treat all of it as Any."""

import tomllib
from importlib.resources import files
from pathlib import Path

import tokenrouter

ROOT = Path(__file__).resolve().parents[2]


def test_the_marker_is_there_and_packaged() -> None:
    """The marker was listed as package data, but did not exist."""
    assert files(tokenrouter).joinpath("py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["*"]
