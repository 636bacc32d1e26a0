#!/usr/bin/env bash
# What every launcher runs on every node: the settings of this node, then torchrun to its end.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/lib/on_node.sh [options] [-- Megatron flags]

Called by the launchers. Starts the ranks of one node and ends all of them when one dies, when it is
told to by SIGTERM, or, with --end-with-input, when its standard input ends: so nothing is left
running where the launcher or the connection to it is gone.
  --nodes N             nodes of the job (default 1)
  --node-rank R         this node's number (default: Slurm's)
  --master HOST         the first node
  --port P              the port to meet at
  --ranks-per-node N    (default: one a GPU)
  --in-container        the Python is the image's
  --run NAME, --script PATH, --measure-links, --output DIR, --dry-run, --end-with-input
END
}

burst_me=on_node
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/lib/common.sh
source "$here/common.sh"
# shellcheck source=scripts/lib/network.sh
source "$here/network.sh"
# As soon as a node fails srun ends the others and may drop what it has not read yet, the reason itself.
trap 'if (($?)) && [[ -n ${SLURM_STEP_ID:-} ]]; then sleep 1 || true; fi' EXIT

nodes=1 node_rank=${SLURM_NODEID:-0} master="" port="" ranks="" run="" script="" measure=no with_input=no
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --nodes) nodes=$2; shift ;;
        --node-rank) node_rank=$2; shift ;;
        --master) master=$2; shift ;;
        --port) port=$2; shift ;;
        --ranks-per-node) ranks=$2; shift ;;
        --run) run=$2; shift ;;
        --script) script=$2; shift ;;
        --output) output=$2; shift ;;
        --measure-links) measure=yes ;;
        --end-with-input) with_input=yes ;;
        --in-container) in_container=yes ;;
        --dry-run) dry_run=yes ;;
        --) shift; flags=("$@"); break ;;
        *) die "unknown option $1" ;;
    esac
    shift
done
load_env
burst_me="node $node_rank ($(uname -n))"
python=$(python_of_training)

has_gpus() { [[ ${MEGATRON_BURST_CPU:-} != 1 ]] && nvidia-smi -L >/dev/null 2>&1; }

ranks=${ranks:-${BURST_RANKS_PER_NODE:-gpu}}
if [[ $ranks == gpu && $dry_run == no ]] && ! has_gpus; then
    die "no GPU is used here: say how many ranks with --ranks-per-node N or BURST_RANKS_PER_NODE"
fi

# ---- settings of this node ------------------------------------------------------------------------

if ((nodes > 1)); then network_settings "$master"; fi
# Megatron asks for it before it runs context parallelism on GPUs older than Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=$burst_root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 # lines of several ranks appear when they are written

# ---- the command ----------------------------------------------------------------------------------

meeting=(--standalone)
if ((nodes > 1)); then
    meeting=(--nnodes "$nodes" --node-rank "$node_rank" --master-addr "$master" --master-port "$port")
fi
program=(-m megatron_burst.pretrain_gpt)
if [[ -n $script ]]; then program=(-m megatron_burst.run "$script"); fi
named=()
if [[ $measure == yes ]]; then
    program=("$burst_root/scripts/measure_links.py" --output "$output/links.json")
else
    if [[ -n $run ]]; then
        listing=$("$python" -m megatron_burst plan --run "$run" --flags) ||
            die "no flags for --run $run"
        mapfile -t named <<<"$listing"
    fi
    program+=(--tensorboard-dir "$output/tensorboard" "${named[@]}" "${flags[@]}")
fi
command=("$python" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$ranks" "${program[@]}")

if [[ $dry_run == yes ]]; then
    quoted env "CUDA_DEVICE_MAX_CONNECTIONS=$CUDA_DEVICE_MAX_CONNECTIONS" \
        "OMP_NUM_THREADS=$OMP_NUM_THREADS" "PYTHONPATH=$PYTHONPATH" "${command[@]}"
    exit 0
fi

# ---- running --------------------------------------------------------------------------------------

# The environment of torchrun and of every process that it starts, and of no other, has this mark.
mark=BURST_MARK=$(uname -n).$$.$RANDOM$RANDOM

end_leftovers() {
    local file pid
    trap '' PIPE # nobody may be left to read what is said
    for file in /proc/[0-9]*/environ; do
        pid=${file#/proc/} pid=${pid%/environ}
        if grep -qFzx -- "$mark" "$file" 2>/dev/null; then
            kill -KILL "$pid" 2>/dev/null || true
            say "ended process $pid, which outlived its launcher" || true
        fi
    done
}

"$python" "$burst_root/scripts/describe_node.py" --output "$output/node-$node_rank.json" \
    --run "$run" -- "${command[@]}" || say "no description of this node was written"
# In a session of its own torchrun gets SIGTERM once, from here: a second one, as Slurm and terminals
# send it to all processes of a group, would interrupt it while it ends its ranks.
once=yes
start_child setsid env "$mark" "${command[@]}" </dev/null
if [[ $with_input == yes ]]; then
    exec {input}<&0
    # Again and again: a signal that comes just before bash waits is seen with the next one only.
    { while read -r -u "$input" _; do :; done; while kill -TERM $$; do sleep 1; done; } >/dev/null 2>&1 &
    watcher=$!
fi
status=0
wait_for_child || status=$?
end_leftovers
if [[ -n ${watcher:-} ]]; then kill "$watcher" 2>/dev/null || true; fi
if ((status)); then say "the ranks of this node ended with status $status" || true; fi
exit "$status"
