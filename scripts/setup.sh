#!/usr/bin/env bash
# Makes the virtual environment that every other script uses: finds a Python, installs the package.
set -euo pipefail

usage() {
    cat <<'END_OF_TEXT'
Usage: scripts/setup.sh [--help]

Makes a virtual environment in the repository and installs megatron-burst into it (editable,
with the extras train, plot and test, at the versions of scripts/constraints.txt), by uv where it is
there, else by pip. Running it again takes a second; it installs again only when pyproject.toml, the
constraints or the Python changed.

A Python that can already import torch >= 2.9 outside a virtual environment (a container made for
training, say) keeps its own torch: the environment sees it and it is not replaced.

Environment variables:
  PYTHON      the Python to use (default: a 3.12 or 3.13 from PATH, then pyenv, then uv)
  BURST_VENV  where the environment lives (default: .venv in the repository)
The settings of pip and uv (PIP_INDEX_URL, UV_DEFAULT_INDEX, ...) are obeyed.
END_OF_TEXT
}

burst_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
burst_venv=${BURST_VENV:-$burst_root/.venv}
burst_python=$burst_venv/bin/python
burst_stamp=$burst_venv/.megatron-burst-ready # its content: what was installed
burst_made=$burst_venv/.megatron-burst-made   # there: this script made the environment and may remake it

say() { printf 'setup: %s\n' "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

# ---- finding a Python ---------------------------------------------------------------------------

# Every Python worth a try, best first.
candidates() {
    local name root
    if [[ -n ${PYTHON:-} ]]; then echo "$PYTHON"; return; fi
    for name in python3.12 python3.13 python3 python; do command -v "$name" || true; done
    # An empty HOME is looked up: scripts/test.sh runs where nobody is at home.
    for root in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null)" \
        "${HOME:-$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f6)}/.pyenv"; do
        for name in "$root"/versions/3.1[23]*/bin/python3; do
            if [[ -x $name ]]; then echo "$name"; fi
        done
    done
    if have uv; then uv python find --no-project '>=3.12,<3.14' 2>/dev/null || true; fi
}

# Why a Python does not serve, as its status and its last line.
fault='
import os, sys
from importlib.util import find_spec

version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 12):
    sys.exit(f"is Python {version}, older than 3.12")
if sys.version_info >= (3, 14) and not os.environ.get("PYTHON"):
    sys.exit(f"is Python {version}; megatron-core has no ready-made package for it")
if not find_spec("venv") or not (find_spec("ensurepip") or find_spec("pip")):
    sys.exit(f"is Python {version} without venv and ensurepip (Debian, Ubuntu: python3-venv)")
'

# Leaves the first Python that serves in found_python, or says what is wrong with each.
find_python() {
    local path said refused=""
    while IFS= read -r path; do
        found_python=$path
        if said=$("$path" -c "$fault" 2>&1); then return 0; fi
        if [[ $said != "is Python"* ]]; then said="does not run"; fi
        refused+="  $path $said"$'\n'
    done < <(candidates)
    cat >&2 <<END_OF_TEXT
setup: no Python here serves. Needed: Python 3.12 or 3.13 with the modules venv and ensurepip.
Looked at:
${refused:-  nothing: no python3 on PATH, no pyenv, no uv$'\n'}
Install one of these, then run this script again:
  uv               uv python install 3.12
  Debian, Ubuntu   sudo apt-get install python3.12 python3.12-venv
  Fedora           sudo dnf install python3.12
  macOS            brew install python@3.12
  pyenv            pyenv install 3.12
A Python in another place: PYTHON=/path/to/python3.12 scripts/setup.sh
END_OF_TEXT
    return 1
}

# ---- the environment ----------------------------------------------------------------------------

# What the environment depends on, as one line: Python $1, pyproject.toml, the constraints, the place.
environment_key() {
    { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' &&
        cat -- "$burst_root/pyproject.toml" "$burst_root/scripts/constraints.txt" &&
        echo "$burst_root"; } 2>/dev/null | cksum
}

is_ready() {
    [[ -x $burst_python && -s $burst_stamp ]] || return 1
    local key
    key=$(<"$burst_stamp")
    [[ $(environment_key "$burst_python") == "$key" ]] &&
        [[ -z ${PYTHON:-} || $(environment_key "$PYTHON") == "$key" ]]
}

# Whether an environment was finished before with the found Python: then it is updated in place.
can_be_updated() {
    local prefix='import sys; print(sys.version, sys.base_prefix)'
    [[ -s $burst_stamp ]] &&
        [[ $("$burst_python" -c "$prefix" 2>/dev/null) == "$("$found_python" -c "$prefix")" ]]
}

own_torch='
import sys, torch
sys.exit(sys.prefix != sys.base_prefix or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9))
'

# Leaves a working, perhaps still empty environment; one that this script half made is made anew.
make_environment() {
    if [[ -e $burst_venv && ! -e $burst_made ]]; then
        if [[ -e $burst_venv/pyvenv.cfg ]]; then return 0; fi # somebody else's; it is used as it is
        say "$burst_venv exists and is no virtual environment; set BURST_VENV to another place"
        return 1
    fi
    find_python || return 1
    say "Python: $found_python ($("$found_python" -V 2>&1))"
    if can_be_updated; then return 0; fi
    local options=()
    if "$found_python" -c "$own_torch" 2>/dev/null; then
        say "keeping the torch that this Python brings along"
        options=(--system-site-packages)
    fi
    rm -rf -- "$burst_venv" && mkdir -p -- "$burst_venv" && : >"$burst_made" || return 1
    if "$found_python" -c 'import ensurepip' 2>/dev/null; then
        "$found_python" -m venv ${options[@]+"${options[@]}"} "$burst_venv"
    else # it lends its own pip for the first step
        "$found_python" -m venv --without-pip ${options[@]+"${options[@]}"} "$burst_venv" &&
            "$found_python" -m pip --python "$burst_python" install --quiet pip
    fi
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
    if have uv && ! grep -q '^include-system-site-packages = true' "$burst_venv/pyvenv.cfg"; then
        pip=(uv pip install --python "$burst_python" ${PIP_INDEX_URL:+--index-url "$PIP_INDEX_URL"}
            ${PIP_EXTRA_INDEX_URL:+--extra-index-url "$PIP_EXTRA_INDEX_URL"})
    fi
    write_constraints >"$burst_venv/constraints.txt" || return 1
    say "installing megatron-burst[train,plot,test]; the first time torch alone may take minutes"
    "${pip[@]}" -c "$burst_venv/constraints.txt" -e "${burst_root}[train,plot,test]" >&2 </dev/null
}

# Leaves a ready environment in $burst_venv, whose Python is $burst_python.
burst_setup() {
    if ! is_ready; then
        make_environment || return 1
        rm -f -- "$burst_stamp"
        install_package || { say "the installation failed"; return 1; }
        environment_key "$burst_python" >"$burst_stamp" || return 1
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
