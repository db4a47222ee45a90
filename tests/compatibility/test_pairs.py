"""Guards every pair of features: docs/compatibility.md says what is proved here, and nothing else.

The yardstick of a pair is another run: what changes outputs stays on, what may change none is off, the requests come
one at a time, in whole chunks, with room for all. A feature that works alone and leaks into another, that depends on
company, chunks or time, or is lost beside another, shows as a difference.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.compatibility.engines import EVICTS, PROMPT_LENS, TWO_PATHS, hf_model, prompts
from tests.compatibility.pairing import SETTINGS, pairs
from tests.compatibility.rules import is_of, rule_for
from tests.compatibility.running import EXACT, ROUNDED, Run, run
from tokenrouter import RequestOutput

PROBE = {"params.logprobs": 0}
"""The log-probability of every token: shows what changes no token."""


class Base(NamedTuple):
    """What is on beside the settings themselves, because one of them says nothing without it."""

    two_paths: bool = False
    evicts: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return (TWO_PATHS if self.two_paths else {}) | (EVICTS if self.evicts else {})


def base_of(names: Iterable[str]) -> Base:
    settings = [SETTINGS[name] for name in names]
    return Base(any(s.two_paths for s in settings), any(s.evicts for s in settings))


def options_of(names: Iterable[str], base: Base) -> dict[str, Any]:
    options = base.options
    for name in names:
        options |= SETTINGS[name].options
    return options


@cache
def yardstick(names: tuple[str, ...], base: Base, *, probe: bool) -> Run:
    """One request at a time. Cached: many pairs share it."""
    options = options_of(names, base)
    return run(PROBE | options if probe else options, together=False)


def check(names: tuple[str, ...], *, ignored: str | None = None, probe: bool) -> None:
    """The settings together, under load, against the yardstick; none of them is lost."""
    base = base_of(names)
    options = options_of(names, base)
    got = run(PROBE | options if probe else options, together=True)
    matter = tuple(name for name in names if SETTINGS[name].changes_output and name != ignored)
    expected = yardstick(matter, base, probe=probe)
    assert_same_run(got, expected)
    for name in matter:
        assert_changes(name, names, matter, expected)
    for name in set(names) - {ignored}:
        sign = SETTINGS[name].sign
        assert sign is None or sign(got), f"{name} took no part"


def assert_changes(name: str, names: tuple[str, ...], matter: tuple[str, ...], run: Run) -> None:
    """Without ``name`` the yardstick is another one, unless the other setting implies it."""
    rest = tuple(other for other in matter if other != name)
    base = base_of(names)
    needed = base._replace(two_paths=base_of(other for other in names if other != name).two_paths)
    for smaller in dict.fromkeys((base, needed)):
        if not is_implied(name, rest, smaller):
            other = yardstick(rest, smaller, probe=True)
            with pytest.raises(AssertionError):
                assert_same_run(run, other)
                assert np.array_equal(numbers(run), numbers(other))
            return


def is_implied(name: str, rest: tuple[str, ...], base: Base) -> bool:
    """Whether the other settings, or what is on beside them, come with all options of ``name``."""
    return SETTINGS[name].options.items() <= options_of(rest, base).items()


def assert_same_run(got: Run, expected: Run) -> None:
    """Outputs, and when which entry was evicted."""
    for name, output in expected.outputs.items():
        assert_same(got.outputs[name], output)
    for name in expected.requests:
        assert got.evicted(name) == expected.evicted(name), name
    ours_N, theirs_N = numbers(got), numbers(expected)
    assert len(ours_N) == len(theirs_N)
    if len(ours_N):
        difference_N = np.abs(ours_N - theirs_N)
        most, mean = ROUNDED if expected.rounds else EXACT
        assert difference_N.max() <= most and difference_N.mean() <= mean


def assert_same(got: RequestOutput, expected: RequestOutput) -> None:
    """All but numbers."""
    assert got.error is None and got.finished and len(got.outputs) == len(expected.outputs)
    for ours, theirs in zip(got.outputs, expected.outputs, strict=True):
        for name in ("token_ids", "text", "routes", "finish_reason", "stop_reason"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert num_reported(ours.logprobs) == num_reported(theirs.logprobs)
    assert num_reported(got.prompt_logprobs) == num_reported(expected.prompt_logprobs)


def num_reported(logprobs: Any) -> Any:
    """Candidates per token; which ones may change where the last of them are equally likely."""
    return None if logprobs is None else [len(entry or ()) for entry in logprobs]


def numbers(run: Run) -> NDArray[np.float64]:
    """Every log-probability and logit that was reported."""
    found: list[float] = []
    for name in sorted(run.outputs):
        output = run.outputs[name]
        reported = [output.prompt_logprobs, *(c.logprobs for c in output.outputs)]
        entries = [entry or {} for logprobs in reported for entry in logprobs or ()]
        found += [p for entry in entries for p in sorted(c.logprob for c in entry.values())]
        if name in run.logits:
            found += run.logits[name].nan_to_num(0).flatten().tolist()
    return np.array(found)


def test_the_yardstick_is_transformers() -> None:
    """Both sides of every comparison wrong in the same way."""
    found = yardstick((), Base(), probe=False)
    for index, prompt_len in enumerate(PROMPT_LENS):
        ids = found.outputs[str(index)].outputs[0].token_ids
        with torch.inference_mode():
            whole = torch.tensor([[*prompts()[index][:prompt_len], *ids]])
            logits_TV = hf_model()(whole).logits[0]
        assert tuple(logits_TV[prompt_len - 1 : -1].argmax(-1).tolist()) == ids


@pytest.mark.parametrize("name", SETTINGS)
def test_alone(name: str) -> None:
    """A setting that works in no company, is never on, or so weak that its pairs would prove nothing."""
    check((name,), probe=not name.startswith("logprobs."))


@pytest.mark.parametrize("name", [name for name, s in SETTINGS.items() if s.sign is not None])
def test_what_is_off_takes_no_part(name: str) -> None:
    """A sign of life that every run shows."""
    sign = SETTINGS[name].sign
    assert sign is not None and not sign(plain())


@cache
def plain() -> Run:
    """Nothing switched on, three requests at once."""
    return run({}, together=True)


@pytest.mark.parametrize(("a", "b"), [pytest.param(*p, id="+".join(p)) for p in pairs()])
def test_pair(a: str, b: str) -> None:
    """One of the two lost, changed or broken by the other; a refusal that says something else, or never comes."""
    rule = rule_for(a, b)
    if rule is None:
        check((a, b), probe=True)
    elif rule.outcome == "refused":
        with pytest.raises(ValueError, match=re.escape(rule.match)):
            check((a, b), probe=True)
    else:
        ignored = next(name for name in (a, b) if is_of(name, rule.second))
        check((a, b), ignored=ignored, probe=True)
