"""Guards against traces that are changed on the way: lengths, times, shared prefixes, uncounted cuts."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenrouter.workloads import AzureTrace, MooncakeTrace, RequestSet, traces
from tokenrouter.workloads.text import read_text

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,31,8
2023-11-16 18:17:05.2299600,110,27
2023-11-16 18:18:03.9799600,7433,14
"""
MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 7]},
    {"timestamp": 2000, "input_length": 600, "output_length": 3, "hash_ids": [0, 9]},
    {"timestamp": 9000, "input_length": 500, "output_length": 1, "hash_ids": [5]},
]
TEXT = [3 + (i * i + i // 7) % 65_521 for i in range(20_000)]


def _encode(text: str) -> list[int]:
    return list(text.encode())


def _azure(folder: Path, text: str = AZURE, **options: Any) -> AzureTrace:
    (folder / "trace.csv").write_text(text)
    given = {"data_dir": str(folder), "file": "trace.csv", "num_requests": 4}
    return AzureTrace(**(given | options))


def _mooncake(folder: Path, rows: list[dict[str, Any]] = MOONCAKE, **options: Any) -> MooncakeTrace:
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"data_dir": str(folder), "file": "trace.jsonl", "num_requests": len(rows)}
    return MooncakeTrace(**(given | options))


def _lengths(built: RequestSet) -> list[tuple[int, int]]:
    return [(len(r.prompt_ids), r.max_output_tokens) for r in built.requests]


def test_lengths_and_times_are_the_traces(tmp_path: Path) -> None:
    built = _azure(tmp_path).build(_encode, TEXT)
    assert _lengths(built) == [(4808, 10), (31, 8), (110, 27), (7433, 14)]
    assert [r.arrival_s for r in built.requests] == [0.0, 0.052, 1.25, 60.0]
    assert built.clipped_requests == built.wrapped_requests == 0
    assert (built.prompt_tokens, built.output_tokens, built.arrival_span_s) == (12382, 59, 60.0)


def test_a_later_start_begins_at_zero(tmp_path: Path) -> None:
    built = _azure(tmp_path, start=2, num_requests=2, rate_scale=2.0).build(_encode, TEXT)
    assert _lengths(built) == [(110, 27), (7433, 14)]
    assert [r.arrival_s for r in built.requests] == [0.0, 29.375]


def test_rows_out_of_order_are_sorted_by_arrival(tmp_path: Path) -> None:
    head, first, *rest = AZURE.splitlines()
    built = _azure(tmp_path, "\n".join([head, *rest, first])).build(_encode, TEXT)
    assert _lengths(built)[0] == (4808, 10)
    assert [r.arrival_s for r in built.requests] == [0.0, 0.052, 1.25, 60.0]


def test_clipping_keeps_outputs_first_and_counts_every_token(tmp_path: Path) -> None:
    """A long prompt that fills the model leaves an output of one token: no decode is measured."""
    trace = _azure(tmp_path, max_output_tokens=20)
    built = trace.build(_encode, TEXT, max_model_len=1000)
    assert _lengths(built) == [(990, 10), (31, 8), (110, 20), (986, 14)]
    assert built.clipped_requests == 3
    assert built.clipped_prompt_tokens == 4808 - 990 + 7433 - 986
    assert built.clipped_output_tokens == 7


def test_scales_come_before_limits_and_leave_a_token(tmp_path: Path) -> None:
    built = _azure(tmp_path, length_scale=0.01, max_prompt_tokens=60).build(_encode, TEXT)
    assert _lengths(built) == [(48, 1), (1, 1), (1, 1), (60, 1)]
    assert (built.clipped_requests, built.clipped_prompt_tokens) == (1, 14)


def test_a_short_text_starts_again_and_is_counted(tmp_path: Path) -> None:
    built = _azure(tmp_path).build(_encode, TEXT[:200])
    assert built.wrapped_requests == 2
    ids = built.requests[0].prompt_ids
    assert ids[:4608] == ids[200:] and len(set(ids)) == len(set(TEXT[:200]))


def test_equal_hash_ids_are_equal_blocks_and_others_are_not(tmp_path: Path) -> None:
    """Prefix sharing finds what the trace says is shared, and nothing else."""
    a, b, c, d = (r.prompt_ids for r in _mooncake(tmp_path).build(_encode, TEXT).requests)
    assert [len(ids) for ids in (a, b, c, d)] == [1300, 1100, 600, 500]
    assert a[:1024] == b[:1024] and a[:512] == c[:512]
    assert a[1024:1100] != b[1024:] and a[512:600] != c[512:] and a[:500] != d


@pytest.mark.parametrize("length_scale", [0.0625, 0.1, 0.33])
def test_scaled_prompts_share_scaled_blocks(tmp_path: Path, length_scale: float) -> None:
    """Blocks rounded down leave a prompt short of its length."""
    built = _mooncake(tmp_path, length_scale=length_scale).build(_encode, TEXT)
    assert [len(r.prompt_ids) for r in built.requests] == [
        round(length_scale * n) for n in (1300, 1100, 600, 500)
    ]
    a, b, c, _ = (r.prompt_ids for r in built.requests)
    block = int(512 * length_scale)
    assert a[: 2 * block] == b[: 2 * block] and a[:block] == c[:block]
    assert a != b[: len(a)] and b[: len(c)] != c
    rows = [{"timestamp": 0, "input_length": 1536, "output_length": 3, "hash_ids": [0, 1, 2]}]
    [full] = _mooncake(tmp_path, rows, length_scale=length_scale).build(_encode, TEXT).requests
    assert len(full.prompt_ids) == round(length_scale * 1536)


def test_a_clipped_prompt_keeps_its_shared_prefix(tmp_path: Path) -> None:
    built = _mooncake(tmp_path, max_prompt_tokens=700).build(_encode, TEXT)
    a, b, c, _ = (r.prompt_ids for r in built.requests)
    assert a == b and len(a) == 700 and a[:512] == c[:512]
    assert (built.clipped_requests, built.clipped_prompt_tokens) == (2, 600 + 400)


def test_the_seed_moves_passages_and_keeps_the_trace(tmp_path: Path) -> None:
    first, again, other = (_azure(tmp_path, seed=seed).build(_encode, TEXT) for seed in (0, 0, 1))
    assert first == again and _lengths(first) == _lengths(other)
    assert all(
        a.prompt_ids != b.prompt_ids for a, b in zip(first.requests, other.requests, strict=True)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ({"start": -1}, "start must be at least 0, got -1"),
        ({"rate_scale": 0.0}, r"rate_scale=0\.0 must be a number above 0"),
        ({"length_scale": -1.0}, "length_scale=-1.0 must be a number above 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _azure(tmp_path, **options)


def test_a_trace_that_is_too_short_says_how_long_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"start=2 .*num_requests=3 need a trace of 5 .* has 4"):
        _azure(tmp_path, start=2, num_requests=3).build(_encode, TEXT)


AT = "2023-11-16 18:18:04"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the first line names no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,b\n1,2\n", "line 1: the first line names no column ContextTokens"),
        (AZURE + "soon,1,2\n", "line 6: TIMESTAMP must be a time such as .*, got 'soon'"),
        (AZURE + ",1,2\n", "line 6: TIMESTAMP must be a time"),
        (AZURE + f"{AT}\n", "line 6: ContextTokens must be an integer of at least 1, got None"),
        (AZURE + f"{AT},many,2\n", "line 6: ContextTokens .* got 'many'"),
        (AZURE + f"{AT},-5,2\n", "line 6: ContextTokens must be at least 1, got -5"),
        (AZURE + f"{AT},0,2\n", "line 6: ContextTokens must be at least 1, got 0"),
        (AZURE + f"{AT},7,0\n", "line 6: GeneratedTokens must be at least 1, got 0"),
        (AZURE + f"{AT},{'9' * 200_000},1\n", r"behind line 5: no CSV \(field larger"),
    ],
)
def test_a_damaged_line_of_a_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    """A negative length served as a token; KeyError('TIMESTAMP') of a file of thousands of lines."""
    with pytest.raises(ValueError, match=rf"trace\.csv, {message}.*; .*check workload\.file") as it:
        _azure(tmp_path, text, num_requests=1).check()
    assert len(str(it.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": math.nan}, "timestamp=nan must be a number"),
        ({"timestamp": math.inf}, "timestamp=inf must be a number"),
        ({"timestamp": "0"}, "timestamp='0' must be a number"),
        ({"input_length": -5}, "input_length must be at least 1, got -5"),
        ({"input_length": 0}, "input_length must be at least 1, got 0"),
        ({"input_length": 1.5}, "input_length must be an integer of at least 1, got 1.5"),
        ({"output_length": 0}, "output_length must be at least 1, got 0"),
        ({"hash_ids": [0]}, "1 hash_ids are too few blocks for 600 tokens"),
        ({"hash_ids": ["a", "b"]}, "a number in hash_ids must be an integer, got 'a'"),
        ({"hash_ids": 7}, "hash_ids must be a list of integers, got 7"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """NaN as a time, for which an engine steps for ever; an empty prompt that no file is named for."""
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    with pytest.raises(ValueError, match=rf"trace\.jsonl, line 2: {re.escape(message)}.*; mend"):
        _mooncake(tmp_path, [row, row | change]).check()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "a request needs timestamp, .*, and has no timestamp, input_length, output_length"),
        ('{"timestamp": 0, "input_length": 5}', "and has no output_length, hash_ids"),
        ('{"timestamp": ', r"Expecting value"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    trace = _mooncake(tmp_path)
    with (tmp_path / "trace.jsonl").open("a") as file:
        file.write("\n" + line)
    with pytest.raises(ValueError, match=rf"trace\.jsonl, line 6: .*{message}"):
        trace.check()


@pytest.mark.parametrize("make", [_azure, _mooncake])
def test_what_was_checked_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """A trace that is parsed twice, most of a second each; one that another instance is given, too."""
    read: list[Path] = []

    def watched(path: Path, option: str) -> str:
        read.append(path)
        return read_text(path, option)

    monkeypatch.setattr(traces, "read_text", watched)
    trace = make(tmp_path)
    trace.check()
    built = trace.build(_encode, TEXT)
    assert len(read) == 1 and built.requests == trace.build(_encode, TEXT).requests
    assert make(tmp_path, num_requests=3).build(_encode, TEXT).requests == built.requests[:3]
    assert trace == make(tmp_path) and len(read) == 2


@pytest.mark.parametrize("make", [_azure, _mooncake])
def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path, make: Any) -> None:
    """A table saved by a spreadsheet: no column TIMESTAMP."""
    trace = make(tmp_path)
    before = trace.shapes()
    file = tmp_path / trace.file
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert replace(trace).shapes() == before


@pytest.mark.parametrize("make", [_azure, _mooncake])
def test_a_binary_file_is_named_and_not_shown(tmp_path: Path, make: Any) -> None:
    """Raw bytes of it in the error, on the terminal and in status.json."""
    trace = make(tmp_path)
    (tmp_path / trace.file).write_bytes(b"GGUF" + bytes(range(256)) * 40)
    with pytest.raises(
        ValueError, match=r"is no UTF-8 text \(byte 132 .*workload\.file"
    ) as refused:
        trace.check()
    assert str(refused.value).isprintable()


def test_without_the_folder_or_the_file_it_says_how_to_set_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace\.csv needs a folder .*TOKENROUTER_DATA_DIR"):
        _azure(tmp_path, data_dir=None).check()
    with pytest.raises(ValueError, match=r"no trace .*other\.csv; set TOKENROUTER_DATA_DIR"):
        _azure(tmp_path, file="other.csv").check()


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the text has no tokens"):
        _azure(tmp_path).build(_encode, [])
