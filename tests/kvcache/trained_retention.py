"""A learned retention policy of drawn numbers, for what needs one."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tokenrouter.kvcache.retention import Learned
from tokenrouter.kvcache.retention.checkpoint import RetentionModel, write_model
from tokenrouter.kvcache.retention.entry_features import ENTRY_FEATURES


def drawn_model(model_hash: str = "a" * 16, seed: int = 0, hidden: int = 3) -> RetentionModel:
    """Drawn numbers of the right shapes."""
    draw = torch.Generator().manual_seed(seed)
    num = len(ENTRY_FEATURES)
    return RetentionModel(
        features=ENTRY_FEATURES,
        model="tiny",
        model_hash=model_hash,
        tensors={
            "low_F": torch.full((num,), -9.0),
            "high_F": torch.full((num,), 9.0),
            "center_F": torch.zeros(num),
            "scale_F": torch.ones(num),
            "hidden_PF": torch.randn(hidden, num, generator=draw),
            "hidden_bias_P": torch.randn(hidden, generator=draw),
            "out_P": torch.randn(hidden, generator=draw),
        },
    )


def drawn_policy(model_hash: str, **options: Any) -> Learned:
    """For the model of that hash; its file is gone again."""
    with TemporaryDirectory() as folder:
        path = write_model(drawn_model(model_hash), Path(folder) / "policy")
        return Learned(path=str(path), **options)
