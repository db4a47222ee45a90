"""Guards the door: bad input is refused with its value and the limit, while the others finish."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.tools import alone, greedy, plain_llm, prompts, run_all, tiny, tokens
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.scheduler import StaticBatchScheduler


@pytest.mark.parametrize(
    ("bad", "params", "message"),
    [
        ("", greedy(), "prompt is empty"),
        ([], greedy(), "prompt is empty"),
        ([5] * 40, greedy(), "40 tokens; the model's length is 40"),
        ([5] * 400, greedy(), "400 tokens; the model's length is 40"),
        ([5] * 25, greedy(11), "up to 35 KV slots .25 prompt tokens and 10 more.; the pool has 30"),
        (
            [5] * 31,
            greedy(None),
            "prompt alone needs up to 31 .*the pool has 30: shorten it, or raise",
        ),
        (
            [5] * 31,
            greedy(2),
            "prompt alone needs up to 31 .*the pool has 30: shorten it, or raise",
        ),
        (
            [5],
            greedy(31),
            "up to 31 KV slots .1 prompt token and 30 more.; .*: lower max_tokens or",
        ),
        ([384], greedy(), r"0 \.\. 383, got 384 \.\. 384"),
        ([5, -1], greedy(), r"0 \.\. 383, got -1 \.\. 5"),
        ([5, True], greedy(), "got True in it"),
        ([5, 1.5], greedy(), "got 1.5 in it"),
        ([5, "a"], greedy(), "got 'a' in it"),
        (None, greedy(), r"got None \(NoneType\)"),
        (b"bytes", greedy(), r"got b'bytes' \(bytes\)"),
        (7.5, greedy(), r"got 7.5 \(float\)"),
        ("ok", greedy(logit_bias={400: 1.0}), r"logit_bias holds ids \[400\]"),
        ("ok", greedy(stop_token_ids=[400]), r"stop_token_ids holds ids \[400\]"),
        ("ok", greedy(logprobs=385), "logprobs is 385; this model has only 384"),
        ("ok", greedy(prompt_logprobs=385), "prompt_logprobs is 385"),
    ],
)
def test_bad_requests_are_refused_and_the_others_finish(
    bad: Any, params: SamplingParams, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad prompt in a batch of a hundred that ends the whole run, or is dropped without a word."""
    llm = LLM(tiny(max_model_len=40), options=EngineOptions(num_kv_slots=30))
    good = [5, 6, 7]
    outputs = llm.generate([good, bad, good], [greedy(5), params, greedy(6)])
    assert [output.finished for output in outputs] == [True] * 3
    assert outputs[1].error is not None and re.search(message, outputs[1].error)
    assert outputs[1].outputs == ()
    assert outputs[0].error is None and outputs[2].error is None
    assert tokens(outputs[2])[:5] == tokens(outputs[0])
    caplog.clear()
    with pytest.raises(ValueError, match=message):
        llm.generate([bad], params)
    assert not caplog.records, "raised, and said before"
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request("x", bad, params)
    assert not llm.engine.has_unfinished()
    assert llm.engine.pool.free == 30
    llm.engine.add_request("x", good, greedy(2))
    assert len(tokens(run_all(llm)["x"])) == 2, "a refused id must stay usable"


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"n": 0},
        {"n": 2, "temperature": 0},
        {"min_tokens": 20, "max_tokens": 10},
    ],
)
def test_bad_sampling_params_name_the_value(options: dict[str, Any]) -> None:
    """A value out of range that is clipped silently."""
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        SamplingParams(**options)


@pytest.mark.parametrize("options", [{"temperature": 1e-4}, {"top_p": 1e-4}, {"top_k": 1}])
def test_the_smallest_values_work_and_are_greedy(options: dict[str, Any]) -> None:
    """Logits divided by a tiny temperature overflow; a top_p below the best token's mass keeps nothing."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **options)
    outputs = plain_llm().generate(prompts()[:8], params)
    assert tuple(map(tokens, outputs)) == alone()[:8]


def test_duplicate_ids_are_refused_until_the_first_is_done() -> None:
    """Two requests under one id: outputs mixed up, slots leaked."""
    llm = plain_llm()
    llm.engine.add_request("a", [5, 6], greedy(3))
    with pytest.raises(ValueError, match="'a' is already in use"):
        llm.engine.add_request("a", [7, 8], greedy(3))
    first = tokens(run_all(llm)["a"])
    llm.engine.add_request("a", [5, 6], greedy(3))
    assert tokens(run_all(llm)["a"]) == first


def test_numbers_of_prompts_and_params_must_agree() -> None:
    """zip that stops at the shorter."""
    llm = plain_llm()
    with pytest.raises(ValueError, match="2 prompts but 1 sampling params"):
        llm.generate(["a", "b"], [greedy()])
    assert llm.generate([], greedy()) == []
    assert not llm.engine.has_unfinished()


def test_prompts_come_as_text_ids_or_arrays() -> None:
    """A list of ids taken for a list of prompts, or an array of numpy integers."""
    llm = plain_llm()
    expected = tokens(llm.generate("abc", greedy())[0])
    ids = tiny().tokenizer.encode("abc")
    for prompt in (ids, [ids], np.array(ids), [np.int64(i) for i in ids], tuple(ids), ["abc"]):
        (output,) = llm.generate(prompt, greedy())
        assert tokens(output) == expected
        assert output.prompt_token_ids == tuple(ids)


def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    """A crash at start, or token types made up where there is no text to type."""
    bare = replace(tiny(), tokenizer=None)
    llm = LLM(bare)
    (output,) = llm.generate([[5, 6, 7]], greedy())
    assert tokens(output) == tokens(plain_llm().generate([[5, 6, 7]], greedy())[0])
    assert output.outputs[0].text == ""
    with pytest.raises(ValueError, match="no tokenizer: give token ids"):
        llm.generate("text", greedy())
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([[5, 6, 7]], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match=r"router rule needs .*has no tokenizer: choose a router"):
        LLM(bare, router="rule", executors="int8")
    with pytest.raises(ValueError, match="'tiny' has no tokenizer: use generate with token ids"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("prompts", [5, True, None, 1.5, {"prompt": "hi"}, {5, 6}, np.array(5)])
def test_what_is_no_prompt_is_refused_as_such(prompts: Any) -> None:
    """TypeError: object of type 'int' has no len(); KeyError: 0."""
    llm = plain_llm()
    with pytest.raises(ValueError, match=r"prompts must be text, a list of token ids, or .* got"):
        llm.generate(prompts, greedy())
    with pytest.raises(ValueError, match=r"prompts must be text, a list of token ids, or .* got"):
        next(llm.stream(prompts, greedy()))
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("prompt", [b"", b"bytes"])
def test_bytes_are_one_bad_prompt(prompt: bytes) -> None:
    """Empty bytes were taken for an empty list of prompts: no output and no word."""
    with pytest.raises(ValueError, match=r"must be text or a list of token ids, got b'.*\(bytes\)"):
        plain_llm().generate(prompt, greedy())  # type: ignore[arg-type]


def test_router_and_executors_may_be_given_by_position() -> None:
    """LLM(model, router, executors) ended in a TypeError; what follows them stays with its name."""
    llm = LLM(tiny(), "all_low", "int8")
    assert llm.router.name == "all_low" and "low" in llm.pool.executors
    with pytest.raises(TypeError, match="positional"):
        LLM(tiny(), "all_low", "int8", "float32")  # type: ignore[misc]


def test_chat_without_a_template_is_refused() -> None:
    """A made-up template gives fluent nonsense."""
    with pytest.raises(ValueError, match="has no chat template"):
        plain_llm().chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheduler": "lifo"},
            r"unknown scheduler\.policy .*'lifo'; choose one of: fcfs, static_b",
        ),
        ({"dispatch": "both"}, "unknown dispatch 'both'; choose one of: auto, mixed, queued"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        (
            {"num_kv_slots": 0},
            r"kvcache\.num_slots \(in Python: num_kv_slots\) must be at least 1, got 0",
        ),
        (
            {"kv_cache_dtype": "int4"},
            r"kvcache\.dtype \(in Python: kv_cache_dtype\) 'int4'; choose",
        ),
        (
            {"max_overtaken": 10**20},
            "max_overtaken must be at most 9007199254740992, got 1000000000",
        ),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
        (
            {"max_num_batched_tokens": 8},
            "max_num_batched_tokens 8 must be at least max_num_seqs 32",
        ),
        ({"static_batch_size": 33}, "static_batch_size 33 must be at most max_num_seqs 32.*null"),
        ({"max_num_seqs": 7, "static_batch_size": 8}, "static_batch_size 8 must be at most .* 7"),
        ({"static_batch_size": 0}, "static_batch_size must be at least 1, got 0"),
        ({"min_batch": 0}, "min_batch must be at least 1, got 0"),
        ({"max_wait_steps": -1}, "max_wait_steps must be at least 0, got -1"),
    ],
)
def test_bad_engine_options_are_refused(options: dict[str, Any], message: str) -> None:
    """An option that shows as a hang later; one whose mistake shows when the model is loaded, or under another name."""
    with pytest.raises(ValueError, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 8),
        ({"max_num_seqs": 8}, 8),
        ({"max_num_seqs": 5}, 5),
        ({"max_num_seqs": 1}, 1),
        ({"max_num_seqs": 5, "static_batch_size": 2}, 2),
        ({"static_batch_size": 20}, 20),
    ],
)
def test_the_static_batch_follows_max_num_seqs(options: dict[str, Any], size: int) -> None:
    """The baseline's own default contradicts max_num_seqs=5, in the last system that a comparison builds."""
    llm = plain_llm(EngineOptions(scheduler="static_batch", **options))
    assert isinstance(llm.engine.scheduler, StaticBatchScheduler)
    assert llm.engine.scheduler.batch_size == size


def test_unknown_names_list_the_choices() -> None:
    """A typo in a router or a pool."""
    with pytest.raises(ValueError, match="no router 'all_hihg'; routers: all_high"):
        plain_llm(router="all_hihg")
    with pytest.raises(ValueError, match="unknown executor pool 'int9'"):
        plain_llm(executors="int9")


def test_a_router_that_fails_at_admission_leaves_nothing() -> None:
    """The id stays in use for ever, or a half admitted request runs unrouted."""
    from tokenrouter.routers import RequestLevelRouter

    class Uncalibrated(RequestLevelRouter):
        needs_calibration = False  # type: ignore[assignment]

    llm = LLM(tiny(), router=Uncalibrated(high_frac=0.5), executors="int8")
    for _ in range(2):
        with pytest.raises(ValueError, match="has no threshold"):
            llm.engine.add_request("a", [5, 6], greedy(2))
    assert not llm.engine.has_unfinished()
