"""Guards retrieval: an answer at another depth or in no context, a wrong answer that counts, rows of another length."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.evaluation.retrieval.items import TASKS, place_item
from tokenrouter.evaluation.retrieval.measure import (
    Answers,
    Probe,
    make_probes,
    measure_retrieval,
)
from tokenrouter.evaluation.retrieval.results import (
    mix_answers,
    retrieval_rows,
    retrieval_section,
    retrieval_table,
)
from tokenrouter.evaluation.retrieval.settings import RetrievalSettings
from tokenrouter.models import LoadedModel
from tokenrouter.models.tiny import ByteTokenizer
from tokenrouter.workloads import PythonDocs

TOKENIZER = ByteTokenizer()
OTHER = TOKENIZER.encode(" some other text. ")


def item(task: str, length: int, depth: float, seed: str = "0") -> Any:
    return place_item(task, TOKENIZER.encode, OTHER, length=length, depth_frac=depth, seed=seed)


def probes(**options: Any) -> list[Probe]:
    given: dict[str, Any] = {
        "tasks": ["passkey"],
        "lengths": [160, 200],
        "depths": [0.0, 1.0],
        "num_examples": 2,
    }
    settings = RetrievalSettings(**given | options)
    return make_probes(settings, TOKENIZER.encode, OTHER, seed=0)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_answer_stands_at_its_depth_in_a_prompt_of_its_length(task: str, depth: float) -> None:
    """A prompt that is longer than it says, an answer elsewhere, or one that is nowhere."""
    made = item(task, 700, depth)
    assert made.answer_at == 700
    context = TOKENIZER.decode(made.ids[: made.question_at])
    answer = TOKENIZER.decode(made.ids[made.answer_at :])
    asked = TOKENIZER.decode(made.ids[made.question_at : made.answer_at])
    key = asked.strip().splitlines()[-1] if task == "key_value" else ""
    at = context.index(f"{key}{answer}" if key else answer)
    assert answer not in asked
    first = at / len(context)
    assert {0.0: first < 0.25, 0.5: 0.3 < first < 0.75, 1.0: first > 0.7}[depth]


def test_examples_are_drawn_anew_and_repeat_with_their_seed() -> None:
    """One key for all depths: errors of examples that are one example."""
    answers = [tuple(item("passkey", 200, depth).ids[200:]) for depth in (0.0, 0.5, 1.0)]
    assert len(set(answers)) == 3
    assert item("key_value", 400, 0.5).ids == item("key_value", 400, 0.5).ids
    assert item("key_value", 400, 0.5).ids != item("key_value", 400, 0.5, "1").ids


def test_an_item_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an item of passkey lacks \d+ tokens of"):
        item("passkey", 60, 0.5)


def test_exact_answers_count_and_others_do_not(model: LoadedModel) -> None:
    """A first token that is right taken for the whole answer."""
    llm = LLM(model, options=EngineOptions(num_kv_slots=512))
    made = probes(lengths=[160], depths=[0.5])
    size = len(made[0].answer_ids)
    params = SamplingParams(temperature=0.0, max_tokens=size, ignore_eos=True)
    [output] = llm.generate([made[0].prompt_ids], params)
    right = [*made[0].prompt_ids, *output.outputs[0].token_ids]
    almost = [*right[:-1], (right[-1] + 1) % 200]
    given = [_with(made[0], right), _with(made[0], almost)]
    found = measure_retrieval({"all_high": llm}, given)["all_high"]
    assert found.correct == (1.0, 0.0) and found.high_frac == 1.0


def _with(probe: Probe, ids: list[int]) -> Probe:
    return replace(probe, item=replace(probe.item, ids=ids))


def test_rows_are_of_their_length_and_depth() -> None:
    """Answers grouped by another order than they were asked in."""
    made = probes()
    keys = [(probe.length, probe.depth_frac) for probe in made]
    assert keys == [(n, d) for n in (160, 200) for d in (0.0, 1.0) for _ in range(2)]
    high = Answers(correct=(1.0,) * 8, high_frac=1.0)
    own = Answers(correct=(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0), high_frac=0.2)
    rows = retrieval_rows(made, {"all_high": high, "rule": own})
    exact = {
        (row.length_tokens, row.depth_frac): row.exact_frac for row in rows if row.system == "rule"
    }
    assert exact == {
        (None, None): 0.375,
        (None, 0.0): 0.5,
        (None, 1.0): 0.25,
        (160, None): 0.75,
        (160, 0.0): 1.0,
        (160, 1.0): 0.5,
        (200, None): 0.0,
        (200, 0.0): 0.0,
        (200, 1.0): 0.0,
    }
    section = retrieval_section(rows, "rule")["passkey"]
    assert section["by_length"] == {"160": {"exact_frac": 0.75}, "200": {"exact_frac": 0.0}}
    assert section["by_depth_pct"] == {"0": {"exact_frac": 0.5}, "100": {"exact_frac": 0.25}}
    assert (section["n"], section["exact_drop_pp"], section["only_high_right"]) == (8, 62.5, 5)
    table = retrieval_table(rows, "rule").splitlines()
    assert [cell.strip() for cell in table[5].split("|")[1:8]] == [
        "passkey",
        "160",
        "**rule**",
        "4",
        "100",
        "50",
        "75.0 ± 25.0",
    ]
    assert [row.verdict for row in rows if row.system == "rule"][:1] == ["tie"]
    assert table[3].startswith("| passkey | all    | **rule**") and " 25 |" in table[3]
    of_one = retrieval_table(retrieval_rows(made[:4], {"all_high": own}), "rule")
    assert len(of_one.splitlines()) == 3 and "| all    |" not in of_one


def test_a_request_level_prompt_is_answered_as_its_side_does() -> None:
    high, low = Answers(correct=(1.0, 1.0), high_frac=1.0), Answers(correct=(0.0, 0.5), high_frac=0)
    assert mix_answers(high, low, [False, True], 0.5) == Answers(correct=(0.0, 1.0), high_frac=0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"tasks": ["pass_key"]},
            r"no task 'pass_key'; choose of passkey, .* did you mean passkey\?",
        ),
        ({"tasks": []}, r"retrieval\.tasks must be a list of names, such as .* got \[\]"),
        ({"lengths": []}, r"retrieval\.lengths must be a list of numbers of tokens"),
        ({"lengths": [200, 200]}, r"retrieval\.lengths=\[200, 200\] names one twice"),
        ({"lengths": [0]}, r"retrieval\.lengths must be at least 1, got 0"),
        ({"depths": [0.5, 1.5]}, r"retrieval\.depths=1.5 must be a number of 0 to 1"),
        ({"depths": [-0.1]}, r"retrieval\.depths=-0.1 must be a number of 0 to 1"),
        ({"num_examples": 0}, r"retrieval\.num_examples must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        probes(**options)


@pytest.mark.slow
def test_the_default_model_can_do_it(smollm2_fp32: LoadedModel) -> None:
    """Prompts that the model cannot answer: then every router ties with all_high."""
    settings = RetrievalSettings(
        tasks=["passkey", "key_value"], lengths=[256], depths=[0.5], num_examples=2
    )
    encode = partial(smollm2_fp32.tokenizer.encode, add_special_tokens=False)
    text_ids = encode("\n\n".join(PythonDocs().documents()[:3]))
    asked = make_probes(settings, encode, text_ids, seed=0)
    found = measure_retrieval({"all_high": LLM(smollm2_fp32)}, asked)
    assert found["all_high"].correct == (1.0,) * 4
