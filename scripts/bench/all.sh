#!/usr/bin/env bash
# Makes every table and picture of figures that README and docs show, one after the other.
set -euo pipefail

usage() {
    cat <<'END'
Usage: scripts/bench/all.sh [--only NAME...] [options]

Runs every benchmark and tool whose pages, tables and pictures README and docs show, and writes them
where they are. Needs a quiet machine (most wait for one, and in the end refuse), no GPU, and for the
two nodes root and iproute2. What fails does not stop the rest. After an interruption or a failure the
same command goes on; after a whole series it begins anew.
  --only NAME...   these steps alone
  --list           print, as a table in Markdown, every step, its commands, what it makes, minutes
  --dry-run        print the commands that would run
  --again          forget what an interrupted series has done
BURST_PYTHON is the Python to use (default: that of scripts/setup.sh), BURST_BENCH_DONE the directory
that remembers what is done (default: runs/bench/done).
END
}

# A step is: name | minutes on two cores | what it makes | commands. All but cp and rm are Python's. {results} is the directory of the pages, {runs} one for what is not kept.
steps() {
    cat <<'END'
plans | 1 | docs/plan.svg docs/plan-double.svg | scripts/docs/plan_figure.py --ranks-per-node 4 --output docs/plan.svg ; scripts/docs/plan_figure.py --nodes 2 --ranks-per-node 2 --output docs/plan-double.svg
tables | 1 | docs/flags.md docs/api.md docs/support.md | scripts/docs/flags_table.py --write docs/flags.md ; scripts/docs/api.py ; scripts/docs/support_table.py --write docs/support.md
accuracy | 1 | {results}/cpu_accuracy.md | scripts/bench/accuracy.py
gradient_return | 4 | {results}/cpu_gradient_return.md | scripts/bench/accuracy.py --heads 8:8 8:2 --ring kv query --return chain home --grad-dtype float32 model --nodes 1 2 4
loss | 3 | {results}/cpu_loss.md docs/loss-memory.svg | scripts/bench/loss.py ; scripts/bench/plot.py {results}/cpu_loss.csv --output docs/loss-memory.svg
recompute | 3 | {results}/cpu_recompute.md docs/recompute.svg | scripts/bench/recompute.py ; scripts/bench/plot.py {results}/cpu_recompute.csv --output docs/recompute.svg
tiles | 22 | {results}/cpu_tiles.md | scripts/bench/tiles.py
attention | 6 | {results}/cpu_attention.md | scripts/bench/attention.py
two_nodes | 40 | {results}/cpu_two_nodes.md docs/two-nodes.svg | scripts/bench/two_nodes.py --suite ; scripts/bench/plot.py {results}/cpu_two_nodes.csv --output docs/two-nodes.svg
planner | 1 | docs/planner.md docs/planner.csv docs/planner.svg | scripts/docs/planner.py --write docs/planner.md
end_to_end | 18 | {results}/cpu_end_to_end.md | scripts/bench/end_to_end.py
END
}

say() { printf 'all: %s\n' "$*" >&2; }
die() { say "$@"; exit 2; }

only=() listing=no again=no dry_run=no
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --list) listing=yes ;;
        --dry-run) dry_run=yes ;;
        --again) again=yes ;;
        --only)
            (($# > 1)) || die "--only needs names of steps"
            while (($# > 1)) && [[ $2 != --* ]]; do only+=("$2"); shift; done ;;
        *) die "unknown option $1; --help lists them" ;;
    esac
    shift
done
finished=$(realpath -m -- "${BURST_BENCH_DONE:-$(dirname -- "$0")/../../runs/bench/done}")
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

names=() minutes=() makes=() commands=()
while IFS='|' read -r name time made line; do
    line=${line//'{results}'/scripts/bench/results}
    names+=("${name// /}") minutes+=("${time// /}") commands+=("${line//'{runs}'/runs/bench}")
    makes+=("${made//'{results}'/scripts/bench/results}")
done < <(steps)

for name in ${only[@]+"${only[@]}"}; do
    [[ " ${names[*]} " == *" $name "* ]] || die "--only $name: the steps are ${names[*]}"
done

# The commands of step $1, a line each, their program first; $2 is the Python.
commands_of() {
    local line
    while read -r line; do
        case $line in
            "cp "* | "rm "*) printf '%s\n' "$line" ;;
            *) printf '%s %s\n' "$2" "$line" ;;
        esac
    done < <(tr ';' '\n' <<<"${commands[$1]}")
}

list() {
    local i shown files
    printf '| step | command | makes | minutes |\n| --- | --- | --- | ---: |\n'
    for i in "${!names[@]}"; do
        shown=$(commands_of "$i" python | sed 's/.*/`&`<br>/' | tr -d '\n')
        files=$(printf '`%s`<br>' ${makes[i]})
        printf '| %s | %s | %s | %s |\n' \
            "${names[i]}" "${shown%<br>}" "${files%<br>}" "${minutes[i]}"
    done
}

run_step() {
    local line words
    while read -ru 3 line; do
        read -ra words <<<"$line"
        "${words[@]}" </dev/null || return
    done 3< <(commands_of "$1" "$python")
}

if [[ $listing == yes ]]; then list; exit 0; fi
if [[ $dry_run == yes ]]; then
    python=python
else
    python=${BURST_PYTHON:-}
    if [[ -z $python ]]; then
        # shellcheck source=scripts/setup.sh
        source scripts/setup.sh
        burst_setup || exit 1
        python=$burst_python
    fi
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
    export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::UserWarning}
    if [[ $again == yes ]]; then rm -rf -- "$finished"; fi
    mkdir -p -- "$finished"
fi

failed=() chosen=()
for i in "${!names[@]}"; do
    name=${names[i]}
    if ((${#only[@]})) && [[ " ${only[*]} " != *" $name "* ]]; then continue; fi
    chosen+=("$finished/$name")
    if [[ $again == no && -e $finished/$name ]]; then say "$name: done before"; continue; fi
    if [[ $dry_run == yes ]]; then commands_of "$i" "$python"; continue; fi
    say "$name: about ${minutes[i]} minutes, makes ${makes[i]}"
    if run_step "$i"; then touch -- "$finished/$name"; else failed+=("$name"); fi
done
if [[ $dry_run == yes ]]; then exit 0; fi
if ((${#failed[@]})); then
    say "failed: ${failed[*]}; the same command tries them again"
    exit 1
fi
rm -f -- "${chosen[@]}"
