"""Guards the page of many runs: numbers of another run, rows that do not belong together, runs that vanish silently."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tokenrouter.evaluation.report import find_runs, gather, html_page, join
from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.telemetry import RunFolder

PROVENANCE = {
    "commit": "0123456789",
    "dirty": False,
    "model": "tiny",
    "model_hash": "aa",
    "seed": 0,
    "hardware": {"cpu": "a cpu", "num_cpus": 2, "devices": []},
}
PNG = b"\x89PNG\r\n\x1a\n rest"


def system(name: str, rate: float, kl: float | None = None, **more: Any) -> dict[str, Any]:
    spread = {"median": rate, "min": rate - 1.0, "max": rate + 1.0}
    row = SystemRow.from_dict(
        {"name": name, "output_tok_s": spread, "kl_mean_nats": kl} | {"num_passes": 5} | more
    )
    return row.as_dict()


def made(
    path: Path,
    rate: float = 15.0,
    *,
    overrides: tuple[str, ...] = ("router=rule", "seed=0"),
    provenance: Mapping[str, Any] | None = None,
    high: float = 10.0,
) -> Path:
    """A finished run, its chosen system at ``rate`` beside all_high at ``high``."""
    folder = RunFolder(path, job=" ".join(overrides))
    folder.write_config("a: 1\n", overrides)
    folder.write_json("provenance.json", PROVENANCE | dict(provenance or {}))
    folder.write_metrics({"throughput": {"output_tok_s": rate, "busy_s": 1.25}})
    rows = [
        system("all_high", high, 0.0, kl_stderr_nats=0.0, kl_decode_nats=0.0),
        system("all_low", 99.0, 0.04),
        system("rule", rate, 0.02, kl_stderr_nats=1e-4, kl_decode_nats=1e-3, chosen=True),
    ]
    folder.write_json("systems.json", {"rows": rows, "notes": ["first note", "second note"]})
    folder.succeed()
    return path


def page_of(root: Path) -> str:
    gathered = gather(find_runs([str(root)], skip=root / "own"))
    return html_page(gathered, join(gathered.runs))


def test_runs_are_found_once_at_any_depth_and_in_order(tmp_path: Path) -> None:
    """A sweep's tenth job before its second; a run that is named twice and counts twice; the report's own folder."""
    for name in ("sweep/2", "sweep/10", "sweep/0", "runs/a", "own"):
        made(tmp_path / name)
    given = [str(tmp_path / "sweep"), str(tmp_path / "runs" / "*"), str(tmp_path)]
    found = find_runs(given, skip=tmp_path / "own")
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == ["sweep/0", "sweep/2", "sweep/10", "runs/a"]
    assert find_runs([str(tmp_path / "swe[e]p" / "?")], skip=tmp_path)[0].name == "0"
    assert len(find_runs([str(tmp_path / "**" / "10")], skip=tmp_path)) == 1


def test_runs_behind_links_are_found_and_a_link_back_ends(tmp_path: Path) -> None:
    """A run that is kept elsewhere and missing from the page without a word; a search without an end."""
    made(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "kept").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "runs")
    found = find_runs([str(tmp_path / "runs")], skip=tmp_path)
    assert [path.relative_to(tmp_path) for path in found] == [Path("runs/kept/a")]


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in ("nothing", "noth*", "file"):
        with pytest.raises(ValueError, match=r"report\.runs: .*is no folder, and no pattern"):
            find_runs([str(tmp_path / wrong)], skip=tmp_path)


def test_what_is_left_out_is_said_with_its_reason(tmp_path: Path) -> None:
    """A failed, killed, old or damaged run that is in a table, or that nobody misses."""
    made(tmp_path / "a_good")
    RunFolder(tmp_path / "b_killed")
    RunFolder(tmp_path / "c_failed").fail(ValueError("no room"))
    made(tmp_path / "d_old")
    status = json.loads((tmp_path / "d_old/status.json").read_text())
    (tmp_path / "d_old/status.json").write_text(json.dumps(status | {"schema_version": 0}))
    made(tmp_path / "e_cut")
    (tmp_path / "e_cut/metrics.json").write_text('{"rou')
    for name, broken in {
        "f_rows": {"rows": 7},
        "g_name": {"rows": [{"chosen": True}]},
        "h_value": {"rows": [system("all_high", 1.0) | {"kl_mean_nats": "low"}]},
        "i_rate": {"rows": [system("all_high", 1.0) | {"output_tok_s": 3.0}]},
    }.items():
        made(tmp_path / name)
        (tmp_path / name / "systems.json").write_text(json.dumps(broken))
    made(tmp_path / "j_bytes")
    (tmp_path / "j_bytes/metrics.json").write_bytes(b"\xff\xfe")
    made(tmp_path / "k_where")
    (tmp_path / "k_where/provenance.json").write_text('{"hardware": "a cpu"}')
    gathered = gather(find_runs([str(tmp_path)], skip=tmp_path / "own"))
    assert [each.run.path.name for each in gathered.runs] == ["a_good"]
    reasons = {each.path.name: each.reason for each in gathered.left_out}
    says = {
        "b_killed": "the run has not ended, or it was killed",
        "c_failed": "the run failed (ValueError: no room)",
        "d_old": "its files have schema version 0, and this code reads 1",
        "e_cut": "metrics.json cannot be read",
        "f_rows": "systems.json holds no rows of systems",
        "g_name": "systems.json: a system's name must be text, got None",
        "h_value": "systems.json: a system's kl_mean_nats must be a number, got 'low'",
        "i_rate": "systems.json: a system's output_tok_s must be a number",
        "j_bytes": "metrics.json cannot be read",
        "k_where": "provenance.json names no hardware",
    }
    assert set(reasons) == set(says)
    assert all(reasons[name].startswith(text) for name, text in says.items()), reasons
    page = html_page(gathered, join(gathered.runs))
    assert all(f"{tmp_path / name}" in page for name in says) and "(ValueError: no room)" in page


def test_nothing_to_report_on_is_refused_in_words(tmp_path: Path) -> None:
    """A page without a run."""
    (tmp_path / "empty").mkdir()
    for number in range(7):
        RunFolder(tmp_path / "killed" / str(number))
    with pytest.raises(ValueError, match=r"holds no run .*empty is no run folder: there is no"):
        page_of(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"0 the run has not ended.*4 the run .*; and 2 more$"):
        page_of(tmp_path / "killed")


def test_rows_are_of_the_chosen_systems_with_verdicts(tmp_path: Path) -> None:
    """Another run's baseline, a baseline that nobody chose, a difference within the noise that looks like a gain."""
    made(tmp_path / "a", 15.0)
    made(tmp_path / "b", 11.5, overrides=("router=mlp", "seed=0"))
    [joined] = join(gather(find_runs([str(tmp_path)], skip=tmp_path)).runs)
    rows = {row.labels: row for row in joined.table.rows}
    assert list(rows) == [
        ("1: router=rule", "all_high"),
        ("1: router=rule", "rule"),
        ("2: router=mlp", "all_high"),
        ("2: router=mlp", "rule"),
    ]
    fast, slow = rows["1: router=rule", "rule"], rows["2: router=mlp", "rule"]
    assert fast.verdicts["output tok/s"] == "better" and slow.verdicts["output tok/s"] == "tie"
    assert fast.verdicts["KL mnat"] == "worse" and fast.cells["KL mnat"].value == 20.0
    assert joined.title == "tiny (aa) on a cpu (2 cores)"


def test_one_pass_is_no_verdict(tmp_path: Path) -> None:
    """A single pass, whose smallest is its largest, that beats another one without any spread."""
    folder = made(tmp_path / "a")
    rows = json.loads((folder / "systems.json").read_text())
    for row in rows["rows"]:
        row["output_tok_s"] = dict.fromkeys(("median", "min", "max"), row["output_tok_s"]["median"])
    (folder / "systems.json").write_text(json.dumps(rows))
    [joined] = join(gather([folder]).runs)
    assert "output tok/s" not in joined.table.rows[1].verdicts
    assert joined.table.rows[1].cells["output tok/s"].value == 15.0


def test_repeats_share_a_row_and_nothing_else_does(tmp_path: Path) -> None:
    """Seeds that are rows of their own; two commits, or a changed tree, in one mean."""
    for seed in (0, 1, 2):
        made(tmp_path / f"a{seed}", 15.0 + seed, overrides=("router=rule", f"seed={seed}"))
    made(tmp_path / "b", provenance={"commit": "other"})
    for name in ("c", "d"):
        made(tmp_path / name, provenance={"dirty": True})
    [joined] = join(gather(find_runs([str(tmp_path)], skip=tmp_path)).runs)
    labels = list(dict.fromkeys(row.labels[0] for row in joined.table.rows))
    assert [label.partition(":")[0] for label in labels] == ["1, 2, 3", "4", "5", "6"]
    assert joined.table.rows[1].cells["KL decode mnat"].value == 1.0
    assert set(joined.table.rows[1].verdicts) == {"output tok/s", "KL mnat"}, "one text is no noise"
    cell = joined.table.rows[1].cells["output tok/s"]
    assert cell.value == 16.0 and len(cell.samples) == 3


def test_models_and_machines_stand_apart(tmp_path: Path) -> None:
    """Rates of two machines, or KL of two models, one below the other."""
    made(tmp_path / "a")
    made(tmp_path / "b", provenance={"model_hash": "bb"})
    made(tmp_path / "c", provenance={"hardware": {"cpu": "another", "num_cpus": 2, "devices": []}})
    made(tmp_path / "d")
    made(tmp_path / "e", provenance={"num_threads": 7})
    tables = join(gather(find_runs([str(tmp_path)], skip=tmp_path)).runs)
    shown = [sorted(n for own in joined.numbers.values() for n in own) for joined in tables]
    assert shown == [[1, 4], [2], [3], [5]]
    assert len({joined.title for joined in tables}) == 4


def test_a_skipped_job_is_the_run_with_its_numbers(tmp_path: Path) -> None:
    """One run twice, as two repeats; figures of the skipped job's empty folder; a loop of skipped jobs."""
    (made(tmp_path / "a") / "routes.png").write_bytes(PNG)

    def skipped(name: str, **told: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text(json.dumps({"status": "skipped"} | told))

    skipped("b", finished_in=str(tmp_path / "a"))
    skipped("c", finished_in=str(tmp_path / "c"))
    skipped("d", finished_in=str(tmp_path / "gone"))
    skipped("e")
    gathered = gather(find_runs([str(tmp_path)], skip=tmp_path / "own"))
    assert [each.run.path.name for each in gathered.runs] == ["a"]
    reasons = [each.reason for each in gathered.left_out]
    assert "which was skipped" in reasons[0] and "gone is no run folder" in reasons[1]
    assert reasons[2].startswith("it was skipped, and does not say for which run")
    only = gather([tmp_path / "b"])
    assert [name for name, _ in only.runs[0].figures] == ["routes.png"]


def test_a_run_without_systems_has_its_section_and_no_row(tmp_path: Path) -> None:
    """task=generate, which measures and compares nothing: dropped, or a row of blanks."""
    made(tmp_path / "a")
    (made(tmp_path / "b") / "systems.json").unlink()
    page = page_of(tmp_path)
    assert 'since they compare no systems: <a href="#run-2">2</a>' in page
    assert '<section id="run-2">' in page
    (tmp_path / "a/systems.json").unlink()
    assert "<h2>Chosen systems" not in page_of(tmp_path)


def test_a_section_holds_what_its_folder_holds(tmp_path: Path) -> None:
    """Numbers, notes, facts or figures of a neighbour, or none."""
    made(tmp_path / "a")
    made(tmp_path / "b", 12.0, overrides=())
    for name, content in (("routes.png", PNG), ("torn.png", b"half"), ("note.txt", PNG)):
        (tmp_path / "b" / name).write_bytes(content)
    first, second = page_of(tmp_path).split("<section ")[1:]
    assert "<code>router=rule</code> <code>seed=0</code>" in first and "<img" not in first
    assert "No overrides: the defaults." in second
    assert "<code>throughput.output_tok_s</code></td><td>12</td>" in second
    folded = second.partition("<details>")[2]
    assert "<code>throughput.busy_s</code></td><td>1.25</td>" in folded
    assert "first note<br>second note" in first and "0123456789" in first
    assert '<img alt="routes.png of run 2: ' in second and "data:image/png;base64,iVBOR" in second
    assert "torn.png is no picture" in second and "note.txt" not in second


def test_what_cannot_be_written_is_no_crash(tmp_path: Path) -> None:
    """UnicodeEncodeError for half a surrogate pair in a file of a run."""
    folder = made(tmp_path / "a")
    (folder / "overrides.yaml").write_text('- "prompt=\\ud800"\n')
    assert "prompt=?" in html_page(*_both(folder)).encode().decode()


def _both(folder: Path) -> Any:
    gathered = gather([folder])
    return gathered, join(gathered.runs)
