#!/usr/bin/env bash
# Training, small enough for a laptop: install, make a tiny model, warm-start it on additions that mostly forget their carries, and
# let it learn to carry by reinforcement, on two ranks with real vLLM engines. Arguments go to the reinforcement:
#
#   bash scripts/smoke.sh [--section.key value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

echo "· making a tiny model and its data"
.venv/bin/python scripts/make_tiny.py runs/arithmetic_start/tiny
.venv/bin/python scripts/arithmetic.py runs/arithmetic_start/data
# Two ranks, or one where there is a single GPU, which two cannot share.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
export NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus == 1 ? 1 : 2))}
echo "· warm-starting it on additions that mostly forget their carries"
bash scripts/train.sh sft scripts/recipes/arithmetic_sft.yaml --resume none
echo "· training it by reinforcement to carry"
exec bash scripts/train.sh scripts/recipes/arithmetic.yaml --checkpoint.resume none "$@"
