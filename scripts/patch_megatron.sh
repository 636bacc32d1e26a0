#!/usr/bin/env bash
# Applies or removes the patch by which a fork's own scripts load the plug-in.
set -euo pipefail

usage() {
    cat <<'END_OF_TEXT'
Usage: scripts/patch_megatron.sh --megatron DIR [--check | --reverse] [--help]

Applies the patch of patches/ that fits the Megatron-LM checkout DIR, then proves it: the help of
the patched scripts has to show the plug-in's flags, else the patch is taken out again.
Applied already, it is proved and left as it is.
  --check     change nothing; exit status 0: applied and proved, 1: not applied, but it can be
  --reverse   take the patch out again
Exit status 2: DIR is refused, the proof failed, or the command line is wrong.

The version in DIR/megatron/core/package_info.py says which patch fits. The proof needs neither a
GPU nor data, but a Python with megatron_burst and all that the scripts import.

Environment variables:
  PYTHON   the Python of the proof (default: python3, then python, from PATH)
END_OF_TEXT
}

flag=--context-parallel-algo # what the proof looks for
say() { printf 'patch_megatron: %s\n' "$*"; }
refuse() { say "$@" >&2; exit 2; }

megatron="" action=apply
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --megatron) megatron=${2:-}; [[ -n $megatron ]] || refuse "--megatron needs a directory"; shift ;;
        --check | --reverse)
            [[ $action == apply ]] || refuse "--check and --reverse exclude each other"
            action=${1#--} ;;
        *) refuse "unknown argument $1; see --help" ;;
    esac
    shift
done
[[ -n $megatron ]] || refuse "--megatron DIR is missing; see --help"
command -v git >/dev/null || refuse "git is not on PATH"

info=megatron/core/package_info.py
scripts=(pretrain_gpt.py pretrain_hybrid.py)
for file in "$info" "${scripts[@]}"; do
    [[ -f $megatron/$file ]] || refuse "$megatron is no checkout of Megatron-LM: it lacks $file"
done
megatron=$(cd -- "$megatron" && pwd -P)
version=$(sed -n -E 's/^(MAJOR|MINOR) *= *([0-9]+).*/\2/p' "$megatron/$info" | paste -s -d .)
case $version in
    0.19) patch=core_v0.19.0.patch ;;
    0.20) patch=main-2026-08.patch ;;
    *) refuse "$info says version ${version:-unknown}; there are patches for 0.19 (tag core_v0.19.0)" \
        "and 0.20 (main of August 2026)" ;;
esac
say "$megatron: $info says $version, so patches/$patch"
patch=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../patches" && pwd)/$patch

# git apply in the checkout, which need not be a repository, but may lie inside of one.
apply() {
    GIT_CEILING_DIRECTORIES=$(dirname -- "$megatron") git -C "$megatron" apply "$@" "$patch"
}

prove() {
    local python script log
    python=${PYTHON:-$(command -v python3 || command -v python)} || refuse "no Python on PATH"
    for script in "${scripts[@]}"; do
        log=$(cd -- "$megatron" && "$python" "$script" --help 2>&1) || true
        if [[ $log != *"$flag"* ]]; then
            tail -n 15 <<<"$log" >&2
            say "$python $script --help does not show $flag" >&2
            return 1
        fi
    done
    say "proved: --help of ${scripts[*]} shows $flag and the other flags of the plug-in"
}

applied=no
if apply --reverse --check 2>/dev/null; then
    applied=yes
elif ! fault=$(apply --check 2>&1); then
    refuse "the patch does not fit these scripts, which are not upstream's; put the lines of
$patch into them by hand, before they import Megatron:
$fault"
fi
case $action-$applied in
    apply-yes | check-yes) say "already applied"; prove || exit 2 ;;
    apply-no)
        apply
        prove || { apply --reverse; refuse "the patch was taken out again"; }
        say "applied" ;;
    check-no) say "not applied; it can be"; exit 1 ;;
    reverse-yes) apply --reverse; say "taken out" ;;
    reverse-no) say "not applied, nothing to take out" ;;
esac
