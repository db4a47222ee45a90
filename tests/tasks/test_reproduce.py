"""Guards scripts/reproduce.sh: runs that are made twice, failures that stop the others, tables of half the runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tokenrouter.tasks import reproduce
from tokenrouter.telemetry.runfolder import is_finished

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
    assert "table torn is not written" in out.err and not (tables / "torn/quick").exists()
    table = (tables / "tiny/quick/table.md").read_text()
    assert "| all_high |" in table and "| rule     |" in table
    page = (tables / "README.md").read_text()
    assert "## Tiny" in page and "`bash scripts/reproduce.sh tiny --quick`" in page
    assert len(list(runs.glob("*/status.json"))) == 3
    assert sum(is_finished(path.parent) for path in runs.glob("*/status.json")) == 2
    again = ["tiny", *command]
    assert reproduce.main(again) == 0
    assert "2 runs, 2 of them done before" in capsys.readouterr().out


def test_runs_that_others_look_into_come_first(tmp_path: Path) -> None:
    """Guards against a router that is judged before it is trained, or another form's."""
    path = tmp_path / "chain" / "table.yaml"
    path.parent.mkdir()
    chain = (
        "prepared:\n"
        "  labels: {base: [task=collect, collect.path=@run/labels], quick: [collect.num_tokens=512]}\n"
        "  trained: {base: [task=train_router, train.data=@labels/labels]}\n"
        "base: [router=mlp, router.path=@trained/router.json]\n"
        "columns: [{title: tok/s, key: output_tok_s}]\ntitle: Chain\nquestion: Why?\n"
    )
    path.write_text(chain)
    made = reproduce.plan(reproduce.read_spec(path), tmp_path / "runs", quick=True)
    labels, trained, judged = made.in_order()
    assert labels.overrides[1:] == [
        f"collect.path={labels.folder}/labels",
        "collect.num_tokens=512",
    ]
    assert trained.overrides[1] == f"train.data={labels.folder}/labels"
    assert judged.overrides[1] == f"router.path={trained.folder}/router.json"
    longer = reproduce.plan(reproduce.read_spec(path), tmp_path / "runs", quick=False)
    assert not {work.folder for work in longer.in_order()} & {labels.folder, trained.folder}
    path.write_text(chain.replace("@labels/", "@lables/"))
    with pytest.raises(ValueError, match=r"no run @lables before this one; prepared: labels"):
        reproduce.plan(reproduce.read_spec(path), tmp_path / "runs", quick=True)


def test_questions_are_asked_where_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a table that cannot be made without data sets, and columns that are left out without a word."""
    path = tmp_path / "asking" / "table.yaml"
    path.parent.mkdir()
    asking = (
        "title: Asking\nquestion: Right?\ncolumns: [{title: copa, key: tasks.copa.acc_frac}]\n"
        'tasks: {quick: ["evaluation.tasks=[copa]"]}\n'
    )
    path.write_text(asking)
    spec = reproduce.read_spec(path)
    monkeypatch.setenv("TOKENROUTER_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(reproduce, "find_spec", lambda _: object())
    assert reproduce._has_questions([spec]) and not capsys.readouterr().out
    for name, missing in (("find_spec", "lm-eval"), ("os.environ", "TOKENROUTER_DATA_DIR")):
        with monkeypatch.context() as context:
            if name == "find_spec":
                context.setattr(reproduce, "find_spec", lambda _: None)
            else:
                context.delenv("TOKENROUTER_DATA_DIR")
            assert not reproduce._has_questions([spec])
        out = capsys.readouterr().out
        assert missing in out and "asking" in out and len(out.splitlines()) == 1
    for with_tasks, expected in ((True, "evaluation.tasks=[copa]"), (False, "seed=0")):
        (jobs,) = spec.jobs(quick=True, with_tasks=with_tasks).values()
        assert jobs[0][0] == expected
    (jobs,) = spec.jobs(quick=False, with_tasks=True).values()
    assert jobs == [["seed=0"], ["seed=1"], ["seed=2"]]
    path.write_text(asking.replace("quick:", "short:"))
    with pytest.raises(ValueError, match=r"there is no tasks\.short; there are: full, quick"):
        reproduce.read_spec(path)


def test_what_does_not_count_in_a_hash_and_what_does() -> None:
    """Guards against runs that are never found again, and against another's results."""
    plain = reproduce.hash_of(["router=rule"])
    assert plain == reproduce.hash_of([]), "the default router"
    assert plain == reproduce.hash_of(["paths.output_dir=/elsewhere"])
    assert plain != reproduce.hash_of(["seed=1"])
    with pytest.raises(ValueError, match="router=reuter"):
        reproduce.hash_of(["router=reuter"])


def test_every_table_here_composes_in_both_forms() -> None:
    """Guards against an option that was renamed under a table, of which half an hour later one hears."""
    names = reproduce.table_names(reproduce.TABLES)
    assert names, "there are tables"
    for name in names:
        spec = reproduce.read_spec(reproduce.TABLES / name / "table.yaml")
        first = next(iter(spec.runs))
        near = {  # every choice of each dimension beside the others' first ones
            labels: own
            for labels, own in spec.runs.items()
            if sum(a != b for a, b in zip(labels, first, strict=True)) <= 1
        }
        for quick, runs in ((True, near), (False, {first: spec.runs[first]})):
            some = replace(spec, repeats=1, runs=runs)
            made = reproduce.plan(some, Path("runs"), quick=quick, with_tasks=True).in_order()
            folders = {work.folder for work in made}
            assert len(folders) == len(made), "two cells of a grid are one run"


def test_a_table_that_is_not_there_is_named(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["tinny"])
    told = capsys.readouterr().err
    assert "there is no table 'tinny'; did you mean tiny? There are: tiny, torn" in told
    (tables / "tiny/table.yaml").write_text(TABLE.replace("router=rule", "router=reuter"))
    assert reproduce.main(["tiny"]) == 1
    assert "router=reuter" in capsys.readouterr().err


def test_folders_that_cannot_be_written_are_named(
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A traceback after hours of runs, and the other tables unwritten."""
    (tmp_path / "file").write_text("")
    assert reproduce.main(["tiny", "--quick", "--runs", str(tmp_path / "file")]) == 1
    assert "error: runs cannot be kept in" in capsys.readouterr().err

    def interrupted(work: object) -> bool:
        raise KeyboardInterrupt

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patched:
        patched.setattr(reproduce, "run_all", interrupted)
        assert reproduce.main(["tiny", "--quick"]) == 130
    assert "goes on where this one stopped" in capsys.readouterr().err
    for name in ("write", "write_page"):
        monkeypatch.setattr(reproduce, name, refused)
    for name, value in (("run_all", False), ("read_run", None)):
        monkeypatch.setattr(reproduce, name, lambda _, value=value: value)
    assert reproduce.main(["--quick", "--into", str(tables)]) == 1
    told = capsys.readouterr().err
    assert told.count("is not written: read-only") == 3, "two tables and the page"
