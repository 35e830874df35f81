#!/usr/bin/env bash
# Runs the CUDA side on the GPU in software: torch against the CPU, tests/gpu, hotbunk doctor on two devices, and runs of two steps.
# Makes .venv.softgpu first (environment.sh); runs of eight steps also need scripts/setup.sh's .venv. Takes an hour on two quiet cores.
#
#   check.sh [NAME ...]    only these: torch, late, gpu (all of tests/gpu) or a file of it (segments_cuda), doctor, or a run of the list below
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export HOTBUNK_VENV=${SOFTGPU_VENV:-$PWD/.venv.softgpu}
bash tests/softgpu/environment.sh || exit
python=$HOTBUNK_VENV/bin/python cpu_python=$PWD/.venv/bin/python
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

# Makes, on the CPU, the models that runs start from.
starts() (
    export SOFTGPU_OFF=1
    [ -e runs/shapes_start/model ] || "$python" -m scripts.examples.make shapes
    [ -e runs/arithmetic_start/model ] || { "$python" -m scripts.examples.make arithmetic &&
        "$python" -m trainer sft scripts/recipes/arithmetic_sft.yaml --resume none; }
)

# Two steps of a recipe (arithmetic), with every sync verified in full and a gap (1e-4 nats) of float32's:
# [recipe=NAME] [limit=NATS] run NAME RANKS [--section.key value ...]
run() { check "$1" steps 2 "$1" "$2" --eval.every 0 --batch.prompts_per_step 4 "${@:3}"; }
steps() {
    local count=$1 name=softgpu_$2 ranks=$3
    shift 3
    starts || return
    "$python" -m trainer.launcher --nproc-per-node "$ranks" -m trainer train "scripts/recipes/${recipe:-arithmetic}.yaml" --run.name "$name" \
        --checkpoint.resume none --run.steps "$count" --run.step_deadline_s 900 --run.first_step_deadline_s 900 --sync.timeout_s 600 \
        --engine.start_timeout_s 900 "$@" || return
    "$python" - "runs/$name/metrics.jsonl" "${limit:-1e-4}" "$count" <<'END'
import json, sys
steps = [row for row in map(json.loads, open(sys.argv[1])) if "gap/max" in row]
gaps, verified = [row["gap/max"] for row in steps], [row["sync/verified"] for row in steps]
print("largest gap between trainer and engine:", gaps, "verified:", verified)
sys.exit(not (len(steps) == int(sys.argv[3]) and max(gaps) <= float(sys.argv[2]) and verified[-1] >= len(steps)))
END
}

# Eight steps, and the same on the CPU, in its own environment: greedy answers to the held-out prompts earn the same before the first step.
# Other samples are drawn from then on, so that what is learned is printed and not compared.
eight() { check "$1" eight_steps "$@"; }
eight_steps() {
    local name=$1 ranks=$2
    shift 2
    set -- --eval.every 8 --eval.datasets.held_out.size 64 --batch.prompts_per_step 8 --policy.lr 1e-4 "$@"
    steps 8 "$name" "$ranks" "$@" && python=$cpu_python steps 8 cpu_"$name" "$ranks" "$@" || return
    "$python" - runs/softgpu_"$name" runs/softgpu_cpu_"$name" <<'END'
import json, sys
rewards = [[row["eval/reward"] for row in map(json.loads, open(f"{run}/metrics.jsonl")) if "eval/reward" in row] for run in sys.argv[1:]]
print("held-out reward, on the GPU in software and on the CPU:", rewards)
sys.exit(rewards[0][0] != rewards[1][0])
END
}

check torch "$python" -m pytest -n 0 -q tests/softgpu
check late env SOFTGPU_LATE=1 "$python" -m pytest -n 0 -q tests/softgpu
for file in tests/gpu/test_*.py; do
    name=${file#tests/gpu/test_} name=${name%.py}
    [[ $wanted == *" gpu "* ]] && wanted+="$name "
    check "$name" "$python" -m pytest -n 0 -q -s "$file"
done
check doctor "$python" -m trainer doctor --output "$work/doctor"
run staged 1 --sync.way staged
run pull 1 --sync.way pull
run zero_copy 1 --sync.way zero_copy
run staged_ranks 2 --sync.way staged
run pull_ranks 2 --sync.way pull
run ppo 1 --algorithm.preset ppo
run slices 1 --rollout.slice_tokens 3
run offload_optimizer 1 --sync.way staged --policy.offload optimizer
run offload_all 2 --sync.way staged --policy.offload all
run host 1 --policy.update_on host
run host_ranks 2 --policy.update_on host
run host_zero_copy 1 --sync.way zero_copy --policy.update_on host
run muon 2 --policy.optimizer muon
for stage in 1 2 3; do run zero$stage 2 --policy.backend deepspeed --policy.zero_stage $stage; done
limit=0.15 run lora 1 --lora.rank 8 --policy.dtype bfloat16 --batch.prompts_per_step 2 --algorithm.group_size 2
run lora_merged 2 --lora.rank 8 --lora.sync merged
run sequence_parallel 2 --policy.sequence_parallel 2
run apart 2 --engine.placement ranks
run delta 2 --engine.placement ranks --sync.delta true
run ray 2 --engine.placement ray
run tensor_parallel 2 --engine.tensor_parallel_size 2
limit=0.15 run bfloat16 1 --policy.dtype bfloat16
recipe=shapes run images 1
eight eight_staged 1 --sync.way staged
eight eight_zero_copy 1 --sync.way zero_copy
eight eight_pull 1 --sync.way pull
eight eight_staged_ranks 2 --sync.way staged
eight eight_pull_ranks 2 --sync.way pull
[ "${#failed[@]}" = 0 ] && echo "softgpu: all passed in $SECONDS s" && exit
printf 'softgpu: FAILED: %s\n' "${failed[@]}"
exit 1
