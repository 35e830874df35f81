"""Shared memory of an engine's killed workers is removed when the engine is closed; tested without an engine."""

import subprocess
import sys
import uuid
from pathlib import Path

from generation.engine.engine import Engine
from generation.engine.settings import EngineSettings
from generation.engine.vllm_compat import worker_memory

WORKER = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
time.sleep(1000)
"""


def test_shared_memory_of_killed_workers_is_removed_with_their_engine() -> None:
    worker_file, foreign = (
        Path(f"/dev/shm/vllm_dist_{uuid.uuid4().hex}-tp:0-[0-1]-cpushm_0") for _ in range(2)
    )
    worker = Engine(EngineSettings("no model", 64))
    try:
        for file in (worker_file, foreign):
            file.write_bytes(b"x" * 4096)
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(worker_file)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        worker._worker_memory = worker_memory()
        process.kill()
        process.wait()
        assert worker._worker_memory == {worker_file}
        worker.close()
        worker.close()
        assert not worker_file.exists() and foreign.exists()
    finally:
        worker_file.unlink(missing_ok=True)
        foreign.unlink(missing_ok=True)
