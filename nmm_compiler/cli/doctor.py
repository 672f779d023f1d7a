"""`nmm doctor`: what this machine has, and what will therefore happen."""

from __future__ import annotations

import importlib.metadata
import platform

from rich.console import Console
from rich.table import Table

from nmm_compiler import options, targets
from nmm_compiler.version import VERSION

_PACKAGES = (
    ("torch", "core"),
    ("numpy", "core"),
    ("ml_dtypes", "core"),
    ("libcst", "core: codegen"),
    ("transformers", "extra hf"),
    ("matplotlib", "extra plot"),
    ("torch-mlir", "extra mlir"),
    ("iree-base-compiler", "extra mlir-test"),
    ("peft", "extra peft"),
)


def doctor() -> None:
    """Print versions, targets, the cache directory and the Neuron packages found.

    Example: nmm doctor
    """
    from nmm_compiler.cache.store import Store
    from nmm_compiler.runtime import machine

    console = Console(markup=False)
    table = Table("what", "found", title=f"nmm_compiler {VERSION}")
    table.add_row("Python", platform.python_version())
    for package, role in _PACKAGES:
        table.add_row(f"{package} ({role})", _version(package))
    for name in targets.names():
        target = targets.get(name)
        kind = {True: " (default)", False: ""}[name == options.Options().target]
        table.add_row(f"target {name}{kind}", target.summary)
    table.add_row("cache", f"{options.cache_dir()}, mode {options.cache_mode()}")
    store = Store.open()
    table.add_row("cache state", str(store))
    for what, found in machine.probe().rows():
        table.add_row(what, found)
    console.print(table)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
