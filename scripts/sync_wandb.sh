#!/usr/bin/env bash
# Sends offline W&B runs to the server, each once:
#   bash scripts/sync_wandb.sh [--all] [folder, outputs/ by default] [arguments for wandb sync, such as --dry-run]
# Runs whose job says that it is still running (or that was killed) are left out, unless --all is given.
# Needs an account: wandb login, or WANDB_API_KEY.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

say() { printf '[sync] %s\n' "$*"; }
usage() {
    say "error: $*" >&2
    exit 2
}

all= folder=$root/outputs
if [[ ${1:-} == --all ]]; then all=yes && shift; fi
if [[ -n ${1:-} && $1 != -* ]]; then folder=$1 && shift; fi
[[ -d $folder ]] || usage "no folder $folder"
wandb=$root/.venv/bin/wandb
if [[ ! -x $wandb ]]; then wandb=$(command -v wandb) || usage "no wandb: run scripts/quickstart.sh --setup-only"; fi

sent=0 left=0 failed=0
while IFS= read -r -d '' run; do
    if compgen -G "$run/*.wandb.synced" >/dev/null; then continue; fi
    status=$(dirname -- "$(dirname -- "$run")")/status.json
    if [[ -z $all ]] && grep -qs '"status": "running"' "$status"; then
        say "left out, its job did not end: $run"
        left=$((left + 1))
    elif "$wandb" sync --yes "$@" "$run" </dev/null; then  # stdin is the list of runs
        sent=$((sent + 1))
    else
        say "not sent: $run" >&2
        failed=$((failed + 1))
    fi
done < <(find "$folder" -type d -path '*/wandb/offline-run-*' -prune -print0 | sort -z)
say "sent: $sent, left out: $left, failed: $failed"
((failed == 0))
