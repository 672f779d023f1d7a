"""Loads kernel source files under the stand-in modules, without touching `sys.modules`.

Every loaded file gets builtins of its own whose `__import__` resolves `nki...` to the stand-ins,
modules found beside the kernel (in its package or directory) to private copies loaded the same
way, and everything else to the real import. A kernel function that lives in an already imported
module is rebuilt over a copy of its globals in which `nki` objects are replaced.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from pathlib import Path
from typing import Any

from nmm_compiler.errors import KernelNotFoundError, SimulationError, closest
from nmm_compiler.nki_api.source_text import read_source
from nmm_compiler.simulator.loading import standins
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.loading.run_text import run_source

_LIBRARIES = frozenset({"nkilib", "nkilib_src", "nki_samples"})
_STDLIB = sys.stdlib_module_names


class PrivateModules:
    """The private modules of some search roots.

    shadows: names of the standard library that the roots may replace.
    """

    def __init__(self, roots: list[Path]) -> None:
        self.roots = roots
        self.modules: dict[str, types.ModuleType] = {}
        self.stamps: dict[Path, tuple[int, int]] = {}
        self.shadows: frozenset[str] = frozenset()
        self.builtins = dict(vars(builtins))
        self.builtins["__import__"] = self.import_module

    def locate(self, name: str) -> Path | None:
        """Return the source of a dotted module name under the roots, or None."""
        parts = name.split(".")
        for root in self.roots:
            base = root.joinpath(*parts)
            if (base / "__init__.py").is_file():
                return base / "__init__.py"
            if base.with_suffix(".py").is_file():
                return base.with_suffix(".py")
        if parts[0] in _LIBRARIES:
            return self._installed(parts)
        for root in self.roots:
            base = root.joinpath(*parts)
            if (base.is_dir() and any(base.glob("*.py"))) or (base.is_dir() and len(parts) > 1):
                return base
        return None

    def _installed(self, parts: list[str]) -> Path | None:
        spec = importlib.util.find_spec(parts[0])
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(next(iter(spec.submodule_search_locations))).parent
        if root in self.roots:
            return None
        self.roots.append(root)
        return self.locate(".".join(parts))

    def load(self, name: str) -> types.ModuleType | None:
        """Return the private module of a dotted name, loading it and its parents."""
        known = self.modules.get(name)
        if known is not None:
            return known
        parent, _, leaf = name.rpartition(".")
        if parent:
            self.load(parent)
            known = self.modules.get(name)
            if known is not None:
                return known
        path = self.locate(name)
        if path is None:
            return None
        if name.partition(".")[0] == "nmm_compiler" and path.name == "__init__.py":
            path = path.parent  # our own rooms: their doors import what no kernel needs
        module = self.execute(path, name)
        if parent and parent in self.modules:
            setattr(self.modules[parent], leaf, module)
        return module

    def execute(self, path: Path, name: str) -> types.ModuleType:
        """Execute a file (or make a namespace package) as private module `name`."""
        module = types.ModuleType(name)
        self.modules[name] = module
        module.__dict__["__builtins__"] = self.builtins
        if path.is_dir():
            module.__path__ = [str(path)]
            module.__package__ = name
            return module
        is_package = path.name == "__init__.py"
        module.__file__ = str(path)
        module.__package__ = name if is_package else name.rpartition(".")[0]
        if is_package:
            module.__path__ = [str(path.parent)]
        stat = path.stat()
        self.stamps[path] = (stat.st_mtime_ns, stat.st_size)
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
        for path, stamp in self.stamps.items():
            try:
                stat = path.stat()
            except OSError:
                return False
            if (stat.st_mtime_ns, stat.st_size) != stamp:
                return False
        return True

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
            parts = package.split(".") if package else []
            if level > len(parts) + (0 if package else 1):
                raise ImportError(f"relative import of {'.' * level}{name} beyond its package")
            base = parts[: len(parts) - level + 1]
            full = ".".join([*base, *([name] if name else [])])
            module = self.load(full)
            if module is None:
                raise ModuleNotFoundError(f"no module {full!r} under {self.roots}", name=full)
            return self._with_fromlist(module, full, fromlist)
        top = name.partition(".")[0]
        if name == "importlib":
            return self._importlib()
        if name == "inspect":
            return self._inspect()
        if name == "dataclasses":
            return _DATACLASSES
        if top == "neuronxcc" and name.startswith("neuronxcc.nki"):
            return standins.beta_typing(name, bool(fromlist))
        if top == "nki":
            module = standins.find(name)
            if fromlist:
                for item in fromlist:
                    if f"{name}.{item}" in standins.MODULES:
                        setattr(module, item, standins.MODULES[f"{name}.{item}"])
                return module
            return standins.find(top)
        if (top not in _STDLIB or top in self.shadows) and top != "nmm_compiler":
            module = self.load(name)
            if module is not None:
                return self._with_fromlist(module, name, fromlist) if fromlist else self.load(top)
        return builtins.__import__(name, globals, locals, fromlist, 0)

    def _importlib(self) -> types.ModuleType:
        """Return `importlib` whose import_module goes through this loader."""
        proxy = types.ModuleType("importlib")
        proxy.__dict__.update(vars(importlib))

        def import_module(name: str, package: str | None = None) -> Any:
            level = len(name) - len(name.lstrip("."))
            context = {"__package__": package}
            return self.import_module(name[level:], context, None, ("__name__",), level)

        proxy.__dict__["import_module"] = import_module
        return proxy

    def _inspect(self) -> types.ModuleType:
        """Return `inspect` whose getmodule knows private modules."""
        proxy = types.ModuleType("inspect")
        proxy.__dict__.update(vars(inspect))

        def getmodule(thing: Any, filename: str | None = None) -> Any:
            namespace = getattr(thing, "f_globals", getattr(thing, "__globals__", None))
            for module in self.modules.values():
                if namespace is not None and vars(module) is namespace:
                    return module
            return inspect.getmodule(thing, filename)

        proxy.__dict__["getmodule"] = getmodule
        return proxy

    def _with_fromlist(self, module: types.ModuleType, name: str, fromlist: Any) -> Any:
        if hasattr(module, "__path__"):
            for item in fromlist or ():
                if item != "*" and not hasattr(module, item):
                    self.load(f"{name}.{item}")
        return module


def _dataclass(cls: Any = None, /, **options: Any) -> Any:
    """Do dataclasses.dataclass; in an NKIObject a field that is not given is None.

    So the NKI language guide defines the initializer of such classes, decorated or not.
    """
    if cls is None:
        return lambda c: _dataclass(c, **options)
    own = "__init__" in vars(cls)
    made = dataclasses.dataclass(**options)(cls)
    if own or not issubclass(made, NKIObject) or not options.get("init", True):
        return made
    record: Any = made
    fields = [f for f in dataclasses.fields(record) if f.init]
    required = {
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    names = {f.name for f in fields}
    initialize = record.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for field in fields[len(args) :]:
            if field.name in required:
                kwargs.setdefault(field.name, None)
        plain = {k: kwargs.pop(k) for k in list(kwargs) if k not in names and hasattr(made, k)}
        initialize(self, *args, **kwargs)
        for name, value in plain.items():  # class attributes without an annotation
            object.__setattr__(self, name, value)

    record.__init__ = __init__
    return made


_DATACLASSES = types.ModuleType("dataclasses")
_DATACLASSES.__dict__.update(vars(dataclasses))
_DATACLASSES.__dict__["dataclass"] = _dataclass

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
        raise KernelNotFoundError(f"kernel file {path} does not exist; check the path")
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

    path: where people find the text; neither it nor a file beside it is read.
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
    own = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, standins.JitKernel)
        and getattr(value.function, "__code__", None) is not None
        and value.function.__code__.co_filename == str(path.resolve())
    }
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__code__.co_filename == str(path.resolve())
    }
    if name is not None:
        found = vars(module).get(name)
        if callable(found):
            return found
        known = [*own, *functions]
        raise KernelNotFoundError(
            f"{path} has no kernel {name!r}{closest(name, known)} (it has: "
            f"{', '.join(known) or 'no function'})"
        )
    choices: dict[str, Any] = own or {k: v for k, v in functions.items() if not k.startswith("_")}
    if len(choices) != 1:
        raise KernelNotFoundError(
            f"{path} has {len(choices)} kernels ({', '.join(choices) or 'none'}); name one as "
            f"{path.name}:NAME"
        )
    return next(iter(choices.values()))


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
        raise KernelNotFoundError(
            f"{kernel!r} is no kernel; pass a path, 'file.py:name', a function, or an object with "
            ".path and .name"
        )
    rebuilt = Rebuilder().function(function)
    result = standins.JitKernel(rebuilt, grid)
    return result, function.__code__.co_filename


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
            replaced = self._by_name(value, module)
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
    def _by_name(value: Any, module: str) -> Any:
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


__all__ = ["PrivateModules", "SimulationError", "find_kernel", "load_file", "resolve", "unwrap"]
