"""Which memory of a trainer lies in expandable segments: that of updates, and not what an engine maps.

Skipped without a GPU. It has run on the GPU in software (tests/softgpu), where the driver's calls are counted, too.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.commands.doctor_trials import Trial, make_model, recipe
from trainer.distributed import destroy_process_group, init_process_group
from trainer.run import processes

pytestmark = pytest.mark.gpu

LEGACY_CUDA_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE in CUDA's headers


def is_plain(address: int) -> bool:
    """Return True if the driver could export the memory at this address by CUDA IPC, as it can what cudaMalloc returned."""
    driver, capable = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
    assert (
        driver.cuPointerGetAttribute(
            ctypes.byref(capable), LEGACY_CUDA_IPC_CAPABLE, ctypes.c_uint64(address)
        )
        == 0
    )
    return bool(capable.value)


def driver_calls() -> Counter[str]:
    """Return the number of calls by which this process got memory, on the GPU in software."""
    lines = Path(os.environ["SOFTGPU_LOG"]).read_text("utf-8").splitlines()
    words = [line.split() for line in lines if line.startswith(f"[softgpu {os.getpid()}] cu")]
    return Counter(word[2] for word in words)


def check(way: str) -> int:
    """Return the exit code of a process that has a GPU to itself: two shifts and the update between them."""
    exported: list[bool] = []
    share = torch.UntypedStorage._share_cuda_

    def noted_share(storage: torch.UntypedStorage) -> Any:
        exported.append(is_plain(storage.data_ptr()))
        return share(storage)

    torch.UntypedStorage._share_cuda_ = noted_share
    counted = "HOTBUNK_COUNTED" in os.environ
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="model-")))
        init_process_group(300, "cuda")
        trial = Trial(recipe(make_model(folder), "cuda", way, 1), resources)
        for _ in range(2):
            with trial.manager.generation_shift(trial.policy):
                assert trial.manager.report.verified == "full"
                batch = trial.sample(1.0)
            _name, gap, bound = trial.gap(batch, 1.0)
            assert gap <= bound
            torch.cuda.empty_cache()
            before = driver_calls() if counted else Counter[str]()
            trial.learn(batch)
            activations = torch.empty(64 << 20, dtype=torch.uint8, device=trial.device)
            assert not is_plain(activations.data_ptr())
            del activations
            if counted:
                calls = driver_calls() - before
                print(f"an update after sync.way: {way}: {dict(calls)}")
                assert calls["cuMemCreate"] and not calls["cudaMalloc"]
    print(f"exported by sync.way: {way}: {len(exported)} pieces of memory")
    assert exported and all(exported)
    destroy_process_group()
    return 0


@pytest.mark.parametrize("way", ["staged", "pull", "zero_copy"])
def test_what_an_engine_maps_is_plain_and_an_update_is_expandable(way: str, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if "software" in torch.cuda.get_device_name():
        environment |= {
            "HOTBUNK_COUNTED": "1",
            "SOFTGPU_VERBOSE": "1",
            "SOFTGPU_LOG": str(tmp_path / "log"),
        }
    command = [sys.executable, "-m", "tests.gpu.test_segments_cuda", way]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


if __name__ == "__main__":
    processes.start_guardian()
    processes.run(lambda: check(*sys.argv[1:]))
