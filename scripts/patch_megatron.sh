#!/usr/bin/env bash
# Applies or removes the patch by which a fork's own scripts load the plug-in.
set -euo pipefail

usage() {
    cat <<'END_OF_TEXT'
Usage: scripts/patch_megatron.sh --megatron DIR [--check | --reverse] [--help]

Applies patches/launch.patch to the Megatron-LM checkout DIR, then proves it: each patched script trains
a tiny model for one step, and the model has to have the plug-in's attention and loss, else the patch is
taken out again. Applied already, it is proved and left as it is.
  --check     change nothing; exit status 0: applied and proved, 1: not applied, but it can be
  --reverse   take the patch out again
Exit status 2: DIR is refused, the proof failed, or the command line is wrong.

The proof needs neither a GPU nor data, but a Python with megatron_burst and all that the scripts import,
and what training in DIR needs anyway: a C++ compiler for Megatron's data-set helpers.

Environment variables:
  PYTHON   the Python of the proof (default: python3, then python, from PATH)
END_OF_TEXT
}

# A tiny model, one step, and what the log says when it was ours.
flags=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 255 --mock-data
    --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --lr-decay-style constant
    --split "100,0,0" --eval-iters 0 --eval-interval 1000 --log-interval 1
    --context-parallel-algo burst --lm-head-loss chunked
)
signs=("burst attention: burst on" "chunked LM head loss: " "lm loss: ")
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
patch=$(cd -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/../patches" && pwd)/launch.patch

# git apply in the checkout, which need not be a repository, but may lie inside of one.
apply() {
    GIT_CEILING_DIRECTORIES=$(dirname -- "$megatron") git -C "$megatron" apply "$@" "$patch"
}

prove() {
    local python script sign log pattern
    python=${PYTHON:-$(command -v python3 || command -v python)} || refuse "no Python on PATH"
    if [[ $python == */* && $python != /* ]]; then python=$PWD/$python; fi
    for script in "${scripts[@]}"; do
        pattern=()
        [[ $script == pretrain_gpt.py ]] || pattern=(--hybrid-layer-pattern "*-*-")
        log=$(cd -- "$megatron" && MEGATRON_BURST_CPU=1 "$python" -m torch.distributed.run \
            --local-addr localhost --standalone --nproc-per-node 1 "$script" "${flags[@]}" "${pattern[@]}" 2>&1) || true
        for sign in "${signs[@]}"; do
            [[ $log == *"$sign"* ]] && continue
            tail -n 30 <<<"$log" >&2
            say "$script did not train a model of ours: its log lacks '$sign'" >&2
            return 1
        done
    done
    say "proved: ${scripts[*]} train one step with the plug-in's attention and loss"
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
