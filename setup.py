"""Build step that pyproject.toml cannot describe: two files go to the top of site-packages.

See `infra/cpu/orbitserve_torchvision_cpu.py`, which has to be imported at interpreter start.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithStartUpFiles(build_py):
    """`build_py` that also copies the shim for torchvision and the `.pth` file that imports it."""

    def run(self) -> None:
        """Build, then copy; an editable install takes no files."""
        super().run()
        if not self.editable_mode:
            for file in Path("infra/cpu").glob("orbitserve_torchvision_cpu.*"):
                self.copy_file(str(file), self.build_lib)


setup(cmdclass={"build_py": BuildWithStartUpFiles})
