#!/usr/bin/env bash
# Lint, check types and run the tests; every argument goes to pytest (bash scripts/test.sh tests/unit -k config).
# All of them run even when one fails, and the last line is pytest's summary. `-n 2` shares them out to two processes; some
# tests that look for what a run leaves behind may then mistake a neighbour's shared memory for it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh || exit

status=0
.venv/bin/python -m ruff check . || status=1
.venv/bin/python -m ruff format --check . || status=1
.venv/bin/python -m mypy || status=1
.venv/bin/python -m pytest "$@" || status=$?
exit "$status"
