"""KL of every system to float32, with random routing at the routed system's share beside it."""

from tokenrouter import LLM
from tokenrouter.evaluation.quality import Quality, QualitySettings, measure_quality
from tokenrouter.routers import RandomRouter
from tokenrouter.workloads import windows

from .measures import show_values
from .setup import Bench

POOL_OF = {"routed": "int8", "shared_routed": "int8_shared"}
RANDOM_OF = {"routed": "random", "shared_routed": "shared_random"}


def quality(bench: Bench) -> dict[str, float]:
    """In forced prefill; random gets the share that routed has on these windows."""
    length, count = bench.sizes.window_tokens, bench.sizes.num_windows
    settings = QualitySettings(
        window_tokens=length, num_windows=count, decode_tokens=0, decode_windows=0
    )
    texts = windows(bench.ids, length, count)

    def measure(systems: dict[str, LLM]) -> dict[str, Quality]:
        return measure_quality(bench.float32, systems, texts, settings).systems

    found = measure(bench.systems)
    found |= measure(
        {
            RANDOM_OF[name]: bench.llm(RandomRouter(high_frac=found[name].high_frac), pool)
            for name, pool in POOL_OF.items()
        }
    )
    values = {f"{name}_kl_mean_nats": q.prefill.kl_mean_nats for name, q in found.items()}
    for name in (*POOL_OF, *RANDOM_OF.values()):
        values[f"{name}_eval_high_frac"] = found[name].high_frac
    show_values(f"quality on {count} windows of {length} tokens", values)
    return values
