"""Guards the kernels' benchmark: implementations that do other work, weights that stay in a cache, a wrong roofline."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.kernel_bench.app import all_cases, head, line, parse_arguments
from scripts.kernel_bench.case import LIBRARY, NATIVE, REFERENCE, SEPARATE, Case, Result, Turn
from scripts.kernel_bench.roofline import Level, Machine, Roofline, Work
from scripts.kernel_bench.shapes import QUICK, Shapes, parse_shapes
from tokenrouter.kernels import KernelSet, Product, QuantizedRows, ReferenceKernels, select
from tokenrouter.telemetry import Spread

ROOT = Path(__file__).resolve().parent.parent
TINY = Shapes(hidden=64, inter=96, heads=4, kv_heads=2, head_dim=16, vocab=128, layers=2)
MACHINE = Machine(
    hardware="a machine",
    isa="plain",
    threads=1,
    levels=(
        Level(num_bytes=100, read_bytes_s=1000.0, copy_bytes_s=400.0),
        Level(num_bytes=1000, read_bytes_s=100.0, copy_bytes_s=50.0),
    ),
    bf16_ops_s=10.0,
    int8_ops_s=20.0,
)


def cases(*, cached: bool = False) -> list[Case]:
    backends: list[KernelSet] = [select("native"), ReferenceKernels()]
    torch.manual_seed(0)
    return list(all_cases(backends, TINY, QUICK, cached=cached))


def values(result: Tensor | QuantizedRows | tuple[Tensor, Tensor]) -> Tensor:
    if isinstance(result, QuantizedRows):
        return result.q_TK.float() * result.scale_T1.float()
    if isinstance(result, tuple):  # largest values and where they are
        return torch.stack([part.float() for part in result])
    return result.float().clone()


def result_of(case: Case, call: Any) -> Tensor:
    """What a call returns; of ``layer_tail`` what it makes of its hidden states, which are put back."""
    if case.operator != "layer_tail":
        return values(call())
    x_TE = call.args[1]
    before_TE = x_TE.clone()
    assert call() is None
    result_TE = values(x_TE)
    x_TE.copy_(before_TE)
    return result_TE


def test_implementations_compute_the_same_on_every_copy() -> None:
    """A speed-up over an operator that computes something else; copies that are not the same work."""
    for case in cases():
        expected = result_of(case, case.calls[REFERENCE][0])
        assert expected.abs().max() > 0, case
        for name, calls in case.calls.items():
            for call in (calls[0], calls[-1]):
                found = result_of(case, call).view(expected.shape)
                error = (found - expected).abs().max() / expected.abs().max()
                assert error < 0.03, (case.operator, case.size, name, error)


def test_attention_received_is_written_by_each_implementation() -> None:
    """``received`` that is asked for in the label only."""
    asked = [case for case in cases() if "received" in case.size]
    assert asked
    for case in asked:
        sums = {}
        for name, (call, *_) in case.calls.items():
            call()
            sums[name] = call.keywords["received"]
        torch.testing.assert_close(sums[NATIVE], sums[REFERENCE], rtol=0.02, atol=1e-3)


def test_every_operator_of_the_contract_is_measured() -> None:
    """An operator that joins the contract and is never measured, be it abstract or one that a backend may fuse."""
    found = cases()
    measured = {case.operator for case in found}
    assert measured == {
        name
        for part in KernelSet.__mro__
        for name, value in vars(part).items()
        if callable(value) and not name.startswith(("_", "pack_", "plan_"))
    }
    assert measured > {"project", "layer_tail", "attend"}, "what the engine runs"
    for operator in ("project", "layer_tail"):
        sizes = [case.size for case in found if case.operator == operator]
        for product in Product:
            assert any(f" {product.value}," in size for size in sizes), (operator, product)
    products = [case for case in found if "matmul" in case.operator]
    linears = {linear.name for linear in (*TINY.linears, TINY.lm_head)}
    assert {case.size.split()[0] for case in products} == linears
    for case in found:
        others = {NATIVE, REFERENCE} | ({SEPARATE} if case.operator == "routed_matmul" else set())
        assert set(case.calls) - {LIBRARY} == others, case.size


def memory_of(case: Case) -> set[int]:
    """Addresses of what native's calls stream: packed weights, or the arenas of the layers."""
    calls = case.calls[NATIVE]
    if case.operator == "routed_matmul":
        return {call.args[3].weight.data_ptr() for call in calls}
    if "matmul" in case.operator:
        return {call.args[1].weight.data_ptr() for call in calls}
    if case.operator == "project":
        return {call.args[-1].weight.data_ptr() for call in calls}
    if case.operator == "layer_tail":
        return {id(call.func) for call in calls}
    index = {"attention": 1, "rope_store_kv": 4, "attend": 4}.get(case.operator)
    return {call.args[index].data_ptr() for call in calls} if index else set()


def test_weights_and_entries_rotate_unless_cached() -> None:
    """A decode product that reads from a cache what a decode step reads from memory."""
    for rotating, cached in zip(cases(), cases(cached=True), strict=True):
        alone = "matmul" not in rotating.operator and rotating.operator not in (
            "attention",
            "rope_store_kv",
            "project",
            "layer_tail",
            "attend",
        )
        assert len(memory_of(cached)) == (0 if alone else 1), cached.size
        assert alone or len(memory_of(rotating)) > 1, rotating.size
        if not alone:
            assert rotating.work.working_set_bytes > cached.work.working_set_bytes, cached.size


def test_copies_of_a_linear_take_the_memory_of_all_layers() -> None:
    """lm_head thirty times, or a small linear whose thirty copies fit into a cache."""
    shapes = Shapes()
    whole = shapes.layers * sum(linear.num_weights for linear in shapes.linears)
    for linear in (*shapes.linears, shapes.lm_head):
        copied = shapes.copies(linear) * linear.num_weights
        assert whole <= copied < whole + linear.num_weights, linear.name
    both = shapes.linears[2:]
    assert shapes.copies(*both) < min(map(shapes.copies, both)), (
        "two linears are one after the other"
    )


def test_a_turn_goes_on_where_the_last_one_stopped() -> None:
    """Turns that begin with the same copy each find it in the cache."""
    seen: list[int] = []
    turn = Turn([lambda i=i: seen.append(i) for i in range(5)], turn_s=0.0)
    assert turn.num_calls == 1
    for _ in range(5):
        assert turn() > 0
    assert seen == list(islice([0, 1, 2, 3, 4] * 2, 7))


def work(**values: int) -> Work:
    return Work(**{"read_bytes": 0, "written_bytes": 0, "working_set_bytes": 50} | values)


@pytest.mark.parametrize(
    ("given", "seconds", "bound"),
    [
        (work(read_bytes=100, written_bytes=20), 80 / 1000 + 40 / 400, "memory"),
        (work(read_bytes=20, written_bytes=100), 120 / 400, "memory"),
        (work(read_bytes=100, working_set_bytes=101), 1.0, "memory"),
        (work(read_bytes=100, working_set_bytes=10**9), 1.0, "memory"),
        (work(read_bytes=100, bf16_ops=10, int8_ops=40), 3.0, "product"),
    ],
)
def test_roofline(given: Work, seconds: float, bound: str) -> None:
    """Cache bandwidth for what does not fit into it; both formats' operations at one rate."""
    found = MACHINE.roofline(given)
    assert found.seconds == pytest.approx(seconds) and found.bound == bound


def test_work_of_known_operators() -> None:
    """Bytes or operations that are counted twice or not at all."""
    found = {(case.operator, case.size): case.work for case in cases()}
    dense = found["matmul", "gate_up 64 to 192, 32 rows"]
    assert dense.read_bytes == 2 * (192 * 64 + 32 * 64) and dense.written_bytes == 2 * 32 * 96
    assert (dense.bf16_ops, dense.int8_ops) == (2 * 32 * 64 * 192, 0)
    low = found["int8_matmul", "qkv 64 to 128, 1 rows"]
    assert low.read_bytes == 128 * 64 + 64 and low.int8_ops == 2 * 128 * 64
    four = found["int4_matmul", "qkv 64 to 128, 1 rows"]
    assert four.read_bytes == 128 * 64 * 9 // 16 + 64 and four.int8_ops == 2 * 128 * 64
    shared = found["routed_matmul", "out 64 to 64, 3 of 32 rows high, shared"]
    assert shared.read_bytes == 64 * 64 + 3 * 2 * 64 + 29 * 64
    assert (shared.bf16_ops, shared.int8_ops) == (2 * 3 * 64 * 64, 2 * 29 * 64 * 64)
    prefill = found["attention", "prefill of 48"]
    assert prefill.bf16_ops == 4 * 4 * 16 * 48 * 49 // 2
    decode = found["attention", "decode 3 x 40"]
    assert decode.bf16_ops == 4 * 4 * 16 * 3 * 40
    assert decode.working_set_bytes > 2 * 3 * 40 * 4 * 16 * 2
    project = found["project", "qkv 64 to 128, normed, int8_matmul, 1 rows"]
    assert (project.read_bytes, project.written_bytes) == (128 * 64 + 2 * 64, 2 * 128)
    assert (project.bf16_ops, project.int8_ops) == (0, 2 * 128 * 64)
    tail, num_weights = found["layer_tail", "64 to 96, matmul, 32 rows"], 3 * 96 * 64 + 3 * 64 * 64
    assert tail.read_bytes == 2 * (num_weights + 32 * 64)
    assert tail.written_bytes == 2 * 32 * (64 + 128)
    assert (tail.bf16_ops, tail.int8_ops) == (2 * 32 * num_weights, 0)
    attend = found["attend", "decode 3 x 40"]
    assert attend.bf16_ops == decode.bf16_ops
    assert attend.written_bytes == 2 * 3 * (4 * 16 + 4 * 16)
    assert attend.read_bytes == 2 * (3 * 39 * 4 * 16 + 3 * (128 + 2 * 16)) + 8 * (3 + 3 * 40)


def test_a_line_fits_the_head_and_says_what_is_missing() -> None:
    """Columns under the wrong name."""
    result = Result(
        operator="int8_matmul",
        size="qkv 576 to 960, 1 rows",
        seconds={
            NATIVE: Spread(median=2e-6, min=1e-6, max=3e-6),
            LIBRARY: Spread(median=7e-6, min=7e-6, max=7e-6),
        },
        speedups={LIBRARY: Spread(median=3.5, min=3.0, max=4.0)},
        roofline=Roofline(seconds=5e-7, bound="memory"),
    )
    top, row = head(), line(result)
    for name, shown in {
        "reference": "-",
        "library": "7.0",
        "separate": "-",
        "share %": "25.0",
    }.items():
        end = top.index(name) + len(name)
        assert row[:end].split()[-1] == shown, (name, row)
    assert "[1.0 .. 3.0]" in row
    shown = result.as_dict()
    assert shown["native_roofline_frac"] == 0.25 and shown["us"][NATIVE]["median"] == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("576,1536,9", "must be five numbers: hidden,inter,heads,kv_heads,head_dim"),
        ("576,1536,9,3,x", "'576,1536,9,3,x' must be five numbers"),
        ("576,1536,9,2,64", "9 query heads cannot share 2 key heads"),
        ("576,1536,9,3,63", "head_dim must be even .*got 63"),
        ("0,1536,9,3,64", "hidden must be at least 1, got 0"),
    ],
)
def test_shapes_that_cannot_be(text: str, message: str) -> None:
    """A traceback out of an operator after a minute."""
    with pytest.raises(ValueError, match=message):
        parse_shapes(text, vocab=128, layers=2)
    with pytest.raises(SystemExit):
        parse_arguments("", ["--model-shapes", text])


def test_no_repeats_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of nothing."""
    with pytest.raises(SystemExit):
        parse_arguments("", ["--repeats", "0"])
    assert "--repeats must be at least 1, got 0" in capsys.readouterr().err


def test_the_script_runs_to_its_json() -> None:
    """An import that works in tests only; a table whose last line others cannot read."""
    shapes = ("--model-shapes", "64,96,4,2,16", "--vocab", "128", "--layers", "2")
    command = [sys.executable, "scripts/bench_kernels.py", "--quick", "--repeats", "1", *shapes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(last)
    assert found["quick"] and not found["cached"] and found["model_shapes"] == "64,96,4,2,16"
    for result in found["results"]:
        assert any(row.startswith(result["operator"]) and result["size"] in row for row in table), (
            result
        )
        assert 0 < result["native_roofline_frac"] and 0 < result["us"]["native"]["min"]
    sizes = [level["num_bytes"] for level in found["machine"]["levels"]]
    assert sizes == sorted(set(sizes)) and len(sizes) == 2
    assert len(found["results"]) == len(cases())
