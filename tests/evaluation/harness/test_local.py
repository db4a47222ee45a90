"""Guards the local task files: a set that no longer loads, a right answer that is another choice, silent bad input."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tokenrouter.evaluation.harness import local

QUESTION = {"query": "Is it?", "choices": ["no", "yes"], "gold": 1}


@pytest.fixture
def data_dir() -> str:
    """The folder of local data sets."""
    found = os.environ.get("TOKENROUTER_DATA_DIR")
    if not found or not Path(found).is_dir():
        pytest.skip("TOKENROUTER_DATA_DIR is not set, or is no folder")
    return found


@pytest.mark.data
@pytest.mark.parametrize("name", local.names())
def test_every_task_file_makes_questions(name: str, data_dir: str) -> None:
    """A template that names a field which the data has not, or one that leaves the answer in the prompt."""
    pytest.importorskip("lm_eval")
    from tokenrouter.evaluation.harness.runner import LoadedTasks, TaskSettings

    loaded = LoadedTasks(TaskSettings(tasks=[name], data_dir=data_dir))
    [task] = loaded._loaded["tasks"].values()
    assert loaded.names == (name,) and len(task.eval_docs) >= 70
    for doc in task.eval_docs:
        text, target = task.doc_to_text(doc), task.doc_to_target(doc)
        if task.OUTPUT_TYPE != "multiple_choice":
            assert isinstance(text, str) and isinstance(target, str) and text and target.strip()
            assert not text.endswith(target)
            continue
        choices = task.doc_to_choice(doc)
        assert 2 <= len(choices) <= 5 and all(isinstance(choice, str) for choice in choices)
        right = text if name == "winogrande" else target
        assert isinstance(right, int) and 0 <= right < len(choices)


def _write(folder: Path, text: str) -> None:
    (folder / "copa").mkdir()
    (folder / "copa" / "copa.jsonl").write_text(text)


def test_questions_are_those_of_the_file(tmp_path: Path) -> None:
    """Lines that end inside a text, at a separator that is no line break in JSON."""
    odd = {**QUESTION, "query": "one\u2028two"}
    _write(tmp_path, "".join(json.dumps(q, ensure_ascii=False) + "\n" for q in (QUESTION, odd)))
    docs = local.load(name="copa", data_dir=str(tmp_path), version=1.0)["test"]
    assert docs == [QUESTION, odd] and set(docs.features) == set(QUESTION)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no file .*copa.jsonl; set TOKENROUTER_DATA_DIR, or pass paths.data_dir"),
        ("", "holds no question"),
        ('{"query": "Is it?"}\n', "another format than expected .KeyError: 'choices'"),
        ("plain text\n", "another format than expected .JSONDecodeError"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    """An accuracy of no questions."""
    if text is not None:
        _write(tmp_path, text)
    with pytest.raises(ValueError, match=f"task 'copa'.*{says}|{says}"):
        local.load(name="copa", data_dir=str(tmp_path))


def test_no_data_folder_is_named() -> None:
    with pytest.raises(ValueError, match=r"task 'copa' needs .*TOKENROUTER_DATA_DIR"):
        local.load(name="copa")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hellaswag",
            "A man sits. he\n2\na.\nb.\nc.\nd.\n",
            {"query": "A man sits. he", "gold": 2, "choices": ["a.", "b.", "c.", "d."]},
        ),
        (
            "sciq",
            json.dumps(
                {
                    "prompt": "Text - x\n\nQ: What?\n\n Choices:\n\n- one\n\n- two\n\nA:\n",
                    "completion": "two<|endoftext|>",
                }
            ),
            {
                "query": "Text - x\n\nQ: What?\n\n Choices:\n\n- one\n\n- two\n\nA:",
                "gold": 1,
                "choices": ["one", "two"],
            },
        ),
    ],
)
def test_other_formats_are_read(name: str, text: str, expected: dict[str, Any]) -> None:
    [doc] = local._SETS[name][1](text)
    assert doc == expected


def test_a_half_written_question_is_refused() -> None:
    with pytest.raises(IndexError, match="line 7"):
        list(local._SETS["hellaswag"][1]("q\n0\na\nb\nc\nd\nq\n1\na\n"))
