#!/usr/bin/env bash
# Makes the tables and figures of experiments/ and shows them in experiments/README.md:
#   bash scripts/reproduce.sh [table ...] [--quick]
# Runs that ended well are kept in outputs/reproduce: after an interruption the same command goes on.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

set_up runtime
cd -- "$root"
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
exec "$python" -m tokenrouter.tasks.reproduce "$@"
