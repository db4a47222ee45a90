#!/usr/bin/env bash
# Sets up .venv with the test tools (the first time), then lint, types, import contracts and tests:
#   bash scripts/test.sh [arguments for pytest]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

set_up runtime dev
cd -- "$root"
export HF_HUB_OFFLINE=1 WANDB_MODE=offline

check() {
    printf '[test] %s\n' "$1"
    "${@:2}"
}
check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check "mypy" "$python" -m mypy
check "import contracts" "$venv/bin/lint-imports"
# One process per core and one thread in each: tiny models lose more to threads than they gain.
export OMP_NUM_THREADS=1
check "pytest" "$python" -m pytest -q --numprocesses auto --dist loadfile --durations 25 "$@"
