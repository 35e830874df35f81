"""A process that calls the GPU in software: it reads lines of Python, and answers each by a line of JSON.

Started as `python softgpu_calls.py FOLDER`, with the libraries that build.sh has made in FOLDER. It does not import
torch.
"""

import ctypes
import json
import sys
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

driver, cuda, nvml = (
    ctypes.CDLL(f"{sys.argv[1]}/{name}")
    for name in ("libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1")
)
GRAIN = 2 << 20


class Handle(ctypes.Structure):
    """CUDA's IPC handles: 64 bytes, passed by value."""

    _fields_ = (("bytes", c_char * 64),)


class Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of device `id`."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("kind", c_int),
        ("id", c_int),
        ("rest", c_uint64 * 2),
    )


for name in (
    "cudaFree",
    "cudaIpcCloseMemHandle",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaEventQuery",
):
    getattr(cuda, name).argtypes = [c_void_p]
cuda.cudaMemcpyAsync.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
cuda.cudaMemcpy.argtypes = [c_void_p, c_void_p, c_size_t, c_int]
cuda.cudaMemset.argtypes = [c_void_p, c_int, c_size_t]
cuda.cudaIpcGetMemHandle.argtypes = cuda.cudaIpcGetEventHandle.argtypes = [c_void_p, c_void_p]
cuda.cudaIpcOpenMemHandle.argtypes = [c_void_p, Handle, c_int]
cuda.cudaIpcOpenEventHandle.argtypes = [c_void_p, Handle]
cuda.cudaEventRecord.argtypes = [c_void_p, c_void_p]
cuda.cudaStreamWaitEvent.argtypes = [c_void_p, c_void_p, c_int]
driver.cuMemMap.argtypes = [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64]
driver.cuMemSetAccess.argtypes = [c_uint64, c_size_t, c_void_p, c_size_t]
driver.cuMemUnmap.argtypes = driver.cuMemAddressFree.argtypes = [c_uint64, c_size_t]
driver.cuMemRelease.argtypes = [c_uint64]


class CudaError(Exception):
    """A call has returned an error code, the argument."""


def check(error: int) -> None:
    if error:
        raise CudaError(error)


def made(function: Any, kind: type[Any], *arguments: Any) -> int:
    """Call a function that writes its result to its first argument, and return the result."""
    result = kind()
    check(function(byref(result), *arguments))
    return result.value or 0


def handle_of(function: Any, item: int) -> str:
    handle = Handle()
    check(function(byref(handle), item))
    return bytes(handle).hex()


def malloc(size: int) -> int:
    return made(cuda.cudaMalloc, c_void_p, c_size_t(size))


def stream() -> int:
    return made(cuda.cudaStreamCreateWithFlags, c_void_p, 1)


def event() -> int:
    return made(cuda.cudaEventCreateWithFlags, c_void_p, 2)


def export(pointer: int) -> str:
    return handle_of(cuda.cudaIpcGetMemHandle, pointer)


def export_event(event: int) -> str:
    return handle_of(cuda.cudaIpcGetEventHandle, event)


def open_handle(text: str) -> int:
    return made(cuda.cudaIpcOpenMemHandle, c_void_p, Handle.from_buffer_copy(bytes.fromhex(text)), 1)


def open_event(text: str) -> int:
    return made(cuda.cudaIpcOpenEventHandle, c_void_p, Handle.from_buffer_copy(bytes.fromhex(text)))


def create(size: int, device: int = 0) -> int:
    """Allocate memory without an address, by the driver's virtual memory management."""
    return made(
        driver.cuMemCreate, c_uint64, c_size_t(size), byref(Properties(1, 1, 1, device)), c_uint64()
    )


def reserve(size: int) -> int:
    return made(driver.cuMemAddressReserve, c_uint64, c_size_t(size), c_size_t(), c_uint64(), c_uint64())


def map_at(start: int, size: int, handle: int) -> None:
    check(driver.cuMemMap(start, size, 0, handle, 0))
    check(driver.cuMemSetAccess(start, size, None, 1))


def mem_get_info() -> tuple[int, int]:
    """Free and total bytes, by the runtime."""
    free, total = c_size_t(), c_size_t()
    check(cuda.cudaMemGetInfo(byref(free), byref(total)))
    return free.value, total.value


def nvml_used(index: int = 0) -> int:
    """Return bytes that all processes use, by NVML."""
    device, memory = c_void_p(), (c_uint64 * 3)()
    check(nvml.nvmlDeviceGetHandleByIndex_v2(index, byref(device)))
    check(nvml.nvmlDeviceGetMemoryInfo(device, memory))
    return memory[2]


def write(pointer: int, text: str) -> None:
    ctypes.memmove(pointer, text.encode(), len(text))


def read(pointer: int, size: int) -> str:
    return ctypes.string_at(pointer, size).decode(errors="replace")


def copy(to: int, source: int, size: int, stream: int = 0) -> None:
    check(cuda.cudaMemcpyAsync(to, source, size, 4, stream))


def main() -> None:
    """Evaluates or executes each line, and prints the result."""
    for line in sys.stdin:
        try:
            try:
                answer = eval(line, globals())
            except SyntaxError:
                answer = exec(line, globals())
        except CudaError as error:
            answer = {"error": error.args[0]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
