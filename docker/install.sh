#!/usr/bin/env bash
# All that the Dockerfile runs: installs megatron-core and the plug-in beside the image's own torch.
set -euo pipefail

usage() {
    cat <<'END'
Usage: docker/install.sh [--megatron DIR] [--user ID] [--help] [arguments of pip install]

Installs megatron-core and megatron_burst into a Python that has its own torch. Every package that
is there already stays at its version, and what pip adds has that of scripts/constraints.txt: the script
fails if a package was replaced. The doctor prints the versions.
  --megatron DIR  a checkout of Megatron-LM: its data-set helpers are compiled, the patch of patches/
                  is applied, and a tiny model is trained to prove it
  --user ID       make the user "burst" with this number, and a home

Environment variables:
  PYTHON         the Python to install into (default: python3 from PATH)
  MEGATRON_CORE  the version of megatron-core (default: 0.19.2)
END
}

source_dir=$(cd -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/.." && pwd)
python=${PYTHON:-python3}
megatron_core=${MEGATRON_CORE:-0.19.2}
megatron="" user="" more=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --megatron) megatron=${2:?--megatron wants a folder}; shift ;;
        --user) user=${2:?--user wants a number}; shift ;;
        *) more+=("$1") ;;
    esac
    shift
done

say() { printf -- '-- %s\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }

# Every installed package as name==version, in pip's form; then the lines of a file for the others.
installed() {
    "$python" - "${1:-/dev/null}" <<'END'
import importlib.metadata
import re
import sys

packages = [(d.metadata["Name"] or "", d.version) for d in importlib.metadata.distributions()]
with open(sys.argv[1]) as file:
    packages += [line.strip().split("==") for line in file if "==" in line]
found = {}
for name, version in packages:  # the first on the path is the one that is used
    found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
for name in sorted(found.keys() - {"", "megatron-core", "megatron-burst"}):
    print(f"{name}=={found[name]}")
END
}

torch_version() { "$python" -c 'import torch; print(torch.__version__, torch.__file__)'; }

install() {
    local before constraints
    before=$(torch_version) || fail "$python cannot import torch: this is for an image that has one"
    constraints=$(mktemp)
    # shellcheck disable=SC2064
    trap "rm -f '$constraints' '$constraints.pins' '$constraints.after'" EXIT
    installed >"$constraints"
    installed "$source_dir/scripts/constraints.txt" >"$constraints.pins"
    say "installing; $(wc -l <"$constraints") packages stay as they are"
    # The image's own PIP_CONSTRAINT would hold for packages that it does not have, too.
    PIP_CONSTRAINT="" "$python" -m pip install --no-cache-dir --constraint "$constraints.pins" \
        "${source_dir}[train]" "megatron-core==$megatron_core" ${more[@]+"${more[@]}"}
    installed >"$constraints.after"
    local replaced
    replaced=$(comm -23 <(sort "$constraints") <(sort "$constraints.after"))
    [[ -z $replaced ]] || fail "these packages were replaced or removed:"$'\n'"$replaced"
    [[ $(torch_version) == "$before" ]] || fail "torch was $before and is $(torch_version)"
}

patch_megatron() {
    [[ -f $megatron/pretrain_gpt.py ]] || fail "$megatron is no checkout of Megatron-LM; docker build\
 --build-context megatron-lm=DIR gives one"
    say "compiling the data-set helpers of $megatron"
    "$python" -c 'import pathlib, sys
from megatron_burst.data_checks import dataset_helpers
sys.exit(dataset_helpers.make(pathlib.Path(sys.argv[1])) or 0)' "$megatron/megatron/core/datasets" ||
        fail "the data-set helpers of $megatron do not compile"
    say "patching $megatron"
    PYTHON=$(command -v "$python") bash "$source_dir/scripts/patch_megatron.sh" --megatron "$megatron"
}

# Megatron's parser and all validation, on a command line that has to pass.
prove() {
    say "the plug-in on a small command line"
    MEGATRON_BURST_CPU=1 "$python" -m megatron_burst doctor -- \
        --context-parallel-algo burst --context-parallel-size 1 --calculate-per-token-loss \
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \
        --max-position-embeddings 64 --position-embedding-type rope --attention-dropout 0 \
        --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 \
        --eval-interval 1 --tokenizer-type NullTokenizer --vocab-size 255 --mock-data
}

install
if [[ -n $megatron ]]; then patch_megatron; fi
prove
if [[ -n $user ]]; then
    say "user burst, $user"
    useradd --create-home --non-unique --uid "$user" burst
fi
