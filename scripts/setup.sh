#!/usr/bin/env bash
# Makes the virtual environment that every other script uses: finds a Python, installs the package.
set -euo pipefail

usage() {
    cat <<'END_OF_TEXT'
Usage: scripts/setup.sh [--help]

Makes a virtual environment and installs megatron-burst into it, editable, with the extras train
and test at the versions of scripts/constraints.txt, by uv where it is there, else by pip. Again, it
installs only what changed. The torch (2.9 or newer) of a container's Python is kept and used.

Environment variables, beside those of pip and uv:
  PYTHON      the Python to use (default: a 3.12 or 3.13 from PATH, then pyenv, then by uv)
  BURST_VENV  where the environment lives (default: .venv in the repository)
END_OF_TEXT
}

burst_root=$(cd -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/.." && pwd)
burst_venv=${BURST_VENV:-$burst_root/.venv}
if [[ $burst_venv != /* ]]; then burst_venv=$PWD/$burst_venv; fi
burst_python=$burst_venv/bin/python
burst_stamp=$burst_venv/.megatron-burst-ready # what was installed; empty while this script makes it

say() { printf 'setup: %s\n' "$*" >&2; }

# Leaves the first Python that serves in found_python, or says what is wrong with each.
find_python() {
    local path said home shim
    home=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)} # an empty HOME is looked up
    shim=$(command -v python3) || true # of pyenv, whose own word follows HOME
    for path in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3 python \
        {"${PYENV_ROOT:-${shim%/shims/*}}","$home/.pyenv"}/versions/3.1[23]*/bin/python3; do
        found_python=$(command -v "$path") || continue
        said=$("$path" -c 'import sys, venv; print("%d.%d.%d" % sys.version_info[:3])' 2>&1) || true
        if [[ $said == 3.1[23].* ]]; then return 0; fi
        if [[ $said == Traceback* ]]; then said=${said##*$'\n'}; fi
        say "$found_python is no Python 3.12 or 3.13 with venv, it says: ${said%%$'\n'*}"
        if [[ -n ${PYTHON:-} ]]; then return 1; fi
    done
    return 1
}

# Leaves a working, perhaps still empty environment; one that this script half made is made anew.
make_environment() {
    if [[ -e $burst_venv ]] && [[ -s $burst_stamp || ! -e $burst_stamp ]]; then
        if [[ -e $burst_venv/pyvenv.cfg ]] && "$burst_python" -c ''; then return 0; fi
        say "$burst_venv is no virtual environment that works: remove it, or set BURST_VENV"
        return 1
    fi
    rm -rf -- "$burst_venv"
    if ! find_python; then
        if [[ -z ${PYTHON:-} ]] && command -v uv >/dev/null; then
            uv venv --python '>=3.12,<3.14' "$burst_venv" >&2
            return
        fi
        say "install a Python and run this again: uv python install 3.12, or on Debian and Ubuntu" \
            "apt-get install python3.12-venv; in another place: PYTHON=/path/to/python3.12"
        return 1
    fi
    mkdir -p -- "$burst_venv" && : >"$burst_stamp"
    local options=()
    if "$found_python" -c 'import sys, torch
version = tuple(map(int, torch.__version__.split(".")[:2]))
sys.exit(sys.prefix != sys.base_prefix or version < (2, 9))' 2>/dev/null; then
        say "keeping the torch that $found_python brings along"
        options=(--system-site-packages)
    fi
    "$found_python" -m venv --without-pip ${options[@]+"${options[@]}"} "$burst_venv" &&
        { "$burst_python" -m ensurepip --default-pip >/dev/null 2>&1 || # or it lends its own pip
            "$found_python" -m pip --python "$burst_python" install --quiet pip; }
}

# The constraints to install with: ours, but a package the base Python brings along stays as it is.
write_constraints() {
    "$burst_python" - "$burst_root/scripts/constraints.txt" <<'END_OF_TEXT'
import pathlib
import sys
from importlib.metadata import PackageNotFoundError, distribution

for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    try:
        found = distribution(line.partition("==")[0].strip("# ") or "-")
        inherited = not pathlib.Path(found.locate_file("")).is_relative_to(sys.prefix)
        print(f"{found.name}=={found.version}" if inherited else line)
    except PackageNotFoundError:
        print(line)
END_OF_TEXT
}

install_package() {
    local pip=("$burst_python" -m pip install --disable-pip-version-check)
    # uv does not see what an environment inherits, and would install torch anew.
    if command -v uv >/dev/null && ! grep -q 'system-site-packages = true' "$burst_venv/pyvenv.cfg"; then
        pip=(uv pip install --python "$burst_python" ${PIP_INDEX_URL:+--index-url "$PIP_INDEX_URL"}
            ${PIP_EXTRA_INDEX_URL:+--extra-index-url "$PIP_EXTRA_INDEX_URL"})
    fi
    write_constraints >"$burst_venv/constraints.txt" || return 1
    say "installing megatron-burst[train,test]; the first time torch alone may take minutes"
    "${pip[@]}" -c "$burst_venv/constraints.txt" -e "${burst_root}[train,test]" >&2 </dev/null
}

is_ready() { [[ -x $burst_python && $(cat -- "$burst_stamp" 2>/dev/null) == "$1" ]]; }

# Makes the environment of this key; who comes second waits for the first.
make_ready() {
    local lock=$burst_venv.lock who
    mkdir -p -- "$(dirname -- "$burst_venv")" || return 1
    # shellcheck disable=SC2094 # the lock says who holds it
    { # what is started here holds it, too, so until nothing writes there any more
        who="process $$ on $(uname -n), since $(printf '%(%F %T)T' -1)"
        if ! command -v flock >/dev/null; then
            say "there is no flock: start no second setup meanwhile"
        elif ! flock -n 9; then
            say "$(cat -- "$lock") makes $burst_venv; this one waits"
            flock 9 || say "$lock cannot be locked: start no second setup meanwhile"
        fi
        printf '%s\n' "$who" >"$lock"
        if is_ready "$1"; then return 0; fi
        make_environment || return 1
        install_package || { say "the installation failed"; return 1; }
        echo "$1" >"$burst_stamp"
    } 9>>"$lock"
}

# Leaves a ready environment in $burst_venv, whose Python is $burst_python.
burst_setup() {
    local key
    key="$burst_root $(cat -- "$burst_root/pyproject.toml" "$burst_root/scripts/constraints.txt" | cksum)"
    if ! is_ready "$key"; then
        make_ready "$key" || return 1
    elif [[ -n ${PYTHON:-} && $("$PYTHON" -V) != "$("$burst_python" -V)" ]]; then
        say "$burst_venv has another Python than $PYTHON: remove it, or set BURST_VENV"
        return 1
    fi
    say "$burst_venv is ready ($("$burst_python" -V))"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    case ${1:-} in
        "") burst_setup && say "activate it with: source $burst_venv/bin/activate" ;;
        -h | --help) usage ;;
        *) usage >&2; exit 2 ;;
    esac
fi
