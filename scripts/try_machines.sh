#!/usr/bin/env bash
# Runs README's first two commands in a fresh clone for each Python and each build of torch that this machine has, and on a processor with
# AMX both with AMX and without. Prints a table of the results. Each row takes half an hour on two cores, and 7 GiB.
#
#   bash scripts/try_machines.sh                       all rows: Python 3.11, 3.12 and 3.13; PyPI's torch, and the build for CPUs
#   bash scripts/try_machines.sh 3.12-pypi 3.13-cpu    these rows; a suffix -amx or -hidden chooses between with AMX and without
#
# The clones are in .machines while their rows run; their logs stay there.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$PWD/.machines
mkdir -p "$folder"
processor=$(awk -F': ' '/model name/ {print $2; exit}' /proc/cpuinfo)
uses=-
grep -qw amx_tile /proc/cpuinfo && uses="amx hidden"
rows=()

last_line() { grep -aE "$2" "$1" | tail -n 1 | sed -E 's/^=+ | =+$//g'; }

try() { # PYTHON BUILD AMX
    local name=$1-$2-$3 clone=$folder/$1-$2-$3 python smoke tests torch
    python=python$1
    "$python" -c "" 2>/dev/null || { rows+=("| $1 | $2 | $3 | this Python is not installed | |"); return; }
    rm -rf "$clone"
    git clone --quiet . "$clone"
    (
        cd "$clone" || exit
        export PYTHON=$python HOTBUNK_DEVICE=cpu
        [ "$2" = cpu ] || export PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS="" PIP_EXTRA_INDEX_URL=""
        [ "$3" != hidden ] || export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 # keeps the trainer's torch from using AMX; engines never use it
        bash scripts/setup.sh || exit
        .venv/bin/python -c 'import torch; print("torch", torch.__version__)'
        bash scripts/smoke.sh --run.steps 8 --eval.every 8 && echo "smoke: passes" || echo "smoke: fails"
        bash scripts/test.sh
        echo "test.sh: exit code $?"
    ) >"$folder/$name.log" 2>&1
    torch=$(last_line "$folder/$name.log" "^torch ")
    smoke=$(last_line "$folder/$name.log" "^smoke: ")
    tests=$(last_line "$folder/$name.log" "^=+ .*(passed|failed|error).* in ")
    [ "$2" != cpu ] || [[ $torch == *+cpu ]] || smoke="pip found no build for CPUs: ${smoke#smoke: }"
    rows+=("| $1 | ${torch#torch } | $3 | ${smoke#smoke: } | ${tests:-did not end, see $name.log}, $(last_line "$folder/$name.log" "^test.sh: ") |")
    rm -rf "$clone"
}

for combination in "${@:-3.11 3.12 3.13}"; do
    for one in $combination; do
        IFS=- read -r release build amx <<<"$one"
        for build in ${build:-cpu pypi}; do
            for use in ${amx:-$uses}; do try "$release" "$build" "$use"; done
        done
    done
done
echo
echo "$processor, $(nproc) cores, $(git rev-parse --short HEAD), $(date +%F)"
echo
printf '%s\n' "| Python | torch | AMX | smoke.sh | test.sh |" "|---|---|---|---|---|" "${rows[@]}"
