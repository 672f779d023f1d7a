"""Registers the quantizer of `hf.py` when transformers is imported, before or after this package.

`import nmm_compiler` calls `watch()`, so that `from_pretrained` knows a saved low-rank model with
no further call. transformers is never imported here: if it is there, the quantizer is registered
now; if not, an import hook waits for `transformers.quantizers.auto` and registers then. Programs
that do not import this package get it from `startup/_nmm_compiler_startup.py`, which is installed
beside it. So nothing here may raise: a transformers that the quantizer does not fit has to work for
all other models.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_REGISTRY = "transformers.quantizers.auto"


class _Loader(Loader):
    """Runs the registry module with its own loader, then registers."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        _register()


class _Finder(MetaPathFinder):
    """Finds the registry module once, with the loader above around its own."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def watch() -> None:
    """Register now if transformers is loaded, else as soon as it is; calling it again is free."""
    if _REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    try:
        from nmm_compiler.compress import hf

        hf.register()
    except Exception as error:  # a transformers that does not fit must still load other models
        warnings.warn(
            f"nmm_compiler could not make transformers know low-rank models ({error}); "
            "from_pretrained will refuse them",
            stacklevel=2,
        )
