"""A small data set of labels as task=collect writes it, whose needy tokens are known."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokenrouter.features import FeatureExtractor, TokenTypeTable, sequence_batch
from tokenrouter.training.storage import LabelStore, WindowRows

KINDS = [None, "\n", "7", ".", " the", " ==", " Paris", "The", " river", "ing"]
VOCAB_SIZE = 60
TABLE = TokenTypeTable.from_texts([KINDS[i % len(KINDS)] for i in range(VOCAB_SIZE)])
FEATURES = ("position", "token_type", "previous_token_type", "log_frequency", "repeats")
FACTS = {
    "label": "fisher",
    "label_columns": ["layer_0", "layer_1"],
    "kind": "precision",
    "features": list(FEATURES),
    "model": "tiny_llama",
    "model_hash": "0123456789abcdef",
    "executor": "int8",
    "executor_version": "",
    "window_tokens": 128,
    "texts": {"drawn": "0"},
    "seed": 0,
}
NEEDY_ID = 28  # of the plain type, like 8, 18, 38, ...: only its own row can tell


def need(ids_N: Tensor, position_N: Tensor) -> Tensor:
    """What is to be learned: newlines, early tokens, and one id."""
    is_newline_N = (ids_N % len(KINDS) == 1).float()
    is_needy_N = (ids_N == NEEDY_ID).float()
    return torch.exp(2 * is_newline_N + 2 * is_needy_N + 16 / (8 + position_N))


def window_rows(
    number: int, split: str, *, length: int = 128, features: Sequence[str] = FEATURES
) -> WindowRows:
    """One window; its labels are noisy, in two layers."""
    draw = torch.Generator().manual_seed(1000 * (split == "valid") + number)
    ids = torch.randint(0, VOCAB_SIZE, (length,), generator=draw).tolist()
    batch = sequence_batch(ids, prompt_len=length // 2, token_types=TABLE)
    noise_N2 = torch.empty(length, 2).exponential_(generator=draw)
    return WindowRows(
        text="drawn",
        split=split,
        window=number,
        prompt_len=length // 2,
        columns={
            "document": torch.full((length,), number),
            "position": batch.positions_T,
            "token_id": batch.ids_T,
            "phase": batch.phase_T,
            "prefix_hash": batch.prefix_hash_T,
        },
        features_NF=FeatureExtractor(features, TABLE).extract(batch).values_TF,
        label_NC=need(batch.ids_T, batch.positions_T.float())[:, None] * noise_N2,
    )


def write_set(
    path: Path,
    *,
    num_train: int = 40,
    num_valid: int = 6,
    features: Sequence[str] = FEATURES,
    **facts: object,
) -> Path:
    """A data set of drawn text; ``facts`` replace those of ``FACTS``."""
    store = LabelStore(path)
    store.open(FACTS | {"features": list(features)} | facts)
    for split, count in (("train", num_train), ("valid", num_valid)):
        for number in range(count):
            rows = window_rows(number, split, features=features)
            store.write(f"{split}-drawn-{number:05d}", rows)
    return path
