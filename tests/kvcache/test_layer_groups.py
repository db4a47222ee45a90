"""Guards the way from the pool's layer groups to the kernels: each layer writes and reads by its own group's slots.

Groups that start empty hand out the same slots, so a mix-up would not show. Here a row that holds slots in the second
group only drives them apart.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.tools import NearTies, greedy, prompts, routes, run_all, tiny, tokens, twin
from tokenrouter import LLM, EngineOptions
from tokenrouter.engine import memory
from tokenrouter.engine.step import ForwardBuilder
from tokenrouter.executors import build_pool
from tokenrouter.models.tiny import tiny_random
from tokenrouter.routers import RandomRouter
from tokenrouter.types import AttentionBatch, ForwardBatch

SEATS = 6
ALTERNATE = (0, 1, 0, 1)


def engine(model_name: str, kernels: str, num_kv_slots: int | None = None) -> LLM:
    """Two routes of the tiny model, or a model whose upper layers slide; a seat more than will run."""
    options = EngineOptions(
        max_num_seqs=SEATS + 1,
        max_num_batched_tokens=48,
        num_kv_slots=num_kv_slots,
        dispatch="mixed",
    )
    if model_name == "two routes":
        llm = LLM(tiny(), router=RandomRouter(0.4), executors=twin(), options=options)
    else:
        model = tiny_random(
            "qwen2", sliding_window=20, max_window_layers=2, use_sliding_window=True
        )
        assert model.config.windows == (None, None, 20, 20)
        llm = LLM(model, executors=build_pool("full", model, kernels=kernels), options=options)
    llm.engine.scheduler.max_num_seqs = SEATS
    return llm


def grouped(monkeypatch: pytest.MonkeyPatch, *args: Any) -> LLM:
    """The same with every other layer in the second group."""
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_layer_groups", lambda num_layers, options: ALTERNATE)
        llm = engine(*args)
    assert len(llm.engine.pool.tables) == 2
    return llm


def drive_apart(llm: LLM) -> int:
    """Takes slots of the second group only; returns the row that holds them."""
    pool = llm.engine.pool
    row = pool.acquire_row(1)
    pool.tables[1].extend(row, 7)
    assert pool.free == pool.num_slots - 7
    return row


@pytest.mark.parametrize(
    ("model_name", "kernels", "num_kv_slots"),
    [
        ("two routes", "native", 400),
        ("two routes", "native", 120),
        ("windows", "native", 400),
        ("windows", "reference", 120),
    ],
)
def test_two_groups_give_the_tokens_of_one(
    monkeypatch: pytest.MonkeyPatch, model_name: str, kernels: str, num_kv_slots: int
) -> None:
    """A layer that writes by one group's slots and reads by another's; a plan of another group or window."""
    one = engine(model_name, kernels)
    expected = one.generate(prompts()[:24], greedy())
    llm = grouped(monkeypatch, model_name, kernels, num_kv_slots)
    pool, scheduler = llm.engine.pool, llm.engine.scheduler
    wedge, steps, apart = drive_apart(llm), 0, 0

    def compare() -> None:
        nonlocal steps, apart
        for r in scheduler.running:
            first, second = (table.slots_RN[r.row, : r.num_computed] for table in pool.tables)
            apart += not np.array_equal(first, second)
        steps += 1
        if steps == 25:
            pool.release(wedge)

    for index, prompt in enumerate(prompts()[:24]):
        llm.engine.add_request(str(index), prompt, greedy())
    last = run_all(llm, compare)
    ties = NearTies(one)
    for index, (prompt, output) in enumerate(zip(prompts(), expected, strict=False)):
        ties.same(prompt, tokens(output), tokens(last[str(index)]))
        if tokens(output) == tokens(last[str(index)]):
            assert routes(output) == routes(last[str(index)])
    assert ties.count <= 1
    assert apart > 50, "the groups had the same slots: nothing was tested"
    assert (llm.engine.stats.num_preemptions > 0) == (num_kv_slots == 120)


def test_a_forward_has_an_access_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors copied for every group and forward; positions passed, and gathered, though all are 0 .. N-1."""
    llm = grouped(monkeypatch, "two routes", "native")
    drive_apart(llm)
    built: list[ForwardBatch] = []
    build_forward = ForwardBuilder.build

    def spy(self: ForwardBuilder, *args: Any) -> tuple[ForwardBatch, torch.Tensor]:
        forward, rows = build_forward(self, *args)
        built.append(forward)
        return forward, rows

    monkeypatch.setattr(ForwardBuilder, "build", spy)
    llm.generate(prompts()[:4], greedy(4))
    assert built
    own = {"slots_RN", "num_keys_B"}
    shared = {field.name for field in fields(AttentionBatch)} - own
    for forward in built:
        first, second = forward.kv
        assert not (first.slots_T == second.slots_T).any()
        assert first.attention.positions_RN is None
        assert all(getattr(first.attention, n) is getattr(second.attention, n) for n in shared)
        for access, table in zip(forward.kv, llm.engine.pool.tables, strict=True):
            table_RN = torch.from_numpy(table.slots_RN)
            assert access.attention.slots_RN.data_ptr() == table_RN.data_ptr(), "a stale copy"


def test_each_layer_is_written_by_its_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that the decoder never hears of: all layers on the first table, the others' slots held for nothing."""
    llm = grouped(monkeypatch, "two routes", "native")
    drive_apart(llm)
    pool, kv_LSPD = llm.engine.pool, llm.engine._parts.arena.kv_LSPD
    kv_LSPD[:, : pool.num_slots] = float("nan")
    llm.engine.add_request("0", prompts()[2][:40], greedy())
    llm.engine.step()
    (request,) = llm.engine.scheduler.running
    for layer, group in enumerate(ALTERNATE):
        written = kv_LSPD[layer, : pool.num_slots].isfinite().all((1, 2)).nonzero().flatten()
        slots_N = pool.tables[group].slots_RN[request.row, :40]
        assert written.tolist() == sorted(slots_N.tolist()), f"layer {layer}"


def test_one_group_by_default() -> None:
    """An engine that keeps, and plans attention over, more tables than its layers need."""
    assert memory._layer_groups(4, EngineOptions()) == (0, 0, 0, 0)
    assert len(engine("two routes", "native").engine.pool.tables) == 1
