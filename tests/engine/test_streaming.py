"""Guards what a user reads: joined pieces are the text, stop strings end it, each completion is its own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.tools import greedy, plain_llm, prompts, run_all, tiny, tokens
from tokenrouter import LLM, EngineOptions, RequestOutput, SamplingParams
from tokenrouter.executors import build_pool

EOS = 2


def script(ids: list[int]) -> LLM:
    """An engine whose model says ``ids``, one per step, to a single request."""
    pool = build_pool("full", tiny())
    said = iter(ids)

    def logits(hidden_TE: Tensor) -> Tensor:
        logits_TV = torch.zeros(len(hidden_TE), tiny().config.vocab_size)
        logits_TV[:, next(said)] = 50.0
        return logits_TV

    pool.executors["high"].logits = logits  # type: ignore[method-assign]
    return LLM(tiny(), executors=pool)


def says(text: str | list[int], **options: Any) -> list[RequestOutput]:
    """All outputs of a streamed request whose model says ``text``, then EOS."""
    ids = tiny().tokenizer.encode(text) if isinstance(text, str) else text
    params = SamplingParams(temperature=0, **{"max_tokens": 100, **options})
    return list(script([*ids, EOS, *[50] * 100]).stream("prompt: ", params))


def read(outputs: list[RequestOutput]) -> tuple[str, str | None, int | str | None]:
    """Text, finish reason and stop reason; checks that the pieces joined are the text, step by step."""
    joined = ""
    for output in outputs:
        joined += output.outputs[0].delta
        assert output.outputs[0].text == joined
    last = outputs[-1]
    assert last.finished and not any(output.finished for output in outputs[:-1])
    return joined, last.outputs[0].finish_reason, last.outputs[0].stop_reason


@pytest.mark.parametrize("text", ["plain", "naïve 中文 😀👩‍👧 e\u0301", "\n\n  x\t"])
def test_characters_come_whole(text: str) -> None:
    """Bytes of a character that show as question marks until the rest is there."""
    outputs = says(text)
    assert read(outputs) == (text, "stop", None)
    for output in outputs:
        assert "\ufffd" not in output.outputs[0].text
        assert text.startswith(output.outputs[0].text)
    assert len(outputs) == len(text.encode()) + 1, "one output per token"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_split_over_tokens_never_leaks(include: bool) -> None:
    """Its first letters are out before the last one is seen; the tokens after it are kept."""
    outputs = says("one STOP two", stop=["never", "STOP"], include_stop_str_in_output=include)
    assert read(outputs) == ("one STOP" if include else "one ", "stop", "STOP")
    assert tokens(outputs[-1]) == tuple(tiny().tokenizer.encode("one STOP"))
    if not include:
        assert all("S" not in output.outputs[0].text for output in outputs)


def test_an_unfinished_stop_string_is_text_after_all() -> None:
    """Text that was held back is lost at the end, or when it turns out to be no stop string."""
    assert read(says("one STO two", stop="STOP")) == ("one STO two", "stop", None)
    assert read(says("one STO", stop="STOP")) == ("one STO", "stop", None)
    assert read(says("one STOP", stop="STOP", max_tokens=7)) == ("one STO", "length", None)


def test_a_stop_string_found_at_the_very_end() -> None:
    """The last piece comes out when the request ends: a stop string in it must count."""
    euro = tiny().tokenizer.encode("a\u20ac")[:3]  # two of three bytes: U+FFFD when it ends there
    assert read(says(euro, stop="\ufffd", max_tokens=3)) == ("a", "stop", "\ufffd")


def test_stop_ids_and_end_of_sequence() -> None:
    """The reason mixed up; the ending token shown as text; ignore_eos that also ignores stop ids."""
    ids = tiny().tokenizer.encode("abc")
    assert read(says("abc")) == ("abc", "stop", None)
    assert read(says("abcd", stop_token_ids=[ids[2]])) == ("ab", "stop", ids[2])
    kept = {"stop_token_ids": [ids[2]], "include_stop_str_in_output": True}
    assert read(says("abcd", **kept)) == ("abc", "stop", ids[2])
    assert read(says("abc", ignore_eos=True, max_tokens=5)) == ("abc/", "length", None)
    both = {"ignore_eos": True, "stop_token_ids": [EOS]}
    assert read(says("abc", **both)) == ("abc", "stop", EOS)
    assert read(says("abc", max_tokens=2)) == ("ab", "length", None)
    assert read(says("abc", max_tokens=4)) == ("abc", "stop", None)


def test_end_of_sequence_is_no_text_even_when_special_tokens_are() -> None:
    """``</s>`` at the end of every answer of a user who wanted to see special tokens."""
    shown = {"skip_special_tokens": False}
    assert read(says([100, 1, 101], **shown))[0] == "a<s>b"
    assert read(says([100, 1, 101], include_stop_str_in_output=True, **shown))[0] == "a<s>b</s>"
    assert read(says([100, 1, 101]))[0] == "ab"


def test_min_tokens_holds_off_every_kind_of_end() -> None:
    """A stop string or id inside the minimum that ends it."""
    assert read(says("xSTOPxSTOPx", stop="STOP", min_tokens=8)) == ("xSTOPx", "stop", "STOP")
    (a,) = tiny().tokenizer.encode("a")
    outputs = says("abcabc", stop_token_ids=[a], min_tokens=3)
    assert read(outputs) == ("bc", "stop", a)  # the first could not be said
    assert tokens(outputs[-1])[0] != a and len(tokens(outputs[-1])) == 4


def test_without_detokenizing_there_is_no_text() -> None:
    """A benchmark that pays for text it does not want."""
    outputs = says("abc", detokenize=False)
    assert read(outputs) == ("", "stop", None)
    assert tokens(outputs[-1]) == (*tiny().tokenizer.encode("abc"), EOS)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 5, "max_num_batched_tokens": 11}, {"num_kv_slots": 120}],
    ids=["plain", "small chunks", "preempted"],
)
def test_random_bytes_of_many_requests(options: dict[str, Any]) -> None:
    """Pieces of one request that come to another; a piece doubled after a preemption; broken bytes."""
    llm = plain_llm(EngineOptions(**options))
    asked = [f"{i} " + "ask " * (i % 20) for i in range(24)]
    params = [SamplingParams(seed=i, max_tokens=30, stop=["ab", "\n"]) for i in range(24)]
    for index, (prompt, one) in enumerate(zip(asked, params, strict=True)):
        llm.engine.add_request(str(index), prompt, one)
    joined = [""] * len(asked)
    seen: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            joined[int(output.request_id)] += output.outputs[0].delta
            assert joined[int(output.request_id)] == output.outputs[0].text
            before = seen.get(output.request_id)
            assert before is None or len(output.outputs[0].token_ids) == 1 + len(
                before.outputs[0].token_ids
            )
            seen[output.request_id] = output
    assert (llm.engine.stats.num_preemptions > 0) == ("num_kv_slots" in options)
    finals = plain_llm().generate(asked, params)
    for index, final in enumerate(finals):
        assert joined[index] == final.outputs[0].text
        assert seen[str(index)].outputs[0].finish_reason == final.outputs[0].finish_reason
        if final.outputs[0].finish_reason == "length":
            ids = [i for i in tokens(final) if i < len(tiny().tokenizer)]
            assert final.outputs[0].text == tiny().tokenizer.decode(ids, skip_special_tokens=True)
        else:
            assert "ab" not in joined[index] and "\n" not in joined[index]


def test_stream_and_generate_agree() -> None:
    """A path of its own for streaming that drifts from the other."""
    finals = plain_llm().generate(prompts()[:8], greedy())
    streamed = [o for o in plain_llm().stream(prompts()[:8], greedy()) if o.finished]
    by_id = {output.request_id: output for output in streamed}
    for final in finals:
        one = by_id[final.request_id]
        assert one.outputs[0].text == final.outputs[0].text
        assert tokens(one) == tokens(final)


def test_without_streaming_a_request_comes_once() -> None:
    """``stream=False`` that still makes an output per token."""
    llm = plain_llm()
    llm.engine.add_request("a", prompts()[3], greedy(), stream=False)
    llm.engine.add_request("b", prompts()[4], greedy(5))
    outputs = []
    while llm.engine.has_unfinished():
        outputs += llm.engine.step()
    assert [o.request_id for o in outputs].count("a") == 1
    assert [o.request_id for o in outputs].count("b") == 5


@pytest.mark.parametrize("options", [{}, {"num_kv_slots": 110, "max_num_seqs": 4}])
def test_n_completions_are_seeded_one_by_one(options: dict[str, Any]) -> None:
    """All n equal, the i-th not reproducible alone, or their order by who finished first."""
    llm = plain_llm(EngineOptions(**options))
    params = SamplingParams(n=4, seed=10, max_tokens=15, stop_token_ids=list(range(3, 40)))
    (output,) = llm.generate([prompts()[2]], params)
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert len({one.token_ids for one in output.outputs}) == 4
    for index, one in enumerate(output.outputs):
        seeded = SamplingParams(seed=10 + index, max_tokens=15, stop_token_ids=list(range(3, 40)))
        (single,) = plain_llm().generate([prompts()[2]], seeded)
        assert tokens(single) == one.token_ids
        assert single.outputs[0].text == one.text


def test_a_seeded_request_is_the_same_in_any_company() -> None:
    """One stream for all: a neighbour's draw changes this request's tokens."""
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, temperature=0.8, top_p=0.9)
    expected = tokens(plain_llm().generate([prompts()[3]], params)[0])
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    for options in (EngineOptions(), EngineOptions(max_num_seqs=7, max_num_batched_tokens=9)):
        llm = plain_llm(options)
        for index, prompt in enumerate(prompts()[4:9]):
            llm.engine.add_request(str(index), prompt, free)
        llm.engine.step()
        llm.engine.add_request("seeded", prompts()[3], params)
        assert tokens(run_all(llm)["seeded"]) == expected


def test_the_engines_seed_makes_a_run_repeatable() -> None:
    """Unseeded requests that differ from run to run."""
    free = SamplingParams(max_tokens=10, ignore_eos=True)
    runs = [
        [tokens(o) for o in plain_llm(EngineOptions(seed=seed)).generate(prompts()[:5], free)]
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
