"""``python run.py router=rule executor=int8``: composes conf/ and runs the task; see --help."""

import sys

import hydra
from omegaconf import DictConfig

from tokenrouter.tasks.common import quote_prompt, run_job


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Runs one job."""
    run_job(cfg)


if __name__ == "__main__":
    sys.argv = quote_prompt(sys.argv)
    main()
