"""Where the curves of a training go."""

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from tokenrouter.tasks.common import Job
from tokenrouter.tasks.tracking import WandbRun


def curve_loggers(job: Job) -> list[Logger]:
    """Losses per epoch as csv in the run folder, and in the job's W&B run where there is one."""
    loggers: list[Logger] = [CSVLogger(save_dir=job.folder.path, name="", version="training")]
    if isinstance(job.run, WandbRun):
        loggers.append(WandbLogger(experiment=job.run.experiment))
    return loggers
