#!/usr/bin/env bash
# Ten minutes on a new GPU: kernels first, then engines one after another, each check with a deadline, a log and a line of JSON.
#
#   bash scripts/try_gpu.sh [--minutes N] [--cpu] [--output FOLDER] [NAME ...]
#
# PYTHON names an interpreter (default: .venv's). Nothing is installed or downloaded. What a machine or an environment lacks, such as vLLM,
# leaves out the checks that need it. docs/state-of-testing.md says what the checks are and where to send the results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
exec "${PYTHON:-.venv/bin/python}" scripts/try_gpu.py "$@"
