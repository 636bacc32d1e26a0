#!/usr/bin/env bash
# Runs every check: style, types and tests.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/test.sh [--all] [--help] [pytest arguments]

Sets up the environment (scripts/setup.sh), then runs ruff, mypy and the tests.
  --all   also the tests marked slow, with more training steps and examples
Everything else goes to pytest, for example: scripts/test.sh -k layout -x
Two files of tests run at a time, the trainings as one; -n 0 runs one, as a debugger needs it.
END
}

everything=no
arguments=()
for argument in "$@"; do
    case $argument in
        -h | --help) usage; exit 0 ;;
        --all) everything=yes ;;
        *) arguments+=("$argument") ;;
    esac
done

# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/setup.sh"
burst_setup || exit 1
cd -- "$burst_root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several processes share the cores
export PYTHONDONTWRITEBYTECODE= # what one has compiled the others need not compile again

step() { printf -- '-- %s\n' "$*"; "$burst_python" -m "$@"; }
step ruff check .
step ruff format --check .
step mypy
if [[ $everything == yes ]]; then arguments=(-m "" ${arguments[@]+"${arguments[@]}"}); fi
step pytest -n 2 --dist loadfile ${arguments[@]+"${arguments[@]}"}
