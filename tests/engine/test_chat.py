"""Guards chat: the model's own template, once, and nothing tokenised twice."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.tools import SMALL, greedy, tokens
from tokenrouter import LLM
from tokenrouter.models import tiny_random

QUESTION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is 2 < 3?"},
]


@pytest.fixture(scope="module")
def llm(smollm2_tokenizer: Any) -> LLM:
    """A tiny model behind a real tokenizer with a chat template."""
    model = tiny_random("llama", vocab_size=49152, **SMALL)
    return LLM(replace(model, tokenizer=smollm2_tokenizer))


def test_template_is_applied_once(llm: LLM) -> None:
    """Special tokens added twice, spelt as text, or no turn for the assistant."""
    (ids,) = llm.render_chat(QUESTION)
    expected = llm.tokenizer.apply_chat_template(
        QUESTION, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids == list(expected)
    text = llm.tokenizer.decode(ids)
    assert text.count("<|im_start|>") == 3 and text.endswith("<|im_start|>assistant\n")


def test_one_conversation_or_several(llm: LLM) -> None:
    """A list of messages taken for a list of conversations."""
    (single,) = llm.chat(QUESTION, greedy(4))
    two = llm.chat([QUESTION, QUESTION[1:]], greedy(4))
    assert tokens(two[0]) == tokens(single)
    assert len(two[1].prompt_token_ids) != len(single.prompt_token_ids)
    assert single.prompt_token_ids == tuple(llm.render_chat(QUESTION)[0])


def test_no_messages_are_refused(llm: LLM) -> None:
    """An index error for an empty chat."""
    with pytest.raises(ValueError, match="at least one message"):
        llm.chat([], greedy(4))
