"""Guards docs/compatibility.md: it says what the tests declare, and what they declare is about pairs that exist."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.compatibility import document
from tests.compatibility.features import FEATURES
from tests.compatibility.pairing import SETTINGS, pairs, shared_option
from tests.compatibility.rules import RULES, Rule, outcome_of, rule_for
from tests.compatibility.setting import Feature

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
KEYS = [feature.key for feature in FEATURES]


def test_the_page_is_up_to_date() -> None:
    """A feature that is added, or refused from now on, and a page that says what was true before."""
    written = PAGE.read_text(encoding="utf-8")
    assert written == document.text(), "run python scripts/compatibility.py"


def test_only_values_of_one_option_are_left_out() -> None:
    """A setting of one feature that also sets what another one is about: their pairs would silently go untested."""
    all_pairs = [p for p in combinations(SETTINGS, 2) if p[0].split(".")[0] != p[1].split(".")[0]]
    left_out = {
        (a.split(".")[0], b.split(".")[0]): shared_option(a, b)
        for a, b in all_pairs
        if (a, b) not in pairs()
    }
    assert left_out == {("token_router", "layerwise"): "router"}
    assert len(set(KEYS)) == len(KEYS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.first}+{rule.second}")
def test_every_rule_is_about_pairs_that_are_tested(rule: Rule) -> None:
    """A misspelt name in a rule, or one that an earlier rule hides: the page would show a note without a cell."""
    assert any(rule_for(a, b) is rule for a, b in pairs())
    assert bool(rule.match) == (rule.outcome == "refused") and rule.why


@pytest.mark.parametrize("one", FEATURES, ids=lambda feature: feature.key)
def test_cells_say_what_their_pairs_do(one: Feature) -> None:
    """A cell that shows one of its pairs for all, or another one in the other triangle."""
    for other in FEATURES:
        shown = document.cell(one, other)
        assert shown == document.cell(other, one)
        outcomes = {
            outcome_of(a, b)
            for a, b in pairs()
            if {a.split(".")[0], b.split(".")[0]} == {one.key, other.key}
        }
        for outcome, symbol in document.SYMBOLS.items():
            assert (symbol in shown) == (outcome in outcomes or (one is other and symbol == "✓"))
