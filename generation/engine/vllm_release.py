"""Check that the vLLM that is installed was tried with this code, and is built for this machine.

The supported releases are named here alone.
"""

import os
import re
from importlib.util import find_spec
from typing import Any

from generation.engine.settings import EngineSettings

SUPPORTED = ((0, 31), (0, 33))
"""The oldest and the newest release of vLLM that engines take: docs/vllm-notes.md says what was
tried with each. pyproject.toml has the same bounds; the locks have a release between them.
"""

RELEASES = "vLLM " + " to ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in SUPPORTED))
"""The supported releases in words."""

BOUNDS = f">={SUPPORTED[0][0]}.{SUPPORTED[0][1]},<{SUPPORTED[1][0]}.{SUPPORTED[1][1] + 1}"
"""The supported releases as pip writes them."""


def is_supported(version: str) -> bool:
    """Return True for a supported release of vLLM.

    A development build, or one without a version number, is accepted, and with HOTBUNK_ANY_VLLM=1,
    which scripts/try_vllm.sh sets, any release is.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or "dev" in version or os.environ.get("HOTBUNK_ANY_VLLM") == "1":
        return True
    return SUPPORTED[0] <= (int(match[1]), int(match[2])) <= SUPPORTED[1]


def check_version(version: str | None = None) -> None:
    """Raise ImportError, naming the supported releases, unless vLLM is installed and
    `is_supported`.

    `version` is by default the installed one's.
    """
    wanted = f"{RELEASES} is needed ({BOUNDS}): install it with bash scripts/setup.sh"
    if version is None:
        if find_spec("vllm") is None:
            raise ImportError(f"vllm is not installed. {wanted}, or pip install 'vllm{BOUNDS}'")
        import vllm

        version = str(vllm.__version__)
    if not is_supported(version):
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
