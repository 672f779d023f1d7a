"""Finds the kernel that a path, a text, a function or an object names, and loads its file.

`resolve` is the entry point: it returns a callable whose `nki` is the stand-in. A file is loaded
again only when it, or a file that it imports, changes.
"""

from __future__ import annotations

import inspect
import os
import types
from pathlib import Path
from typing import Any

from nmm_compiler.errors import KernelArgumentError, closest, nearest
from nmm_compiler.simulator.beta1 import kernel as beta1
from nmm_compiler.simulator.loading import standins
from nmm_compiler.simulator.loading.private_modules import BETA_1, PrivateModules
from nmm_compiler.simulator.loading.rebuild import Rebuilder, unwrap

_CACHE: dict[Path, tuple[PrivateModules, types.ModuleType]] = {}
_VERIFIED: dict[tuple[Path, str], types.ModuleType] = {}
_MODULES_KEPT = 64


def package_of(path: Path) -> tuple[Path, str]:
    """Return (search root, dotted module name) of a file, from the `__init__.py` beside it."""
    parts = [path.stem] if path.name != "__init__.py" else []
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts) or path.stem


def load_file(path: Path) -> types.ModuleType:
    """Return the private module of a kernel file; loaded once until a file changes."""
    path = path.resolve()
    if not path.is_file():
        raise KernelArgumentError(f"kernel file {path} does not exist; check the path")
    known = _CACHE.get(path)
    if known is not None and known[0].fresh():
        return known[1]
    root, name = package_of(path)
    roots = [root] if root == path.parent else [root, path.parent]
    private = PrivateModules(roots)
    module = private.load(name)
    if module is None or getattr(module, "__file__", None) != str(path):
        module = private.execute(path, name)
    if len(_CACHE) > _MODULES_KEPT:
        _CACHE.pop(next(iter(_CACHE)))
    _CACHE[path] = (private, module)
    return module


def load_text(text: str, path: Path) -> types.ModuleType:
    """Return the private module of a kernel's verified text; loaded once.

    path: the file's name in messages; neither it nor a file beside it is read.
    """
    known = _VERIFIED.get((path, text))
    if known is None:
        module = types.ModuleType(path.stem)
        known = PrivateModules([]).run_text(text, path, path.stem, module)
        if len(_VERIFIED) > _MODULES_KEPT:
            _VERIFIED.pop(next(iter(_VERIFIED)), None)
        _VERIFIED[path, text] = known
    return known


def find_kernel(module: types.ModuleType, path: Path, name: str | None) -> Any:
    """Return the kernel `name` of a module, or its only `@nki.jit` function."""
    found = None if name is None else vars(module).get(name)
    if callable(found):
        return _of_its_dialect(found, module)
    file = str(path.resolve())
    own = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, standins.JitKernel)
        and getattr(value.function, "__code__", None) is not None
        and value.function.__code__.co_filename == file
    }
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__code__.co_filename == file
    }
    if name is not None:
        known = [*own, *functions]
        raise KernelArgumentError(
            f"{path} has no kernel {name!r}{closest(name, known)} (it has: "
            f"{nearest(name, known) or 'no function'})"
        )
    choices: dict[str, Any] = own or {k: v for k, v in functions.items() if not k.startswith("_")}
    if len(choices) != 1:
        raise KernelArgumentError(
            f"{path} has {len(choices)} kernels ({', '.join(choices) or 'none'}); name one as "
            f"{path.name}:NAME"
        )
    return _of_its_dialect(next(iter(choices.values())), module)


def _of_its_dialect(found: Any, module: types.ModuleType) -> Any:
    """Return a plain function of a Beta 1 file as a kernel of that dialect."""
    if isinstance(found, types.FunctionType) and BETA_1 in vars(module):
        return beta1.Kernel(found, checked=False)
    return found


def resolve(kernel: Any) -> tuple[Any, str]:
    """Return (callable under the stand-ins, its file) of whatever names a kernel."""
    if isinstance(kernel, standins.JitKernel):
        return kernel, kernel.function.__code__.co_filename
    if isinstance(kernel, (str, os.PathLike)):
        text = os.fspath(kernel)
        name: str | None = None
        if not os.path.exists(text) and ":" in text:
            head, _, tail = text.rpartition(":")
            if tail.isidentifier():
                text, name = head, tail
        path = Path(text)
        return find_kernel(load_file(path), path, name), str(path.resolve())
    if hasattr(kernel, "path") and hasattr(kernel, "name"):
        path = Path(kernel.path).resolve()
        source = getattr(kernel, "source", None)
        module = load_text(source, path) if isinstance(source, str) else load_file(path)
        return find_kernel(module, path, kernel.name), str(path)
    function, grid = unwrap(kernel)
    if not isinstance(function, types.FunctionType):
        raise KernelArgumentError(
            f"{kernel!r} is no kernel; pass a path, 'file.py:name', a function, or an object with "
            ".path and .name"
        )
    rebuilt = Rebuilder().function(function)
    result = standins.JitKernel(rebuilt, grid)
    return result, function.__code__.co_filename
