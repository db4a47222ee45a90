"""Requests with a common beginning, and the two engines."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import build_pool
from tokenrouter.models import LoadedModel
from tokenrouter.workloads import PythonDocs, RequestSpec, evaluation_documents, windows
from tokenrouter.workloads.base import greedy

PLAIN, SHARED = "plain", "shared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run.

    Attributes:
        common_tokens, own_tokens: of a prompt: its beginning, which all have, and the rest. Requests whose prompts
            start in one step share nothing with each other.
    """

    requests: int = 32
    common_tokens: int = 512
    own_tokens: int = 60
    output_tokens: int = 32


QUICK = Sizes(requests=4, own_tokens=10, output_tokens=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Requests and engines.

    Attributes:
        systems: ``plain`` and ``shared``: all_high without and with prefix sharing, on one pool of executors.
    """

    sizes: Sizes
    repeats: int
    requests: list[RequestSpec]
    systems: dict[str, LLM]


def build(model: LoadedModel, sizes: Sizes, *, repeats: int) -> Bench:
    """Requests of the evaluation text and a seat for each of them in both engines."""
    encode = model.tokenizer.encode
    text = "\n\n".join(evaluation_documents(PythonDocs().documents()))
    pool = build_pool("full", model)
    return Bench(
        sizes=sizes,
        repeats=repeats,
        requests=make_requests(encode(text, add_special_tokens=False), sizes),
        systems={
            name: LLM(
                model,
                executors=pool,
                options=EngineOptions(max_num_seqs=sizes.requests, prefix_sharing=name == SHARED),
            )
            for name in (PLAIN, SHARED)
        },
    )


def make_requests(ids: Sequence[int], sizes: Sizes) -> list[RequestSpec]:
    """All at once: the first tokens of ``ids``, then of each request other ones.

    Raises:
        ValueError: ``ids`` are too few.
    """
    common = list(ids[: sizes.common_tokens])
    own = windows(ids[sizes.common_tokens :], sizes.own_tokens, sizes.requests)
    params = greedy(sizes.output_tokens)
    return [RequestSpec(prompt_ids=(*common, *part), params=params) for part in own]
