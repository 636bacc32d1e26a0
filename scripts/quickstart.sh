#!/usr/bin/env bash
# Trains a small model without context parallelism and twice with it, and reports that all are equal.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/quickstart.sh [--steps N] [--output DIR] [--gpt] [--input PATH]... [--help] [Megatron flags]

Sets up the environment, makes a corpus from Python's own standard library, and trains the same
small model on the same tokens on one rank, and on four context-parallel ranks by burst attention and
by a plain ring. The report compares losses, bytes and times and is left in DIR with all logs. Again,
it keeps what has finished.
  --steps N      training steps (default 80)
  --output DIR   where everything goes (default: runs/quickstart in the repository)
  --gpt          a GPTModel (default: a HybridModel)
  --input PATH   train on this text, directory or JSONL file instead; may be given again
Every other flag is passed to all trainings and wins over the script's own.

Without CUDA devices this runs in float32 on the CPU. With CUDA devices it uses up to four of them
in bfloat16; with a single one all trainings run on one rank, so
    CUDA_VISIBLE_DEVICES= scripts/quickstart.sh
still shows context parallelism, on the CPU.
END
}

steps=80 output="" options=() flags=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --steps) steps=${2:?--steps needs a number}; shift ;;
        --gpt) options+=(--gpt) ;;
        --input) options+=(--input "${2:?--input needs a path}"); shift ;;
        --output) output=${2:?--output needs a directory}; shift ;;
        *) flags+=("$1") ;;
    esac
    shift
done
if [[ ! $steps =~ ^[1-9][0-9]*$ ]]; then
    printf 'quickstart: --steps %s is not a positive number\n' "$steps" >&2
    exit 2
fi

# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/setup.sh"
burst_setup || exit 1
exec "$burst_python" -m megatron_burst compare --toy --no-trace --variants 'CP=1 burst,burst,ring flat' \
    --output "${output:-$burst_root/runs/quickstart}" ${options[@]+"${options[@]}"} -- \
    --train-iters "$steps" --micro-batch-size 4 --global-batch-size 4 ${flags[@]+"${flags[@]}"}
