"""What the tests of wrappers share: a router that tells what it was asked, and inputs to ask about."""

import torch

from tokenrouter.features import TokenTypeTable, sequence_batch
from tokenrouter.routers import Router, RuleRouter
from tokenrouter.types import RouteInput, RoutingDecision

KINDS = [None, "\n", "7", ".", " the", " ==", " Paris", "The", " river", "ing"]
VOCAB_SIZE = 60
TABLE = TokenTypeTable.from_texts([KINDS[i % len(KINDS)] for i in range(VOCAB_SIZE)])


class Asked(RuleRouter):
    """The rules, and the number of tokens of every call."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.calls: list[int] = []
        self.inputs: list[RouteInput] = []

    def route(self, inputs: RouteInput) -> RoutingDecision:
        self.calls.append(len(inputs))
        self.inputs.append(inputs)
        return super().route(inputs)


def ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def see(router: Router, token_ids: list[int], prompt_len: int | None = None) -> RouteInput:
    batch = sequence_batch(token_ids, prompt_len=prompt_len)
    return router.extractor(TABLE).extract(batch)


def same(a: RoutingDecision, b: RoutingDecision) -> bool:
    return (
        torch.equal(a.route_T, b.route_T)
        and torch.equal(a.score_T, b.score_T)
        and [a.reasons[i] for i in a.reason_T.tolist()]
        == [b.reasons[i] for i in b.reason_T.tolist()]
    )
