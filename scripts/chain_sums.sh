#!/usr/bin/env bash
# Procedural data, small enough for a laptop and without a network: reasoning-gym's sums (pip install reasoning-gym). A tiny model is
# warm-started on transcripts that mostly overlook a minus, and learns by reinforcement to look at the sign. Arguments go to the
# reinforcement:
#
#   bash scripts/chain_sums.sh [--section.key value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
start=runs/chain_sums_start
.venv/bin/python -c 'import reasoning_gym' 2>/dev/null || { echo "chain_sums: pip install reasoning-gym first" >&2; exit 2; }

echo "· making a tiny model and its data"
.venv/bin/python scripts/make_tiny.py $start/tiny --layers 3 --intermediate-size 256
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} .venv/bin/python scripts/chain_sums.py $start/data
# Two ranks, or one where there is a single GPU, which two cannot share.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
export NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus == 1 ? 1 : 2))}
echo "· warm-starting it on sums that mostly overlook a minus"
bash scripts/train.sh sft scripts/recipes/chain_sums_sft.yaml --resume none
echo "· training it by reinforcement to look at the sign"
exec bash scripts/train.sh scripts/recipes/chain_sums.yaml --checkpoint.resume none "$@"
