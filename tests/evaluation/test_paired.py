"""Guards the comparison of two systems' answers: a sign turned round, an unpaired error, a p-value of another test."""

import math

import pytest

from tokenrouter.evaluation.harness.results import SystemTasks, TaskResult, mix_tasks, task_rows
from tokenrouter.evaluation.paired import compare_answers, mcnemar
from tokenrouter.evaluation.request_level import choose_high
from tokenrouter.evaluation.tables import p_value
from tokenrouter.routers import RequestLevelRouter


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (6, 0), (2, 9), (5, 5), (700, 800)])
def test_the_p_value_is_that_of_an_exact_binomial_test(first: int, second: int) -> None:
    """The chi-square form is far off for a few questions; one side alone is half of it."""
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(second, first) == mcnemar(first, second)


def test_known_p_values() -> None:
    assert mcnemar(0, 0) == 1.0 and mcnemar(5, 5) == 1.0
    assert mcnemar(0, 5) == 2 / 32 and mcnemar(1, 7) == 2 * 9 / 256
    assert 0.0 < mcnemar(0, 1000) < 1e-300


def test_a_large_task_is_tested_at_once() -> None:
    """A minute for this one, and hours for ten times as much, where every binomial is computed anew."""
    assert mcnemar(9_900, 10_000) == pytest.approx(0.4829, abs=1e-3)


def test_a_drop_is_paired_and_positive_where_the_system_is_worse() -> None:
    """An error of two independent samples would be 8 points and not 3: nothing was ever worse."""
    high, own = [1.0] * 50 + [0.0] * 50, [0.0] * 10 + [1.0] * 40 + [0.0] * 50
    found = compare_answers(own, high)
    assert found.drop_pp == pytest.approx(10.0) and found.verdict == "worse"
    assert found.drop_stderr_pp == pytest.approx(100 * math.sqrt(0.1 * 0.9 / 99))
    assert (found.only_other_right, found.only_own_right) == (10, 0)
    back = compare_answers(high, own)
    assert back.drop_pp == pytest.approx(-10.0) and back.verdict == "better"


def test_a_difference_within_noise_is_a_tie() -> None:
    """5 of 5 is p = 0.0625: still luck; 6 of 6 is not."""
    for count, verdict in ((0, "tie"), (5, "tie"), (6, "worse")):
        own, high = [0.0] * count + [1.0] * 20, [1.0] * (count + 20)
        assert compare_answers(own, high).verdict == verdict


def test_one_question_has_no_error() -> None:
    assert compare_answers([0.0], [1.0]).drop_stderr_pp is None


@pytest.mark.parametrize(("own", "other"), [([], []), ([1.0], [1.0, 0.0])])
def test_answers_to_other_questions_are_refused(own: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError, match=f"^{len(own)} and {len(other)} answers cannot be paired"):
        compare_answers(own, other)


def _system(*correct: float, high_frac: float = 0.0) -> SystemTasks:
    acc = sum(correct) / len(correct)
    result = TaskResult(
        num_questions=len(correct), metric="acc,none", acc_frac=acc, correct=correct
    )
    other = TaskResult(num_questions=3, metrics={"word_perplexity,none": 9.0})
    return SystemTasks(results={"a": result, "b": other}, high_frac=high_frac)


def test_a_request_level_answer_is_one_of_both_sides() -> None:
    """Answers of the wrong side, or a perplexity averaged as if it were one of questions."""
    high, low = _system(1, 1, 0, 0), _system(0, 1, 1, 0)
    mixed = mix_tasks(high, low, {"a": [True, False, False, True]}, 0.5)
    assert mixed.results["a"].correct == (1, 1, 1, 0) and mixed.results["a"].acc_frac == 0.75
    assert list(mixed.results) == ["a"] and mixed.high_frac == 0.5
    rows = task_rows({"all_high": high, "all_low": low, "request_level": mixed}, list)
    assert [(row.task, row.system) for row in rows] == [
        ("a", "all_high"),
        ("a", "all_low"),
        ("a", "request_level"),
    ]
    assert rows[0].verdict is None and rows[2].acc_drop_pp == -25.0


def test_the_neediest_requests_go_high_up_to_the_share() -> None:
    """Requests counted and not their tokens: one long one is then worth as little as a short one."""
    router = RequestLevelRouter()
    shares, weights = [0.1, 0.4, 0.2, 0.3], [100, 10, 60, 30]
    assert choose_high(router, shares, weights, 0.5) == ([False, True, True, True], 0.5)
    assert choose_high(router, shares, weights, 0.2) == ([False, True, False, True], 0.2)
    assert choose_high(router, shares, weights, 0.0) == ([False] * 4, 0.0)
    assert choose_high(router, shares, weights, 1.0) == ([True] * 4, 1.0)
    assert router.high_frac is None


def test_a_small_p_value_is_not_zero() -> None:
    """0.000, as if luck were ruled out."""
    assert [p_value(p) for p in (None, 1.0, 0.0312, 0.0006, 0.0001)] == [
        "",
        "1.000",
        "0.031",
        "0.001",
        "<0.001",
    ]
