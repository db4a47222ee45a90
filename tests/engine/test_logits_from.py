"""Guards scores of a sequence's end: rows that are lost, doubled or of another sequence, and an lm_head run for nobody.

R rows of a call, V vocabulary.
"""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.prefix_tools import BASE, cold, warm
from tests.engine.tools import greedy, prompts, tiny, twin
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.routers import RandomRouter

SEQUENCES = [(*BASE[: 8 * (i % 5) + 20], *prompts()[i][:15]) for i in range(12)]
STARTS = [max(len(ids) - 1 - i % 6, 0) for i, ids in enumerate(SEQUENCES)]


def scored(llm: LLM, logits_from: list[int] | None) -> list[dict[int, Tensor]]:
    """By sequence the logits of each position; a position that comes twice fails."""
    found: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)

    def keep(index: int, position: int, logits_RV: Tensor) -> None:
        for offset, row_V in enumerate(logits_RV):
            assert position + offset not in found[index]
            found[index][position + offset] = row_V.clone()

    llm.score(SEQUENCES, sink=keep, logits_from=logits_from)
    return [found[index] for index in range(len(SEQUENCES))]


@pytest.fixture(scope="module")
def expected() -> list[dict[int, Tensor]]:
    """Every position, each sequence computed by itself."""
    return scored(cold(None, RandomRouter(0.5)), None)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 13, "max_num_seqs": 4},
        {"num_kv_slots": 80, "max_num_seqs": 4, "max_num_batched_tokens": 8},
    ],
    ids=["whole", "chunks", "preempted"],
)
def test_the_rows_are_those_of_a_full_score(
    expected: list[dict[int, Tensor]], is_shared: bool, options: dict[str, Any]
) -> None:
    """A prefix that reaches into the rows that are wanted, or rows that a recompute hands over again."""
    llm = (warm if is_shared else cold)(None, RandomRouter(0.5), **options)
    for name in "ab":  # the second time all beginnings are there
        for other in "12" if "num_kv_slots" in options else "":  # take slots away as they grow
            llm.engine.add_request(name + other, BASE[:12], greedy(60))
        for ids, start, found, full in zip(
            SEQUENCES, STARTS, scored(llm, STARTS), expected, strict=True
        ):
            assert sorted(found) == list(range(start, len(ids)))
            for position, row_V in found.items():
                torch.testing.assert_close(row_V, full[position], rtol=1e-4, atol=1e-4)
    assert (llm.engine.stats.shared_tokens > 100) == is_shared
    assert (llm.engine.stats.num_preemptions > 0) == ("num_kv_slots" in options)


def test_the_lm_head_runs_for_the_wanted_rows_of_all_sequences_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call per sequence reads all its weights for a few rows; a call for every token takes as long as a layer."""
    llm = LLM(tiny(), executors=twin(), options=EngineOptions(max_num_seqs=16))
    executor, calls = llm.pool.executors["high"], []
    logits = executor.logits

    def count(hidden_RE: Tensor) -> Tensor:
        calls.append(len(hidden_RE))
        return logits(hidden_RE)

    monkeypatch.setattr(executor, "logits", count)
    scored(llm, STARTS)
    wanted = sum(len(ids) - start for ids, start in zip(SEQUENCES, STARTS, strict=True))
    assert calls == [wanted, len(SEQUENCES)]  # the second: what the sampler would get


def test_positions_outside_a_sequence_are_refused() -> None:
    """A start behind the end hands over nothing, and nobody would know."""
    llm = cold(None)
    for start in (-1, 3):
        with pytest.raises(ValueError, match=rf"logits_from {start} must lie in 0 .. 2"):
            llm.score([[5, 6, 7]], sink=lambda *_: None, logits_from=[start])
    with pytest.raises(ValueError, match="exclude each other"):
        llm.score([[5, 6, 7]], sink=lambda *_: None, logits_from=[0], prefill_len=1)
    with pytest.raises(ValueError, match=r"logits_from=2 .* needs wants_all_logits"):
        llm.engine.add_request("x", [5, 6, 7], SamplingParams(), logits_from=2)
    assert not llm.engine.has_unfinished()
