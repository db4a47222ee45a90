"""Routes by known labels: how much a router of this budget could gain, on text that was labelled.

Shape letters: T tokens in a step, N labelled tokens.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenrouter.features import TokenHistory
from tokenrouter.features.base import Dependency
from tokenrouter.features.draws import draw_levels
from tokenrouter.routers.base import HIGH, LOW, Router
from tokenrouter.routers.budget import Budget
from tokenrouter.types import RouteInput, RoutingDecision

FORMAT = "tokenrouter labels 1"
_REASONS = ("label among the top", "label below the top")


def save_labels(
    path: Path | str, token_ids: Sequence[Sequence[int]], scores: Sequence[Tensor], *, label: str
) -> None:
    """Writes labels so that the oracle finds them: by the hash of each token's prefix.

    Where sequences begin alike, a prefix has the mean of its labels: more than the prefix no router could know.

    Args:
        path: of the file, ``.safetensors``; its folder must exist.
        token_ids: labelled sequences, each from its first token on, as it will be served.
        scores: float32 [N] or [N, L] per sequence; of several columns (layers) the sum counts. Larger
            means more in need of the high path.
        label: name of the label maker.

    Raises:
        ValueError: no tokens, lengths that differ, or a value that is not finite.
    """
    if len(token_ids) != len(scores) or not token_ids:
        raise ValueError(
            f"{len(token_ids)} sequences and {len(scores)} tensors of labels: give one per sequence, at least one"
        )
    hashes, values = [], []
    for index, (ids, score) in enumerate(zip(token_ids, scores, strict=True)):
        if len(ids) != len(score):
            raise ValueError(f"sequence {index} has {len(ids)} tokens and {len(score)} labels")
        total_N = score.float().reshape(len(ids), -1).sum(1)
        if not bool(total_N.isfinite().all()):
            raise ValueError(f"sequence {index} has labels that are not finite")
        hashes.append(TokenHistory(ids, len(ids)).prefix_hash)
        values.append(total_N.cpu().numpy())
    hash_N, of, count = np.unique(np.concatenate(hashes), return_inverse=True, return_counts=True)
    score_N = np.bincount(of, weights=np.concatenate(values)) / count
    tensors = {
        "prefix_hash": torch.from_numpy(hash_N),
        "score": torch.from_numpy(score_N.astype(np.float32)),
    }
    save_file(tensors, str(path), metadata={"format": FORMAT, "label": label})


class OracleRouter(Router):
    """High where a token's label is among the top ``high_frac`` of all labels in its file.

    For teacher-forced text only, the one that was labelled: a generated token, or one after any other
    prefix, has no label and is refused.

    Args:
        path: of a file that ``save_labels`` wrote.
        budget: ``high_frac`` of the labelled tokens, and the seed of the tie break; None: 10 %.

    Raises:
        ValueError: no such file, or not one of labels; a budget without ``high_frac``.
    """

    name = "oracle"
    sees = frozenset({"prefix_hash"})

    def __init__(self, path: str, budget: Budget | None = None) -> None:
        self.path = str(path)
        self.budget = Budget(high_frac=0.1) if budget is None else budget
        if self.budget.high_frac is None:
            raise ValueError(
                "oracle needs a share to route high: set router.budget.high_frac, 0 to 1"
            )
        self.label, self._hash_N, self._score_N = _read(self.path)
        self._is_high_N = self._top(self.budget.high_frac)
        content = self._hash_N.tobytes() + self._score_N.tobytes()
        self._digest = hashlib.sha256(content).hexdigest()[:16]

    @property
    def options(self) -> dict[str, object]:
        """The labels by their content, and the budget; where the file lies does not matter."""
        budget = {"high_frac": self.budget.high_frac, "seed": self.budget.seed}
        return {"label": self.label, "labels": self._digest, "budget": budget}

    @property
    def depends_on(self) -> frozenset[Dependency]:
        """The token prefix, by which labels are found."""
        return frozenset({"tokens"})

    @property
    def only_route(self) -> int | None:
        """High at a share of 1, low at 0."""
        return {1.0: HIGH, 0.0: LOW}.get(self.budget.high_frac or 0.0)

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """By label; the score is the label. Raises ValueError where a token has none."""
        hash_T = inputs.prefix_hash_T.cpu().numpy()
        index_T = np.searchsorted(self._hash_N, hash_T).clip(max=len(self._hash_N) - 1)
        unknown = np.flatnonzero(self._hash_N[index_T] != hash_T)
        if len(unknown):
            first = int(unknown[0])
            raise ValueError(
                f"oracle has no label for {len(unknown)} of {len(inputs)} tokens (the first: id "
                f"{int(inputs.ids_T[first])} at position {int(inputs.positions_T[first])}): it routes "
                f"only the text that {self.path} labels, teacher-forced from its beginning. Label this "
                "text (task=collect_oracle), or choose another router for requests that generate"
            )
        device = inputs.ids_T.device
        route_T = torch.from_numpy((~self._is_high_N[index_T]).astype(np.int64)).to(device)
        return RoutingDecision(
            route_T=route_T,  # HIGH is 0, LOW is 1
            score_T=torch.from_numpy(self._score_N[index_T]).to(device),
            reason_T=route_T,
            reasons=_REASONS,
        )

    def _top(self, high_frac: float) -> NDArray[np.bool_]:
        """Which labels are among the top; equal ones by draws of their prefixes."""
        draw_N = draw_levels(torch.from_numpy(self._hash_N), self.budget.seed).numpy()
        order = np.lexsort((draw_N, self._score_N))[::-1]
        is_high_N = np.zeros(len(order), np.bool_)
        is_high_N[order[: round(high_frac * len(order))]] = True
        return is_high_N


def _read(path: str) -> tuple[str, NDArray[np.int64], NDArray[np.float32]]:
    """Label maker, prefix hashes in ascending order and scores of a file."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is no file of labels (format {metadata.get('format')!r}, expected {FORMAT!r}): "
                    "give one that task=collect_oracle wrote"
                )
            hash_N, score_N = file.get_tensor("prefix_hash"), file.get_tensor("score")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"router.path={path} cannot be read ({error}): give a file of labels that "
            "task=collect_oracle wrote"
        ) from error
    return metadata["label"], hash_N, score_N
