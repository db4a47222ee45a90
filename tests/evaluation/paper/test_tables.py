"""Guards the tables of experiments/: numbers of the wrong run, ties that look like wins, empty tables."""

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tokenrouter.evaluation.paper import (
    Run,
    Table,
    TableSpec,
    build_table,
    estimate,
    read_run,
    read_spec,
    verdict,
)
from tokenrouter.evaluation.paper.intervals import Sample
from tokenrouter.evaluation.paper.render import as_csv, latex, markdown
from tokenrouter.evaluation.paper.runs import is_finished
from tokenrouter.evaluation.paper.write import write_page, write_table
from tokenrouter.telemetry import RunFolder

PROVENANCE = {
    "commit": "0123456789",
    "dirty": False,
    "model": "tiny",
    "model_hash": "aa",
    "num_threads": 1,
    "hardware": {"cpu": "a cpu", "num_cpus": 2, "devices": []},
}
SPEC = """
title: A table
question: Which is faster?
base: [task=benchmark]
grid:
  executor: [executor=int8, executor=full]
  router: {the rule: router=rule, mlp: [router=mlp, router.budget.high_frac=0.2]}
rows: systems
quick: [experiment=quick]
columns:
  - {title: tok/s, key: output_tok_s, better: more}
  - {title: KL mnat, key: kl_mean_nats, error: kl_stderr_nats, scale: 1000, digits: 2, better: less}
  - {title: router %, key: router.overhead_frac, scale: 100}
  - {title: nothing, key: nowhere.at_all}
figure: {x: tok/s, y: KL mnat, series: [router], joined: false}
"""


def spec_of(tmp_path: Path, text: str = SPEC) -> TableSpec:
    path = tmp_path / "speed" / "table.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return read_spec(path)


def row(name: str, rate: float, kl: float, *, chosen: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "chosen": chosen,
        "output_tok_s": {"median": rate, "min": rate - 1.0, "max": rate + 1.0},
        "kl_mean_nats": kl,
        "kl_stderr_nats": 1e-4,
    }


def written(
    path: Path, rows: list[dict[str, Any]], provenance: Mapping[str, Any] = PROVENANCE
) -> Run:
    folder = RunFolder(path)
    folder.write_config("a: 1\n", ["router=rule", "seed=0"])
    folder.write_json("provenance.json", provenance)
    folder.write_metrics({"router": {"overhead_frac": 0.012}})
    folder.write_json("systems.json", {"rows": rows, "notes": []})
    folder.succeed()
    return read_run(path)


def table_of(tmp_path: Path) -> Table:
    runs = {}
    for index, router in enumerate(("the rule", "mlp")):
        chosen = row("rule" if index == 0 else "mlp", 12.0 + index * 3, 0.002, chosen=True)
        rows = [row("all_high", 10.0 + index, 0.0), row("all_low", 20.0, 0.004), chosen]
        runs["int8", router] = [written(tmp_path / f"run{index}", rows)]
    return build_table(spec_of(tmp_path), runs)


def test_a_spec_makes_a_run_per_cell_of_the_grid(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert spec.name == "speed" and spec.row_labels == ("executor", "router")
    mlp = ["task=benchmark", "executor=full", "router=mlp", "router.budget.high_frac=0.2"]
    assert len(spec.runs) == 4 and spec.runs["full", "mlp"] == mlp
    assert spec.jobs(quick=True)["full", "mlp"] == [[*mlp, "experiment=quick", "seed=0"]]
    assert [own[-1] for own in spec.jobs(quick=False)["full", "mlp"]] == [
        "seed=0",
        "seed=1",
        "seed=2",
    ]


def test_a_list_of_grids_makes_the_runs_of_each(tmp_path: Path) -> None:
    """Runs of a router that was trained for another executor, or a grid that replaces the one before it."""
    second = "  - {executor: [executor=int4], router: {mlp: router=rule}}"
    start, end = SPEC.index("grid:\n"), SPEC.index("rows: systems")
    first = "  - " + SPEC[start + 8 : end].strip().replace("\n", "\n  ")
    listed = f"{SPEC[:start]}grid:\n{first}\n{second}\n{SPEC[end:]}"
    spec, plain = spec_of(tmp_path, listed), spec_of(tmp_path)
    assert spec.labels == plain.labels
    assert spec.runs == {
        **plain.runs,
        ("int4", "mlp"): ["task=benchmark", "executor=int4", "router=rule"],
    }
    for old, new, says in (
        ("{executor: [executor=int4], ", "{", "grids of a list, the same"),
        ("executor=int4", "executor=int8", "two grids have int8, mlp"),
        (second, "  - executor", "grid must map labels"),
    ):
        with pytest.raises(ValueError, match=says):
            spec_of(tmp_path, listed.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("title: A table", "titel: A table", "there is no titel"),
        ("rows: systems", "rows: all", "rows must be one of systems, chosen"),
        ("better: more", "better: up", "better of 'tok/s' must be more or less"),
        ("title: nothing", "title: tok/s", "two columns have one title"),
        ("series: [router]", "series: [reuter]", "'reuter' is no column and no label"),
        ("x: tok/s", "z: tok/s", "there is no figure.z"),
        (
            "executor: [executor=int8, executor=full]",
            "executor: int8",
            "grid.executor must be a list",
        ),
        ("question: Which", "question: [Which", "is no YAML"),
        ("rows: systems", "repeats: 0", "repeats must be at least 1"),
    ],
)
def test_a_wrong_spec_is_refused_in_words(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in SPEC
    with pytest.raises(ValueError, match=says):
        spec_of(tmp_path, SPEC.replace(old, new))


def test_rows_are_of_systems_and_baselines_stand_once(tmp_path: Path) -> None:
    """Guards against a baseline that is averaged into the chosen one, or compared with another run's."""
    table = table_of(tmp_path)
    by_labels = {row.labels: row for row in table.rows}
    assert list(by_labels) == [
        ("int8", "all_high"),
        ("int8", "all_low"),
        ("int8", "the rule"),
        ("int8", "mlp"),
    ]
    high = by_labels["int8", "all_high"]
    assert high.cells["tok/s"].value == 10.5 and len(high.cells["tok/s"].samples) == 2
    assert not high.verdicts, "nothing is better than itself"
    rule, mlp = by_labels["int8", "the rule"], by_labels["int8", "mlp"]
    assert (rule.cells["tok/s"].value, mlp.cells["tok/s"].value) == (12.0, 15.0)
    assert rule.verdicts == {"tok/s": "tie", "KL mnat": "worse"}, "12 ± 1 beside 10 ± 1 touch"
    assert mlp.verdicts == {"tok/s": "better", "KL mnat": "worse"}, "15 ± 1 beside 11 ± 1"
    assert mlp.cells["KL mnat"].low == pytest.approx(2.0 - 0.196)
    assert mlp.cells["router %"].value == pytest.approx(1.2)
    assert "router %" not in high.cells, "metrics.json is about the chosen system"
    assert [column.title for column in table.columns] == ["tok/s", "KL mnat", "router %"]


def test_intervals_are_students_and_pairs_are_of_one_run() -> None:
    """Guards against a machine's drift between repeats that hides a difference, or makes one."""
    own = estimate([Sample(value=v) for v in (11.0, 21.0, 31.2)])
    other = estimate([Sample(value=v) for v in (10.0, 20.0, 30.0)])
    assert own.value == pytest.approx(63.2 / 3)
    half = 4.303 * 10.1005 / math.sqrt(3)
    assert (own.low, own.high) == pytest.approx((own.value - half, own.value + half), rel=1e-3)
    found = verdict(own, other, "more")
    assert found is not None and found[0] == "better", (
        "1 in each pair, though the runs differ by 10"
    )
    assert (verdict(other, own, "more") or ("",))[0] == "worse"
    assert (verdict(other, own, "less") or ("",))[0] == "better"
    mixed = estimate([Sample(value=v) for v in (11.0, 19.0, 30.1)])
    assert (verdict(mixed, other, "more") or ("",))[0] == "tie"
    single = estimate([Sample(value=1.0)])
    assert not single.is_bounded and verdict(single, single, "more") is None


def test_the_same_numbers_in_every_form(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    lines = markdown(table).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == 6
    assert "| int8     | mlp      | 15.0 [14.0, 16.0] ↑ |" in lines[5]
    tex = latex(table)
    assert r"int8 & the rule & 12.0 [11.0, 13.0] $=$ & 2.00 [1.80, 2.20] $\downarrow$" in tex
    assert r"executor & router & tok/s & KL mnat & router \% \\" in tex
    assert tex.count("\n") == 4 + 1 + 1 + 4 + 1 + 1 - 1, (
        "comment, begin, four rules and lines, rows"
    )
    rows = list(csv.DictReader(io.StringIO(as_csv(table))))
    mlp = next(r for r in rows if (r["router"], r["column"]) == ("mlp", "KL mnat"))
    assert float(mlp["value"]) == 2.0 and mlp["verdict"] == "worse" and mlp["runs"] == "1"
    assert len(rows) == 4 * 2 + 2


def test_files_and_the_page(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    folder = tmp_path / "speed" / "results"
    files = write_table(table, folder, command="bash scripts/reproduce.sh speed", is_quick=True)
    assert {path.name for path in files} == {
        *("table.md", "table.tex", "table.csv", "about.json"),
        *("figure.png", "figure.pdf"),
    }
    assert all(path.stat().st_size > 0 for path in files)
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    write_page(tmp_path, tmp_path / "README.md", ["speed", "never_run"])
    page = (tmp_path / "README.md").read_text()
    assert "## A table" in page and "Which is faster?" in page and markdown(table).rstrip() in page
    assert "2 runs, tiny, a cpu (2 cores, 1 threads), commit 01234567" in page
    assert "Short form" in page and "](speed/results/figure.png)" in page
    assert "never_run" not in page


def test_no_table_of_nothing_and_none_of_two_kinds(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    bare = written(tmp_path / "bare", [])
    with pytest.raises(ValueError, match=r"no run measured any of .*bare"):
        build_table(
            spec_of(
                tmp_path,
                SPEC.replace("rows: systems", "rows: chosen").replace("router.overhead_frac", "x"),
            ),
            {("int8", "mlp"): [bare]},
        )
    one = written(tmp_path / "one", [row("all_high", 1.0, 0.0, chosen=True)])
    for key, value, what in (
        ("model_hash", "bb", "models"),
        ("hardware", PROVENANCE["hardware"] | {"cpu": "another"}, "machines"),
    ):
        rows = [row("all_high", 1.0, 0.0, chosen=True)]
        other = written(tmp_path / what, rows, PROVENANCE | {key: value})
        with pytest.raises(ValueError, match=f"one and .*{what} are of different {what}"):
            build_table(spec, {("int8", "mlp"): [one, other]})


def test_a_run_that_no_number_should_be_taken_from(tmp_path: Path) -> None:
    """Guards against half-written, failed, foreign and old run folders."""

    def refused(name: str, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            read_run(tmp_path / name)
        assert not is_finished(tmp_path / name)

    refused("nothing", "is no run folder: there is no status.json")
    RunFolder(tmp_path / "killed")
    refused("killed", "has not ended, or it was killed")
    RunFolder(tmp_path / "failed").fail(ValueError("no room"))
    refused("failed", r"the run failed \(ValueError: no room\)")
    written(tmp_path / "old", [])
    status = json.loads((tmp_path / "old/status.json").read_text())
    (tmp_path / "old/status.json").write_text(json.dumps(status | {"schema_version": 0}))
    refused("old", "schema version 0, and this code reads 1")
    written(tmp_path / "cut", [])
    (tmp_path / "cut/metrics.json").write_text('{"router": {"over')
    with pytest.raises(ValueError, match=r"metrics.json cannot be read .* cut short"):
        read_run(tmp_path / "cut")
    (tmp_path / "cut/metrics.json").unlink()
    with pytest.raises(ValueError, match=r"has measured nothing: there is no metrics.json"):
        read_run(tmp_path / "cut")
    assert read_run(written(tmp_path / "good", []).path).overrides == ["router=rule", "seed=0"]
