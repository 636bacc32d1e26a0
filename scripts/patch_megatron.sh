#!/usr/bin/env bash
# Applies or removes the patch by which a fork's own pretrain_gpt.py loads the plug-in.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/patch_megatron.sh --megatron DIR [--check | --reverse] [--help]

Applies the patch of patches/ that fits the Megatron-LM checkout DIR, then proves it: the help of
the patched pretrain_gpt.py has to show the plug-in's flags, else the patch is taken out again.
Applied already, it is proved and left as it is.
  --check     change nothing; exit status 0: applied and proved, 1: not applied, but it can be
  --reverse   take the patch out again
Exit status 2: DIR is refused, the proof failed, or the command line is wrong.

The version in DIR/megatron/core/package_info.py says which patch fits. The proof needs neither a
GPU nor data, but a Python with megatron_burst and all that pretrain_gpt.py imports.

Environment variables:
  PYTHON   the Python of the proof (default: python3, then python, from PATH)
END
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
flag=--context-parallel-algo # what the proof looks for

say() { printf 'patch_megatron: %s\n' "$*"; }
refuse() { printf 'patch_megatron: %s\n' "$*" >&2; exit 2; }

# The patch for the version $1 (MAJOR.MINOR), or nothing.
patch_for() {
    case $1 in
        0.19) echo core_v0.19.0.patch ;;
        0.20) echo main-2026-08.patch ;;
    esac
}

known="0.19 (tag core_v0.19.0) and 0.20 (main of August 2026)"

# Prints MAJOR.MINOR of the checkout.
version_of() {
    sed -n -E 's/^(MAJOR|MINOR) *= *([0-9]+).*/\2/p' "$1" | paste -s -d .
}

# git apply in the checkout, which need not be a repository, but may lie inside of one.
apply() {
    GIT_CEILING_DIRECTORIES=$(dirname -- "$megatron") git -C "$megatron" apply "$@" "$patch"
}

prove() {
    local python log
    python=${PYTHON:-$(command -v python3 || command -v python)} || refuse "no Python on PATH"
    log=$(cd -- "$megatron" && "$python" pretrain_gpt.py --help 2>&1) || true
    if [[ $log == *"$flag"* ]]; then
        say "proved: pretrain_gpt.py --help shows $flag and the other flags of the plug-in"
        return 0
    fi
    printf '%s\n' "$log" | tail -n 15 >&2
    say "$python pretrain_gpt.py --help does not show $flag" >&2
    return 1
}

megatron="" action=apply
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --megatron)
            [[ -n ${2:-} ]] || refuse "--megatron needs a directory"
            megatron=$2
            shift
            ;;
        --check | --reverse)
            [[ $action == apply ]] || refuse "--check and --reverse exclude each other"
            action=${1#--}
            ;;
        *) refuse "unknown argument $1; see --help" ;;
    esac
    shift
done
[[ -n $megatron ]] || refuse "--megatron DIR is missing; see --help"
command -v git >/dev/null || refuse "git is not on PATH"

info=megatron/core/package_info.py
if [[ ! -f $megatron/$info || ! -f $megatron/pretrain_gpt.py ]]; then
    refuse "$megatron is no checkout of Megatron-LM: it lacks $info or pretrain_gpt.py"
fi
megatron=$(cd -- "$megatron" && pwd -P)
version=$(version_of "$megatron/$info")
patch=$(patch_for "$version")
[[ -n $patch ]] || refuse "$info says version ${version:-unknown}; there are patches for $known"
say "$megatron: $info says $version, so patches/$patch"
patch=$root/patches/$patch

applied=no
if apply --reverse --check 2>/dev/null; then
    applied=yes
elif ! fault=$(apply --check 2>&1); then
    refuse "the patch does not fit this pretrain_gpt.py, which is not upstream's; put the lines of
$patch into it by hand, before it imports Megatron:
$fault"
fi

case $action-$applied in
    apply-yes)
        say "already applied"
        prove || exit 2
        ;;
    apply-no)
        apply
        if ! prove; then
            apply --reverse
            refuse "the patch was taken out again"
        fi
        say "applied"
        ;;
    check-yes)
        say "applied"
        prove || exit 2
        ;;
    check-no)
        say "not applied; it can be"
        exit 1
        ;;
    reverse-yes)
        apply --reverse
        say "taken out"
        ;;
    reverse-no) say "not applied, nothing to take out" ;;
esac
