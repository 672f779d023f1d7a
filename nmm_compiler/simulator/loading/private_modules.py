"""Private modules: kernel files and what they import, loaded without touching `sys.modules`.

Every file gets builtins of its own whose `__import__` resolves `nki...` to the stand-ins, modules
found beside the kernel (in its package or directory) to private copies loaded the same way, and
everything else to the real import.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

from nmm_compiler.simulator.beta1 import modules as beta1
from nmm_compiler.simulator.loading import nki_object, standins
from nmm_compiler.simulator.loading.source_text import read_source, run_source

_LIBRARIES = frozenset({"nkilib", "nkilib_src", "nki_samples"})
BETA_1 = "__nki_beta_1__"
"""Name in the globals of a file that imports `neuronxcc.nki`: its dialect is Beta 1."""


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file does; None for a file that is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


class PrivateModules:
    """The private modules of some search roots."""

    def __init__(self, roots: list[Path]) -> None:
        self.roots = roots
        self.modules: dict[str, types.ModuleType] = {}
        self.stamps: dict[Path, tuple[int, int] | None] = {}
        self.builtins = dict(vars(builtins))
        self.builtins["__import__"] = self.import_module
        self.changed = {
            "dataclasses": _changed(dataclasses, dataclass=nki_object.dataclass),
            "importlib": _changed(importlib, import_module=self._import_by_name),
            "inspect": _changed(inspect, getmodule=self._module_of),
        }

    def locate(self, name: str) -> Path | None:
        """Return the source of a dotted module name under the roots, or None."""
        parts = name.split(".")
        if parts[0] in _LIBRARIES:
            spec = importlib.util.find_spec(parts[0])
            places = (spec.submodule_search_locations if spec is not None else None) or ()
            self.roots += {Path(place).parent for place in places} - set(self.roots)
        bases = [root.joinpath(*parts) for root in self.roots]
        for base in bases:
            for path in (base / "__init__.py", base.with_suffix(".py")):
                if path.is_file():
                    return path
        return next(
            (b for b in bases if b.is_dir() and (len(parts) > 1 or [*b.glob("*.py")])), None
        )

    def load(self, name: str) -> types.ModuleType | None:
        """Return the private module of a dotted name, loading it and its parents."""
        parent, _, leaf = name.rpartition(".")
        if parent and name not in self.modules:
            self.load(parent)  # which may load this one
        if name in self.modules:
            return self.modules[name]
        path = self.locate(name)
        if path is None:
            return None
        if name.partition(".")[0] == "nmm_compiler" and path.name == "__init__.py":
            path = path.parent  # our own `__init__.py` imports too much
        module = self.execute(path, name)
        if parent and parent in self.modules:
            setattr(self.modules[parent], leaf, module)
        return module

    def execute(self, path: Path, name: str) -> types.ModuleType:
        """Execute a file (or make a namespace package) as private module `name`."""
        module = self.modules[name] = types.ModuleType(name)
        is_package = path.is_dir() or path.name == "__init__.py"
        module.__package__ = name if is_package else name.rpartition(".")[0]
        if is_package:
            module.__path__ = [str(path if path.is_dir() else path.parent)]
        if path.is_dir():
            return module
        module.__file__ = str(path)
        self.stamps[path] = _stamp(path)
        return self.run_text(read_source(path), path, name, module)

    def run_text(
        self, text: str, path: Path, name: str, module: types.ModuleType
    ) -> types.ModuleType:
        """Execute source text as the body of `module`."""
        module.__dict__["__builtins__"] = self.builtins
        if "dataclass" in text:
            # dataclasses looks string annotations up in sys.modules[__module__]
            module.__dict__["__name__"] = __name__
        try:
            run_source(text, str(path), module.__dict__)
        except BaseException:
            self.modules.pop(name, None)
            raise
        return module

    def fresh(self) -> bool:
        """Return whether no loaded file has changed since."""
        return all(_stamp(path) == stamp for path, stamp in self.stamps.items())

    def import_module(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        """Stand in for `__import__` inside private modules."""
        if level:
            package = (globals or {}).get("__package__") or ""
            dots = "." * (level if package else level - 1)  # a file without a package is its own
            name = importlib.util.resolve_name(dots + name, package) if dots else name
        elif name in self.changed:
            return self.changed[name]
        elif beta1.stands_in(name):
            if globals is not None and name != "neuronxcc.nki.typing":  # of annotations
                globals[BETA_1] = True
            return beta1.import_module(name, fromlist)
        top = name.partition(".")[0]
        if top == "nki" and not level:
            found = standins.find(name)
            return found if fromlist else standins.find(top)
        elsewhere = not level and (top in sys.stdlib_module_names or top == "nmm_compiler")
        module = None if elsewhere else self.load(name)
        if module is None:
            if level:
                raise ModuleNotFoundError(f"no module {name!r} under {self.roots}", name=name)
            return builtins.__import__(name, globals, locals, fromlist, 0)
        for item in fromlist or ():
            if hasattr(module, "__path__") and item != "*" and not hasattr(module, item):
                self.load(f"{name}.{item}")
        return module if fromlist else self.load(top)

    def _import_by_name(self, name: str, package: str | None = None) -> Any:
        """Do importlib.import_module."""
        level = len(name) - len(name.lstrip("."))
        context = {"__package__": package}
        return self.import_module(name[level:], context, None, ("__name__",), level)

    def _module_of(self, thing: Any, filename: str | None = None) -> Any:
        """Do inspect.getmodule, which knows no private modules."""
        namespace = getattr(thing, "f_globals", getattr(thing, "__globals__", None))
        for module in self.modules.values():
            if vars(module) is namespace:
                return module
        return inspect.getmodule(thing, filename)


def _changed(module: types.ModuleType, **names: Any) -> types.SimpleNamespace:
    """Return what stands for a module: it has other functions under some names."""
    return types.SimpleNamespace(**{**vars(module), **names})
