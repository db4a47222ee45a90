"""Guards against ratios the wrong way round, a warm-up that counts, and tokens that are not counted."""

from types import SimpleNamespace

import pytest
import torch

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.evaluation import ratios
from tokenrouter.evaluation.peers import TransformersPeer
from tokenrouter.evaluation.ratios import (
    DecodeBatch,
    decode_turns,
    format_rates,
    speed_ratio,
    take_turns,
)
from tokenrouter.executors import ExecutorPool
from tokenrouter.models import LoadedModel
from tokenrouter.models.tiny import tiny_hf
from tokenrouter.workloads import RequestSpec

PROMPTS = [[3 + (7 * i + row) % 250 for i in range(20)] for row in range(3)]


def test_systems_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    seconds = take_turns({"a": lambda: run("a"), "b": lambda: run("b")}, 2, title="turns")
    assert order == ["a", "b"] * 3
    assert seconds == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_no_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        take_turns({}, 0, title="turns")


def test_a_ratio_is_of_speeds_turn_by_turn() -> None:
    """The median of ratios, not the ratio of medians (which is 2 here): drift between turns cancels."""
    ratio = speed_ratio({"own": [1.0, 2.0, 40.0], "other": [4.0, 6.0, 4.0]}, "own", "other")
    assert (ratio.median, ratio.min, ratio.max) == (3.0, 0.1, 4.0)
    assert "50.0 tok/s   [25.0, 100.0]" in format_rates("title", {"a": [0.1, 0.2, 0.4]}, 10)


@pytest.mark.parametrize("dispatch", ["mixed", "queued"])
def test_a_stretch_counts_tokens_and_leaves_nothing_behind(
    model: LoadedModel, int8_pool: ExecutorPool, dispatch: str
) -> None:
    options = EngineOptions(dispatch=dispatch, min_batch=4)  # type: ignore[arg-type]
    llm = LLM(model, router="rule", executors=int8_pool, options=options)
    with DecodeBatch(llm, PROMPTS, num_steps=4) as batch:
        stats = llm.engine.stats
        assert stats.prefill_tokens == sum(map(len, PROMPTS))
        steps, tokens = stats.steps, stats.output_tokens
        assert batch.stretch_s() > 0.0
        assert stats.steps == steps + 4 and tokens < stats.output_tokens <= tokens + 4 * 3
    assert not llm.engine.has_unfinished() and llm.engine.pool.live == 0


def test_a_stretch_is_the_time_of_one_token_of_every_request(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued step may leave requests waiting: time over steps would flatter it."""
    with DecodeBatch(llm := LLM(model), PROMPTS, num_steps=4) as batch:
        step, waits = llm.engine.step, iter([True, False, True, False])
        clock = iter([10.0, 18.0])
        monkeypatch.setattr(llm.engine, "step", lambda: [] if next(waits) else step())
        monkeypatch.setattr(ratios, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        assert batch.stretch_s() == 4.0


def test_decode_turns_run_every_prompt_once(model: LoadedModel) -> None:
    llms = {"a": LLM(model), "b": LLM(model)}
    seconds = decode_turns(llms, PROMPTS, 2, num_steps=3, title="decode")
    assert [len(values) for values in seconds.values()] == [2, 2]
    for llm in llms.values():
        assert llm.engine.stats.prefill_tokens == sum(map(len, PROMPTS))


def test_the_peer_generates_what_the_engine_generates(model: LoadedModel) -> None:
    """Padding on the wrong side, or a mask that is left out, changes the text of short prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    requests = [
        RequestSpec(prompt_ids=tuple(ids[: 20 - 6 * row]), params=params)
        for row, ids in enumerate(PROMPTS)
    ]
    hf, made = tiny_hf(), []
    generate = hf.generate

    def keep(*arguments: object, **options: object) -> None:
        made.extend(generate(*arguments, **options)[:, -5:].tolist())

    hf.generate = keep
    peer = TransformersPeer(hf, requests, batch_size=2, pad_id=0)
    assert peer.serve_s() > 0.0 and peer.prefill_s(PROMPTS[0]) > 0.0
    outputs = LLM(model).generate([list(r.prompt_ids) for r in requests], params)
    assert made == [list(output.outputs[0].token_ids) for output in outputs]


def test_the_peer_prefills_the_whole_prompt_and_keeps_one_row() -> None:
    shapes: list[torch.Size] = []
    hf = tiny_hf()
    forward = hf.forward

    def keep(ids: torch.Tensor, **options: object) -> object:
        found = forward(ids, **options)
        shapes.extend([ids.shape, found.logits.shape[:2]])
        return found

    hf.forward = keep
    TransformersPeer(hf, [], batch_size=8, pad_id=0).prefill_s(PROMPTS[0])
    assert shapes == [(1, 20), (1, 1)]
