# shellcheck shell=bash disable=SC2034,SC2154 # variables that the launchers set or use
# What the launchers share: the env file, their common options, a log, and an end without orphans.

burst_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
burst_on_node=$burst_root/scripts/lib/on_node.sh

say() { printf '%s: %s\n' "$burst_me" "$*" >&2; }
die() { say "$@"; exit 2; }

# The arguments as one line that a shell reads back as the same arguments.
quoted() {
    local line
    printf -v line '%q ' "$@"
    printf '%s\n' "${line% }"
}

# Reads the site's settings. What the environment already says wins over the file (`: "${X:=...}"`).
load_env() {
    local file=${BURST_ENV:-$burst_root/scripts/env.sh}
    [[ -z ${BURST_ENV:-} || -r $file ]] || die "BURST_ENV=$file cannot be read"
    if [[ ! -r $file ]]; then return; fi
    set -a # what it sets is for the processes that are started
    # shellcheck disable=SC1090 # the site's own file
    source "$file"
    set +a
}

in_container=no
# The Python of the training: the environment of scripts/setup.sh; in a container the image's own.
python_of_training() {
    if [[ -n ${BURST_PYTHON:-} ]]; then
        printf '%s' "$BURST_PYTHON"
    elif [[ $in_container == no && -x $burst_root/.venv/bin/python ]]; then
        printf '%s' "$burst_root/.venv/bin/python"
    else
        printf 'python3'
    fi
}

# ---- options that every launcher takes -----------------------------------------------------------

common_usage() {
    cat <<'END'
  --run NAME            a named run of configs/; flags that you add win over its own
  --ranks-per-node N    ranks on a node (default: one a GPU; needed where there is none)
  --output DIR          log, command, versions and TensorBoard events go here
                        (default: a new directory in runs/ below the current one)
  --script PATH         run this pretrain_gpt.py of Megatron-LM instead of ours
  --measure-links       time the links between the ranks into DIR/links.json instead of training
  --dry-run             print the commands and run nothing
Everything else, and all that follows --, goes to Megatron. The settings of your site are read from
scripts/env.sh, or from the file that BURST_ENV names; scripts/env.example.sh explains them.
END
}

output="" dry_run=no named_run=""
node_options=() # what goes on to lib/on_node.sh
flags=()        # what goes to Megatron

# Takes one argument with its value off "$@"; leaves in `taken` how many that were.
common_option() {
    taken=1
    case $1 in
        --run) need_value "$@"; named_run=$2; node_options+=("$1" "$2") taken=2 ;;
        --ranks-per-node) need_value "$@"; node_options+=("$1" "$2") taken=2 ;;
        --script) need_value "$@"; node_options+=("$1" "$(absolute "$2")") taken=2 ;;
        --output) need_value "$@"; output=$2 taken=2 ;;
        --measure-links) node_options+=("$1") ;;
        --dry-run) dry_run=yes ;;
        --) shift; taken=$(($# + 1)) flags+=("$@") ;;
        *) flags+=("$1") ;;
    esac
}

need_value() { (($# > 1)) || die "$1 needs a value; --help says which"; }

# Refuses a --run that configs/ lacks before a node is asked for.
check_named_run() {
    local names
    if [[ -z $named_run ]]; then return; fi
    # A login node may have no Python for it; then the nodes find out.
    names=$(PYTHONPATH=$burst_root "$(python_of_training)" -m megatron_burst plan --list \
        2>/dev/null) || return 0
    grep -qxF -- "$named_run" <<<"$names" ||
        die "configs/ has no run $named_run; it has: ${names//$'\n'/, }"
}

# Makes the directory of the run and writes the command that was given into it. Arguments: it.
prepare_output() {
    output=$(absolute "${output:-runs/$(date +%Y%m%d-%H%M%S)-$$}")
    if [[ $dry_run == yes ]]; then return; fi
    mkdir -p -- "$output"
    rm -f -- "$output/status"
    quoted "$@" >"$output/command.txt"
}

absolute() { if [[ $1 == /* ]]; then printf '%s' "$1"; else printf '%s/%s' "$PWD" "$1"; fi; }

# ---- running --------------------------------------------------------------------------------------

ending=no # yes once a signal shall end what was started
child=""  # the process that a signal ends
told=no   # whether it was told so
once=no   # whether it must not be told again

# Starts a command; from now on SIGTERM, SIGINT and SIGHUP end it. Bash loses a signal that comes while
# it sets a trap: what will surely send one is begun after this.
start_child() {
    local ready started
    child="" told=no
    trap 'ending=yes; end_child' TERM INT HUP
    # As long as the new process still has this trap, it too would lose a signal: it says when not.
    exec {ready}<> <(:)
    (printf . >&"$ready"; exec {ready}>&-; exec "$@") &
    started=$!
    until read -rt 1 -n 1 -u "$ready" _ || ! kill -0 "$started" 2>/dev/null; do :; done
    exec {ready}>&-
    child=$started
    end_child # a signal may have come before
}

end_child() {
    # A bare `return` in a trap would return the status of what it interrupted, and end the script.
    if [[ $ending == no || -z $child || $told$once == yesyes ]]; then return 0; fi
    told=yes
    kill -TERM "$child" 2>/dev/null || true
}

# Returns the child's status once it has ended. Signals do nothing any more then, until `trap -`.
wait_for_child() {
    local status=0
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ended the waiting, not the child
        status=0
        wait "$child" || status=$?
    done
    child=""
    return "$status"
}

# Runs a command to its end and returns its status; the signals end it first.
supervise() {
    local status=0
    start_child "$@"
    wait_for_child || status=$?
    trap - TERM INT HUP
    return "$status"
}

# Runs a function or command; what it prints is shown and added to DIR/log.txt, its status goes to
# DIR/status and is returned.
run_logged() {
    local status=0 sink tee
    exec {sink}> >(exec tee -ai -- "$output/log.txt")
    tee=$!
    "$@" >&"$sink" 2>&1 || status=$?
    exec {sink}>&-
    wait "$tee" || true
    printf '%d\n' "$status" >"$output/status"
    if ((status)); then say "ended with status $status; the log is $output/log.txt"; fi
    return "$status"
}

# The names of the variables of this environment that a node shall have, too.
variables_for_nodes() {
    compgen -e | grep -E '^(BURST|MEGATRON_BURST|NCCL|GLOO|CUDA|OMP|TORCH|PYTORCH|NVTE)_' || true
}

# What a container needs of this machine, each once; the site's own in BURST_MOUNTS come as they are.
mounts() {
    local needed=("$burst_root" "$PWD" "$output")
    if [[ -f ${BURST_ENV:-} ]]; then needed+=("$(absolute "$BURST_ENV")"); fi
    printf '%s\n' "${needed[@]}" | sort -u | sed 's/.*/&:&/'
    if [[ -n ${BURST_MOUNTS:-} ]]; then tr ',' '\n' <<<"$BURST_MOUNTS"; fi
}
