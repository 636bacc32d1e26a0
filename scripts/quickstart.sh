#!/usr/bin/env bash
# Trains a small GPT twice, with context parallelism and without, and reports that both are equal.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/quickstart.sh [--steps N] [--output DIR] [--input PATH]... [--help] [Megatron flags]

Sets up the environment, makes a corpus from Python's own standard library, and trains the same
small GPT on the same tokens with burst attention on four context-parallel ranks and on one. The
report compares the two losses step by step and is left in DIR with both logs.
  --steps N      training steps (default 120)
  --output DIR   where everything goes (default: runs/quickstart in the repository)
  --input PATH   train on this text, JSONL or .bin/.idx prefix instead; may be given again
Every other flag is passed to both trainings and wins over the script's own.

Without CUDA devices this runs in float32 on the CPU. With CUDA devices it uses up to four of them
in bfloat16; with a single one there is no second training to compare with, so
    CUDA_VISIBLE_DEVICES= scripts/quickstart.sh
still shows context parallelism, on the CPU.
END
}

# The value after flag $1 among the arguments from $3 on, else $2; the last one wins, as in Megatron.
value_of() {
    local flag=$1 value=$2
    shift 2
    while (($#)); do
        case $1 in
            "$flag") value=${2:-} ;;
            "$flag"=*) value=${1#*=} ;;
        esac
        shift
    done
    printf '%s' "$value"
}

# Runs a command with its output in log $1; while it runs, shows what the function $2 makes of the
# log: every second on a terminal, every ten seconds elsewhere.
with_progress() {
    local log=$1 status_of=$2 child result=0 started=$SECONDS shown=-10 now
    shift 2
    "$@" >"$log" 2>&1 </dev/null &
    child=$!
    trap 'kill "$child" 2>/dev/null; wait "$child"; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        now=$((SECONDS - started))
        if [[ -t 2 ]]; then
            printf '\r\033[K[%4d s] %s' "$now" "$("$status_of" "$log")" >&2
        elif ((now - shown >= 10)); then
            printf '[%4d s] %s\n' "$now" "$("$status_of" "$log")" >&2
            shown=$now
        fi
        sleep 1
    done
    wait "$child" || result=$?
    trap - INT TERM
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
    printf '[%4d s] %s\n' $((SECONDS - started)) "$("$status_of" "$log")" >&2
    return "$result"
}

# "step 30/150  loss 2.41  1.20 s/step" from the last such line of a Megatron log.
training_status() {
    local line number='([0-9.E+-]+)'
    local pattern="iteration +([0-9]+)/ *([0-9]+) .*per iteration \(ms\): $number .*lm loss: $number"
    line=$(grep -a 'lm loss:' "$1" | tail -n 1) || true
    if [[ $line =~ $pattern ]]; then
        printf 'step %d/%d  loss %.3f  %.2f s/step' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" \
            "${BASH_REMATCH[4]}" "${BASH_REMATCH[3]}e-3"
    else
        printf 'starting'
    fi
}

# Trains on $1 ranks; the log and the TensorBoard events go to $output/cp$1.
train() {
    local ranks=$1 directory=$output/cp$1
    shift
    rm -rf -- "$directory/tensorboard" # events of an earlier run would be read as this run's
    mkdir -p -- "$directory"
    printf -- '-- training with context parallelism on %d rank(s), log in %s\n' \
        "$ranks" "$directory/log.txt"
    with_progress "$directory/log.txt" training_status \
        "$burst_python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        -m megatron_burst.pretrain_gpt \
        --context-parallel-algo burst --context-parallel-size "$ranks" \
        --tensorboard-dir "$directory/tensorboard" "$@" && return 0
    tail -n 40 "$directory/log.txt" >&2
    printf 'quickstart: the training failed; its whole log is %s\n' "$directory/log.txt" >&2
    return 1
}

steps=120
output=""
inputs=()
flags=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --steps) steps=${2:?--steps needs a number}; shift ;;
        --input) inputs+=("${2:?--input needs a path}"); shift ;;
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
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
burst_setup || exit 1
output=${output:-$burst_root/runs/quickstart}
mkdir -p -- "$output"
output=$(cd -- "$output" && pwd)
export LC_ALL=C OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Megatron asks for it before it runs context parallelism on GPUs older than Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Megatron warns on every rank about optional packages that this training does not use.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::UserWarning}

printf -- '-- corpus\n'
"$burst_python" -m megatron_burst.tools.corpus --output "$output/corpus" \
    ${inputs[@]+--input "${inputs[@]}"}
corpus=()
while IFS= read -r argument; do corpus+=("$argument"); done < <("$burst_python" -c '
import json, sys
corpus = json.load(open(sys.argv[1]))
print(corpus["source"][:12], *corpus["tokenizer_args"], sep="\n")' "$output/corpus/corpus.json")
# Megatron's index cache knows a corpus by its path alone: another text needs another cache.
cache=$output/corpus/cache-${corpus[0]} tokenizer=("${corpus[@]:1}")

devices=0
[[ ${MEGATRON_BURST_CPU:-} == 1 ]] || devices=$("$burst_python" -c 'import torch; print(torch.cuda.device_count())')
precision=() tolerance=1e-4 ranks=4
if ((devices > 0)); then
    precision=(--bf16) tolerance=1e-2
    while ((ranks > devices)); do ranks=$((ranks / 2)); done
fi

arguments=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
    --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 4 --global-batch-size 4 --train-iters "$steps" --calculate-per-token-loss
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.07
    --weight-decay 0.01 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
    --data-path "$output/corpus/corpus" --data-cache-path "$cache"
    --split "100,0,0" --eval-iters 0 --eval-interval 1000 --num-workers 0
    --log-interval 1 --tensorboard-log-interval 1 --log-timers-to-tensorboard
    "${tokenizer[@]}" ${precision[@]+"${precision[@]}"} ${flags[@]+"${flags[@]}"}
)
runs=()
for size in "$ranks" 1; do
    if ((${#runs[@]} && size == ranks)); then break; fi # one device: nothing to compare with
    train "$size" "${arguments[@]}"
    runs+=(--run "burst CP=$size" "$output/cp$size/tensorboard")
done

printf -- '-- report\n'
checks=()
if ((steps < 100)); then
    printf 'under 100 steps the loss is not asked to be below the unigram entropy\n'
    checks=(--no-entropy-check)
fi
tokens=$(($(value_of --seq-length 1024 "${arguments[@]}") * \
    $(value_of --global-batch-size 4 "${arguments[@]}")))
"$burst_python" -m megatron_burst.tools.report --corpus "$output/corpus/corpus.json" "${runs[@]}" \
    --tokens-per-step "$tokens" --tolerance "$tolerance" --output "$output" ${checks[@]+"${checks[@]}"}
