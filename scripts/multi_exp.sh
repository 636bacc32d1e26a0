#!/usr/bin/env bash
# Trains every combination of sizes, methods and ablations: megatron-burst launch series.
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch" series "$@"
