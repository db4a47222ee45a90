"""What the engine is compared with outside itself: transformers on the same tokens."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from tokenrouter.workloads import RequestSpec


class TransformersPeer:
    """A transformers model that serves in static batches, padded on the left, in the given order.

    Args:
        model: a causal language model of transformers, in the dtype of the engine's high path.
        requests: greedy, EOS ignored; a batch generates until its longest output is done.
        batch_size: requests per batch.
        pad_id: fills short prompts; it is masked.
    """

    def __init__(
        self, model: Any, requests: Sequence[RequestSpec], *, batch_size: int, pad_id: int
    ) -> None:
        self._model = model
        self._batches = [
            _pad_left(requests[start : start + batch_size], pad_id)
            for start in range(0, len(requests), batch_size)
        ]

    @torch.inference_mode()
    def serve_s(self) -> float:
        """Serves all requests; returns the wall time in seconds."""
        started = time.perf_counter()
        for ids_BT, mask_BT, num_new in self._batches:
            self._model.generate(
                ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
            )
        return time.perf_counter() - started

    @torch.inference_mode()
    def prefill_s(self, ids: Sequence[int]) -> float:
        """One forward of a prompt that keeps its KV and the last position's logits; in seconds."""
        ids_1T = torch.tensor([list(ids)])
        started = time.perf_counter()
        self._model(ids_1T, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started


def _pad_left(
    requests: Sequence[RequestSpec], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids and mask, int64 ``[B, T]``, and the number of tokens to generate."""
    longest = max(len(r.prompt_ids) for r in requests)
    ids_BT = torch.full((len(requests), longest), pad_id)
    mask_BT = torch.zeros_like(ids_BT)
    for row, request in enumerate(requests):
        ids_BT[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask_BT[row, longest - len(request.prompt_ids) :] = 1
    return ids_BT, mask_BT, max(r.params.max_tokens or 0 for r in requests)
