"""What a router would see of tokens that are served: for calibration on features that only a running engine knows."""

import itertools
from collections.abc import Sequence

from tokenrouter.engine.build import build_engine
from tokenrouter.engine.options import EngineOptions
from tokenrouter.executors import ExecutorPool
from tokenrouter.features import TokenTypeTable
from tokenrouter.models import LoadedModel
from tokenrouter.routers.base import Router
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.types import RouteInput, RouteTable, RoutingDecision

MAX_TOKENS = 6144
"""Sequences are served until they hold so many tokens: each decode token costs a share of a step."""


def served_inputs(
    router: Router,
    model: LoadedModel,
    pool: ExecutorPool,
    token_types: TokenTypeTable,
    options: EngineOptions,
    sequences: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
) -> list[RouteInput]:
    """Serves sequences by teacher forcing on the router's route 0, and keeps what it would have been shown.

    Args:
        router: not asked, and not modified.
        model: loaded.
        pool: executors built for ``model``.
        token_types: of its vocabulary.
        options: of the engine that is to be calibrated for; only what it observes matters.
        sequences: token ids; those behind the first 6,144 tokens are left out, and what is longer than the model's
            length is cut.
        prompt_lens: so many of each are the prompt, the others are fed one by one.
    """
    seen: list[RouteInput] = []
    options = EngineOptions(observe=options.observe, dispatch="mixed")
    engine = build_engine(model, _probe(router, seen), pool, token_types, options)
    params = SamplingParams(temperature=0.0, detokenize=False)
    totals = itertools.accumulate(map(len, sequences), initial=0)
    for index, (ids, split, before) in enumerate(zip(sequences, prompt_lens, totals, strict=False)):
        if before >= MAX_TOKENS:
            break
        kept = ids[: model.config.max_model_len]
        engine.add_request(str(index), kept[:split], params, forced_ids=kept[split:], stream=False)
    while engine.has_unfinished():
        engine.step()
    return seen


def _probe(router: Router, seen: list[RouteInput]) -> Router:
    """Asks for what ``router`` asks for, keeps it in ``seen`` and answers route 0."""

    class Probe(Router):
        name = router.name
        after_layer = router.after_layer
        phases = router.phases
        features = router.features
        optional = router.optional

        @property
        def options(self) -> dict[str, object]:
            return {}

        def routes(self, num_layers: int) -> RouteTable:
            return router.routes(num_layers)

        def route(self, inputs: RouteInput) -> RoutingDecision:
            if len(inputs):
                seen.append(inputs)
            return RoutingDecision.constant(0, len(inputs), "not decided yet", inputs.ids_T.device)

    return Probe()
