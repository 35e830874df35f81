#!/usr/bin/env bash
# Train a recipe, by reinforcement or, with `sft` before it, on the answers in its data:
#
#   bash scripts/train.sh [sft] RECIPE [--section.key value ...]
#
# It is `hotbunk train` or `hotbunk sft` of this clone's .venv (or HOTBUNK_VENV), whose --help says how many ranks there are, how a
# run takes several nodes, and what RESTARTS does. On Slurm, scripts/slurm.sh starts it on each node.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${HOTBUNK_VENV:-$root/.venv}/bin/python
command=train
if [ "${1:-}" = sft ]; then
    command=sft
    shift
fi
if [ ! -x "$python" ]; then
    echo "train: there is no .venv yet: run bash scripts/setup.sh first." >&2
    exit 2
fi
# The current folder may have other modules called trainer, generation or sharding, which are not to be imported.
export PYTHONSAFEPATH=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m hotbunk "$command" "${@:---help}"
