#!/usr/bin/env bash
# Makes the virtual environment that every other script uses: finds a Python, installs the package.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/setup.sh [--help]

Makes a virtual environment in the repository and installs megatron-burst into it (editable,
with the extras train, plot and test, at the versions of scripts/constraints.txt). Running it again
takes a second; it installs again only when pyproject.toml, the constraints or the Python changed.

A Python that can already import torch >= 2.9 outside a virtual environment (a container made for
training, say) keeps its own torch: the environment sees it and pip does not replace it.

Environment variables:
  PYTHON      the Python to use (default: a 3.12 or 3.13 from PATH, then pyenv, then uv)
  BURST_VENV  where the environment lives (default: .venv in the repository)
pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) are obeyed.
END
}

burst_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
burst_venv=${BURST_VENV:-$burst_root/.venv}
burst_python=$burst_venv/bin/python
burst_stamp=$burst_venv/.megatron-burst-ready # its content: what was installed
burst_made=$burst_venv/.megatron-burst-made   # there: this script made the environment and may remake it
burst_refused=""

say() { printf 'setup: %s\n' "$*" >&2; }

# ---- finding a Python ---------------------------------------------------------------------------

# The reason why $1 does not serve, or nothing. $2: the newest 3.x accepted.
python_fault() {
    "$1" - "$2" 2>/dev/null <<'END' || echo "does not run"
import sys

version, newest = ".".join(map(str, sys.version_info[:3])), int(sys.argv[1])
if sys.version_info[:2] < (3, 12):
    print(f"is Python {version}, older than 3.12")
elif sys.version_info[:2] > (3, newest):
    print(f"is Python {version}; megatron-core has no ready-made package for it")
else:
    from importlib.util import find_spec

    if not find_spec("venv") or not (find_spec("ensurepip") or find_spec("pip")):
        print(f"is Python {version} without venv and ensurepip (Debian, Ubuntu: python3-venv)")
END
}

# Prints "path<TAB>where it was found" for every Python worth a try, best first.
python_candidates() {
    local name dir version
    for name in python3.12 python3.13 python3 python; do
        if command -v "$name" >/dev/null 2>&1; then
            printf '%s\tPATH\n' "$(command -v "$name")"
        fi
    done
    while IFS= read -r dir; do
        for version in 12 13; do
            for name in "$dir"/versions/3."$version"*/bin/python3."$version"; do
                if [[ -x $name ]]; then printf '%s\tpyenv in %s\n' "$name" "$dir"; fi
            done
        done
    done < <(pyenv_roots)
    if command -v uv >/dev/null 2>&1; then
        name=$(uv python find --no-project '>=3.12,<3.14' 2>/dev/null) || name=""
        if [[ -n $name ]]; then printf '%s\tuv\n' "$name"; fi
    fi
}

# The directories under which pyenv may keep its versions, whatever HOME says.
pyenv_roots() {
    local home command
    if [[ -n ${PYENV_ROOT:-} ]]; then echo "$PYENV_ROOT"; fi
    home=${HOME:-}
    if [[ -z $home ]] && command -v getent >/dev/null 2>&1; then
        home=$(getent passwd "$(id -u)" | cut -d: -f6) || home=""
    fi
    if [[ -n $home ]]; then echo "$home/.pyenv"; fi
    if command=$(command -v pyenv); then
        dirname -- "$(dirname -- "$(readlink -f -- "$command")")"
    fi
}

# Sets `found_python` and `found_where`; leaves what was refused, and why, in burst_refused.
find_python() {
    local path where fault
    found_python="" found_where="" burst_refused=""
    if [[ -n ${PYTHON:-} ]]; then
        fault=$(python_fault "$PYTHON" 99)
        if [[ -n $fault ]]; then
            burst_refused="  $PYTHON (from \$PYTHON) $fault"$'\n'
            return 1
        fi
        found_python=$PYTHON found_where="\$PYTHON"
        return 0
    fi
    while IFS=$'\t' read -r path where; do
        fault=$(python_fault "$path" 13)
        if [[ -z $fault ]]; then
            found_python=$path found_where=$where
            return 0
        fi
        burst_refused+="  $path (from $where) $fault"$'\n'
    done < <(python_candidates)
    return 1
}

no_python() {
    cat >&2 <<END
setup: no Python here serves. Needed: Python 3.12 or 3.13 with the modules venv and ensurepip.
Looked at:
${burst_refused:-  nothing: no python3 on PATH, no pyenv, no uv$'\n'}
Install one of these, then run this script again:
  Debian, Ubuntu   sudo apt-get install python3.12 python3.12-venv
  Fedora           sudo dnf install python3.12
  macOS            brew install python@3.12
  pyenv            pyenv install 3.12
  uv               uv python install 3.12
A Python in another place: PYTHON=/path/to/python3.12 scripts/setup.sh
END
}

# ---- the environment ----------------------------------------------------------------------------

# What the environment depends on, as one hash: Python $1, pyproject.toml, the constraints, the place.
environment_key() {
    "$1" - "$burst_root" 2>/dev/null <<'END'
import hashlib
import pathlib
import sys

root = pathlib.Path(sys.argv[1])
key = hashlib.sha256(f"{sys.version} {sys.base_prefix} {root}".encode())
for name in ("pyproject.toml", "scripts/constraints.txt"):
    key.update((root / name).read_bytes())
print(key.hexdigest())
END
}

is_ready() {
    [[ -x $burst_python && -s $burst_stamp ]] || return 1
    local key
    key=$(environment_key "$burst_python") || return 1
    [[ $(<"$burst_stamp") == "$key" ]] || return 1
    [[ -z ${PYTHON:-} ]] || [[ $(environment_key "$PYTHON") == "$key" ]]
}

# The torch version that Python $1 brings along, when an environment made from it can use it.
torch_of_base() {
    "$1" - 2>/dev/null <<'END' || true
import sys

if sys.prefix == sys.base_prefix:
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9):
        print(torch.__version__)
END
}

# Leaves a working, perhaps still empty environment; one that this script half made is made anew.
make_environment() {
    if [[ -e $burst_venv && ! -e $burst_made ]]; then
        if [[ ! -e $burst_venv/pyvenv.cfg ]]; then
            say "$burst_venv exists and is no virtual environment; set BURST_VENV to another place"
            return 1
        fi
        say "using the environment that is already in $burst_venv"
        return 0
    fi
    find_python || { no_python; return 1; }
    say "Python: $found_python ($("$found_python" -V 2>&1)), from $found_where"
    if is_ready_for "$found_python"; then return 0; fi
    local torch_version
    torch_version=$(torch_of_base "$found_python")
    if [[ -n $torch_version ]]; then
        say "keeping the torch $torch_version that this Python brings along"
    fi
    rm -rf -- "$burst_venv" && mkdir -p -- "$burst_venv" && : >"$burst_made" || return 1
    create_environment ${torch_version:+--system-site-packages}
}

# Fills the empty directory; a Python without ensurepip lends its own pip for the first step.
create_environment() {
    if "$found_python" -c 'import ensurepip' 2>/dev/null; then
        "$found_python" -m venv "$@" "$burst_venv"
    else
        "$found_python" -m venv --without-pip "$@" "$burst_venv" || return 1
        "$found_python" -m pip --python "$burst_python" install --quiet pip
    fi
}

# Whether a finished environment made from Python $1 can be brought up to date in place.
is_ready_for() {
    [[ -s $burst_stamp && -x $burst_python ]] || return 1
    "$burst_python" -m pip --version >/dev/null 2>&1 || return 1
    local same='import sys; print(sys.version, sys.base_prefix)'
    [[ $("$burst_python" -c "$same") == "$("$1" -c "$same")" ]]
}

# The constraints to install with: ours, but a package the base Python brings along stays as it is.
write_constraints() {
    "$burst_python" - "$burst_root/scripts/constraints.txt" >"$1" <<'END'
import pathlib
import sys
from importlib.metadata import PackageNotFoundError, distribution

for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    name = line.partition("==")[0]
    if not name or name.startswith("#"):
        continue
    try:
        found = distribution(name)
        inherited = not pathlib.Path(found.locate_file("")).is_relative_to(sys.prefix)
        print(f"{name}=={found.version}" if inherited else line)
    except PackageNotFoundError:
        print(line)
END
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

pip_status() {
    local doing='^ *(Collecting|Downloading|Using cached|Building|Installing|Preparing|Successfully)'
    { grep -E "$doing" "$1" || echo starting; } | tail -n 1 | sed 's/^ *//' | cut -c 1-68
}

install_package() {
    local log constraints
    log=$burst_venv/install.log constraints=$burst_venv/constraints.txt
    write_constraints "$constraints" || return 1
    say "installing megatron-burst[train,plot,test]; the first time torch alone may take minutes"
    if ! with_progress "$log" pip_status "$burst_python" -m pip install --progress-bar off \
        -c "$constraints" -e "${burst_root}[train,plot,test]"; then
        tail -n 25 "$log" >&2
        say "the installation failed; everything pip said is in $log"
        return 1
    fi
}

# Leaves a ready environment in $burst_venv, whose Python is $burst_python.
burst_setup() {
    if is_ready; then
        say "$burst_venv is ready ($("$burst_python" -V))"
        return 0
    fi
    make_environment || return 1
    rm -f -- "$burst_stamp"
    install_package || return 1
    environment_key "$burst_python" >"$burst_stamp" || return 1
    say "$burst_venv is ready ($("$burst_python" -V))"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    case ${1:-} in
        "") burst_setup && say "activate it with: source $burst_venv/bin/activate" ;;
        -h | --help) usage ;;
        *) usage >&2; exit 2 ;;
    esac
fi
