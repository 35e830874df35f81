"""Lays the Python part of a release of vLLM over the CPU build that is installed: vllm_sources.py WHEEL

WHEEL is that release's wheel for CUDA. The CPU build's compiled operators stay, and the release calls itself VERSION+cpu,
by which vLLM knows that it computes on a CPU. Only an environment that scripts/try_vllm.sh made is changed.
"""

import re
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

LEFT_OUT = ("vllm/third_party/deep_gemm/include/", "vllm/third_party/triton_kernels/")
"""Sources of CUDA kernels, and kernels that builds for CPUs lack, and that an engine without Triton would try to import."""


def lay_over(wheel: Path, site: Path) -> None:
    """Replace all of vLLM below `site`, except compiled operators, by what the wheel has."""
    for file in (site / "vllm").rglob("*"):
        if file.is_file() and file.suffix != ".so":
            file.unlink()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so") or name.startswith(LEFT_OUT):
                continue
            archive.extract(name, site)
    for metadata in site.glob("vllm-*.dist-info/METADATA"):
        text = re.sub(r"(?m)^Version: (\S+)$", r"Version: \1+cpu", metadata.read_text(), count=1)
        metadata.write_text(text)


if __name__ == "__main__":
    found = find_spec("vllm")
    if found is None or found.origin is None or ".venv.vllm-" not in sys.prefix:
        sys.exit("vllm_sources: only an environment of scripts/try_vllm.sh is changed")
    lay_over(Path(sys.argv[1]), Path(found.origin).parents[1])
