#!/usr/bin/env bash
# Lint, check types and run the tests; every argument goes to pytest (bash scripts/test.sh tests/unit -k config).
# All of them run even when one fails, and the last line is pytest's summary. Two processes share them, but tests that start
# several ranks run one at a time (tests/conftest.py). `-n 0` is one process, for --pdb, say.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh || exit

status=0
.venv/bin/python -m ruff check . || status=1
.venv/bin/python -m ruff format --check . || status=1
.venv/bin/lint-imports --no-cache || status=1
.venv/bin/python -m mypy || status=1
.venv/bin/python -m pytest -n 2 "$@" || status=$?
exit "$status"
