"""Hardware as data: `get("trn2")` returns the frozen record of one NeuronCore generation.

Every file `<name>.py` of this folder that has a `TARGET` is one target.
"""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from nmm_compiler.errors import UnknownNameError
from nmm_compiler.targets.base import Source, Target
from nmm_compiler.targets.this_machine import FILE, from_file

__all__ = ["Source", "Target", "get", "names", "oldest_with"]


_FILES = [importlib.import_module(f"{__name__}.{f.name}") for f in pkgutil.iter_modules(__path__)]
_KNOWN = [file.TARGET for file in _FILES if hasattr(file, "TARGET")]
_TARGETS: dict[str, Target] = {t.name: t for t in sorted(_KNOWN, key=lambda t: t.generation)}


def names() -> tuple[str, ...]:
    """Return the names of all targets, oldest first."""
    return tuple(_TARGETS)


def get(name: str | Target) -> Target:
    """Return the target called `name`; a Target passes through.

    A name that ends in .json is a file that `nmm doctor --fit` wrote. Raises UnknownNameError with
    the closest name, FileError for a file that describes no target.
    """
    if isinstance(name, Target):
        return name
    if name.endswith(FILE):
        return from_file(Path(name).expanduser(), _TARGETS)
    if name not in _TARGETS:
        raise UnknownNameError("target", name, names())
    return _TARGETS[name]


def oldest_with(has: Callable[[Target], bool]) -> str:
    """Return the name of the oldest target for which `has` is true; at least one must be."""
    return next(target.name for target in _TARGETS.values() if has(target))
