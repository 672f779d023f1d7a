"""Finds the kernel that a path, a text, a function or an object names, and loads its file.

`resolve` is the entry point: it returns a callable whose `nki` is the stand-in. A file is loaded
again only when it, or a file that it imports, changes. A function of an imported module is rebuilt:
it gets a copy of its globals in which everything of `nki` is the stand-in's, and so do the
functions of its module that it may call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from pathlib import Path
from typing import Any

from nmm_compiler.errors import KernelArgumentError, closest, nearest
from nmm_compiler.simulator.beta1 import modules as beta1
from nmm_compiler.simulator.loading import standins
from nmm_compiler.simulator.loading.private_modules import BETA_1, PrivateModules
from nmm_compiler.simulator.machine import defined_at

_CACHE: dict[Path, tuple[PrivateModules, types.ModuleType]] = {}
_MODULES_KEPT = 64


def load_file(path: Path) -> types.ModuleType:
    """Return the private module of a kernel file; loaded once until a file changes."""
    path = path.resolve()
    if not path.is_file():
        raise KernelArgumentError(f"kernel file {path} does not exist; check the path")
    known = _CACHE.get(path)
    if known is not None and known[0].fresh():
        return known[1]
    parts = [path.stem] if path.name != "__init__.py" else []
    root = path.parent
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    name = ".".join(parts) or path.stem
    private = PrivateModules(list(dict.fromkeys((root, path.parent))))
    module = private.load(name)
    if module is None or getattr(module, "__file__", None) != str(path):
        module = private.execute(path, name)
    if len(_CACHE) > _MODULES_KEPT:
        _CACHE.pop(next(iter(_CACHE)))
    _CACHE[path] = (private, module)
    return module


@functools.lru_cache(_MODULES_KEPT)
def load_text(text: str, path: Path) -> types.ModuleType:
    """Return the private module of a kernel's verified text; loaded once.

    path: the file's name in messages; neither it nor a file beside it is read.
    """
    module = types.ModuleType(path.stem)
    return PrivateModules([]).run_text(text, path, path.stem, module)


def find_kernel(module: types.ModuleType, path: Path, name: str | None) -> Any:
    """Return the kernel `name` of a module, or its only `@nki.jit` function."""
    found = None if name is None else vars(module).get(name)
    if not callable(found):
        found = _only_kernel(module, path, name)
    if isinstance(found, standins.JitKernel):
        return found
    beta_1 = BETA_1 in vars(module)
    return beta1.Beta1Kernel(found, checked=False) if beta_1 else standins.JitKernel(found)


def _only_kernel(module: types.ModuleType, path: Path, name: str | None) -> Any:
    """Return the only kernel of a module; refuse a name that it does not have."""
    file = str(path.resolve())
    known = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, (standins.JitKernel, types.FunctionType))
        and defined_at(value)[0] == file
    }
    if name is not None:
        raise KernelArgumentError(
            f"{path} has no kernel {name!r}{closest(name, known)} (it has: "
            f"{nearest(name, known) or 'no function'})"
        )
    kernels = {k: v for k, v in known.items() if isinstance(v, standins.JitKernel)}
    choices: dict[str, Any] = kernels or {k: v for k, v in known.items() if not k.startswith("_")}
    if len(choices) != 1:
        raise KernelArgumentError(
            f"{path} has {len(choices)} kernels ({', '.join(choices) or 'none'}); name one as "
            f"{path.name}:NAME"
        )
    return next(iter(choices.values()))


def resolve(kernel: Any) -> Any:
    """Return the callable under the stand-ins of whatever names a kernel."""
    if isinstance(kernel, standins.JitKernel):
        return kernel
    if isinstance(kernel, (str, os.PathLike)):
        text = os.fspath(kernel)
        head, _, name = text.rpartition(":")
        named = head and name.isidentifier() and not os.path.exists(text)
        path = Path(head if named else text)
        return find_kernel(load_file(path), path, name if named else None)
    if hasattr(kernel, "path") and hasattr(kernel, "name"):
        path = Path(kernel.path).resolve()
        source = getattr(kernel, "source", None)
        module = load_text(source, path) if isinstance(source, str) else load_file(path)
        return find_kernel(module, path, kernel.name)
    function, grid = _unwrapped(kernel)
    if not isinstance(function, types.FunctionType):
        raise KernelArgumentError(
            f"{kernel!r} is no kernel; pass a path, 'file.py:name', a function, or an object with "
            ".path and .name"
        )
    return standins.JitKernel(Rebuilder().function(function), grid)


_WRAPPED = ("__func__", "__wrapped__", "func", "fn", "function", "_func")
"""Attributes under which methods and decorators such as the real `nki.jit` keep a function."""


def _unwrapped(kernel: Any) -> tuple[Any, int]:
    """Return (plain function, grid) behind decorators such as the real `nki.jit`."""
    grid = 1
    for _ in range(16):
        if isinstance(kernel, types.FunctionType) and not hasattr(kernel, "__wrapped__"):
            break
        size = getattr(kernel, "grid", None)
        grid = size if isinstance(size, int) else grid
        held = (getattr(kernel, attribute, None) for attribute in _WRAPPED)
        inner = next((f for f in held if callable(f) and f is not kernel), None)
        if inner is None:
            break
        kernel = inner
    return kernel, grid


class Rebuilder:
    """Rebuilds a function over globals in which everything of `nki` is the stand-in's."""

    def __init__(self) -> None:
        self.globals: dict[int, _Globals] = {}
        self.made: dict[int, types.FunctionType] = {}
        self.private = PrivateModules([])

    def function(self, function: types.FunctionType) -> types.FunctionType:
        """Return the rebuilt function; closures and defaults are mapped too."""
        known = self.made.get(id(function))
        if known is not None:
            return known
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        rebuilt = types.FunctionType(
            function.__code__,
            self.namespace(function.__globals__),
            function.__name__,
            None,
            cells or None,
        )
        self.made[id(function)] = rebuilt
        rebuilt.__dict__.update(function.__dict__)
        by_name = function.__kwdefaults__ or {}
        rebuilt.__kwdefaults__ = {name: self.value(v) for name, v in by_name.items()}
        rebuilt.__defaults__ = tuple(map(self.value, function.__defaults__ or ()))
        rebuilt.__annotations__ = dict(function.__annotations__)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is empty yet
                cell.cell_contents = self.value(old.cell_contents)
        return rebuilt

    def namespace(self, original: dict[str, Any]) -> _Globals:
        """Return the globals of a module with its `nki` objects replaced."""
        known = self.globals.get(id(original))
        if known is None:
            known = self.globals[id(original)] = _Globals(self, original)
            file = original.get("__file__")
            self.private.roots += [Path(file).resolve().parent] if file else []
        return known

    def value(self, value: Any) -> Any:
        """Return the replacement of one value, or the value."""
        if isinstance(value, types.ModuleType):
            return standins.find(value.__name__) if _is_nki(value.__name__) else value
        replaced = self._by_name(value) if _is_nki(getattr(value, "__module__", "")) else None
        if replaced is not None or not callable(value) or isinstance(value, type):
            return value if replaced is None else replaced
        inner, _ = _unwrapped(value)
        if not isinstance(inner, types.FunctionType):
            return value
        own = inner.__globals__  # of a rebuilt function, or with a module of `nki`
        modules = (v.__name__ for v in own.values() if isinstance(v, types.ModuleType))
        if id(own) not in self.globals and not any(map(_is_nki, modules)):
            return value
        if inner is value:
            return self.function(inner)
        return standins.JitKernel(self.function(inner)) if _is_nki(type(value).__module__) \
            else value  # fmt: skip

    @staticmethod
    def _by_name(value: Any) -> Any:
        """Return the stand-in's member or function of the same name, or None."""
        name = getattr(value, "name", None) or getattr(value, "__name__", None)
        for names in map(vars, standins.MODULES.values()):
            members = getattr(names.get(type(value).__name__), "__members__", names)
            if name in members:
                return members[name]
        return None


class _Globals(dict[str, Any]):
    """The globals of rebuilt functions: each name is replaced when it is first read."""

    def __init__(self, rebuilder: Rebuilder, original: dict[str, Any]) -> None:
        own = {name: value for name, value in original.items() if name.startswith("__")}
        super().__init__(own, __builtins__=rebuilder.private.builtins)
        self.rebuilder, self.original = rebuilder, original

    def __missing__(self, name: str) -> Any:
        value = self[name] = self.rebuilder.value(self.original[name])
        return value


def _is_nki(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == "nki"
