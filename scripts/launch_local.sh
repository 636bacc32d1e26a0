#!/usr/bin/env bash
# Trains on this machine alone.
set -euo pipefail

burst_me=launch_local
# shellcheck source=scripts/lib/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'END'
Usage: scripts/launch_local.sh [options] [Megatron flags]

Trains on the GPUs of this machine, or on the CPU with MEGATRON_BURST_CPU=1, and ends with the
status of the training. A rank that dies ends all ranks; so does SIGTERM or Ctrl-C.

END
    common_usage
}

command=("$0" "$@")
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        *) common_option "$@"; shift "$taken" ;;
    esac
done
load_env
prepare_output "${command[@]}"
if [[ $dry_run == yes ]]; then node_options+=(--dry-run); fi
node=("$burst_on_node" --output "$output" "${node_options[@]}" -- "${flags[@]}")
if [[ $dry_run == yes ]]; then exec "${node[@]}"; fi
run_logged supervise "${node[@]}"
