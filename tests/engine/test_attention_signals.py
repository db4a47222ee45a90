"""Guards the attention statistics that features are told of, against transformers' own attention rows.

N tokens of a request, S signals.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.recorder import recording
from tests.engine.test_observation import expected as attention_row
from tests.engine.tools import greedy, prompts
from tokenrouter import ObserveOptions
from tokenrouter.features.signals import ATTENTION_SIGNALS

ALL_LAYERS = ObserveOptions(prefill_layers=(0, 1, 2, 3), prefill_queries=1)
ASKED = prompts()[:10]


def dense_attention(ids: Sequence[int], prompt_len: int) -> Tensor:
    """``[N, S]``: statistics of transformers' attention rows before each token behind the prompt."""
    rows, decayed = [], float("nan")
    for p in range(prompt_len, len(ids)):
        row_N = attention_row("llama", ids[:p], 1)
        received = float(row_N[-16:].sum())
        decayed = received if p == prompt_len else 0.9 * decayed + 0.1 * received
        rows.append(
            [received, decayed, float(row_N[:4].sum()), float(torch.special.entr(row_N).sum())]
        )
    return torch.tensor(rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 4},
        {"num_kv_slots": 130, "max_num_batched_tokens": 64},
        {
            "num_kv_slots": 130,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 8,
            "dispatch": "queued",
        },
    ],
    ids=["plain", "tiny chunks", "preempted", "preempted, small chunks"],
)
def test_attention_of_the_token_before(options: dict[str, Any]) -> None:
    """Statistics that depend on where a chunk began, of another request, or averaged anew after a preemption."""
    llm, router = recording(ATTENTION_SIGNALS, observe=ALL_LAYERS, **options)
    outputs = llm.generate(ASKED, greedy(12))
    assert (llm.engine.stats.num_preemptions > 0) == ("num_kv_slots" in options)
    for output in outputs[::3]:
        prompt = output.prompt_token_ids
        ids = [*prompt, *output.outputs[0].token_ids[:-1]]
        expected_NS = dense_attention(ids, len(prompt))
        assert_close(router.values_of(ids, len(prompt)), expected_NS, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "observe",
    [
        None,
        ObserveOptions(),
        ObserveOptions(prefill_layers=(0, 1), prefill_queries=1),
        ObserveOptions(prefill_layers=(0, 1, 2, 3)),
        ObserveOptions(decode=False, prefill_layers=(0, 1, 2, 3), prefill_queries=1),
    ],
)
def test_attention_that_is_not_observed_is_refused(observe: ObserveOptions | None) -> None:
    """A router that fails in the middle of a run, at the first token after a prompt."""
    message = r"recorder asks for sink_share, .*set observe=ObserveOptions\(prefill_layers=tuple\(range\(4\)\)"
    with pytest.raises(ValueError, match=message):
        recording(("sink_share",), observe=observe)
