#!/usr/bin/env bash
# Runs a series of trainings, sizes x methods x ablations, and goes on where an earlier call stopped.
set -euo pipefail

burst_me=multi_exp
# shellcheck source=scripts/lib/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'END'
Usage: scripts/multi_exp.sh [options] [Megatron flags]

Runs every combination, one after the other, each in DIR/SIZE.METHOD.ABLATION, and at the end
collects all of them into DIR/results.csv and DIR/results.json. What has finished is not run again: after an
interruption give the same command. One that fails does not stop the others; it is tried again by the
next call. A single series works in a directory at a time.
  --output DIR          where the series is (default: runs/series below the current directory)
  --sizes "NAME ..."    named runs of configs/, or shell patterns of them, as "toy scaling-*"
  --methods "NAME ..."  burst, ring, double-ring, usp, allgather, ulysses, megatron
  --ablations "NAME ..." flat-ring, kv-backward, query-backward, all-logits, no-kept-attention
                        Of all three - is none, which is the default: your own flags, what the run
                        says, nothing changed.
  --define NAME=FLAGS   another method or ablation; may be given again
  --launcher COMMAND    what starts a run (default: scripts/launch_local.sh; for example
                        "scripts/launch.slurm --nodes 4 --wait" or "scripts/launch_nodes.sh")
  --list                print the combinations and which have finished; run nothing
  --dry-run             print the command of every run; run nothing
Everything else, and all that follows --, goes to the launcher and to Megatron. Flags that come later
win: those of the size, of the method, of the ablation, yours. Another machine, commit or flags: take
another DIR.
END
}

declare -A defined=(
    [-]=""
    [burst]="--context-parallel-algo burst"
    [ring]="--context-parallel-algo ring --burst-topology flat"
    [double-ring]="--context-parallel-algo ring --burst-topology double"
    [usp]="--context-parallel-algo ring --burst-topology flat --burst-head-parallel-size 8"
    [allgather]="--context-parallel-algo allgather"
    [ulysses]="--context-parallel-algo ulysses"
    # Not given, its dropouts were 0.1, and those of the others 0.
    [megatron]="--context-parallel-algo megatron --attention-dropout 0 --hidden-dropout 0"
    [flat-ring]="--burst-topology flat"
    [kv-backward]="--burst-backward kv"
    [query-backward]="--burst-backward query"
    [all-logits]="--lm-head-loss megatron"
    [no-kept-attention]="--recompute-attention-fraction 1"
)

output=runs/series sizes="-" methods="-" ablations="-" launcher=$burst_root/scripts/launch_local.sh
listing=no rest=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --output | --sizes | --methods | --ablations | --launcher)
            need_value "$@"
            printf -v "${1#--}" '%s' "$2"
            shift ;;
        --define) need_value "$@"; defined[${2%%=*}]=${2#*=}; shift ;;
        --list) listing=yes ;;
        --dry-run) dry_run=yes ;;
        --) shift; rest+=("$@"); break ;;
        *) rest+=("$1") ;;
    esac
    shift
done
load_env
output=$(absolute "$output")
read -ra launcher <<<"$launcher"

# The named runs that the words of $1 mean.
expand_sizes() {
    local word found
    set -f
    for word in $1; do
        if [[ $word == *[*?[]* ]]; then
            found=$("$(python_of_training)" -m megatron_burst plan --list "$word") || return
            [[ -n $found ]] || die "no run of configs/ matches $word"
            printf '%s\n' "$found"
        else
            printf '%s\n' "$word"
        fi
    done
    set +f
}

export PYTHONPATH=$burst_root${PYTHONPATH:+:$PYTHONPATH}
sizes=$(expand_sizes "$sizes") || die "--sizes cannot be read"
for name in $methods $ablations; do
    [[ -n ${defined[$name]+x} ]] || die "no method or ablation $name; there are ${!defined[*]}"
done

status_of() { # finished, failed with a status, in Slurm's queue, or still to do
    local job="" status=""
    if [[ -s $1/status ]]; then status=$(<"$1/status"); fi
    if [[ $status == 0 ]]; then
        printf 'finished'
    elif [[ -s $1/job ]] && job=$(squeue -h -j "$(<"$1/job")" -o %T 2>/dev/null) && [[ -n $job ]] ||
        grep -qxF -- "$1" < <(squeue -h --me -o %k 2>/dev/null); then
        printf 'in the queue'
    elif [[ -n $status ]]; then
        printf 'failed with status %d' "$status"
    else
        printf 'to do'
    fi
}

# Runs one combination in $1 with size $2, method $3, ablation $4.
run_one() {
    local flags=() run=()
    read -ra flags <<<"${defined[$3]} ${defined[$4]}"
    if [[ $2 != - ]]; then run=(--run "$2"); fi
    if [[ $dry_run == yes ]]; then run+=(--dry-run); fi
    supervise "${launcher[@]}" --output "$1" "${run[@]}" "${flags[@]}" "${rest[@]}"
}

if [[ $dry_run == no && $listing == no ]]; then
    mkdir -p -- "$output"
    exec {lock}>"$output/.lock"
    flock -n "$lock" || die "another series runs in $output"
fi
failed=0
for size in $sizes; do
    for method in $methods; do
        for ablation in $ablations; do
            name=$(printf '%s\n' "$size" "$method" "$ablation" | grep -vx -- - | paste -sd.) || name="run"
            status=$(status_of "$output/$name")
            if [[ $listing == yes || ($status != "to do" && $status != failed*) ]]; then
                printf '%s: %s\n' "$name" "$status"
                continue
            fi
            if [[ $dry_run == no ]]; then printf -- '-- %s\n' "$name"; fi
            run_one "$output/$name" "$size" "$method" "$ablation" || failed=$((failed + 1))
            if [[ $ending == yes ]]; then say "stopped in $name; the same command goes on"; exit 130; fi
        done
    done
done
if [[ $dry_run == yes || $listing == yes ]]; then exit; fi
"$(python_of_training)" "$burst_root/scripts/collect.py" "$output" --output "$output/results"
if ((failed)); then say "$failed run(s) failed; the same command tries them again"; exit 1; fi
