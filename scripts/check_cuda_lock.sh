#!/usr/bin/env bash
# Checks the CUDA lock as far as that is possible without a GPU:
#
# - it can be installed, and is complete;
# - with an empty libcuda.so.1 and eight simulated H100s, everything that a run imports can be imported, and vLLM's configuration has the
#   values of our arguments;
# - on fake CUDA tensors, no operation mixes devices, and none waits for the device;
# - unit tests and the tests of several ranks (gloo, CPU tensors) pass on its torch;
# - tests/gpu, hotbunk doctor and short runs pass on a GPU in software, in a separate environment, .venv.softgpu
#   (docs/state-of-testing.md says what that shows, and tests/softgpu/README.md what is real there).
#
# No CUDA kernel runs.
#
#   --resolve              first resolve the lock again, as close to cpu.txt as possible, and rewrite cuda.txt and cuda_metadata.json
#   HOTBUNK_VENV=FOLDER    the environment (default: .venv.cuda)
#
# Further arguments go to pytest. It downloads some 5 GB from PyPI, takes two hours and 9 GB of disk for each of two environments, and is not
# part of .ci/run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${HOTBUNK_VENV:-$PWD/.venv.cuda}
lock=scripts/requirements/cuda.txt
failed=()

# uv prefers the versions in its output file where they fit: here those of cpu.txt, then those of the previous Python. The lock has the
# packages of all three Pythons. NVIDIA's cuda-python must match torch's CUDA, but FlashInfer's requirements alone would choose an older one.
resolve() {
    local made version comments
    made=$(mktemp -d)
    comments=$(grep '^#' $lock)
    cp scripts/requirements/cpu.txt "$made/lock"
    echo 'cuda-python>=13' >"$made/constraints"
    for version in 3.11 3.12 3.13; do
        "$venv/bin/uv" pip compile pyproject.toml --extra cuda --extra deepspeed --extra lora --extra ray --extra test --quiet \
            --python-version $version --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
            --constraint "$made/constraints" --output-file "$made/lock" >/dev/null || return
        cat "$made/lock" >>"$made/all"
    done
    grep '^uv==' scripts/requirements/cpu.txt >>"$made/all"
    { echo "$comments" && LC_ALL=C sort -u "$made/all"; } >$lock
    rm -r "$made"
}

check() {
    local what=$1
    shift
    echo "== $what"
    "$@" || failed+=("$what")
}

with_stub() {
    LD_LIBRARY_PATH=$venv/stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@"
}

install() { HOTBUNK_DEVICE=cuda HOTBUNK_VENV=$venv bash scripts/setup.sh; }

store=()
if [ "${1:-}" = --resolve ]; then
    shift
    store=(--store)
    install && resolve || exit # installing brings uv
fi
install || exit
mkdir -p "$venv/stub"
echo | gcc -shared -x c - -Wl,-soname,libcuda.so.1 -o "$venv/stub/libcuda.so.1" || exit

python=$venv/bin/python
check "installed packages fit each other" "$venv/bin/uv" pip check --python "$python"
check "the lock is complete" "$python" scripts/check_lock.py cuda "${store[@]}"
check "imports, configurations and fake tensors on made-up GPUs" with_stub "$python" -m pytest -n 0 -W ignore tests/cuda_lock "$@"
check "unit tests" "$python" -m pytest -n 2 tests/unit "$@"
check "tests of several ranks" "$python" -m pytest -n 0 tests/distributed "$@"
check "a GPU in software" bash tests/softgpu/check.sh
[ "${#failed[@]}" = 0 ] && echo "check_cuda_lock: all passed in $SECONDS s" && exit
printf 'check_cuda_lock: FAILED: %s\n' "${failed[@]}"
exit 1
