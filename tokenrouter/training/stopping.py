"""Training until validation gets no better, and going back to where it was best."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger


def fit_best(
    module: lightning.LightningModule,
    *,
    monitor: str,
    mode: Literal["min", "max"],
    max_epochs: int,
    patience: int,
    fast_dev_run: bool,
    folder: Path,
    loggers: Sequence[Logger],
    **data: Any,
) -> None:
    """Trains ``module`` and leaves it with the weights of the epoch in which it was best.

    Args:
        module: logs ``monitor`` in validation.
        monitor: what training stops by.
        mode: whether less or more of it is better.
        max_epochs: at most.
        patience: epochs without a better one before it stops.
        fast_dev_run: one batch of each only, and no checkpoint.
        folder: gets ``checkpoints``.
        loggers: of what the module logs.
        **data: for ``Trainer.fit``: a data module or data loaders.
    """
    best = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        filename="epoch-{epoch:03d}",
        auto_insert_metric_name=False,  # a name with "=" cannot be given to Hydra
        monitor=monitor,
        mode=mode,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        callbacks=[EarlyStopping(monitor, mode=mode, patience=patience), best],
        logger=list(loggers),
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        fast_dev_run=fast_dev_run,
        log_every_n_steps=1,
        deterministic=True,
        default_root_dir=folder,
    )
    trainer.fit(module, **data)
    if best.best_model_path:
        load_checkpoint(module, Path(best.best_model_path))


def load_checkpoint(module: torch.nn.Module, path: Path) -> None:
    """Puts a checkpoint's weights into ``module``: plain tensors, so that nothing in the file can run code.

    Raises:
        ValueError: a file that is damaged or of another router.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        module.load_state_dict(state)
    except Exception as error:  # pickle, zip and torch each have their own
        raise ValueError(
            f"checkpoint {path} cannot be used ({type(error).__name__}: {error}): it is damaged or of another "
            "training; "
            "train again"
        ) from error
