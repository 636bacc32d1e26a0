#!/usr/bin/env bash
# Trains on a list of nodes over ssh, without a scheduler.
set -euo pipefail

burst_me=launch_nodes
# shellcheck source=scripts/lib/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'END'
Usage: scripts/launch_nodes.sh [--nodes "HOST HOST ..."] [options] [Megatron flags]

Starts the ranks of every node over ssh, without passwords (BURST_SSH, default: ssh with BatchMode).
The repository and the current directory have the same path on all nodes. With BURST_IMAGE set the
ranks run in that container, started by docker run with BURST_DOCKER_OPTIONS.
  --nodes "HOST ..."    the nodes, the first one where the ranks meet (default: BURST_NODES, for
                        example "$(scripts/check_nodes.sh --list)")
When one node fails, all are ended, with a message that names it. Nothing is left running on the nodes
even if this script is killed: the ranks end with the connection that started them.

END
    common_usage
}

command=("$0" "$@") nodes=""
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --nodes) need_value "$@"; nodes=$2; shift 2 ;;
        *) common_option "$@"; shift "$taken" ;;
    esac
done
load_env
nodes=${nodes:-${BURST_NODES:-}}
read -ra nodes <<<"${nodes//$'\n'/ }"
((${#nodes[@]})) || die 'say which nodes: --nodes "HOST HOST ..." or BURST_NODES'
read -ra ssh <<<"${BURST_SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4}"
check_named_run
prepare_output "${command[@]}"
port=${BURST_PORT:-$((10000 + RANDOM % 20000))}

# Leaves in `remote` the command that node number $1 runs.
remote_command() {
    local name variables=() container=() inside=() place
    mapfile -t names < <(variables_for_nodes)
    for name in "${names[@]}"; do variables+=("$name=${!name}"); done
    if [[ -n ${BURST_IMAGE:-} ]]; then
        local docker_options=() settings=()
        read -ra docker_options <<<"${BURST_DOCKER_OPTIONS:---gpus all --ipc host}"
        for name in "${names[@]}"; do settings+=(--env "$name"); done
        while read -r place; do settings+=(--volume "$place"); done < <(mounts)
        container=(docker run --rm --init --interactive --network host "${docker_options[@]}"
            "${settings[@]}" --workdir "$PWD" "$BURST_IMAGE")
        inside=(--in-container)
    fi
    remote=(env "${variables[@]}" "${container[@]}" "$burst_on_node" --nodes "${#nodes[@]}"
        --node-rank "$1" --master "${BURST_MASTER:-${nodes[0]#*@}}" --port "$port" --output "$output"
        --end-with-input "${inside[@]}" "${node_options[@]}" -- "${flags[@]}")
}

# Leaves in `connection` the command that starts node number $1 from here.
connect_command() {
    local line
    remote_command "$1"
    line="cd $(quoted "$PWD") && exec $(quoted "${remote[@]}")"
    connection=("${ssh[@]}" "${nodes[$1]}" "bash -c $(quoted "$line")")
}

if [[ $dry_run == yes ]]; then
    for rank in "${!nodes[@]}"; do connect_command "$rank" && quoted "${connection[@]}"; done
    exit
fi

# Runs one node to its end; leaves its status in a file.
run_node() {
    local status=0
    connect_command "$1"
    "${connection[@]}" <&"$ear" || status=$?
    printf '%d\n' "$status" >"$scratch/status-$1.new"
    mv -- "$scratch/status-$1.new" "$scratch/status-$1"
}

# Every connection reads a fifo that only this process writes to. When it lets go of it, however it
# ends, the input of every node ends, and with it the ranks there.
run_nodes() {
    local rank status life ear failed=0 running=1
    mkfifo "$scratch/life"
    # Opened to be read here, once: a connection that opened it after the other end is gone would hang.
    exec {life}<>"$scratch/life"
    exec {ear}<"$scratch/life"
    trap 'exec {life}>&-' TERM INT HUP
    for rank in "${!nodes[@]}"; do run_node "$rank" {life}>&- & done
    while ((running)); do
        sleep 0.3 {life}>&- || true
        running=0
        for rank in "${!nodes[@]}"; do
            if [[ ! -e $scratch/status-$rank ]]; then running=1; continue; fi
            status=$(<"$scratch/status-$rank")
            if ((status && !failed)); then
                failed=$status
                say "${nodes[$rank]} ended with status $status, so all nodes are ended"
                exec {life}>&-
            fi
        done
    done
    return "$failed"
}

scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
run_logged run_nodes
