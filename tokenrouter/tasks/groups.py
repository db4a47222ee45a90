"""The parts of conf/ that have no target: their keys, and what each is for. A new key is one line here.

``checks.check_config`` refuses every other key: what nothing reads would have no effect, and nobody would say so.
"""

from collections.abc import Collection, Mapping

ENGINE: Mapping[str, Mapping[str, str]] = {
    "scheduler": {
        "policy": "scheduler",
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "static_batch_size": "static_batch_size",
        "phase_order": "phase_order",
        "max_prefill_tokens": "max_prefill_tokens",
        "max_decode_tokens": "max_decode_tokens",
        "max_phase_wait_steps": "max_phase_wait_steps",
        "max_overtaken": "max_overtaken",
        "max_num_waiting": "max_num_waiting",
        "dispatch": "dispatch",
        "min_batch": "min_batch",
        "max_wait_steps": "max_wait_steps",
    },
    "kvcache": {
        "num_slots": "num_kv_slots",
        "num_host_slots": "num_host_slots",
        "dtype": "kv_cache_dtype",
        "prefix_sharing": "prefix_sharing",
        "prefix_block": "prefix_block",
        "retention": "retention",
    },
}
"""By group, which field of EngineOptions each key sets."""

QUALITY = ("window_tokens", "num_windows", "decode_tokens", "decode_windows")
"""Keys of conf/evaluation that QualitySettings takes under the same names."""

TASKS = ("tasks", "limit", "num_fewshot", "apply_chat_template")
"""Those that TaskSettings takes."""

KEYS: Mapping[str, Collection[str]] = {
    **ENGINE,
    "evaluation": (*QUALITY, *TASKS, "retrieval", "reference_dtype", "num_repeats", "slo"),
    "kernels": ("backend",),
}
"""All keys of each part."""
