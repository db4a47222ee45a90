"""Guards against requests that change from run to run, miss their lengths, or stop early."""

from dataclasses import replace

import pytest

from tokenrouter.workloads import DEFAULT_PROMPTS, LengthMix

LENGTHS = [20, 30, 50, 80, 120, 200, 500, 1000] * 2


def _encode(text: str) -> list[int]:
    return list(text.encode())


def _mix(**changes: object) -> LengthMix:
    options: dict[str, object] = {
        "prompt_lengths": LENGTHS,
        "output_min": 8,
        "output_max": 128,
        "seed": 0,
    }
    return LengthMix(**(options | changes))  # type: ignore[arg-type]


def test_lengths_are_exact_and_outputs_within_range() -> None:
    specs = _mix().requests(_encode, range(5000))
    assert [len(spec.prompt_ids) for spec in specs] == LENGTHS
    assert all(
        spec.params.max_tokens is not None and 8 <= spec.params.max_tokens <= 128 for spec in specs
    )
    assert len({spec.params.max_tokens for spec in specs}) > 4


def test_a_scale_is_of_prompts_and_outputs() -> None:
    """Guards against a shorter form whose prompts or outputs are as long as before, or empty."""
    full, quarter, least = (
        _mix(length_scale=scale).requests(_encode, range(5000)) for scale in (1.0, 0.25, 1e-3)
    )
    for specs, scale in ((quarter, 0.25), (least, 1e-3)):
        for was, spec in zip(full, specs, strict=True):
            assert len(spec.prompt_ids) == max(1, round(scale * len(was.prompt_ids)))
    assert {spec.params.max_tokens for spec in least} == {1}
    assert max(spec.max_output_tokens for spec in quarter) <= 32
    assert quarter[-1].prompt_ids[-1] in range(5000)


def test_every_system_gets_the_same_work() -> None:
    specs = _mix().requests(_encode, range(5000))
    assert specs == _mix().requests(_encode, range(5000))
    assert all(spec.params.ignore_eos and spec.params.greedy for spec in specs)


def test_another_seed_is_another_workload() -> None:
    first, second = (_mix(seed=seed).requests(_encode, range(5000)) for seed in (0, 1))
    assert [s.params.max_tokens for s in first] != [s.params.max_tokens for s in second]


def test_prompts_of_one_length_differ() -> None:
    specs = _mix().requests(_encode, range(5000))
    assert len({spec.prompt_ids for spec in specs}) == len(specs)


def test_short_text_is_refused_with_the_lengths() -> None:
    with pytest.raises(ValueError, match="1000 tokens needs a longer text; this one has 999"):
        _mix().requests(_encode, range(999))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_lengths": []},
        {"prompt_lengths": [0]},
        {"output_min": 0},
        {"output_max": 7},
        {"length_scale": 0.0},
    ],
)
def test_impossible_lengths_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="workload"):
        _mix(**changes)


@pytest.mark.parametrize("seed", [0, 1])
def test_priorities_are_dealt_in_equal_parts_and_by_the_seed(seed: int) -> None:
    """Priorities by the number of the request: each goes to prompts of its own kinds and lengths."""
    dealt = [s.priority for s in _mix(priorities=[0, 1], seed=seed).requests(_encode, range(5000))]
    assert dealt == [
        s.priority for s in _mix(priorities=[0, 1], seed=seed).requests(_encode, range(5000))
    ]
    assert sorted(dealt) == [0] * 8 + [1] * 8 and dealt != [0, 1] * 8
    plain = _mix(seed=seed).requests(_encode, range(5000))
    assert {s.priority for s in plain} == {0}
    changed = _mix(priorities=[7], seed=seed).requests(_encode, range(5000))
    assert [replace(s, priority=0) for s in changed] == plain


@pytest.mark.parametrize("priorities", [3, "01", [], [0.5], [True], ["high"]])
def test_priorities_are_integers(priorities: object) -> None:
    """A priority that the engine refuses when the model is loaded."""
    with pytest.raises(ValueError, match=r"workload\.priorities"):
        _mix(priorities=priorities)


def test_default_prompts_cover_scripts_and_code() -> None:
    text = "".join(DEFAULT_PROMPTS)
    assert len(set(DEFAULT_PROMPTS)) == len(DEFAULT_PROMPTS) >= 16
    assert all(sample in text for sample in ("def ", "请", "🙂", "14:35", "SELECT"))
