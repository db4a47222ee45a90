"""``python run.py router=rule executor=int8``: composes conf/ and runs the task; see --help."""

import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from tokenrouter.tasks.common import quote_prompt, run_job
from tokenrouter.tasks.sweeps import check_extras


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """Runs one job; returns what a search optimises."""
    return run_job(cfg)


if __name__ == "__main__":
    check_extras(sys.argv[1:])
    sys.argv = quote_prompt(sys.argv)
    main()
