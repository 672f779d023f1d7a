"""Rebuilds a kernel function of an already imported module over the stand-ins.

The function gets a copy of its globals in which everything of `nki` is the stand-in's; so do the
functions of its module that it may call.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

from nmm_compiler.simulator.loading import standins
from nmm_compiler.simulator.loading.private_modules import PrivateModules


def unwrap(kernel: Any) -> tuple[Any, int]:
    """Return (plain function, grid) behind decorators such as the real `nki.jit`."""
    grid = 1
    for _ in range(16):
        if isinstance(kernel, types.FunctionType) and not hasattr(kernel, "__wrapped__"):
            break
        if isinstance(kernel, types.MethodType):
            kernel = kernel.__func__
            continue
        size = getattr(kernel, "grid", None)
        if isinstance(size, int):
            grid = size
        for attribute in ("__wrapped__", "func", "fn", "function", "_func"):
            inner = getattr(kernel, attribute, None)
            if callable(inner) and inner is not kernel:
                kernel = inner
                break
        else:
            break
    return kernel, grid


class Rebuilder:
    """Rebuilds a function over globals in which everything of `nki` is the stand-in's."""

    def __init__(self) -> None:
        self.globals: dict[int, dict[str, Any]] = {}
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
        rebuilt.__kwdefaults__ = {
            k: self.value(v) for k, v in (function.__kwdefaults__ or {}).items()
        } or None
        rebuilt.__defaults__ = tuple(self.value(v) for v in function.__defaults__ or ()) or None
        rebuilt.__annotations__ = dict(function.__annotations__)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.value(old.cell_contents)
            except ValueError:
                continue
        return rebuilt

    def namespace(self, original: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a module's globals with its `nki` objects replaced."""
        known = self.globals.get(id(original))
        if known is not None:
            return known
        copy = dict(original)
        self.globals[id(original)] = copy
        folder = original.get("__file__")
        if folder:
            root = Path(folder).resolve().parent
            if root not in self.private.roots:
                self.private.roots.append(root)
        copy["__builtins__"] = self.private.builtins
        for key, value in original.items():
            if not key.startswith("__"):
                copy[key] = self.value(value, original)
        return copy

    def value(self, value: Any, home: dict[str, Any] | None = None) -> Any:
        """Return the replacement of one value, or the value."""
        if isinstance(value, types.ModuleType):
            if isinstance(value, standins.StandIn):
                return value
            top = value.__name__.partition(".")[0]
            return standins.find(value.__name__) if top == "nki" else value
        module = getattr(value, "__module__", None) or ""
        if isinstance(module, str) and module.partition(".")[0] == "nki":
            replaced = self._by_name(value)
            if replaced is not None:
                return replaced
        if isinstance(value, standins.JitKernel):
            return value
        inner, _ = unwrap(value) if callable(value) and not isinstance(value, type) \
            else (value, 1)  # fmt: skip
        if isinstance(inner, types.FunctionType) and (
            home is None or inner.__globals__ is home or self._uses_nki(inner)
        ):
            if inner is value:
                return self.function(inner)
            if type(value).__module__.partition(".")[0] == "nki":
                return standins.JitKernel(self.function(inner))
        return value

    @staticmethod
    def _uses_nki(function: types.FunctionType) -> bool:
        return any(
            isinstance(v, types.ModuleType) and v.__name__.partition(".")[0] == "nki"
            for v in function.__globals__.values()
        )

    @staticmethod
    def _by_name(value: Any) -> Any:
        name = getattr(value, "name", None) or getattr(value, "__name__", None)
        if not isinstance(name, str):
            return None
        kind = type(value).__name__
        for candidate in standins.MODULES.values():
            if isinstance(getattr(type(value), "__members__", None), dict) or hasattr(
                type(value), "__members__"
            ):
                enum = candidate.__dict__.get(kind)
                if enum is not None and hasattr(enum, name):
                    return getattr(enum, name)
            if name in candidate.__dict__ and not name.startswith("_"):
                return candidate.__dict__[name]
        return None
