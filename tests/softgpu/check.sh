#!/usr/bin/env bash
# Runs the CUDA side on the GPU in software: torch against the CPU, tests/gpu, hotbunk doctor on two devices, and runs of two steps.
# Makes .venv.softgpu first (environment.sh). Takes half an hour on two quiet cores.
#
#   check.sh [NAME ...]    only these: torch, late, gpu, doctor, or a run of the list below
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export HOTBUNK_VENV=${SOFTGPU_VENV:-$PWD/.venv.softgpu}
bash tests/softgpu/environment.sh || exit
python=$HOTBUNK_VENV/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SOFTGPU_DEVICES=${SOFTGPU_DEVICES:-2} SOFTGPU_STATE=$work/state SOFTGPU_LOG=$work/log PYTHONSAFEPATH=1 PYTHONPATH=$PWD
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TMPDIR=${TMPDIR:-/tmp}
failed=()
wanted=" $* "

# Runs a command, and reports what it did that CUDA forbids.
check() {
    local name=$1
    shift
    [ "$wanted" = "  " ] || [[ $wanted == *" $name "* ]] || return 0
    echo "== GPU in software: $name"
    : >"$SOFTGPU_LOG"
    "$@" || failed+=("$name")
    sed 's/^\[softgpu [0-9]*\] //' "$SOFTGPU_LOG" | sort | uniq -c
}

# Two steps of the arithmetic recipe, whose gap must be that of float32: run NAME RANKS [--section.key value ...]
run() { check "$1" two_steps "$@"; }
two_steps() {
    local name=softgpu_$1 ranks=$2
    shift 2
    "$python" -m trainer.launcher --nproc-per-node "$ranks" -m trainer train scripts/recipes/arithmetic.yaml --checkpoint.resume none \
        --run.name "$name" --run.steps 2 --eval.every 0 --batch.prompts_per_step 8 --run.step_deadline_s 900 \
        --run.first_step_deadline_s 900 --sync.timeout_s 600 --engine.start_timeout_s 900 "$@" || return
    "$python" - "runs/$name/metrics.jsonl" <<'END'
import json, sys
gaps = [step["gap/max"] for step in map(json.loads, open(sys.argv[1])) if "gap/max" in step]
print("largest gap between trainer and engine:", max(gaps))
sys.exit(not len(gaps) or max(gaps) > 1e-4)
END
}

check torch "$python" -m pytest -n 0 -q tests/softgpu
check late env SOFTGPU_LATE=1 "$python" -m pytest -n 0 -q tests/softgpu
check gpu "$python" -m pytest -n 0 -q tests/gpu
check doctor "$python" -m trainer doctor --output "$work/doctor"
if [ ! -e runs/arithmetic_start/model ]; then # on the CPU
    (
        export SOFTGPU_OFF=1
        "$python" scripts/make_tiny.py runs/arithmetic_start/tiny && "$python" scripts/arithmetic.py runs/arithmetic_start/data &&
            "$python" -m trainer sft scripts/recipes/arithmetic_sft.yaml --resume none
    ) || exit
fi
run staged 1 --sync.way staged
run pull 1 --sync.way pull
run zero_copy 1 --sync.way zero_copy
run staged_ranks 2 --sync.way staged
run pull_ranks 2 --sync.way pull
run ppo 1 --algorithm.preset ppo
[ "${#failed[@]}" = 0 ] && echo "softgpu: all passed in $SECONDS s" && exit
printf 'softgpu: FAILED: %s\n' "${failed[@]}"
exit 1
