"""Guards SamplingParams: what is refused, with which words, and what vLLM's users may rely on."""

import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tokenrouter.sampling_params import SamplingParams


def test_defaults_are_vllms() -> None:
    """A default that drifts changes everybody's outputs silently."""
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": None,
    }


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", 0, "1 or more"),
        ("n", True, "integer"),
        ("n", 1.0, "integer"),
        ("presence_penalty", 2.1, r"\[-2, 2\]"),
        ("frequency_penalty", -2.1, r"\[-2, 2\]"),
        ("frequency_penalty", math.nan, r"\[-2, 2\]"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", math.inf, "above 0"),
        ("temperature", -0.1, r"0 \(greedy\) or more"),
        ("temperature", math.nan, r"0 \(greedy\) or more"),
        ("temperature", math.inf, r"0 \(greedy\) or more"),
        ("temperature", "0.7", "number"),
        ("temperature", True, "number"),
        ("temperature", None, "number"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.01, r"\(0, 1\]"),
        ("top_p", math.nan, r"\(0, 1\]"),
        ("top_k", -2, "1 or more"),
        ("top_k", 5.0, "integer"),
        ("min_p", -0.01, r"\[0, 1\]"),
        ("min_p", 1.01, r"\[0, 1\]"),
        ("seed", -1, "None leaves the request unseeded"),
        ("seed", 2**63, "2\\*\\*63 - 1"),
        ("seed", 1.5, "integer"),
        ("max_tokens", 0, "1 or more; None"),
        ("max_tokens", "16", "integer"),
        ("min_tokens", -1, "0 or more"),
        ("logprobs", -1, "0 or more; None is off"),
        ("logprobs", True, "integer"),
        ("prompt_logprobs", -1, "0 or more; None is off"),
        ("stop", "", "empty string"),
        ("stop", ["a", ""], "empty string"),
        ("stop", ["a", 3], "list of strings"),
        ("stop", 3, "list of strings"),
        ("stop", b"ab", "list of strings"),
        ("stop_token_ids", [1, -1], "0 or more"),
        ("stop_token_ids", [True], "integers"),
        ("stop_token_ids", "12", "list of token ids"),
        ("stop_token_ids", 12, "list of token ids"),
        ("ignore_eos", 1, "True or False"),
        ("detokenize", "no", "True or False"),
        ("logit_bias", {-1: 1.0}, "0 or more"),
        ("logit_bias", {"5": 1.0}, "integers"),
        ("logit_bias", {5: math.inf}, r"logit_bias\[5\]"),
        (
            "logit_bias",
            {5: 1e39},
            r"logit_bias\[5\]",
        ),  # overflows float32 and would fail every request of the step
        ("logit_bias", {5: "1"}, r"logit_bias\[5\]"),
        ("logit_bias", [(5, 1.0)], "dict"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any, says: str) -> None:
    """A bad value that gets through fails later, in the middle of a batch of other requests."""
    with pytest.raises(ValueError, match=says) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": 2, "temperature": 0.0}, "n must be 1 when greedy"),
        ({"min_tokens": 17}, "17 and 16"),
        ({"stop": "x", "detokenize": False}, "detokenize=True"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], says: str) -> None:
    """Greedy completions are equal; without text no stop string is ever found."""
    with pytest.raises(ValueError, match=says):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0001},
        {"top_p": 0.0001},
        {"top_k": -1},
        {"max_tokens": None, "min_tokens": 1000},
        {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"min_p": 1.0, "top_p": 1, "presence_penalty": -2, "repetition_penalty": 0.5},
        {"top_k": np.int64(5), "temperature": np.float32(0.5)},
        {"n": 3, "seed": 0},
        {"logprobs": 0, "prompt_logprobs": 0},
    ],
)
def test_edge_values_are_taken(options: dict[str, Any]) -> None:
    """Checks that are too strict refuse what vLLM takes."""
    params = SamplingParams(**options)
    for name, value in options.items():
        assert getattr(params, name) == value


def test_stop_options_become_tuples() -> None:
    """A list kept by reference changes under a running request."""
    stops, ids, bias = ["a", "bc", "a"], [5, 7, 5], {3: 1}
    params = SamplingParams(stop=stops, stop_token_ids=ids, logit_bias=bias)
    stops.append("d")
    ids.append(8)
    bias[4] = 2
    assert params.stop == params.stop_strings == ("a", "bc")
    assert params.stop_token_ids == params.stop_ids == (5, 7)
    assert params.logit_bias == {3: 1.0}
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_greedy_is_temperature_zero_only() -> None:
    """0.0001 is a legal temperature that samples; what float32 cannot divide by is greedy."""
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=0.0001).greedy
    assert not SamplingParams(temperature=0.0, top_p=0.5).truncates
    assert SamplingParams(top_p=0.5).truncates
    assert SamplingParams(top_k=1).truncates
    assert SamplingParams(min_p=0.5).truncates
    assert not SamplingParams().truncates


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    """They would index outside the logits: a crash, or on a GPU a dead process."""
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9], logprobs=10).check_vocab(10)
    with pytest.raises(
        ValueError, match=r"logit_bias holds ids \[10\]; this model's ids are 0 to 9"
    ):
        SamplingParams(logit_bias={9: 1.0, 10: 1.0}).check_vocab(10)
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[10]).check_vocab(10)
    with pytest.raises(ValueError, match="prompt_logprobs is 11"):
        SamplingParams(prompt_logprobs=11).check_vocab(10)


def test_is_a_value() -> None:
    """Requests are compared, replaced, hashed and sent to other processes."""
    params = SamplingParams(stop=["a"], logit_bias={3: 1.0}, seed=4)
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=5) == SamplingParams(
        stop=["a"], logit_bias={3: 1.0}, seed=5
    )
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_needs_the_standard_library_only() -> None:
    """Workload files describe requests without paying for torch."""
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    path = sys.modules[SamplingParams.__module__].__file__
    assert path is not None
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_numpy_integers_become_plain() -> None:
    """An int8 limit wrapped at the first prompt of 20 tokens; a seed of int64 overflowed in the sampler."""
    import numpy as np

    params = SamplingParams(max_tokens=np.int8(127), seed=np.int64(3))  # type: ignore[arg-type]
    assert type(params.max_tokens) is int and type(params.seed) is int


def test_min_tokens_that_leave_nothing_to_choose() -> None:
    """Every step of the engine then failed, for all requests, until someone aborted this one."""
    params = SamplingParams(min_tokens=1, stop_token_ids=range(1, 10))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"min_tokens=1 forbids .* all 10 tokens"):
        params.check_vocab(10, frozenset({0}))
    params.check_vocab(11, frozenset({0}))
