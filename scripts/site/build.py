"""What pyproject.toml cannot say: the wheel has files for site-packages itself, one of which runs at each start."""

from pathlib import Path

from setuptools.command.build_py import build_py


class WithStartFiles(build_py):
    """Copies hotbunk_torchvision beside the packages; an editable installation gets it from scripts/setup.sh."""

    def run(self) -> None:
        """As the base class, and then the files."""
        super().run()
        for name in ("hotbunk_torchvision.py", "hotbunk_torchvision.pth"):
            self.copy_file(str(Path("scripts/site") / name), self.build_lib)
