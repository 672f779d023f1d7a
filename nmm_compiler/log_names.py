"""Makes torch's logging know `nmm`: TORCH_LOGS="nmm", "+nmm", "nmm_graphs", "nmm_kernels", ...

torch reads TORCH_LOGS while it is imported and refuses names that are not registered. So `watch()`,
which `import nmm_compiler` calls, registers the names as soon as torch's own are there: at once, or
by an import hook. A program that
imports torch first, or never this package, sets TORCH_LOGS="+nmm_compiler", which torch takes as a
module's name.

All of the package logs to the standard loggers below "nmm_compiler", with torch or without.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ARTIFACTS = {
    "nmm_graphs": "each graph before and after nmm's rewrite, as code",
    "nmm_kernels": "the NKI source of each kernel of a graph",
    "nmm_schedules": "the schedule of each kernel and the runners-up",
}
"""Names for TORCH_LOGS beside the log "nmm"."""

NOISY = ("torchao", "torch.utils._pytree")
"""transformers imports torchao where it is installed; torchao then warns of GPU libraries that it
cannot load, and torch of how torchao registers its classes. Nothing here uses either."""
_REGISTRY = "torch._logging._registrations"


class _Loader(Loader):
    """Runs torch's list of log names with its own loader, then adds ours."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _register()


class _Finder(MetaPathFinder):
    """Finds torch's list once, with the loader above around its own."""

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
    """Register now, or when torch is loaded; calling it again does nothing."""
    if _REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def quiet_libraries() -> None:
    """Let the noisy loggers say only errors, where their level is not set."""
    for logger in map(logging.getLogger, NOISY):
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)


def _register() -> None:
    from torch._logging._internal import register_artifact, register_log

    register_log("nmm", "nmm_compiler")
    for name, what in ARTIFACTS.items():
        register_artifact(name, what, visible=True, off_by_default=True)
