# shellcheck shell=bash disable=SC2034,SC2154 # variables that its users set or read
# What scripts of several processes share: messages, the env file, an end without orphans.

burst_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
dry_run=no

say() { printf '%s: %s\n' "$burst_me" "$*" >&2; }
die() { say "$@"; exit 2; }

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

# The Python of the training: by default the environment of scripts/setup.sh.
python_of_training() {
    local own=$burst_root/.venv/bin/python
    if [[ -x $own ]]; then printf '%s' "${BURST_PYTHON:-$own}"; else printf '%s' "${BURST_PYTHON:-python3}"; fi
}

need_value() { (($# > 1)) || die "$1 needs a value; --help says which"; }

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
