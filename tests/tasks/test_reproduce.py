"""Guards scripts/reproduce.sh: runs that are made twice, failures that stop the others, tables of half the runs."""

from pathlib import Path

import pytest

from tokenrouter.evaluation.paper.runs import is_finished
from tokenrouter.tasks import reproduce

TINY = "[task=benchmark, debug=tiny, executor=int8, num_threads=1]"
TABLE = f"""
title: Tiny
question: Does it run?
base: {TINY}
grid:
  router: [router=all_high, router=rule]
quick: [evaluation=short]
columns:
  - {{title: tok/s, key: output_tok_s, better: more}}
  - {{title: router %, key: router.overhead_frac, scale: 100}}
"""


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two tables; a run of the second fails."""
    folder = tmp_path / "experiments"
    for name, text in (
        ("tiny", TABLE),
        ("torn", TABLE.replace("router=rule]", "evaluation.num_repeats=0]")),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "table.yaml").write_text(text)
    monkeypatch.setattr(reproduce, "TABLES", folder)
    return folder


@pytest.mark.slow
def test_runs_are_shared_kept_and_may_fail(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three runs for two tables, of which one fails: its table is left out, and a rerun makes that run alone again."""
    runs = tmp_path / "runs"
    command = ["--quick", "--runs", str(runs), "--into", str(tables)]
    assert reproduce.main(command) == 1
    out = capsys.readouterr()
    assert "3 runs, 0 of them done before" in out.out and "[3/3]" in out.out
    assert "failed (exit code 1): ValueError: evaluation.num_repeats must be at least 1" in out.err
    assert "table torn is not written" in out.err and not (tables / "torn/results").exists()
    table = (tables / "tiny/results/table.md").read_text()
    assert "| all_high |" in table and "| rule     |" in table
    page = (tables / "README.md").read_text()
    assert "## Tiny" in page and "`bash scripts/reproduce.sh tiny --quick`" in page
    assert len(list(runs.glob("*/status.json"))) == 3
    assert sum(is_finished(path.parent) for path in runs.glob("*/status.json")) == 2
    again = ["tiny", *command]
    assert reproduce.main(again) == 0
    assert "2 runs, 2 of them done before" in capsys.readouterr().out


def test_what_does_not_count_in_a_hash_and_what_does() -> None:
    """Guards against runs that are never found again, and against another's results."""
    plain = reproduce.config_hash(["router=rule"])
    assert plain == reproduce.config_hash([]), "the default router"
    assert plain == reproduce.config_hash(["logger=none", "paths.output_dir=/elsewhere"])
    assert plain != reproduce.config_hash(["seed=1"])
    with pytest.raises(ValueError, match="router=reuter"):
        reproduce.config_hash(["router=reuter"])


def test_every_table_here_composes_in_both_forms() -> None:
    """Guards against an option that was renamed under a table, of which half an hour later one hears."""
    names = reproduce.table_names(reproduce.TABLES)
    assert names, "there are tables"
    for name in names:
        spec = reproduce.read_spec(reproduce.TABLES / name / "table.yaml")
        for quick in (True, False):
            first = {labels: jobs[:1] for labels, jobs in spec.jobs(quick=quick).items()}
            hashes = {reproduce.config_hash(jobs[0]) for jobs in first.values()}
            assert len(hashes) == len(first), "two cells of a grid are one run"


def test_a_table_that_is_not_there_is_named(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["tinny"])
    assert "tinny" in capsys.readouterr().err
    (tables / "tiny/table.yaml").write_text(TABLE.replace("router=rule", "router=reuter"))
    assert reproduce.main(["tiny"]) == 1
    assert "router=reuter" in capsys.readouterr().err
