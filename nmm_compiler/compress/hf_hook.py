"""Registers low-rank layers with transformers and PEFT, whenever those are imported.

`import nmm_compiler` calls `watch()`, so that `from_pretrained` knows a saved low-rank model, and
PEFT its layers, with no further call. This module imports neither: it registers with a library that
is loaded already, and else waits for its import with an import hook. Programs that do not import
this package get it from `startup/_nmm_compiler_startup.py`, which is installed beside it. So
nothing here may raise: a transformers version that the quantizer does not fit has to work for all
other models.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Module to wait for: (our module, its function that registers, what is lost without it).
_TOLD = {
    "transformers.quantizers.auto": ("hf", "register", "from_pretrained will refuse them"),
    "peft.tuners.lora.model": ("lora", "install", "LoraConfig has to name their factors"),
}


class _Loader(Loader):
    """Runs a module with its own loader, then registers with it."""

    def __init__(self, inner: Loader, name: str) -> None:
        self._inner, self._name = inner, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        _tell(self._name)


class _Finder(MetaPathFinder):
    """Finds one module once, with the loader above around its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


def watch() -> None:
    """Register with each library now, or when it is imported; calling it again does nothing."""
    waiting = {finder.name for finder in sys.meta_path if isinstance(finder, _Finder)}
    for name in _TOLD:
        if name in sys.modules:
            _tell(name)
        elif name not in waiting:
            sys.meta_path.insert(0, _Finder(name))


def _tell(name: str) -> None:
    ours, function, lost = _TOLD[name]
    try:
        getattr(importlib.import_module(f"nmm_compiler.compress.{ours}"), function)()
    except Exception as error:  # a library that does not fit must still work for other models
        warnings.warn(
            f"nmm_compiler could not make {name.partition('.')[0]} know low-rank models "
            f"({error}); {lost}",
            stacklevel=2,
        )
