"""`nmm doctor`: what this machine has, and what will therefore happen."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nmm_compiler import options, targets
from nmm_compiler.outputs import check_writable, write_text
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


def doctor(
    device: Annotated[
        bool, typer.Option(help="run small kernels, one construct each, and say which fail")
    ] = False,
    executor: Annotated[
        str | None,
        typer.Option(help="of --device: neuron, nki_simulate or simulator; default: the best here"),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="of --device; default: the device's, else trn2")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="of --device: write the verdicts here")] = None,
) -> None:
    """Print versions, targets, the cache directory and the Neuron packages found.

    Example: nmm doctor

    Example: nmm doctor --device --json verdicts.json
    """
    if device:
        _climb(executor, target, json)
        return
    for name, given in (("executor", executor), ("target", target), ("json", json)):
        if given is not None:
            raise typer.BadParameter(f"--{name} is of --device; add it")
    from nmm_compiler.cache.store import Store
    from nmm_compiler.runtime import machine

    console = Console(markup=False)
    table = Table("what", "found", title=f"nmm_compiler {VERSION}")
    table.add_row("Python", platform.python_version())
    for package, role in _PACKAGES:
        table.add_row(f"{package} ({role})", _version(package))
    for name in targets.names():
        default = " (default)" if name == options.Options().target else ""
        table.add_row(f"target {name}{default}", targets.get(name).summary)
    table.add_row("cache", f"{options.cache_dir()}, mode {options.cache_mode()}")
    store = Store.open()
    table.add_row("cache state", str(store))
    for what, found in machine.probe().rows():
        table.add_row(what, found)
    console.print(table)


def _climb(executor: str | None, target: str | None, json: Path | None) -> None:
    """Run the ladder with progress, print it, write it; exit code 1 when a rung does not pass."""
    from rich.progress import Progress

    from nmm_compiler.runtime.ladder import RUNGS, climb

    if json is not None:
        check_writable(json)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rungs", total=len(RUNGS))

        def on_rung(rung: Any) -> None:
            progress.update(task, advance=1, description=rung.name)

        ladder = climb(executor, target, on_rung=on_rung)
    if json is not None:
        write_text(json, ladder.to_json(indent=2) + "\n")
    typer.echo(str(ladder))
    if not ladder.passed:
        raise typer.Exit(1)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
