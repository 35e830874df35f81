"""What pyproject.toml cannot say: the wheel has a file for site-packages itself, which Python reads at its start."""

from setuptools import setup
from setuptools.command.build_py import build_py


class WithStartFile(build_py):
    """Copies hotbunk_torchvision.pth beside the packages; an editable installation gets it from scripts/setup.sh."""

    def run(self) -> None:
        """As the base class, and then the file."""
        super().run()
        self.copy_file("hotbunk_torchvision.pth", self.build_lib)


setup(cmdclass={"build_py": WithStartFile})
