"""The local data sets as tasks of the harness read them: ``tasks/*.yaml`` name them; nothing is copied or cached."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenrouter.workloads.text import DATA_DIR_HELP, read_text

Doc = dict[str, Any]
TASKS_DIR = Path(__file__).parent / "tasks"


class Docs(list[Doc]):
    """Documents with as much of a ``datasets.Dataset`` as the harness looks at."""

    @property
    def features(self) -> Doc:
        """The fields; all documents have the same."""
        return self[0]


def names() -> list[str]:
    """The tasks that read local data."""
    return sorted(path.stem for path in TASKS_DIR.glob("*.yaml"))


def load(*, name: str, data_dir: str | None = None, **_: Any) -> dict[str, Docs]:
    """What a task file's ``custom_dataset`` calls.

    Args:
        name: of the set, which the file says.
        data_dir: the folder of local data sets, from the task manager's metadata, which brings more along.

    Returns:
        One split, ``test``.

    Raises:
        ValueError: no folder is set, or the set's file is missing, empty or of another format.
    """
    if not data_dir:
        raise ValueError(f"task {name!r} needs a folder of local data sets: {DATA_DIR_HELP}")
    file, parse = _SETS[name]
    path = Path(data_dir).expanduser() / file
    if not path.is_file():
        raise ValueError(f"task {name!r}: no file {path}; {DATA_DIR_HELP}")
    try:
        docs = Docs(parse(read_text(path, "paths.data_dir")))
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"task {name!r}: {path} has another format than expected ({type(error).__name__}: {error}); check "
            "paths.data_dir"
        ) from error
    if not docs:
        raise ValueError(f"task {name!r}: {path} holds no question; check paths.data_dir")
    return {"test": docs}


def _rows(*fields: str) -> Callable[[str], Iterator[Doc]]:
    """A JSON object a line; ``fields`` of it are kept."""

    def parse(text: str) -> Iterator[Doc]:
        for line in filter(None, text.split("\n")):
            row = json.loads(line)
            yield {field: row[field] for field in fields}

    return parse


def _hellaswag(text: str) -> Iterator[Doc]:
    """Six lines a question: context, index of the right ending, four endings."""
    lines = text.removesuffix("\n").split("\n")
    for start in range(0, len(lines), 6):
        query, gold, *choices = lines[start : start + 6]
        if len(choices) != 4 or gold not in ("0", "1", "2", "3"):
            raise IndexError(f"line {start + 1}: no context, index 0 to 3 and four endings")
        yield {"query": query, "gold": int(gold), "choices": choices}


def _winogrande(text: str) -> Iterator[Doc]:
    """The choices are two contexts for one continuation."""
    for row in _rows("context_options", "continuation", "gold")(text):
        yield {
            "choices": row["context_options"],
            "continuation": row["continuation"],
            "gold": row["gold"],
        }


def _sciq(text: str) -> Iterator[Doc]:
    """The choices stand in the prompt, as a list; a few questions do not list their answer and are left out."""
    for row in _rows("prompt", "completion")(text):
        answer = row["completion"].removesuffix("<|endoftext|>").strip()
        listed = row["prompt"].rpartition("Choices:")[2]
        choices = re.findall(r"^- (.*)$", listed, flags=re.MULTILINE)
        if choices.count(answer) == 1:
            query = row["prompt"].rstrip()
            yield {"query": query, "choices": choices, "gold": choices.index(answer)}


def _svamp(text: str) -> Iterator[Doc]:
    """Named as gsm8k's fields."""
    for row in _rows("context", "answer")(text):
        yield {"question": row["context"], "answer": row["answer"]}


_CHOICES = _rows("query", "choices", "gold")
_SETS: dict[str, tuple[str, Callable[[str], Iterator[Doc]]]] = {
    "arc_easy": ("arc_easy/arc_easy.jsonl", _CHOICES),
    "boolq": ("boolq/boolq.jsonl", _CHOICES),
    "copa": ("copa/copa.jsonl", _CHOICES),
    "gsm8k": ("gsm8k/test.jsonl", _rows("question", "answer")),
    "hellaswag": ("hellaswag/hellaswag_val.txt", _hellaswag),
    "lambada": ("lambada_openai/lambada_openai.jsonl", _rows("context", "continuation")),
    "openbookqa": ("openbookqa/openbook_qa.jsonl", _CHOICES),
    "piqa": ("piqa/piqa.jsonl", _CHOICES),
    "sciq": ("sciq/sciq_Multiple_Choice.jsonl", _sciq),
    "svamp": ("svamp/svamp.jsonl", _svamp),
    "winogrande": ("winogrande/winogrande.jsonl", _winogrande),
}
