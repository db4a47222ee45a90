"""Guards against a run that fails, or names a foreign commit, because of where it was started."""

import json
import subprocess
from pathlib import Path

import pytest

from tokenrouter.telemetry import collect_provenance, provenance
from tokenrouter.telemetry.provenance import git_state


def _git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tokenrouter").mkdir()
    (tmp_path / "tokenrouter" / "types.py").write_text("a = 1\n")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_clean_and_dirty_checkouts(checkout: Path) -> None:
    commit, dirty = git_state(checkout)
    assert commit is not None and len(commit) == 40 and dirty is False
    (checkout / "tokenrouter" / "new_router.py").write_text("b = 2\n")
    assert git_state(checkout) == (commit, True)


def test_outside_git_nothing_is_known_and_nothing_fails(tmp_path: Path) -> None:
    found = collect_provenance(seed=3, model="tiny", model_hash="abc", root=tmp_path)
    assert (found.commit, found.dirty, found.commit_label) == (None, None, "no commit")
    json.dumps(found.as_dict(), allow_nan=False)


def test_an_enclosing_repository_is_not_ours(checkout: Path) -> None:
    installed = checkout / ".venv" / "site-packages"
    (installed / "tokenrouter").mkdir(parents=True)
    assert git_state(installed) == (None, None)


def test_without_git_installed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_state(checkout) == (None, None)


def test_labels_name_changes_and_threads(checkout: Path) -> None:
    (checkout / "tokenrouter" / "types.py").write_text("a = 2\n")
    found = collect_provenance(seed=0, model="m", model_hash="h", root=checkout)
    assert found.commit_label == f"commit {str(found.commit)[:8]}+changes"
    assert f"{found.num_threads} thread" in found.hardware_label
    assert found.versions["torch"] and found.seed == 0


def test_a_status_that_git_does_not_give_is_not_clean(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time-out of git status was recorded as an unchanged tree."""
    ask = provenance._git
    monkeypatch.setattr(
        provenance, "_git", lambda root, *args: None if args[0] == "status" else ask(root, *args)
    )
    found = collect_provenance(seed=0, model="m", model_hash="h", root=checkout)
    assert found.commit is not None and found.dirty is None
    assert found.commit_label.endswith("(changes unknown)")
