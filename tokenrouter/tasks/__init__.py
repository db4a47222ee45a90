"""One function per config in conf/task; the only importers of hydra and wandb."""
