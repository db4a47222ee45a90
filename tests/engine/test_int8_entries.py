"""Guards int8 KV entries in the engine: what they cost in accuracy and save in bytes, and which tokens have them.

N tokens of a request, V vocabulary.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.tools import greedy, prompts, run_all, tiny, tokens, twin
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.executors import build_pool
from tokenrouter.kvcache.retention import Full, HeavyHitter, RetentionOptions, RouteClass
from tokenrouter.routers import RandomRouter

FORMS: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache_dtype": "int8"},
    "old ones": {
        "retention": RetentionOptions(policy=Full(), interval=8, window=4, compress="old", recent=3)
    },
    "old ones, some evicted": {
        "retention": RetentionOptions(
            policy=HeavyHitter(evicted_frac=0.4), interval=8, window=4, compress="old", recent=3
        )
    },
    "int8, some evicted": {
        "kv_cache_dtype": "int8",
        "retention": RetentionOptions(
            policy=HeavyHitter(evicted_frac=0.4), interval=8, window=4, recent=3
        ),
    },
}
every_form = pytest.mark.parametrize("form", FORMS)


def logits(llm: LLM, count: int = 24) -> list[Tensor]:
    """Of every position of some requests with forced outputs, ``[N, V]`` each."""
    rows: list[list[Tensor]] = [[] for _ in range(count)]
    for index in range(count):
        llm.engine.add_request(
            str(index),
            prompts()[index],
            SamplingParams(),
            forced_ids=prompts(seed=5)[index][:40],
            logits_sink=lambda _, logits_RV, index=index: rows[index].append(logits_RV.clone()),
            wants_all_logits=True,
        )
    run_all(llm)
    return [torch.cat(parts) for parts in rows]


def kl_nats(reference_NV: Tensor, other_NV: Tensor) -> float:
    """Mean over tokens."""
    log_p, log_q = reference_NV.log_softmax(-1), other_NV.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def engine(backend: str = "native", **options: Any) -> LLM:
    executors = build_pool("full", tiny(), kernels=backend)
    return LLM(tiny(), executors=executors, options=EngineOptions(**options))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_entries_are_the_full_ones_rounded(backend: str) -> None:
    """Scales of another token or plane; a form that is asked for and not used."""
    full = torch.cat(logits(engine(backend)))
    for name in ("int8", "old ones"):
        rounded = torch.cat(logits(engine(backend, **FORMS[name])))
        assert 1e-9 < kl_nats(full, rounded) < 1e-3, name
        assert float((full - rounded).abs().max()) < 0.5, name


@every_form
@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 33, "max_num_seqs": 4},
        {"num_kv_slots": 131, "max_num_seqs": 24},
    ],
    ids=["alone", "small chunks", "preempted"],
)
def test_nothing_around_a_request_changes_it(form: str, changes: dict[str, Any]) -> None:
    """Entries quantised at another time in a recompute, or read at the slot that another form has."""
    options = FORMS[form] | {"max_num_batched_tokens": 64}
    expected = logits(engine(**options))
    llm = engine(**(options | changes))
    differing = 0
    for ours, theirs in zip(logits(llm), expected, strict=True):
        # A last bit may flip a rounding, and then which of two nearly equal entries is evicted.
        is_close = float((ours - theirs).abs().max()) < 0.15 and kl_nats(theirs, ours) < 1e-4
        differing += not is_close
    assert differing <= ("evicted" in form)
    if "num_kv_slots" in changes:
        assert llm.engine.stats.num_preemptions > 0


def test_bytes_saved() -> None:
    """Entries that are int8 and still have their full slot."""
    peaks = {}
    for name, options in ({"full": {}} | FORMS).items():
        llm = engine(**options)
        llm.generate(prompts()[2:9], greedy(60))
        stats, engine_bytes = llm.engine.stats, llm.engine.kv_bytes_per_slot
        assert stats.peak_live_bytes >= stats.peak_live_slots * engine_bytes * 0.3
        peaks[name] = stats.peak_live_bytes
    head_dim = tiny().config.head_dim
    assert peaks["int8"] == peaks["full"] * (head_dim + 4) / (4 * head_dim)  # float32 here
    assert peaks["old ones"] < 0.7 * peaks["full"]
    assert peaks["old ones, some evicted"] < peaks["old ones"]
    assert peaks["int8, some evicted"] < peaks["int8"]


def test_classes_say_which_tokens_become_int8() -> None:
    """Classes by the wrong index, recent or protected tokens converted, or one token twice."""
    retention = RetentionOptions(
        policy=RouteClass(evicted_frac=0.0, classes={"high": "normal", "low": "compress"}),
        interval=8,
        window=1,
        sinks=2,
        recent=3,
        compress="class",
    )
    llm = LLM(
        tiny(),
        router=RandomRouter(0.5),
        executors=twin(),
        options=EngineOptions(retention=retention, max_num_seqs=6),
    )
    for index, prompt in enumerate(prompts()[2:8]):
        llm.engine.add_request(str(index), prompt, greedy(30))
    table, num_converted = llm.engine.pool.tables[0], 0

    def check() -> None:
        nonlocal num_converted
        for request in llm.engine.scheduler.running:
            kept = int(table.num_kept_R[request.row])
            assert kept == table.num_seen_R[request.row], "something was evicted"
            is_int8_N = table.slots_RN[request.row, :kept] > table.slots.end
            done = request.num_computed // 8 * 8
            is_low_N = request.requested_N[:kept] == 1
            position_N = np.arange(kept)
            decided_N = (position_N >= 2) & (position_N < done - 3)
            expected_N = is_low_N & decided_N
            assert (is_int8_N[: done - 3] == expected_N[: done - 3]).all()
            num_converted += int(is_int8_N.sum())

    run_all(llm, check)
    assert num_converted > 500
    assert llm.engine.pool.converted == 0


def test_greedy_output_is_the_same_in_both_backends() -> None:
    """Native attention over int8 entries that agrees with itself alone."""
    for form in ("int8", "old ones, some evicted"):
        outputs = [
            [tokens(o) for o in engine(backend, **FORMS[form]).generate(prompts()[:8], greedy(20))]
            for backend in ("native", "reference")
        ]
        differing = sum(a != b for a, b in zip(*outputs, strict=True))
        assert differing <= 1, form


def test_refusals() -> None:
    """An option that silently does nothing."""
    retention = RetentionOptions(policy=Full(), compress="old")
    with pytest.raises(
        ValueError, match=r"has no effect with kvcache\.dtype \(in Python: kv_cache_dtype\)=int8"
    ):
        EngineOptions(kv_cache_dtype="int8", retention=retention)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        EngineOptions(kv_cache_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'class', 'old' or null"):
        RetentionOptions(policy=Full(), compress="all")  # type: ignore[arg-type]
