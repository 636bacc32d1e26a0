#!/usr/bin/env bash
# Says which nodes are free and healthy, over ssh: megatron-burst launch check.
set -euo pipefail
exec "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/lib/launch" check "$@"
