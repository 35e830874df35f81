#!/usr/bin/env bash
# Builds the GPU in software into FOLDER: libcuda.so.1, libcudart.so.13 and libnvidia-ml.so.1, with gcc alone.
#
#   build.sh FOLDER [PYTHON]
#
# With PYTHON, the interpreter of an environment of the CUDA lock, the libraries also have a stub for every function of CUDA's that is not
# implemented, every signature is compared with CUDA's headers, and libsoftgpu_ops.so computes torch's operations (environment.sh).
set -euo pipefail
out=$(realpath -m "$1")
python=${2:-}
cd "$(dirname "${BASH_SOURCE[0]}")/src"
mkdir -p "$out"
flags=(-O1 -g -fPIC -Wall -Wno-format-truncation -Werror)

# Writes a function for each name on standard input that the objects do not define.
make_stubs() {
    local file=$1
    shift
    nm --defined-only "$@" | awk '{print $NF}' | sort -u >"$out/defined"
    { echo 'int sg_stub(const char *);' && sort -u | comm -23 - "$out/defined" | sed 's/.*/int &(void) { return sg_stub("&"); }/'; } >"$file"
}

if [ -n "$python" ]; then
    cuda=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/nvidia/cu13
    flags+=(-DCUDA_HEADERS -I"$cuda/include")
fi
for part in state driver runtime streams nvml; do gcc "${flags[@]}" -c $part.c -o "$out/$part.o"; done
if [ -n "$python" ]; then
    # `_v2` only where there is one: cuGetProcAddress prefers it, and a stub would hide what is implemented.
    grep -ohE '(CUDAAPI cu[A-Z][A-Za-z0-9_]*|\bcu[A-Z][A-Za-z0-9]*_v2\b)' "$cuda/include/cuda.h" | awk '{print $NF}' |
        make_stubs "$out/cuda_stubs.c" "$out"/{state,driver}.o
    nm -D --defined-only "$cuda"/lib/real_libcudart.so.13 | awk '$2 == "T" {sub("@.*", "", $3); print $3}' |
        make_stubs "$out/cudart_stubs.c" "$out"/{runtime,streams}.o
    for library in cuda cudart; do gcc -O1 -fPIC -w -c "$out/${library}_stubs.c" -o "$out/${library}_stubs.o"; done
fi

# The driver's library holds the state, so that one process has it once.
link() {
    local name=$1
    shift
    gcc -shared -Wl,-soname,"$name" "$@" -o "$out/$name" -L"$out" -Wl,-rpath,'$ORIGIN' -lpthread -ldl
}
stubs() { [ -z "$python" ] || echo "$out/$1_stubs.o"; }
echo 'libcudart.so.13 { global: *; };' >"$out/cudart.map" # the version that what was linked against CUDA's asks for
link libcuda.so.1 "$out"/{state,driver}.o $(stubs cuda)
link libcudart.so.13 "$out"/{runtime,streams}.o $(stubs cudart) -Wl,--version-script="$out/cudart.map" -l:libcuda.so.1
link libnvidia-ml.so.1 "$out"/nvml.o -l:libcuda.so.1

if [ -n "$python" ] && [ ops.cpp -nt "$out/libsoftgpu_ops.so" ]; then # it takes a minute
    torch=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
    g++ -std=c++20 -O1 -fPIC -shared -w ops.cpp -o "$out/libsoftgpu_ops.so" -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
        -I"$cuda/include" -I. -L"$torch/lib" -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda -L"$out" -l:libcudart.so.13
fi
