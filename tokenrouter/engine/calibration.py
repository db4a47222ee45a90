"""Gives a router with a budget the tokens on which it sets its thresholds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tokenrouter.features import (
    TokenTypeTable,
    needs_signals,
    sequence_batch,
)
from tokenrouter.routers import RequestLevelRouter, Router
from tokenrouter.types import Phase, RouteInput
from tokenrouter.workloads.text import PythonDocs, calibration_documents, windows

Serve = Callable[[Sequence[Sequence[int]], Sequence[int]], list[RouteInput]]
"""Serves sequences with prompts of given lengths and says what a router would have been shown."""

NUM_SEQUENCES = 48
SEQUENCE_LEN = 256


def calibrate(
    router: Router,
    token_types: TokenTypeTable,
    tokenizer: Any,
    sequences: Sequence[Sequence[int]] | None,
    serve: Serve | None = None,
) -> None:
    """Sets the thresholds of ``router`` where it needs them, and nothing where it does not.

    Args:
        router: of level ``token``: sees each sequence as a prompt and what follows it; of level ``request``: as the
            whole prompt of a request.
        token_types: of the model's vocabulary.
        tokenizer: encodes the default text; may be None when there are sequences.
        sequences: token ids; None: the default text.
        serve: asked where features are known only while an engine runs; None: a router with such is refused.

    Raises:
        ValueError: too few tokens for the budget; neither sequences nor a tokenizer; features that are not known
            without ``serve``.
    """
    if not router.needs_calibration:
        return
    sequences = default_sequences(tokenizer) if sequences is None else sequences
    if serve is not None and router.level == "token" and needs_signals(router.features):
        router.calibrate(
            serve(sequences, [_prompt_len(ids, row) for row, ids in enumerate(sequences)])
        )
        return
    inputs = _prompt_inputs if router.level == "request" else _token_inputs
    router.calibrate(inputs(router, token_types, sequences))


def calibrate_on_requests(
    router: RequestLevelRouter,
    token_types: TokenTypeTable,
    prompts: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
    *,
    sequences: Sequence[Sequence[int]],
) -> None:
    """Sets the threshold of ``router`` on exactly these requests, so that its target holds for them.

    Args:
        router: its inner router is calibrated first, where it has a budget and was not yet.
        token_types: of the model's vocabulary.
        prompts: token ids per request.
        num_tokens: per request what it weighs: its prompt and output tokens.
        sequences: other prompts, on which the inner router sets its thresholds if it needs to.

    Raises:
        ValueError: no target, no requests, or too few tokens for the inner budget.
    """
    if router.inner.needs_calibration:
        router.inner.calibrate(_prompt_inputs(router.inner, token_types, sequences))
    inputs = _prompt_inputs(router, token_types, prompts)
    shares = [router.prompt_shares(prompt)[row] for row, prompt in enumerate(inputs)]
    router.calibrate_requests(shares, num_tokens)


def default_sequences(tokenizer: Any) -> list[list[int]]:
    """Windows of the default text: 48 of 256 tokens, spread evenly; raises ValueError without a tokenizer."""
    if tokenizer is None:
        raise ValueError("calibration on the default text needs a tokenizer: pass calibration_ids")
    ids = list(tokenizer.encode("\n".join(calibration_documents(PythonDocs().documents()))))
    return windows(ids, SEQUENCE_LEN, min(NUM_SEQUENCES, len(ids) // SEQUENCE_LEN))


def _token_inputs(
    router: Router, token_types: TokenTypeTable, sequences: Sequence[Sequence[int]]
) -> list[RouteInput]:
    """Each sequence as a prompt and what follows it, in the phases that the router decides."""
    extractor = router.extractor(token_types)
    phases = torch.tensor(sorted(router.phases))
    inputs = []
    for row, ids in enumerate(sequences):
        batch = sequence_batch(
            ids, prompt_len=_prompt_len(ids, row), row=row, token_types=token_types
        )
        if len(phases) < len(Phase):
            batch = batch.select(torch.isin(batch.phase_T, phases).nonzero().flatten())
        inputs.append(extractor.extract(batch))
    return inputs


def _prompt_inputs(
    router: Router, token_types: TokenTypeTable, sequences: Sequence[Sequence[int]]
) -> list[RouteInput]:
    """Each sequence as the whole prompt of a request."""
    extractor = router.extractor(token_types)
    return [
        extractor.extract(sequence_batch(ids, row=row, token_types=token_types))
        for row, ids in enumerate(sequences)
    ]


def _prompt_len(ids: Sequence[int], row: int) -> int:
    """They grow from sequence to sequence around the half, so that no prompt length is special."""
    return max(1, len(ids) * (1 + row % 8) // 9)
