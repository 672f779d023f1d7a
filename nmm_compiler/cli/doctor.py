"""`nmm doctor`: what is installed, and which executor and inner backend follow from it."""

from __future__ import annotations

import itertools
import json
import platform
from pathlib import Path
from typing import Annotated

import typer

from nmm_compiler import options, outputs, targets
from nmm_compiler.cli import values
from nmm_compiler.errors import CacheError
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.nki_api.installed import version
from nmm_compiler.report.parts import Grid, Line
from nmm_compiler.targets.this_machine import DEVICE, FILE, differences
from nmm_compiler.version import VERSION

_PACKAGES = (
    ("torch", "core"),
    ("numpy", "core"),
    ("ml_dtypes", "core"),
    ("transformers", "extra hf"),
    ("torch-mlir", "extra mlir"),
    ("iree-base-compiler", "extra mlir-test"),
    ("peft", "extra peft"),
)


def doctor(
    device: Annotated[
        bool, typer.Option(help="run small kernels, one construct each, and say which fail")
    ] = False,
    fit: Annotated[
        Path | None,
        values.input_option("verdicts of --device: fit a target of this machine to them"),
    ] = None,
    out: Annotated[
        Path | None,
        values.option(
            values.output_file,
            "FILE",
            "of --device: the verdicts; of --fit: the target, a .json",
            "--out",
            "-o",
        ),
    ] = None,
    as_json: values.Json = False,
) -> values.Answer:
    """Print versions, targets, the cache directory and the Neuron packages found.

    With --device on a Neuron device the verdicts are kept beside the kernel cache, and kernels do
    without the constructs that failed. --fit makes a target of their times, engine by engine, that
    every --target takes.

    Example: nmm doctor

    Example: nmm doctor --device --out verdicts.json

    Example: nmm doctor --fit verdicts.json --out my-trn2.json
    """
    if fit is not None:
        return _fit(fit, out)
    if device:
        return _climb(out)
    if out is not None:
        raise typer.BadParameter("--out is of --device and --fit; add one")
    from nmm_compiler.cache.store import Store
    from nmm_compiler.codegen.machine_target import machine_target
    from nmm_compiler.runtime import machine

    try:
        state = str(Store.open())
    except CacheError as error:
        state = f"not used, kernels are kept in memory: {error}"
    without = [  # what kernels of each target do without on this machine, and who says so
        f"{name} {field}={value}"
        for name in targets.names()
        for field, value in differences(machine_target(name), targets.get(name)).items()
    ]
    verdicts = f"{options.verdict_file() or 'off'}: {', '.join(without) or 'nothing differs'}"
    rows = [
        ("Python", platform.python_version()),
        *((f"{package} ({role})", version(package) or "not installed")
          for package, role in _PACKAGES),
        *((f"target {name}", targets.get(name).summary) for name in targets.names()),
        ("cache", f"{options.cache_dir()}, mode {options.cache_mode()}"),
        ("cache state", state),
        ("verdicts", verdicts),
        *machine.probe().rows(),
    ]  # fmt: skip
    table = Grid.of(("what", "found"), rows)
    said = Line(f"nmm_compiler {VERSION}")
    return values.Answer({"nmm_compiler": VERSION, **dict(rows)}, [said, table])


def _fit(verdicts: Path, out: Path | None) -> values.Answer:
    """Fit a target's constants to the times of a device; write and print them."""
    from nmm_compiler.device.ladder import calibrate

    if out is not None and not out.name.endswith(FILE):
        raise typer.BadParameter(f"--out {out}: a target's file ends in {FILE}")
    fit = calibrate(verdicts)
    if out is not None:
        outputs.write_text(out, json.dumps(fit.file(), indent=1) + "\n")
    use = [Line(f"use it with --target {out}")] if out is not None else []
    return values.Answer(fit.to_dict(), [*fit.parts(), *use])


def _climb(out: Path | None) -> values.Answer:
    """Run the device checks with progress; one that does not pass is no success."""
    from nmm_compiler.device.ladder import RUNGS, climb

    with steps("rungs") as step:
        count = itertools.count(1)
        ladder = climb(on_rung=lambda rung: step(rung.name, next(count), len(RUNGS)))
    kept_at = options.verdict_file(to_write=True) if ladder.executor == DEVICE else None
    place = out or kept_at
    if place is not None:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        outputs.write_text(place, ladder.to_json() + "\n")
    kept = [Line(f"verdicts written to {place}")] if place is not None else []
    return values.Answer(ladder.to_dict(), [*ladder.parts(), *kept], passed=ladder.passed)
