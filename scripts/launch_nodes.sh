#!/usr/bin/env bash
# Trains on a list of nodes over ssh, without a scheduler: megatron-burst launch ssh.
set -euo pipefail
exec "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/lib/launch" ssh "$@"
