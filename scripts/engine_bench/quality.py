"""KL of every system to float32, with random routing at the routed system's share beside it."""

from collections.abc import Sequence

import torch

from tokenrouter import LLM
from tokenrouter.evaluation.held_out import HeldOutWindows
from tokenrouter.evaluation.quality import Quality, QualitySettings, measure_quality
from tokenrouter.features import TokenTypeTable, sequence_batch
from tokenrouter.routers import RandomRouter
from tokenrouter.workloads import windows

from .measures import show_values
from .setup import Bench, routed_router

POOL_OF = {"routed": "int8", "shared_routed": "int8_shared"}
RANDOM_OF = {"routed": "random", "shared_routed": "shared_random"}


def quality(bench: Bench) -> dict[str, float]:
    """In forced prefill; routed meets its budget here, and random goes high as often as routed."""
    length, count = bench.sizes.window_tokens, bench.sizes.num_windows
    settings = QualitySettings(
        window_tokens=length, num_windows=count, decode_tokens=0, decode_windows=0
    )
    texts = windows(bench.ids, length, count)
    held_out = HeldOutWindows(text_ids=bench.held_out, window_tokens=length, decode_tokens=0)
    types = bench.systems["routed"].token_types

    def measure(systems: dict[str, LLM]) -> dict[str, Quality]:
        return measure_quality(bench.float32, systems, texts, settings).systems

    routed = {
        name: bench.llm(
            held_out.calibrated(routed_router(bench.high_frac), types), bench.pools[pool]
        )
        for name, pool in POOL_OF.items()
    }
    found = measure(bench.systems | routed)
    found |= measure(
        {
            RANDOM_OF[name]: bench.llm(
                matched_random(texts, found[name].high_frac, types), bench.pools[pool]
            )
            for name, pool in POOL_OF.items()
        }
    )
    values = {f"{name}_kl_mean_nats": q.prefill.kl_mean_nats for name, q in found.items()}
    for name in (*POOL_OF, *RANDOM_OF.values()):
        values[f"{name}_eval_high_frac"] = found[name].high_frac
    show_values(f"quality on {count} windows of {length} tokens", values)
    return values


def matched_random(
    texts: Sequence[Sequence[int]], high_frac: float, types: TokenTypeTable
) -> RandomRouter:
    """A random router that sends ``high_frac`` of these very tokens high, as prompts.

    A draw is hashed from the token's prefix, so the realised share of a few thousand tokens misses
    the router's by several percent. Its share is therefore put between two draws of these tokens.

    Args:
        texts: token ids.
        high_frac: share of their tokens, 0 to 1.
        types: of the vocabulary.
    """
    router = RandomRouter()
    extractor = router.extractor(types)
    draws = [router.route(extractor.extract(sequence_batch(ids))).score_T for ids in texts]
    draw_T = torch.cat(draws).double().sort(descending=True).values
    num_high = round(high_frac * len(draw_T))
    if not 0 < num_high < len(draw_T):
        return RandomRouter(high_frac=float(num_high > 0))
    return RandomRouter(high_frac=1.0 - float(draw_T[num_high - 1] + draw_T[num_high]) / 2)
