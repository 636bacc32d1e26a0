#!/usr/bin/env bash
# Says which nodes are free and healthy: GPUs, memory in use, links, clocks; over ssh or by Slurm.
set -euo pipefail

burst_me=check_nodes
# shellcheck source=scripts/lib/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'END'
Usage: scripts/check_nodes.sh [--nodes "HOST ..." | --slurm] [options]

Asks every node at the same time and prints a line for each, and why one is not free:
  busy         memory of a GPU is in use, or a GPU or (without GPUs) the CPU is at work, or Slurm has
               given the node away
  unhealthy    no answer, an nvidia-smi that fails, ECC errors that were not corrected, fewer GPUs,
               NVLinks or active InfiniBand ports than another node has, a slower card, or a clock
               that is off
The status is 0 if every node is free. It changes nothing on any node.
  --nodes "HOST ..."    ask these over ssh (BURST_SSH); default: BURST_NODES
  --slurm               ask the idle nodes of the partition SBATCH_PARTITION by srun
                        (BURST_SRUN_OPTIONS), with --nodes only those
  --list                print only the names of the free nodes, on one line, for launch_nodes.sh;
                        the status is 0 if there is one
  --memory-mib N        memory in use up to which a GPU counts as free (default 500)
  --skew-ms N           how far a clock may surely be off (default 500)
  --timeout N           seconds to wait for an answer (default 30)
  --dry-run             print the commands and run nothing
END
}

nodes="" by_slurm=no listing=no memory_mib=500 skew_ms=500 timeout=30
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --nodes | --memory-mib | --skew-ms | --timeout)
            need_value "$@"
            name=${1#--}
            printf -v "${name//-/_}" '%s' "$2"
            shift ;;
        --slurm) by_slurm=yes ;;
        --list) listing=yes ;;
        --dry-run) dry_run=yes ;;
        *) die "unknown option $1; --help lists all" ;;
    esac
    shift
done
load_env
read -ra ssh <<<"${BURST_SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}"
read -ra srun_options <<<"${BURST_SRUN_OPTIONS:-}"
declare -A slurm_state=()
if [[ $by_slurm == no ]]; then nodes=${nodes:-${BURST_NODES:-}}; fi
nodes=${nodes//$'\n'/ }
if [[ $by_slurm == yes ]]; then
    sinfo=(sinfo -h -N -o "%N %T" ${SBATCH_PARTITION:+--partition "$SBATCH_PARTITION"}
        ${nodes:+--nodes "${nodes// /,}"})
    if [[ $dry_run == yes ]]; then quoted "${sinfo[@]}"; fi
    listed=$("${sinfo[@]}") || die "sinfo failed"
    while read -r node state; do slurm_state[$node]=$state; done <<<"$listed"
    mapfile -t nodes < <(printf '%s\n' "${!slurm_state[@]}" | sort -V)
else
    read -ra nodes <<<"${nodes:-}"
    ((${#nodes[@]})) || die 'say which nodes: --nodes "HOST ...", BURST_NODES or --slurm'
fi

# Leaves in `ask` the command that runs the probe on node $1.
ask_command() {
    if [[ $by_slurm == yes ]]; then
        ask=(srun --quiet --nodes=1 --ntasks=1 --nodelist="$1" --immediate="$timeout" --mpi=none
            ${SBATCH_PARTITION:+--partition "$SBATCH_PARTITION"}
            ${SBATCH_ACCOUNT:+--account "$SBATCH_ACCOUNT"} ${SBATCH_QOS:+--qos "$SBATCH_QOS"}
            ${SBATCH_GPUS_PER_NODE:+--gpus-per-node "$SBATCH_GPUS_PER_NODE"}
            "${srun_options[@]}" sh -s)
    else
        ask=("${ssh[@]}" "$1" sh -s)
    fi
}

# Writes what node $1 says to the file $2, with our own clock before and after.
ask_node() {
    local before after
    ask_command "$1"
    before=$(date +%s%3N)
    if timeout "$timeout" "${ask[@]}" <"$burst_root/scripts/lib/probe_node.sh" >"$2" 2>"$2.error"; then
        after=$(date +%s%3N)
        printf 'before=%d\nafter=%d\n' "$before" "$after" >>"$2"
    else
        printf 'fault=no answer: %s\n' "$(head -n 1 "$2.error")" >"$2"
    fi
}

idle() { [[ $by_slurm == no || ${slurm_state[$1]} == idle ]]; }

if [[ $dry_run == yes ]]; then
    for node in "${nodes[@]}"; do
        if idle "$node"; then
            ask_command "$node"
            printf '%s <%q\n' "$(quoted "${ask[@]}")" "$burst_root/scripts/lib/probe_node.sh"
        fi
    done
    exit
fi
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
for node in "${nodes[@]}"; do
    if idle "$node"; then ask_node "$node" "$scratch/$node" & fi
done
wait

# ---- judging: one awk over all answers, because nodes are compared with each other ---------------------
for node in "${nodes[@]}"; do
    printf 'node=%s\n' "$node"
    if idle "$node"; then cat -- "$scratch/$node"; else printf 'slurm=%s\n' "${slurm_state[$node]}"; fi
done | awk -F= -v memory_limit="$memory_mib" -v skew_limit="$skew_ms" -v listing="$listing" '
    function off_by() { # milliseconds the clock of node n is off for sure; +- half the round trip
        middle = (v[n, "before"] + v[n, "after"]) / 2
        skew = v[n, "time"] - middle
        around = (v[n, "after"] - v[n, "before"]) / 2
        return skew > around ? skew - around : skew < -around ? -skew - around : 0
    }
    function add(reason) { why = why (why == "" ? "" : "; ") reason }
    function fewer(key, what) {
        if (v[n, key] + 0 < most[key]) add(v[n, key] + 0 " " what ", another node has " most[key])
    }
    $1 == "node" { count++; name[count] = $2; next }
    {
        value = substr($0, length($1) + 2)
        v[count, $1] = value ~ /^-?[0-9.]+$/ ? value + 0 : value # text is not compared as numbers
        if (value + 0 > most[$1]) most[$1] = value + 0
    }
    END {
        row = "%-20s %-10s %5s %12s %16s %9s  %s\n"
        if (listing == "no") printf row, "node", "state", "GPUs", "memory used", "links", "clock", ""
        for (n = 1; n <= count; n++) {
            why = ""; state = "free"; clock = "-"
            memory = (n, "memory_mib") in v ? v[n, "memory_mib"] " MiB" : "-"
            gpus = (n, "gpus") in v ? v[n, "gpus"] : "-"
            if ((n, "slurm") in v) {
                state = v[n, "slurm"] ~ /^(down|drain|fail|unknown)/ ? "unhealthy" : "busy"
                add("Slurm says " v[n, "slurm"])
            } else {
                if ((n, "fault") in v) add(v[n, "fault"])
                if ((n, "time") in v) {
                    if (off_by() > skew_limit) add(sprintf("its clock is off by %+d ms", skew))
                    clock = sprintf("%+d ms", skew)
                    fewer("gpus", "GPUs"); fewer("nvlinks", "NVLinks"); fewer("ports", "active ports")
                    fewer("rate_gbit", "Gbit/s a card")
                    if (v[n, "ecc_errors"] > 0) add(v[n, "ecc_errors"] " uncorrected ECC errors")
                }
                if (why != "") state = "unhealthy"
                else if (v[n, "memory_mib"] > memory_limit + 0) add(v[n, "memory_mib"] " MiB in use")
                else if (v[n, "busy"] > 5) add("a GPU is at work, " v[n, "busy"] " %")
                else if (v[n, "gpus"] + 0 == 0 && v[n, "load"] > v[n, "cpus"] / 2)
                    add("load " v[n, "load"] " on " v[n, "cpus"] " CPUs")
                if (state == "free" && why != "") state = "busy"
            }
            if (state == "free") free = free (free == "" ? "" : " ") name[n]
            else others++
            links = v[n, "ports"] > 0 ? v[n, "ports"] " x " v[n, "rate_gbit"] " Gbit/s" : "-"
            if (listing == "no") printf row, name[n], state, gpus, memory, links, clock, why
        }
        if (listing == "yes") { if (free != "") print free; exit free == "" }
        exit others > 0
    }'
