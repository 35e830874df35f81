#!/usr/bin/env bash
# Builds the wheel of the last commit, installs it into an empty environment outside the clone, and trains there with its commands only:
#
#   bash scripts/try_wheel.sh [FOLDER]     FOLDER gets all files; it must not exist yet (default: a new folder in /tmp)
#
# As with scripts/setup.sh, PYTHON names an interpreter, and PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes pip install
# PyTorch's build for CPUs. pip installs everything from the index, which takes some minutes and 2 GiB, or 6.5 with PyPI's PyTorch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$(mktemp -du /tmp/hotbunk-wheel-XXXXXX)}
mkdir "$folder"
folder=$(cd "$folder" && pwd)
lock=$root/scripts/requirements/cpu.txt
python=$folder/env/bin/python
unset PYTHONPATH

pip() { "$python" -m pip --disable-pip-version-check --no-input --quiet "$@"; }

say() { echo "== $1 ($SECONDS s)"; }

say "build the wheel"
mkdir "$folder"/source "$folder"/work
git -C "$root" archive HEAD | tar -x -C "$folder"/source
"${PYTHON:-python3}" -m venv "$folder"/env
pip wheel --no-deps --wheel-dir "$folder" "$folder"/source
rm -r "$folder"/source
say "install PyTorch, the rest of the lock, then the wheel with its own requirements"
pip install --constraint "$lock" torch setuptools
pip install --no-deps --no-build-isolation --requirement "$lock"
pip install "$folder"/hotbunk-*.whl

cd "$folder"/work
export PATH=$folder/env/bin:$PATH
say "import"
"$python" -c 'import hotbunk; print(hotbunk.__file__, *(getattr(hotbunk, name).__name__ for name in ("ShardingManager", "TrainConfig", "VllmGeneration")))'
say "hotbunk new"
hotbunk new mine
say "hotbunk train"
hotbunk train mine/recipe.yaml
say "hotbunk generate"
hotbunk generate runs/mine --prompt "digits, please"
say "try_wheel: the wheel in $folder needs nothing of the clone"
