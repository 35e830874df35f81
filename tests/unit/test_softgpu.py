"""The GPU in software (tests/softgpu): memory, mapping, handles between processes, counts, faults. gcc is enough."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "softgpu"
TOTAL, CONTEXT, GRAIN = 256 << 20, 64 << 20, 2 << 20
OUT_OF_MEMORY = {"error": 2}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("softgpu")
    subprocess.run(["bash", str(FOLDER / "build.sh"), str(folder)], check=True)
    return folder


class Process:
    """A process that calls the GPU in software (softgpu_calls.py)."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.child = subprocess.Popen(
            [sys.executable, str(FOLDER.parent / "support" / "softgpu_calls.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )

    def __call__(self, line: str) -> Any:
        """Return the value of a Python expression in that process, or None for a statement; {"error": N} where CUDA
        returned N.
        """
        assert self.child.stdin is not None and self.child.stdout is not None
        print(line, file=self.child.stdin, flush=True)
        return json.loads(self.child.stdout.readline())

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()


Starts = Callable[..., Process]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


@pytest.fixture
def start(libraries: Path, tmp_path: Path, log: Path) -> Iterator[Starts]:
    with ExitStack() as stack:

        def started(**settings: str) -> Process:
            fixed = {
                "SOFTGPU_STATE": str(tmp_path / "state"),
                "SOFTGPU_LOG": str(log),
                "SOFTGPU_MEMORY": "256M",
            }
            process = Process(libraries, fixed | settings)
            stack.callback(process.child.wait)
            stack.callback(process.child.kill)
            return process

        yield started


def test_memory_is_counted_for_all_processes_and_freed_when_one_is_killed(start: Starts) -> None:
    first, second = start(), start()
    assert first("mem_get_info()") == [TOTAL - CONTEXT, TOTAL]
    first("p = malloc(5)")
    assert first("nvml_used()") == CONTEXT + GRAIN == second("nvml_used()")
    assert second("mem_get_info()")[0] == TOTAL - 2 * CONTEXT - GRAIN
    second("q = malloc(100 << 20)")
    assert first("malloc(100 << 20)") == OUT_OF_MEMORY
    second.kill()
    assert first("nvml_used()") == CONTEXT + GRAIN
    assert first("cuda.cudaFree(p)") == 0 and first("nvml_used()") == CONTEXT
    assert first("bool(malloc(100 << 20))") is True


def test_devices_are_counted_apart_and_chosen_by_number_or_uuid(start: Starts) -> None:
    both = start(SOFTGPU_DEVICES="2")
    second = start(SOFTGPU_DEVICES="2", CUDA_VISIBLE_DEVICES="1")
    by_uuid = start(SOFTGPU_DEVICES="2", CUDA_VISIBLE_DEVICES="GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a01")
    none = start(CUDA_VISIBLE_DEVICES="")
    second("p = malloc(GRAIN)")
    by_uuid("p = malloc(GRAIN)")
    assert [both(f"nvml_used({index})") for index in range(2)] == [0, 2 * (CONTEXT + GRAIN)]
    assert both("cuda.cudaSetDevice(1)") == 0 and both("cuda.cudaSetDevice(2)") == 101
    assert none("cuda.cudaGetDeviceCount(byref(c_int()))") == 100


def test_memory_mapped_anew_keeps_its_address_and_not_its_bytes(start: Starts, log: Path) -> None:
    """Unmapped memory is given back, and its addresses stay reserved, under the calls of vLLM's sleeping allocator."""
    process = start()
    process(
        "size = 8 * GRAIN; at = reserve(size); handle = create(size); map_at(at, size, handle); write(at, 'held')"
    )
    assert process("read(at, 4)") == "held" and process("nvml_used()") == 8 * GRAIN
    assert process("driver.cuMemUnmap(at, size)") == 0 and process("nvml_used()") == 8 * GRAIN
    assert process("map_at(at, size, handle)") is None and process("read(at, 4)") == "held"
    assert process("[driver.cuMemUnmap(at, size), driver.cuMemRelease(handle), nvml_used()]") == [
        0,
        0,
        0,
    ]
    assert process("driver.cuMemRelease(handle)") == 1
    process("handle = create(size); map_at(at, size, handle)")
    assert process("read(at, 4)") == "\0\0\0\0"
    assert log.read_text().count("VIOLATION") == 1
    assert process("map_at(at, size, handle)") == {"error": 208}
    assert process("driver.cuMemUnmap(at + size, size)") == 1
    assert log.read_text().count("VIOLATION") == 3


def test_unmapped_memory_cannot_be_read(start: Starts) -> None:
    process = start()
    process(
        "at = reserve(GRAIN); handle = create(GRAIN); map_at(at, GRAIN, handle); driver.cuMemUnmap(at, GRAIN)"
    )
    with pytest.raises(json.JSONDecodeError):
        process("read(at, 4)")
    assert process.child.wait() == -signal.SIGSEGV


def test_a_handle_opens_the_memory_of_another_process(start: Starts, log: Path) -> None:
    owner, reader = start(), start()
    owner("p = malloc(GRAIN); write(p, 'from the owner')")
    handle = owner("export(p)")
    assert owner(f"open_handle('{handle}')") == {"error": 201}  # not in the process that exported it
    reader(f"q = open_handle('{handle}')")
    assert reader("read(q, 14)") == "from the owner"
    reader("write(q, 'from a reader ')")
    assert owner("read(p, 14)") == "from a reader "
    assert reader("nvml_used()") == 2 * CONTEXT + GRAIN  # counted once
    log.write_text("")
    assert owner("cuda.cudaFree(p)") == 0
    assert "that other processes have open 1 times" in log.read_text()
    assert reader("read(q, 4)") == "from"  # the owner is gone, not the bytes
    assert reader("cuda.cudaIpcCloseMemHandle(q)") == 0 and reader("cuda.cudaIpcCloseMemHandle(q)") == 1
    assert reader(f"open_handle('{handle}')") == {"error": 205}


def test_memory_of_the_sleeping_allocator_has_no_handle(start: Starts) -> None:
    process = start()
    process("at = reserve(GRAIN); map_at(at, GRAIN, create(GRAIN))")
    assert process("export(at)") == {"error": 1}


def test_a_killed_reader_no_longer_holds_what_it_had_open(start: Starts, log: Path) -> None:
    owner, reader = start(), start()
    owner("p = malloc(GRAIN)")
    handle = owner("export(p)")
    reader(f"q = open_handle('{handle}')")
    reader.kill()
    assert owner("cuda.cudaFree(p)") == 0 and log.read_text() == ""


def test_freeing_twice_is_a_violation(start: Starts, log: Path) -> None:
    process = start()
    process("p = malloc(GRAIN)")
    assert process("[cuda.cudaFree(p), cuda.cudaFree(p), cuda.cudaFree(None)]") == [0, 1, 0]
    assert log.read_text().count("VIOLATION") == 1


def test_a_child_of_a_process_that_has_used_cuda_cannot_use_it(start: Starts) -> None:
    process = start()
    process("p = malloc(GRAIN)")
    process("import os; child = os.fork(); child or os._exit(cuda.cudaMalloc(byref(c_void_p()), 1))")
    assert process("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == 3


@pytest.mark.parametrize(
    ("fault", "call", "errors"),
    [
        ("malloc:3", "cuda.cudaMalloc(byref(c_void_p()), 1)", [0, 2, 2]),
        ("malloc:3:softgpu_calls.py", "cuda.cudaMalloc(byref(c_void_p()), 1)", [0, 2, 2]),
        ("malloc:3:another", "cuda.cudaMalloc(byref(c_void_p()), 1)", [0, 0, 0]),
        ("lost:2", "cuda.cudaMemset(p, 0, 8)", [0, 719, 719]),
    ],
)
def test_the_call_that_is_named_fails(start: Starts, fault: str, call: str, errors: list[int]) -> None:
    process = start(SOFTGPU_FAULT=fault)
    process("p = malloc(GRAIN)")
    assert process(f"[{call} for _ in range(3)]") == errors


def test_a_handle_that_does_not_open_is_an_error_once(start: Starts) -> None:
    owner, reader = start(), start()
    owner("p = malloc(GRAIN)")
    handle = owner("export(p)")
    reader("driver.sg_arm(b'open', 1)")
    assert reader(f"open_handle('{handle}')") == {"error": 205}
    assert reader(f"bool(open_handle('{handle}'))") is True


def test_fresh_memory_is_nan_where_it_is_poisoned(start: Starts) -> None:
    process = start(SOFTGPU_POISON="1")
    process("p = malloc(8); at = reserve(GRAIN); map_at(at, GRAIN, create(GRAIN))")
    values = process("[str(ctypes.c_float.from_address(start).value) for start in (p, at)]")
    assert values == ["nan", "nan"]


LATE = {"SOFTGPU_LATE": "1", "SOFTGPU_LATE_US": "60000"}


def test_late_copies_are_seen_by_those_who_wait_for_them_only(start: Starts) -> None:
    """The old bytes are read without a wait, on the host and on another stream; the new ones with it."""
    process = start(**LATE)
    process(
        "one, two = stream(), stream(); a, b, c = (malloc(GRAIN) for _ in range(3)); write(a, 'new!')"
    )
    seen = set()
    for _ in range(20):
        process("[write(x, 'old!') for x in (b, c)]")
        seen.add(process("[copy(b, a, 4, one), copy(c, b, 4, two), read(b, 4)][2]"))
        process("[cuda.cudaStreamSynchronize(s) for s in (one, two)]")
        seen.add(process("read(c, 4) + ' on stream two'"))
        assert process("read(b, 4)") == "new!"
    assert {"old!", "old! on stream two"} <= seen
    process("done = event()")
    for _ in range(10):
        process(
            "[write(x, 'old!') for x in (b, c)]; copy(b, a, 4, one); cuda.cudaEventRecord(done, one)"
        )
        process(
            "cuda.cudaStreamWaitEvent(two, done, 0); copy(c, b, 4, two); cuda.cudaStreamSynchronize(two)"
        )
        assert process("read(c, 4)") == "new!"


def test_an_event_of_another_process_is_waited_for(start: Starts) -> None:
    owner, reader = start(**LATE), start(**LATE)
    owner("s = stream(); done = event(); a, p = malloc(GRAIN), malloc(GRAIN); write(a, 'new!')")
    memory, done = owner("export(p)"), owner("export_event(done)")
    reader(f"q = open_handle('{memory}'); done = open_event('{done}'); s = stream(); b = malloc(GRAIN)")
    for _ in range(10):
        owner("write(p, 'old!'); copy(p, a, 4, s); cuda.cudaEventRecord(done, s)")
        reader("cuda.cudaStreamWaitEvent(s, done, 0); copy(b, q, 4, s); cuda.cudaStreamSynchronize(s)")
        assert reader("read(b, 4)") == "new!"


def test_memory_that_a_late_copy_still_uses_may_not_be_unmapped(start: Starts, log: Path) -> None:
    process = start(**LATE)
    process("at = reserve(GRAIN); map_at(at, GRAIN, create(GRAIN)); p = malloc(GRAIN); s = stream()")
    process(
        "[copy(at, p, 4, s) for _ in range(5)]; cuda.cudaStreamSynchronize(s); driver.cuMemUnmap(at, GRAIN)"
    )
    assert log.read_text() == ""
    process(
        "map_at(at, GRAIN, create(GRAIN)); [copy(at, p, 4, s) for _ in range(5)]; driver.cuMemUnmap(at, GRAIN)"
    )
    assert "copies still use" in log.read_text()


def test_pageable_memory_is_copied_before_the_call_returns(start: Starts) -> None:
    process = start(**LATE)
    process("import ctypes; p = malloc(GRAIN); s = stream(); host = ctypes.create_string_buffer(4)")
    process("write(p, 'new!'); copy(ctypes.addressof(host), p, 4, s)")
    assert process("host.raw.decode()") == "new!"
