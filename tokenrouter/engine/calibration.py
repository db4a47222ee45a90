"""Gives a router with a budget the tokens on which it sets its thresholds."""

from collections.abc import Sequence
from typing import Any

from tokenrouter.features import FeatureExtractor, TokenTypeTable, sequence_batch
from tokenrouter.routers import Router
from tokenrouter.types import RouteInput
from tokenrouter.workloads.text import PythonDocs, windows

NUM_SEQUENCES = 48
SEQUENCE_LEN = 256


def default_sequences(tokenizer: Any) -> list[list[int]]:
    """Windows of the default text: 48 of 256 tokens, spread evenly."""
    if tokenizer is None:
        raise ValueError("calibration on the default text needs a tokenizer: pass calibration_ids")
    ids = list(tokenizer.encode("\n".join(PythonDocs().documents()[::4])))
    return windows(ids, SEQUENCE_LEN, min(NUM_SEQUENCES, len(ids) // SEQUENCE_LEN))


def calibration_inputs(
    names: Sequence[str], token_types: TokenTypeTable, sequences: Sequence[Sequence[int]]
) -> list[RouteInput]:
    """Each sequence as the router would see it: half of its tokens as prompt, half as decode.

    The sequences get growing prompt lengths around the half, so that no prompt length is special.
    """
    extractor = FeatureExtractor(names, token_types)
    inputs = []
    for row, ids in enumerate(sequences):
        prompt_len = max(1, len(ids) * (1 + row % 8) // 9)
        inputs.append(extractor.extract(sequence_batch(list(ids), prompt_len=prompt_len, row=row)))
    return inputs


def calibrate(
    router: Router,
    token_types: TokenTypeTable,
    tokenizer: Any,
    sequences: Sequence[Sequence[int]] | None,
) -> None:
    """Calibrates ``router`` on ``sequences``, or on the default text."""
    sequences = default_sequences(tokenizer) if sequences is None else sequences
    if router.level == "request":
        extractor = FeatureExtractor(router.features, token_types)
        prompts = [sequence_batch(list(ids), row=row) for row, ids in enumerate(sequences)]
        router.calibrate([extractor.extract(prompt) for prompt in prompts])
    else:
        router.calibrate(calibration_inputs(router.features, token_types, sequences))
