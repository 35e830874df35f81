#!/usr/bin/env bash
# An agent, small enough for a laptop: make a tiny model, warm-start it on transcripts that mostly guess or stop halfway, and let it
# learn by reinforcement to use its calculator over several turns. Arguments go to the reinforcement:
#
#   bash scripts/calculator.sh [--section.key value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

echo "· making a tiny model and its data"
.venv/bin/python scripts/make_tiny.py runs/calculator_start/tiny --layers 3 --intermediate-size 256
.venv/bin/python scripts/calculator.py runs/calculator_start/data
# Two ranks, or one where there is a single GPU, which two cannot share.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
export NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus == 1 ? 1 : 2))}
echo "· warm-starting it on transcripts that mostly guess"
bash scripts/train.sh sft scripts/recipes/calculator_sft.yaml --resume none
echo "· training it by reinforcement to calculate"
exec bash scripts/train.sh scripts/recipes/calculator_agent.yaml --checkpoint.resume none "$@"
