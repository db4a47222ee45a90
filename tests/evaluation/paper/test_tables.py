"""Guards the tables of experiments/: numbers of the wrong run, ties that look like wins, empty tables."""

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenrouter.evaluation.paper import (
    Estimate,
    Run,
    Table,
    TableSpec,
    build_table,
    estimate,
    read_run,
    read_spec,
    verdict,
)
from tokenrouter.evaluation.paper.intervals import Sample, t_95
from tokenrouter.evaluation.paper.render import as_csv, latex, legend, markdown
from tokenrouter.evaluation.paper.write import QUICK, RESULTS, write_page, write_table
from tokenrouter.evaluation.tables import markdown as padded
from tokenrouter.telemetry import RunFolder
from tokenrouter.telemetry.runfolder import is_finished

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
        "num_passes": 5,
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
        ("better: more", "better: up", "better must be more or less, or left out, got 'up'"),
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
        ("rows: systems", "skipped: all_low", "skipped must be a list of texts"),
        ("quick: [experiment=quick]", "quick: experiment=quick", "quick must be a list of texts"),
        ("base: [task=benchmark]", "base: task=benchmark", "base must be a list of overrides"),
        ("scale: 100}", "scale: 1e-6}", "scale must be a number .YAML reads 1e-6 as text"),
        ("digits: 2", "digits: 1.5", "digits must be a count of 0 to 15"),
        ("key: output_tok_s, ", "", "columns needs key"),
        ("question: Which is faster?", "", "the table needs question"),
        ("title: A table", "title: |\n  A\n  table", "title must be one line of text"),
        ("executor=full]", "other=int8]", "two choices of grid.executor are shown as one"),
        ("mlp: [router=mlp", "the rule: [router=mlp", "'the rule' is there twice"),
        ("mlp: [router=mlp", "mlp: [null", "grid.router.mlp must be a list of overrides"),
        (SPEC[SPEC.index("grid") : SPEC.index("rows")], "grid: []\n", "grid must map labels"),
        ("executor: [", "value: [", "label must not be called 'value'"),
        ("joined: false", "joined: 1", "figure.joined must be true or false"),
        ("rows: systems", "prepared: [labels]", "prepared must be names with values"),
        ("rows: systems", "prepared: {a: {base: task=collect}}", "prepared.a.base must be a list"),
        ("rows: systems", "tasks: {quick: evaluation.limit=4}", "tasks.quick must be a list"),
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
    assert mlp.cells["KL mnat"].low == pytest.approx(2.0 - 0.196, abs=1e-4)
    assert mlp.cells["router %"].value == pytest.approx(1.2)
    assert "router %" not in high.cells, "metrics.json is about the chosen system"
    assert [column.title for column in table.columns] == ["tok/s", "KL mnat", "router %"]


def test_a_baseline_that_follows_the_router_is_not_averaged_over_routers(tmp_path: Path) -> None:
    """One decision per request at shares of 5 and of 50 % high, as one number at none of them."""
    runs = {}
    for index, router in enumerate(("the rule", "mlp")):
        rows = [row("all_high", 10.0, 0.0), row("request_level", 12.0 + index, 0.002 * index)]
        rows.append(row("rule", 15.0, 0.001, chosen=True))
        runs["int8", router] = [written(tmp_path / f"run{index}", rows)]
    found = {r.labels[1]: r.cells["tok/s"].value for r in build_table(spec_of(tmp_path), runs).rows}
    assert found["request_level, as the rule"] == 12.0 and found["request_level, as mlp"] == 13.0
    assert next(iter(found)) == "all_high" and len(found) == 5


def test_intervals_are_students_and_pairs_are_of_one_run() -> None:
    """Guards against a machine's drift between repeats that hides a difference, or makes one."""
    own = estimate([Sample(value=v) for v in (11.0, 21.0, 31.2)])
    other = estimate([Sample(value=v) for v in (10.0, 20.0, 30.0)])
    assert own.value == pytest.approx(63.2 / 3)
    half = 4.303 * 10.1005 / math.sqrt(3)
    assert (own.low, own.high) == pytest.approx((own.value - half, own.value + half), rel=1e-3)
    assert verdict(own, other, "more") == "better", "1 in each pair, though the runs differ by 10"
    assert verdict(other, own, "more") == "worse" and verdict(other, own, "less") == "better"
    mixed = estimate([Sample(value=v) for v in (11.0, 19.0, 30.1)])
    assert verdict(mixed, other, "more") == "tie"
    single = estimate([Sample(value=1.0)])
    assert not single.is_bounded and verdict(single, single, "more") is None


def test_students_t_of_any_number_of_runs() -> None:
    """2.23 for 11 runs and 1.96 for 12."""
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 10, 11, 12, 29, 1000):
        assert t_95(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), abs=3e-3)


def test_repeats_on_one_text_do_not_make_it_longer() -> None:
    """A KL that is the same with every seed is no more certain for it: the text's windows are what it is over."""

    def thrice(value: float, half: float) -> Estimate:
        return estimate([Sample(value=value, low=value - half, high=value + half)] * 3)

    own, other = thrice(2.0, 0.3), thrice(2.2, 0.3)
    assert (own.low, own.high) == pytest.approx((1.7, 2.3))
    assert (
        verdict(own, other, "less") == "tie" and verdict(own, thrice(2.5, 0.3), "less") == "better"
    )
    single = [estimate([each.samples[0]]) for each in (own, other)]
    assert verdict(*single, "less") == "tie"


@pytest.mark.parametrize(
    ("num_passes", "far", "near"), [(2, 7.0, 6.5), (3, 2.8, 2.7), (5, 2.1, 1.9)]
)
def test_few_passes_part_by_luck(num_passes: int, far: float, near: float) -> None:
    """Of two equal systems with two passes each, one in three times one is faster in both."""

    def rate(value: float) -> Estimate:
        bounds = {"low": value - 1.0, "high": value + 1.0}
        return estimate([Sample(value=value, num_passes=num_passes, **bounds)])

    for better, expected in (("more", "better"), ("less", "worse")):
        assert verdict(rate(10.0 + far), rate(10.0), better) == expected
        assert verdict(rate(10.0 + near), rate(10.0), better) == "tie"


def test_an_error_over_few_windows_is_wider(tmp_path: Path) -> None:
    """1.96 standard errors hold 81 % with three windows; a task's hundreds of questions need no more."""
    text = SPEC.replace(
        "title: router %", "title: acc, key: acc, error: kl_half}\n  - {title: router %"
    )
    values = row("all_high", 1.0, 0.002, chosen=True) | {
        "num_windows": 3,
        "acc": 0.5,
        "kl_half": 0.1,
    }
    table = build_table(
        spec_of(tmp_path, text), {("int8", "mlp"): [written(tmp_path / "a", [values])]}
    )
    cells = table.rows[0].cells
    assert cells["KL mnat"].high == pytest.approx(2.0 + 4.303 * 0.1)
    assert cells["acc"].high == pytest.approx(0.5 + 0.196, abs=1e-4)


def test_what_is_no_number_is_no_cell(tmp_path: Path) -> None:
    """NaN that is "worse" than everything; an integer that no float holds, a traceback at the end of all runs."""
    run = written(tmp_path / "a", [row("all_high", 1.0, 0.0, chosen=True)])
    for value in (math.nan, math.inf, 10**400, True, "fast", None):
        changed = replace(run, metrics={"router": {"overhead_frac": value}})
        table = build_table(spec_of(tmp_path), {("int8", "mlp"): [changed]})
        assert "router %" not in table.rows[0].cells, value
    for broken in (
        '{"router": {"overhead_frac": NaN}}',
        '{"router": {"overhead_frac": -Infinity}}',
    ):
        (run.path / "metrics.json").write_text(broken)
        with pytest.raises(
            ValueError, match=r"metrics.json cannot be read \((NaN|-Infinity) is no"
        ):
            read_run(run.path)


def test_a_run_that_has_lost_a_file_is_not_finished(tmp_path: Path) -> None:
    """ "run it again", of a run that the same command then skips as done."""
    for number, (name, content) in enumerate(
        (
            ("metrics.json", None),
            ("systems.json", None),
            ("metrics.json", '{"rou'),
            ("provenance.json", ""),
        )
    ):
        run = written(tmp_path / str(number), [row("all_high", 1.0, 0.0, chosen=True)])
        assert is_finished(run.path)
        (run.path / name).unlink() if content is None else (run.path / name).write_text(content)
        assert not is_finished(run.path), (name, content)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("overrides.yaml", "", "holds no list of overrides"),
        ("overrides.yaml", "- 3\n", "holds no list of overrides"),
        ("overrides.yaml", '- "router=ru', "overrides.yaml cannot be read"),
        ("provenance.json", "{}", "names no hardware"),
        (
            "systems.json",
            '{"rows": [{"name": "a"}, {"name": "a"}], "notes": []}',
            "names a system twice",
        ),
        (
            "systems.json",
            '{"rows": [{"name": "a", "kl_mean_nats": 1e999}], "notes": []}',
            "must be a number",
        ),
    ],
)
def test_damaged_files_are_not_read_as_something_else(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    """A run of other overrides, or of no machine, in a table."""
    run = written(tmp_path / "a", [])
    (run.path / name).write_text(content)
    with pytest.raises(ValueError, match=says):
        read_run(run.path)


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
    assert "2 runs, tiny, a cpu (2 cores, 1 thread), commit 01234567" in page
    assert "Short form" in page and "](speed/results/figure.png)" in page
    assert "never_run" not in page


def test_the_short_form_takes_no_long_ones_place(tmp_path: Path) -> None:
    """A trial of reproduce.sh that replaces measured tables on the page."""
    table = table_of(tmp_path)

    def page(form: str) -> str:
        write_table(table, tmp_path / "speed" / form, command="make it", is_quick=form == QUICK)
        assert write_page(tmp_path, tmp_path / "README.md", ["speed"]) == []
        return (tmp_path / "README.md").read_text()

    assert "Short form" in page(QUICK) and "Short form" not in page(RESULTS)
    shown = page(QUICK)
    assert "Short form" not in shown and "](speed/results/figure.png)" in shown


def test_a_table_that_cannot_be_drawn_or_is_damaged(tmp_path: Path) -> None:
    """Half a table beside another one's figure; a page without the good tables because of a damaged one."""
    table, folder = table_of(tmp_path), tmp_path / "speed" / RESULTS
    write_table(table, folder, command="make it", is_quick=False)
    bare = replace(table, rows=[replace(r, cells={"tok/s": r.cells["tok/s"]}) for r in table.rows])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="no row has both tok/s and KL mnat"):
        write_table(bare, folder, command="make it", is_quick=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    plain = replace(bare, spec=replace(bare.spec, figure=None))
    write_table(plain, folder, command="make it", is_quick=False)
    names = {path.name for path in folder.iterdir()}
    assert names == {"about.json", "table.md", "table.tex", "table.csv"}, "the old figure is gone"
    page = tmp_path / "README.md"
    write_table(table, tmp_path / "other" / RESULTS, command="make it", is_quick=False)
    for name, content in (("about.json", '{"tit'), ("about.json", "{}"), ("table.md", None)):
        write_table(plain, folder, command="make it", is_quick=False)
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
        [problem] = write_page(tmp_path, page, ["speed", "other"])
        assert "speed/results is damaged" in problem and "make the table again" in problem
        assert page.read_text().count("## A table") == 1


def test_no_page_of_nothing(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    assert write_page(tmp_path, page, ["speed"]) == [] and not page.exists()


HOSTILE = "a_b & 50 % of $1 | {x} <i> #2 ~ ^ \\ `c` *d*"


def test_names_with_marks_of_every_form_stay_names(tmp_path: Path) -> None:
    """A cell that ends at a pipe, a formula at a dollar, a row's first bracket that LaTeX takes for a length."""
    rows = [replace(r, labels=(f"[{HOSTILE}", "x\ny")) for r in table_of(tmp_path).rows[2:]]
    titled = replace(spec_of(tmp_path), title=f"{HOSTILE}")
    table = Table(spec=titled, rows=rows, runs=table_of(tmp_path / "again").runs)
    lines = markdown(table).splitlines()
    assert len(lines) == 4 and {line.replace(r"\|", "").count("|") for line in lines} == {6}
    assert r"a_b & 50 % of $1 \| {x} \<i> #2 ~ ^ \\ \`c\` \*d\*" in lines[2] and "x y" in lines[2]
    assert (
        r"{}[a\_b \& 50 \% of \$1 \textbar{} \{x\} \textless{}i\textgreater{} \#2 \textasciitilde{} "
        r"\textasciicircum{} \textbackslash{} `c` *d*"
    ) in latex(table)
    assert next(csv.DictReader(io.StringIO(as_csv(table))))["executor"] == f"[{HOSTILE}"
    files = write_table(table, tmp_path / "drawn", command="x", is_quick=False)
    assert all(path.stat().st_size for path in files)


def test_a_column_that_is_left_out_moves_no_other() -> None:
    """Numbers to the left, because an empty column of names stood before them."""
    rule = padded(["a", "b", "number"], [["", "x", "1.0"]], num_left=2).splitlines()[1]
    assert rule == "| -- | -----: |"


def test_numbers_are_shown_as_such(tmp_path: Path) -> None:
    """-0.0, three hundred digits, and a legend of brackets that no cell has."""
    table = table_of(tmp_path)

    def with_rate(value: float) -> Table:
        cell = estimate([Sample(value=value)])
        return replace(table, rows=[replace(table.rows[0], cells={"tok/s": cell}, verdicts={})])

    for value, shown in ((-0.01, "| 0.0 |"), (1.5e300, "| 1.5e+300 |"), (999.95, "| 1000.0 |")):
        assert shown in " ".join(markdown(with_rate(value)).split())
    assert legend(with_rate(1.0)) == ""
    told = legend(table)
    assert told.startswith(
        "Brackets: of the passes or windows of one run; 95 %"
    ) or told.startswith("Brackets: 95 % over runs; of the passes")
    assert "beside all_high of the same run: ↑ better" in told


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
        ("num_threads", 2, "numbers of threads"),
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
