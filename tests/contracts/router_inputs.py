"""What routers are shown in the tests of their contract, and labels of it for the oracle."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.routers.trained import drawn_artifact
from tokenrouter.features import TokenTypeTable, sequence_batch
from tokenrouter.routers.artifact import write_artifact
from tokenrouter.routers.layer_groups import LayerGroups
from tokenrouter.routers.oracle import save_labels
from tokenrouter.types import RoutingDecision, TokenBatch

NUM_TAILS = 8
KINDS = [None, "\n", "7", ".", " the", " ==", " Paris", "The", " river", "ing"]
VOCAB_SIZE = 60
TABLE = TokenTypeTable.from_texts([KINDS[i % len(KINDS)] for i in range(VOCAB_SIZE)])
FOLDER = TemporaryDirectory(prefix="labels-")


@cache
def sequences() -> list[TokenBatch]:
    """Requests of several lengths; one is all prompt, one has a prompt of one token."""
    generator = torch.Generator().manual_seed(3)
    shapes = {7: (1, 1), 2: (40, 1), 9: (33, 33), 0: (80, 50), 4: (25, 12), 5: (64, 20)}
    return [
        sequence_batch(
            torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist(),
            prompt_len=prompt_len,
            row=row,
        )
        for row, (length, prompt_len) in shapes.items()
    ]


@cache
def label_file(seed: int) -> str:
    """Labels, drawn with ``seed``, of every sequence that a test of the contract asks about."""
    ids = [batch.ids_T.tolist() for batch in sequences()]
    ids += [another_tail(ids[3], keep, tail) for keep in range(1, 80) for tail in range(NUM_TAILS)]
    known: dict[int, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    labels = []
    for hash_T in (sequence_batch(one).prefix_hash_T for one in ids):
        drawn_T = torch.rand(len(hash_T), generator=generator)
        labels.append(
            torch.stack(
                [known.setdefault(h, x) for h, x in zip(hash_T.tolist(), drawn_T, strict=True)]
            )
        )
    path = Path(FOLDER.name) / f"{seed}.safetensors"
    save_labels(path, ids, labels, label="drawn")
    return str(path)


@cache
def grouped_router() -> str:
    """The file of an mlp with drawn numbers that decides about three groups of 30 layers."""
    layers = (29,), (0, 1, *range(10, 29)), tuple(range(2, 10))
    artifact = drawn_artifact(groups=LayerGroups(layers, (1.0, 0.25, -1.0)))
    return str(write_artifact(artifact, Path(FOLDER.name) / "grouped"))


def another_tail(ids: list[int], keep: int, seed: int) -> list[int]:
    """``ids`` with others behind the first ``keep``."""
    generator = torch.Generator().manual_seed(seed)
    return (
        ids[:keep] + torch.randint(0, VOCAB_SIZE, (len(ids) - keep,), generator=generator).tolist()
    )


def concat(batches: list[TokenBatch]) -> TokenBatch:
    columns = set(TokenBatch.__slots__) - {"hidden_TE"}
    return TokenBatch(**{c: torch.cat([getattr(batch, c) for batch in batches]) for c in columns})


def rows_of(decision: RoutingDecision, index_T: torch.Tensor) -> RoutingDecision:
    return RoutingDecision(
        route_T=decision.route_T[index_T],
        score_T=decision.score_T[index_T],
        reason_T=decision.reason_T[index_T],
        reasons=decision.reasons,
    )
