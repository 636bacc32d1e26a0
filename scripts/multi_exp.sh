#!/usr/bin/env bash
# Compares algorithms on several named runs, one after the other: megatron-burst compare --run.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/multi_exp.sh --runs "NAME ..." [--output DIR] [--help] [options of compare]

Starts megatron-burst compare for every named run of configs/ that a NAME or a shell pattern means,
with its page and its JSON in DIR/NAME (default: runs/series). What has finished is kept: after an
interruption give the same command. One that fails does not stop the others.

  scripts/multi_exp.sh --runs "scaling-*" --variants "burst,ring *" -- --train-iters 10
END
}

root=$(cd -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/.." && pwd)
python=${BURST_PYTHON:-$root/.venv/bin/python}
if [[ -z ${BURST_PYTHON:-} && ! -x $python ]]; then python=python3; fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
names="" output=runs/series options=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --runs) names=${2:?--runs needs names}; shift ;;
        --output) output=${2:?--output needs a directory}; shift ;;
        *) options+=("$1") ;;
    esac
    shift
done
if [[ -z $names ]]; then usage >&2; exit 2; fi

failed=() told=0
# Of `jobs`, for a signal may come before the next line has what $! is.
trap 'told=1; kill $(jobs -p) 2>/dev/null || exit 143' TERM INT HUP
set -f # patterns are for the names of runs, not for files
for pattern in $names; do
    found=$("$python" -m megatron_burst plan --list "$pattern" | sed -n '/^runs:$/,$ s/^  //p')
    if [[ -z $found ]]; then printf 'multi_exp: no run matches %s\n' "$pattern" >&2; exit 1; fi
    for name in $found; do
        printf -- '-- %s\n' "$name"
        "$python" -m megatron_burst compare --run "$name" --output "$output/$name" \
            ${options[@]+"${options[@]}"} &
        compare=$!
        wait "$compare" || failed+=("$name")
        if ((told)); then wait "$compare" || true; exit 143; fi
    done
done
if ((${#failed[@]})); then
    printf 'multi_exp: failed: %s; the same command tries again\n' "${failed[*]}" >&2
    exit 1
fi
