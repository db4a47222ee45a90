"""Guards the numbers: log-likelihoods and texts are those of the harness's own transformers backend, in float32."""

from typing import Any

import pytest

pytest.importorskip("lm_eval")

from tests.evaluation.harness.texts import LONG, PAIRS, byte_tokenizer, requests, tiny_pair
from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.harness.model import TokenRouterLM
from tokenrouter.evaluation.harness.scoring import scoring_options
from tokenrouter.models import LoadedModel
from tokenrouter.routers import AllHighRouter

UNTIL = [
    {"until": ["e", "zz"], "max_gen_toks": 12},
    {"until": ["never that"], "max_gen_toks": 12},
    {"until": [" "], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0},
]


def ours(model: LoadedModel) -> TokenRouterLM:
    """The adapter, all high, with shared beginnings."""
    options = scoring_options(EngineOptions(), AllHighRouter())
    return TokenRouterLM(LLM(model, options=options))


def theirs(hf_model: Any, tokenizer: Any) -> Any:
    """The harness's own backend."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=hf_model, tokenizer=tokenizer, batch_size=3, device="cpu")


def assert_same_scores(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [score for score, _ in found] == pytest.approx(
        [score for score, _ in expected], abs=1e-3
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_log_likelihoods_of_a_tiny_model() -> None:
    """An off-by-one of the first scored token, a boundary between tokens, or a choice scored with another's rows."""
    model, hf_model = tiny_pair()
    adapter, backend = ours(model), theirs(hf_model, byte_tokenizer())
    greedy = backend.generate_until(
        requests("generate_until", [(PAIRS[0][0], {"max_gen_toks": 4, "until": []})])
    )
    asked = requests("loglikelihood", [*PAIRS, (PAIRS[0][0], greedy[0]), (LONG, " " + LONG[:99])])
    found = adapter.loglikelihood(asked)
    assert_same_scores(found, backend.loglikelihood(asked))
    assert len({round(score, 3) for score, _ in found}) == len(asked) - 1
    assert adapter.llm.engine.stats.shared_tokens > 150


def test_rolling_log_likelihoods_of_a_tiny_model() -> None:
    """A token at a window's edge that is scored twice or not at all."""
    model, hf_model = tiny_pair()
    asked = requests("loglikelihood_rolling", [("short",), (LONG,), (LONG[:257],), ("a",)])
    found = ours(model).loglikelihood_rolling(asked)
    assert len(byte_tokenizer().encode(LONG)) > 2 * 256
    assert found == pytest.approx(
        theirs(hf_model, byte_tokenizer()).loglikelihood_rolling(asked), rel=1e-6, abs=1e-3
    )


def test_texts_of_a_tiny_model() -> None:
    """A stop string that stays in the text, or a prompt that is too long and loses its end instead of its beginning."""
    model, hf_model = tiny_pair()
    contexts = ["Say something:", LONG, "x"]
    asked = requests(
        "generate_until", [(context, options) for context in contexts for options in UNTIL]
    )
    found = ours(model).generate_until(asked)
    assert found == theirs(hf_model, byte_tokenizer()).generate_until(asked)
    assert any(found)


@pytest.mark.slow
def test_the_real_model(smollm2_fp32: LoadedModel, smollm2_hf: Any, smollm2_tokenizer: Any) -> None:
    """Real merges of the tokenizer, real weights: the promise of 1e-3."""
    adapter, backend = ours(smollm2_fp32), theirs(smollm2_hf, smollm2_tokenizer)
    asked = requests("loglikelihood", PAIRS)
    assert_same_scores(adapter.loglikelihood(asked), backend.loglikelihood(asked))
    rolling = requests("loglikelihood_rolling", [(LONG[:400],)])
    assert adapter.loglikelihood_rolling(rolling) == pytest.approx(
        backend.loglikelihood_rolling(rolling), rel=1e-6, abs=1e-3
    )
    texts = requests("generate_until", [("The capital of France is", UNTIL[1])])
    assert adapter.generate_until(texts) == backend.generate_until(texts)
