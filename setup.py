"""Adds to wheels and to editable installs the two files that Python runs when it starts.

All else is in pyproject.toml. setuptools has no setting for files beside the packages, hence this
sub-command of `build`. See `startup/_nmm_compiler_startup.py` for what the files do.
"""

from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

FILES = ("startup/_nmm_compiler_startup.py", "startup/nmm_compiler_startup.pth")


class build_startup(Command):  # noqa: N801  (setuptools names commands so)
    """Copies the files to the top of the wheel."""

    description = "copy the files that run when Python starts"
    user_options = []  # noqa: RUF012
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def _target(self):
        # What is not part of a package goes into an editable wheel as it is.
        return (
            self.get_finalized_command("install").install_lib
            if self.editable_mode
            else self.build_lib
        )

    def run(self):
        self.mkpath(self._target())
        for file in FILES:
            self.copy_file(file, str(Path(self._target(), Path(file).name)))

    def get_outputs(self):
        return (
            [] if self.editable_mode else [str(Path(self.build_lib, Path(f).name)) for f in FILES]
        )

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return list(FILES)


build.sub_commands = [*build.sub_commands, ("build_startup", None)]
setup(cmdclass={"build_startup": build_startup})
