"""Writes docs/compatibility.md from what the tests of ``test_pairs.py`` check: features, their pairs, and the rules."""

from collections import Counter
from itertools import groupby

from tests.compatibility.features import FEATURES
from tests.compatibility.pairing import SETTINGS, pairs
from tests.compatibility.rules import RULES, Outcome, Rule, outcome_of, rule_for
from tests.compatibility.running import EXACT, ROUNDED
from tests.compatibility.setting import Feature

COMMAND = "python -m pytest -q tests/compatibility"
SYMBOLS: dict[Outcome, str] = {"works": "✓", "refused": "✗", "ignored": "○"}
ALTERNATIVES = "·"

HEAD = """# Compatibility

Which features work together. `python scripts/compatibility.py` writes this page from the tests that prove it; do not
edit it.

{counts}

```
{command}
```

## Matrix

{legend}

{table}

{notes}

## What a test proves

`tests/compatibility/test_pairs.py` runs three requests at once on a tiny random model in float32, on native kernels
where they can be built, with both features on, and checks the pool while several run. The yardstick is another run:
without what may change no output (schedulers, budgets, dispatch, preemption, kernels, observation), with what does
(routers, int8, retention, sampling), one request at a time, in whole chunks, with room for all. Where nothing is on, it
is transformers' own greedy output.

- Token ids, texts, routes, finish reasons, log-probabilities, logits, and when which entry was evicted, are the same.
  Numbers agree to {exact}; where something is int8 to {rounded}, in the mean to {mean}, as a last bit that company
  changes may round a value the other way.
- Each feature shows in the run (a preemption happened, entries were evicted, tokens took both paths, ...), and one that
  changes outputs is not lost beside the other: without it the yardstick is another one.
- A refusal comes, with its reason in the message; what has no effect has none.

What no pair shows: three features at once, speed, other models and dtypes, and quality.

A new feature is one entry in `tests/compatibility/features.py`, with its options; what it cannot be combined with is a
line in `rules.py`, with the reason. A test compares this page with what the script writes.

## Settings

The test of two features is `test_pair[SETTING+SETTING]` for each two of their settings, in this order; `test_alone`
has each by itself.

{settings}
"""


def text() -> str:
    """The whole document."""
    outcomes = Counter(outcome_of(a, b) for a, b in pairs())
    counts = (
        f"{len(FEATURES)} features in {len(SETTINGS)} settings make {len(pairs())} pairs, and each pair has its test: "
        f"{outcomes['works']} work; {outcomes['refused']} are refused, with a message; in {outcomes['ignored']} one of "
        "the two has no effect. Each setting alone has its test, too."
    )
    legend = [
        f"`{SYMBOLS['works']}` works",
        f"`{SYMBOLS['refused']}` refused, with the reason",
        f"`{SYMBOLS['ignored']}` one of the two has no effect",
        f"`{ALTERNATIVES}` alternatives: values of one option",
        "two symbols: some of their settings each; letters: notes below; the diagonal: alone",
    ]
    return HEAD.format(
        counts=_wrapped(counts),
        command=COMMAND,
        legend=_wrapped("; ".join(legend) + "."),
        table=_table(),
        notes="\n".join(_note(rule) for rule in RULES),
        exact=f"{EXACT[0]:.0e}",
        rounded=ROUNDED[0],
        mean=ROUNDED[1],
        settings="\n".join(_settings(feature) for feature in FEATURES),
    )


def cell(one: Feature, other: Feature) -> str:
    """The symbols of what the pairs of two features do, and the letters of the notes."""
    if one is other:
        return SYMBOLS["works"]
    named = [(a, b) for a, b in pairs() if {_key(a), _key(b)} == {one.key, other.key}]
    if not named:
        return ALTERNATIVES
    outcomes = {outcome_of(a, b) for a, b in named}
    symbols = "".join(symbol for outcome, symbol in SYMBOLS.items() if outcome in outcomes)
    letters = sorted({_letter(rule) for a, b in named if (rule := rule_for(a, b)) is not None})
    return " ".join([symbols, *letters])


def _key(setting: str) -> str:
    return setting.split(".")[0]


def _letter(rule: Rule) -> str:
    return chr(ord("a") + RULES.index(rule))


def _title(name: str) -> str:
    """A feature's number, and the setting where only that is meant."""
    key, _, setting = name.partition(".")
    number = [feature.key for feature in FEATURES].index(key) + 1
    return f"{number}, {setting}" if setting else str(number)


def _table() -> str:
    numbers = range(1, len(FEATURES) + 1)
    rows = [f"| | {' | '.join(map(str, numbers))} |", f"|---|{':-:|' * len(FEATURES)}"]
    for group, features in groupby(FEATURES, key=lambda feature: feature.group):
        rows.append(f"| **{group}** |{' |' * len(FEATURES)}")
        for feature in features:
            cells = " | ".join(cell(feature, other) for other in FEATURES)
            rows.append(f"| {_title(feature.key)}. {feature.title} | {cells} |")
    return "\n".join(rows)


def _note(rule: Rule) -> str:
    first, second = _title(rule.first), _title(rule.second)
    says = {
        "refused": f"({first}) with ({second}) is refused",
        "ignored": f"({second}) has no effect with ({first})",
    }
    return f"- **{_letter(rule)}** {says[rule.outcome]}: {rule.why}."


def _settings(feature: Feature) -> str:
    names = ", ".join(f"`{feature.key}.{name}`" for name in feature.settings)
    return f"- {_title(feature.key)}. {names}"


def _wrapped(words: str, width: int = 120) -> str:
    lines = [""]
    for word in words.split(" "):
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)
