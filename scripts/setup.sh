#!/usr/bin/env bash
# Make .venv with the pinned lock of scripts/requirements. A further call reuses a finished .venv.
#
#   PYTHON=python3.12      the interpreter to use (default: the first suitable one of python3, python3.13, python3.12, python3.11)
#   HOTBUNK_DEVICE=cuda    which lock: cpu or cuda (default: cuda where nvidia-smi lists a GPU, else cpu)
#   HOTBUNK_VENV=FOLDER    another place than .venv
#
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes pip install PyTorch's build for CPUs. Then
# the environment takes 2 GiB, instead of 6.5 with the build from PyPI. Both work.
# Needs Linux, Python 3.11, 3.12 or 3.13 with its headers, and g++: PyTorch compiles kernels while vLLM runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "setup: $1" >&2
    exit 2
}

# The locks are one resolution for these (scripts/check_lock.py, PYTHONS).
is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11, 3.12 or 3.13 is needed, but ${PYTHON:-python3} is $(release_of "${PYTHON:-python3}"): install one, or name one as PYTHON=/path/to/python3.13."
}

release_of() { "$1" -V 2>/dev/null || echo not there; }

# The CUDA lock is built for CUDA 13, which needs a driver of at least 580 (generation/engine/devices.py).
check_driver() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | awk "NR == 1") || return 0
    [[ $driver =~ ^[0-9]+ ]] && [ "${BASH_REMATCH[0]}" -lt 580 ] && [ "${VLLM_ENABLE_CUDA_COMPATIBILITY:-0}" != 1 ] || return 0
    die "the NVIDIA driver here is $driver, but the CUDA lock needs 580 or newer: update it, on a data centre's card install cuda-compat and set VLLM_ENABLE_CUDA_COMPATIBILITY=1, or set HOTBUNK_DEVICE=cpu."
}

find_device() {
    if [ -n "${HOTBUNK_DEVICE:-}" ]; then
        echo "$HOTBUNK_DEVICE"
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        echo cuda
    else
        echo cpu
    fi
}

# Checks everything that an installation needs besides the network, before anything is created.
check_machine() {
    local headers need_gib=$1
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python has no venv module: install it (on Debian: apt install python$version-venv), or set PYTHON to an interpreter that has it."
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -e "$headers/Python.h" ] ||
        die "the headers of $python are missing ($headers/Python.h): install them (on Debian: apt install python$version-dev), or set PYTHON to an interpreter that has them."
    command -v "${CXX:-g++}" >/dev/null ||
        die "no C++ compiler (${CXX:-g++}) was found: install one (on Debian: apt install g++), or name one as CXX=/path/to/c++."
    check_space "$need_gib" ""
}

check_space() {
    local free_gib need_gib=$1 because=$2
    free_gib=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
    [ "$free_gib" -ge "$need_gib" ] ||
        die "$PWD has $free_gib GiB of free disk space, but $need_gib are needed$because: free some, or clone to a larger disk."
}

is_finished() { [ "$(cat "$venv"/.hotbunk 2>/dev/null)" = "$key" ] && "$venv"/bin/python -c '' 2>/dev/null; }

pip() { "$venv"/bin/python -m pip --disable-pip-version-check --no-input --quiet "$@"; }

# The lock is complete, so no dependencies are resolved. uv takes seconds where pip takes a minute, but does not read pip's configuration,
# such as another index. Where uv fails, pip installs the lock.
install_exactly() {
    "$venv"/bin/uv pip install --quiet --python "$venv"/bin/python --no-deps --no-build-isolation --compile-bytecode "$@" && return
    echo "setup: uv could not install the lock, so pip does, which takes a minute longer" >&2
    pip install --no-deps --no-build-isolation "$@"
}

# PyPI's own torch is the build for CUDA. It computes on a CPU as well, but is three times as large as all the rest.
check_torch() {
    local offer
    offer=$(pip install --dry-run --ignore-installed --no-deps --report - --constraint "$lock" torch 2>/dev/null) || return 0
    [[ ! $offer =~ \"version\":\ \"[0-9]+\.[0-9.]+\" ]] && return
    echo "setup: pip takes PyPI's torch, the build for CUDA: 6.5 GiB instead of 2; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has it take the build for CPUs" >&2
    (check_space 12 " for PyPI's torch, the build for CUDA") || { rm -rf "$venv" && exit 2; }
}

install() {
    rm -rf "$venv"
    mkdir -p "$venv"
    echo unfinished >"$venv"/.hotbunk
    "$python" -m venv "$venv"
    [ "$device" = cuda ] || check_torch
    # The CPU lock fits several builds of torch, so torch comes first, with the requirements of its build, and then the lock exactly.
    pip install --no-compile --constraint "$lock" $([ "$device" = cuda ] || echo torch) setuptools uv
    install_exactly --requirement "$lock" --editable .
    echo "$key" >"$venv"/.hotbunk
}

python=$(find_python)
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
device=$(find_device)
lock=scripts/requirements/$device.txt
[ -e "$lock" ] || die "HOTBUNK_DEVICE is '$device', but must be cpu or cuda."
key="$device, Python $version, $(cat "$lock" pyproject.toml | sha256sum | cut -c1-16)"
venv=${HOTBUNK_VENV:-$PWD/.venv}
is_finished && exit

[ ! -e "$venv" ] || [ -e "$venv/.hotbunk" ] ||
    die "$venv exists but was not made by this script: move it away first."
[ "$device" = cpu ] || check_driver
check_machine $([ "$device" = cuda ] && echo 20 || echo 6)
[ -n "${PYTHON:-}" ] || [ "$python" = python3 ] || echo "setup: python3 is $(release_of python3), for which there is no lock, so $python is used" >&2
exec 9>"$venv.lock"
flock 9 # of two setups in one clone, the second waits, and uses what the first has made
if ! is_finished; then
    echo "setup: installing the $device lock for Python $version into $venv"
    install
    echo "setup: done in $SECONDS s"
fi
