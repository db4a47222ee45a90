#!/usr/bin/env bash
# Sets up .venv (the first time) and runs the main job:
#   bash scripts/quickstart.sh [--setup-only] [overrides for run.py]
# PYTHON chooses the interpreter, TORCH_CPU_INDEX the index of torch's CPU builds.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

set_up runtime
if [[ ${1:-} == --setup-only ]]; then
    say "ready: $venv"
    exit
fi
cd -- "$root"
exec "$python" run.py "$@"
