"""Check that the vLLM that is installed was tried with this code, and is built for this machine."""

import os
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from generation.engine.settings import (
    EngineSettings,
)

if TYPE_CHECKING:
    pass

SUPPORTED = ((0, 32), (0, 33))
"""The oldest supported release of vLLM, and the first one after the newest."""


def check_version(version: str | None = None) -> None:
    """Raise ImportError, naming the supported range, unless a vLLM of that range is installed.

    `version` is by default the installed one's. A development build, or one without a version
    number, is accepted, and with HOTBUNK_ANY_VLLM=1, which scripts/try_vllm.sh sets, any release
    is.
    """
    (_, oldest), (_, newer) = SUPPORTED
    wanted = (
        f"vLLM 0.{oldest} is needed (>=0.{oldest},<0.{newer}): install it with bash scripts/setup.sh"
    )
    if version is None:
        if find_spec("vllm") is None:
            raise ImportError(
                f"vllm is not installed. {wanted}, or pip install 'vllm>=0.{oldest},<0.{newer}'"
            )
        import vllm

        version = vllm.__version__
    match = re.match(r"(\d+)\.(\d+)", str(version))
    if match is None or "dev" in str(version) or os.environ.get("HOTBUNK_ANY_VLLM") == "1":
        return
    if not SUPPORTED[0] <= (int(match[1]), int(match[2])) < SUPPORTED[1]:
        raise ImportError(
            f"vLLM {version} is installed, but {wanted}; scripts/try_vllm.sh tries another release"
        )


def check_build(settings: EngineSettings) -> None:
    """Raise ValueError where the installed vLLM is built for the other kind of device than the
    engine is to run on.
    """
    from vllm.platforms import current_platform

    if settings.on_cpu and not current_platform.is_cpu():
        raise ValueError(
            "this engine was given no CUDA devices, but the installed vLLM is built for CUDA and "
            "cannot run on a CPU: name devices (device_indices), or install the build for CPUs with "
            "HOTBUNK_DEVICE=cpu bash scripts/setup.sh"
        )
    if not settings.on_cpu and current_platform.is_cpu():
        raise ValueError(
            f"this engine was given CUDA devices {list(settings.device_indices)}, but the installed "
            "vLLM is built for CPUs: install the build for CUDA with HOTBUNK_DEVICE=cuda bash "
            "scripts/setup.sh, or set run.device to cpu"
        )


def check_keyed_noise(settings: EngineSettings, config: Any) -> None:
    """Raise ValueError where a sampled token could depend on more than seed, position and the
    tokens before it.

    Model runner V2 keys its noise (vllm/v1/worker/gpu/sample/gumbel.py). V1 draws it from a
    generator, one draw after the other; on CPU the worker extension replaces that.
    """
    if config.speculative_config is not None:
        reason = "drafts depend on where answers are cut; leave it out"
        raise ValueError(
            f"engine.extra: speculative_config is set, but answers are carried over steps: {reason}"
        )
    if not settings.on_cpu and not config.use_v2_model_runner:
        raise ValueError(
            "answers are carried over steps, which needs vLLM's model runner V2 on CUDA, and this "
            "engine would use V1: unset VLLM_USE_V2_MODEL_RUNNER, and leave out what V2 does not "
            "support"
        )
    if settings.on_cpu and settings.worker_extension is None:
        raise ValueError(
            "on CPU keyed noise needs worker_extension: set it to sharding.WORKER_EXTENSION"
        )
