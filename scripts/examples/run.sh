#!/usr/bin/env bash
# Trains on an example task that suits a laptop: installs, makes a tiny model, warm-starts it on answers that are mostly wrong in one way,
# and has it improve by reinforcement, on two ranks with real vLLM engines. Arguments go to the reinforcement:
#
#   bash scripts/examples/run.sh arithmetic|calculator|chain_sums|shapes [--section.key value ...]
#
#   arithmetic   additions that mostly lack their carries
#   calculator   an agent that mostly guesses, or stops after the first of two calls
#   chain_sums   reasoning-gym's sums (pip install reasoning-gym), in which a minus is mostly overlooked
#   shapes       pictures of shapes, mostly named wrong
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
task=${1:-} recipes=scripts/recipes
[ -e "scripts/examples/tasks/$task.py" ] || { echo "run: name a task: arithmetic, calculator, chain_sums or shapes" >&2; exit 2; }
shift
bash scripts/setup.sh

echo "· making a tiny model and its data"
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} .venv/bin/python -m scripts.examples.make "$task"
# There are two ranks, or one on a machine with a single GPU, which two ranks cannot share.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
export NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus == 1 ? 1 : 2))}
if [ -e $recipes/"$task"_sft.yaml ]; then
    echo "· warm-starting it on answers that are mostly wrong"
    bash scripts/train.sh sft $recipes/"$task"_sft.yaml --resume none
fi
echo "· training it by reinforcement"
exec bash scripts/train.sh $recipes/"$task".yaml --checkpoint.resume none "$@"
