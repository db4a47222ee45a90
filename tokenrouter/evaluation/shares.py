"""Which tokens took which route: overall, and by position and token type for routes.png."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenrouter import LLM
from tokenrouter.evaluation.divergence import BUCKET_EDGES, position_buckets
from tokenrouter.features import TokenType, TokenTypeTable
from tokenrouter.outputs import RequestOutput

Shares = dict[str, dict[str, dict[str, int]]]


def high_work(llm: LLM) -> tuple[float, int]:
    """Work on the executor "high" since the engine's last reset, in tokens; and all tokens.

    For a router that gives a token one executor for all layers, the first is its number of high
    tokens.
    """
    tokens_R = llm.engine.stats.executed_tokens.sum(axis=0)
    return float(tokens_R @ high_layers(llm)), int(tokens_R.sum())


def high_layers(llm: LLM) -> npt.NDArray[np.float64]:
    """Per route of the engine's table the share of its layers on the executor "high"."""
    num_layers = llm.model.config.num_layers
    layers_R = [
        sum(span.stop - span.start for span in route.spans if span.executor == "high")
        for route in llm.engine.route_table.routes
    ]
    return np.asarray(layers_R, dtype=np.float64) / num_layers


def route_shares(
    outputs: Sequence[RequestOutput], route_names: Sequence[str], token_types: TokenTypeTable
) -> Shares:
    """Executed tokens by panel title, bar label and route name. Tokens never fed are left out."""
    ids, positions, routes = [], [], []
    for output in outputs:
        for completion in output.outputs:
            tokens = (*output.prompt_token_ids, *completion.token_ids)
            routes_N = np.asarray(completion.routes, dtype=np.int64)
            fed_N = np.flatnonzero(routes_N >= 0)
            ids.append(np.asarray(tokens, dtype=np.int64)[fed_N])
            positions.append(fed_N)
            routes.append(routes_N[fed_N])
    all_ids, all_positions, all_routes = (
        np.concatenate(column) for column in (ids, positions, routes)
    )
    types = token_types.types_V.numpy()[all_ids]

    def count(mask: npt.NDArray[np.bool_]) -> dict[str, int]:
        return {
            name: int((all_routes[mask] == index).sum()) for index, name in enumerate(route_names)
        }

    by_position = {
        _bucket_label(name): count(mask) for name, mask in position_buckets(all_positions)
    }
    by_type = {
        kind.label.replace("_", "\n"): count(types == kind)
        for kind in TokenType
        if (types == kind).any()
    }
    return {"by position": by_position, "by token type": by_type}


def _bucket_label(name: str) -> str:
    start, _, stop = name.partition("_")
    if stop == "up":
        return f"{BUCKET_EDGES[-1]}+"
    return start if int(stop) - int(start) == 1 else f"{start}-{int(stop) - 1}"
