"""Guards what the harness asks beside scores: options that are lost, chat answers cut early, building by name."""

import logging
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.registry import get_model

from tests.engine.tools import twin
from tests.evaluation.harness.texts import requests, tiny_pair
from tokenrouter import LLM
from tokenrouter.evaluation.harness import model as adapter_module
from tokenrouter.evaluation.harness.model import TokenRouterLM
from tokenrouter.models import tiny_random

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def adapter() -> TokenRouterLM:
    return TokenRouterLM(LLM(tiny_pair()[0]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.0, 256, ())),
        ({"until": "end", "max_gen_toks": 7}, (0.0, 7, ("end",))),
        ({"until": ["a", ""], "do_sample": False, "temperature": 0.7}, (0.0, 256, ("a",))),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.5}, (0.7, 256, ())),
    ],
)
def test_options_of_generation_reach_the_engine(
    adapter: TokenRouterLM, given: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """A temperature of 1 where the task left it out: answers are then drawn at random."""
    params = adapter._params(given)
    assert (params.temperature, params.max_tokens, params.stop_strings) == expected
    assert params.top_p == given.get("top_p", 1.0)


def test_options_that_the_engine_has_not_are_refused(adapter: TokenRouterLM) -> None:
    with pytest.raises(ValueError, match="generation_kwargs num_beams: the engine has no such"):
        adapter.generate_until(requests("generate_until", [("x", {"num_beams": 4})]))
    with pytest.raises(ValueError, match="max_gen_toks=256 leaves no room"):
        adapter.generate_until(requests("generate_until", [("x", {})]))


def test_chat_answers_that_end_at_a_blank_line_are_named(
    adapter: TokenRouterLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the accuracy, because each answer was cut after its first paragraph."""
    monkeypatch.setattr(adapter.tokenizer, "chat_template", TEMPLATE)
    adapter._params({"until": ["\n\n"]})
    assert not caplog.records
    assert adapter.apply_chat_template([{"role": "user", "content": "Hi"}]).startswith("user: Hi\n")
    with caplog.at_level(logging.WARNING, logger=adapter_module.__name__):
        adapter._params({"until": ["Question:"]})
        assert not caplog.records
        adapter._params({"until": ["\n\n"]})
    assert "set what really ends an answer there" in caplog.text


def test_the_harness_finds_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def build(model: str, **options: Any) -> LLM:
        made.update(options, model=model)
        return LLM(tiny_pair()[0], router=options["router"], executors=twin())

    monkeypatch.setattr(adapter_module, "LLM", build)
    kind: Any = get_model("tokenrouter")
    found = kind.create_from_arg_string("model=some/model,router=all_low", {"batch_size": None})
    assert isinstance(found, TokenRouterLM) and found.llm.router.name == "all_low"
    assert made["model"] == "some/model" and made["options"].prefix_sharing
    for arguments, more, says in (
        ({"router": "rule"}, None, "model .needed."),
        ({"model": "m", "pretrained": "x"}, None, "model .needed."),
        ({"model": "m"}, {"batch_size": 8, "device": None}, "batch_size: the engine makes its own"),
    ):
        with pytest.raises(ValueError, match=says):
            kind.create_from_arg_obj(arguments, more)


def test_a_model_without_text_is_refused() -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match="has no tokenizer"):
        TokenRouterLM(LLM(replace(tiny_random(), tokenizer=None)))
