"""A learned retention policy of drawn numbers, for what needs one."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tokenrouter.kvcache.retention import Learned
from tokenrouter.kvcache.retention.checkpoint import RetentionModel, write_model
from tokenrouter.kvcache.retention.entry_features import ENTRY_FEATURES

_FOLDER = TemporaryDirectory()


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


@dataclass(kw_only=True)
class ForAnyModel(Learned):
    """One that does not ask which model it was trained for: drawn numbers are for none."""

    def use_for(self, *, model: str, model_hash: str) -> None:
        """Takes every model."""


def drawn_for_any_model(**options: Any) -> ForAnyModel:
    """Its file stays while the tests run, so that copies with other options can be made."""
    return ForAnyModel(path=str(write_model(drawn_model(), Path(_FOLDER.name) / "any")), **options)


def drawn_policy(model_hash: str, **options: Any) -> Learned:
    """For the model of that hash; its file is gone again."""
    with TemporaryDirectory() as folder:
        path = write_model(drawn_model(model_hash), Path(folder) / "policy")
        return Learned(path=str(path), **options)
