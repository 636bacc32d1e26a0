#!/usr/bin/env bash
# Trains on this machine alone: megatron-burst launch local.
set -euo pipefail
exec "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/lib/launch" local "$@"
