#!/usr/bin/env bash
# Makes a base model of 3.1M parameters and problems with answers that can be checked, and trains it as docs/results.md shows:
#
#   bash scripts/results/run.sh short              # model, warm start and one run of 10 steps, with its report: a quarter of an hour
#   bash scripts/results/run.sh                    # every setting of the page with three seeds: hours; what is finished is not run again
#   bash scripts/results/run.sh grpo race          # what is named alone
#   bash scripts/results/run.sh start              # model and warm start alone, as scripts/bench/race.py needs them
#
# Every run continues where it was stopped. SEEDS="0" trains one seed, and RESTARTS=3 restarts a run that fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/setup.sh
python=${HOTBUNK_VENV:-$PWD/.venv}/bin/python
if ! "$python" -c 'import reasoning_gym' 2>/dev/null; then
    echo "· installing reasoning-gym"
    "$python" -m pip --disable-pip-version-check --no-input --quiet install reasoning-gym==0.1.25 ||
        { echo "results: reasoning-gym could not be installed; give pip an index that has it (PIP_INDEX_URL), then give the same command again" >&2; exit 2; }
fi
export PYTHONSAFEPATH=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
exec "$python" -m scripts.results.run "$@"
