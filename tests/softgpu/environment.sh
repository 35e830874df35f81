#!/usr/bin/env bash
# Makes an environment of the CUDA lock, .venv.softgpu, in which the GPU in software takes the place of CUDA's driver and runtime.
# A second call finds it finished. No GPU works in it. README.md has the variables that its processes read.
#
#   HOTBUNK_VENV=FOLDER    another place
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=${HOTBUNK_VENV:-$PWD/.venv.softgpu}
HOTBUNK_DEVICE=cuda HOTBUNK_VENV=$venv bash scripts/setup.sh
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
key=$(cat tests/softgpu/src/* tests/softgpu/{build,environment}.sh "$venv/.hotbunk" | sha256sum)
[ "$(cat "$venv/softgpu/key" 2>/dev/null)" = "$key" ] && exit

# torch finds its own libcudart by its RPATH, before LD_LIBRARY_PATH is looked at, and torchvision brings another one.
for real in "$site"/nvidia/cu13/lib/libcudart.so.13 "$site"/torchvision.libs/libcudart.*.so.13; do
    [ -L "$real" ] || mv "$real" "$(dirname "$real")/real_$(basename "$real")" # build.sh reads the names of its functions
    ln -sfn "$venv/softgpu/libcudart.so.13" "$real"
done
bash tests/softgpu/build.sh "$venv/softgpu" "$venv/bin/python"
ln -sfn "$PWD/tests/softgpu/hotbunk_softgpu.py" "$site/hotbunk_softgpu.py"
echo 'import hotbunk_softgpu; hotbunk_softgpu.install()' >"$site/hotbunk_softgpu.pth" # at each start of Python
echo "$key" >"$venv/softgpu/key"
