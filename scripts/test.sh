#!/usr/bin/env bash
# Lint, check types and run the tests; every argument goes to pytest (bash scripts/test.sh tests/unit -k config).
# All checks run even when one fails. The last line is pytest's summary, or mypy's where the tests take less than its minute.
# Three processes share the tests, file by file (tests/conftest.py), since tests often wait. `-n 0` uses one process, as --pdb needs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh || exit
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --group torchrl ||
    echo "test: TorchRL could not be installed: the tests of its clients are skipped" >&2
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import PyTorch, and compiling it each time would take longer than the tests

status=0
.venv/bin/python -m ruff check . || status=1
.venv/bin/python -m ruff format --check . || status=1
.venv/bin/lint-imports --no-cache || status=1
.venv/bin/python -m mypy &
types=$!
.venv/bin/python -m pytest -n 3 --durations=15 "$@" || status=$?
wait "$types" || status=1
exit "$status"
