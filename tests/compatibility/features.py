"""The features whose combinations are tested: an entry of ``FEATURES`` makes a row of docs/compatibility.md.

Each setting of a feature is tried with each setting of every other feature. What is known to be refused, or to have no
effect, is declared in ``rules.py``. Two settings that give one option different values are alternatives, not a pair.
"""

import string

from tests.compatibility.engines import model
from tests.compatibility.setting import (
    Setting,
    feature,
    neutral,
    params,
    retention,
    routed,
    router,
)
from tests.engine.late import LateRouter
from tests.kvcache.trained_retention import drawn_policy
from tokenrouter import ObserveOptions
from tokenrouter.kvcache.retention import (
    HeavyHitter,
    KeyNorm,
    ObservationWindow,
    Random,
    RouteClass,
    SinkWindow,
    Threshold,
)
from tokenrouter.routers import (
    Budget,
    LayerwiseRouter,
    RandomRouter,
    RequestLevelRouter,
    RuleRouter,
)

SHARE = {"evicted_frac": 0.3}
SAMPLED = {"temperature": 0.9, "seed": 7}
PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.8, "presence_penalty": 1.2}

FEATURES = (
    feature(
        "precision",
        "low_path",
        "int8 products: `executor=int8`, `int8_shared`, `int8_smooth`",
        int8=routed(pool="int8"),
        int8_shared=routed(pool="int8_shared"),
        int8_smooth=routed(pool="int8_smooth"),
    ),
    feature(
        "precision",
        "lm_head",
        "int8 head of low tokens: `executor.lm_head=low`",
        low=Setting(options={"pool.lm_head": "low"}, two_paths=True),
    ),
    feature(
        "precision",
        "token_router",
        "a route per token: `router=rule`, also with a budget, `random`, one asked after the first layer",
        rule=router(lambda: RuleRouter(first_positions=4)),
        rule_budget=router(lambda: RuleRouter(budget=Budget(high_frac=0.6))),
        random=router(lambda: RandomRouter(0.3, seed=2)),
        after_layer=router(LateRouter),
    ),
    feature(
        "precision",
        "layerwise",
        "a fixed layer map: `router=layerwise`",
        last=router(lambda: LayerwiseRouter(high_layers=(1,))),
    ),
    feature(
        "precision",
        "request_level",
        "a route per request: `router=request_level`, around a router per token",
        half=routed(router_around=lambda inner: RequestLevelRouter(inner, high_frac=0.5)),
    ),
    feature(
        "precision",
        "kernels",
        "torch operators: `kernels.backend=reference`",
        reference=Setting(
            options={"kernels": "reference"},
            changes_output=False,
            sign=lambda run: run.kernels == "ReferenceKernels",
        ),
    ),
    feature(
        "schedule",
        "scheduler",
        "policies: `scheduler=priority`, `shortest_first`, `static_batch`",
        priority=Setting(
            options={"engine.scheduler": "priority", "request.priorities": (2, 1, 0)},
            changes_output=False,
            sign=lambda run: run.order == ["2", "1", "0"],
        ),
        shortest_first=neutral(
            lambda run: run.order == ["2", "1", "0"], scheduler="shortest_first"
        ),
        static_batch=neutral(
            lambda run: run.most_running == 2, scheduler="static_batch", static_batch_size=2
        ),
    ),
    feature(
        "schedule",
        "phase_order",
        "`scheduler.phase_order=prefill_first`, `decode_first`",
        prefill_first=neutral(
            lambda run: not run.mixes_phases, phase_order="prefill_first", max_phase_wait_steps=99
        ),
        decode_first=neutral(
            lambda run: not run.mixes_phases, phase_order="decode_first", max_phase_wait_steps=99
        ),
    ),
    feature(
        "schedule",
        "budgets",
        "budgets of a step: `max_num_batched_tokens`, `max_prefill_tokens`, `max_decode_tokens`",
        tokens=neutral(lambda run: run.largest_step <= 6, max_num_batched_tokens=6),
        phases=neutral(lambda run: run.most_decode <= 1, max_prefill_tokens=5, max_decode_tokens=1),
    ),
    feature(
        "schedule",
        "dispatch",
        "`scheduler.dispatch=queued`, `auto`",
        queued=neutral(lambda run: run.waited, two_paths=True, dispatch="queued"),
        auto=neutral(None, two_paths=True, dispatch="auto"),
    ),
    feature(
        "schedule",
        "queue_cap",
        "a full queue refuses: `scheduler.max_num_waiting`",
        three=neutral(lambda run: run.stats.num_rejected > 0, max_num_waiting=3),
    ),
    feature(
        "schedule",
        "abort",
        "a neighbour that is aborted: `LLMEngine.abort`",
        neighbour=Setting(
            options={"request.neighbour_aborts": True},
            changes_output=False,
            sign=lambda run: run.num_aborted == 1,
        ),
    ),
    feature(
        "memory",
        "preemption",
        "preemption: recomputed, or kept by the host tier (`kvcache.num_host_slots`)",
        recompute=neutral(
            lambda run: run.stats.num_preemptions > 0 and run.stats.reused_tokens > 0,
            num_kv_slots=50,
            num_host_slots=0,
        ),
        host=neutral(
            lambda run: run.num_swapped > 0 and run.stats.reused_tokens == 0,
            num_kv_slots=50,
            num_host_slots=400,
        ),
    ),
    feature(
        "memory",
        "kv_int8",
        "all entries in int8: `kvcache.dtype=int8`",
        int8=Setting(
            options={"engine.kv_cache_dtype": "int8"},
            sign=lambda run: run.stats.peak_int8_tokens > 0,
        ),
    ),
    feature(
        "memory",
        "retention",
        "eviction: `kvcache=heavy_hitter`, `observation_window`, `threshold`, `key_norm`, `random`, `sink_window`, "
        "`route`, `learned`",
        heavy_hitter=retention(HeavyHitter(**SHARE)),
        observation_window=retention(ObservationWindow(**SHARE, pool_size=3)),
        threshold=retention(Threshold(threshold=0.7)),
        key_norm=retention(KeyNorm(**SHARE)),
        random=retention(Random(**SHARE)),
        sink_window=retention(SinkWindow(**SHARE)),
        route=retention(RouteClass(**SHARE)),
        learned=retention(drawn_policy(model().model_hash, **SHARE)),
    ),
    feature(
        "memory",
        "layer_groups",
        "groups of layers keep their own tokens: `kvcache.retention.groups`",
        two=Setting(
            options={"retention.groups": 2},
            evicts=True,
            sign=lambda run: run.num_groups == 2 and run.stats.evicted_entries > 0,
        ),
    ),
    feature(
        "memory",
        "compress",
        "entries become int8: `kvcache.retention.compress=old`, `class`",
        old=Setting(
            options={"retention.compress": "old"},
            sign=lambda run: run.stats.peak_int8_tokens > 0,
        ),
        by_class=Setting(
            options={"retention.compress": "class", "router.low_class": "compress"},
            two_paths=True,
            sign=lambda run: run.stats.peak_int8_tokens > 0,
        ),
    ),
    feature(
        "memory",
        "prefix_sharing",
        "prompts that begin alike share entries: `kvcache.prefix_sharing=true`",
        on=Setting(
            options={
                "engine.prefix_sharing": True,
                "engine.prefix_block": 8,
                "request.forerunners": True,
            },
            changes_output=False,
            sign=lambda run: run.stats.shared_tokens > 0,
        ),
    ),
    feature(
        "sampling",
        "sampling",
        "sampled with a seed: `temperature`, `top_k`, `top_p`, `min_p`",
        truncated=params(**SAMPLED, top_k=40, top_p=0.9, min_p=0.02),
    ),
    feature(
        "sampling",
        "n",
        "several completions: `n`",
        two=params(lambda run: run.num_completions == 2, n=2, **SAMPLED),
    ),
    feature(
        "sampling",
        "penalties",
        "`repetition_penalty`, `frequency_penalty`, `presence_penalty`",
        all=params(**PENALTIES),
    ),
    feature(
        "sampling",
        "logit_bias",
        "`logit_bias`",
        some=params(logit_bias={i: -2.0 if i % 2 else 1.0 for i in range(3, 120)}),
    ),
    feature(
        "sampling",
        "stop",
        "`stop` strings, `stop_token_ids`, `min_tokens`",
        strings=params(lambda run: run.num_stopped > 0, stop=tuple(string.printable), min_tokens=8),
        ids=params(lambda run: run.num_stopped > 0, stop_token_ids=range(100, 240), min_tokens=8),
    ),
    feature(
        "observation",
        "logprobs",
        "`logprobs`, `prompt_logprobs`",
        output=params(lambda run: run.has_logprobs, logprobs=2),
        prompt=params(lambda run: run.has_prompt_logprobs, prompt_logprobs=2),
    ),
    feature(
        "observation",
        "scoring",
        "teacher forcing: `LLM.score`, `task=evaluate`",
        forced=Setting(
            options={"request.forced": True}, sign=lambda run: len(run.logits) == len(run.outputs)
        ),
    ),
    feature(
        "observation",
        "observe",
        "attention statistics: `EngineOptions.observe`",
        all=neutral(
            lambda run: run.num_observed > 0,
            observe=ObserveOptions(prefill_layers=(0, 1), prefill_queries=4),
        ),
    ),
    feature(
        "observation",
        "decision_log",
        "the decision log: `EngineOptions.log_decisions`",
        on=neutral(lambda run: run.num_logged == run.stats.decided_tokens, log_decisions=True),
    ),
    feature(
        "observation",
        "streaming",
        "streaming: `LLM.stream`",
        on=Setting(
            options={"request.stream": True},
            changes_output=False,
            sign=lambda run: run.num_outputs > 2 * len(run.outputs),
        ),
    ),
)
