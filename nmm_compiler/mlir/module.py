"""The result of an export: MLIR text, the kernels it calls, and how both are written to disk."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmm_compiler import outputs
from nmm_compiler.mlir.program import Argument


@dataclass(frozen=True)
class KernelSource:
    """The NKI source of a kernel for one token count: text, sha256 and file name."""

    tokens: int
    file: str
    sha256: str
    text: str


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of an NKI kernel.

    family, spec: what it computes, as KernelSpec's JSON; "m" is null when the token count is known
    at run time only. operands: for each positional argument of the NKI function, the number of the
    call's operand. sources: NKI files, one per token count; empty when none were written.
    """

    family: str
    spec: dict[str, Any]
    operands: tuple[int, ...]
    sources: tuple[KernelSource, ...]

    def to_dict(self, directory: str) -> dict[str, Any]:
        """Return plain JSON data; `directory` holds the source files."""
        sources = [
            {"tokens": s.tokens, "file": f"{directory}/{s.file}", "sha256": s.sha256}
            for s in self.sources
        ]
        return {
            "family": self.family,
            "spec": self.spec,
            "operands": list(self.operands),
            "sources": sources,
        }


@dataclass(frozen=True)
class ExportedKernel:
    """One distinct kernel of a module: a function, or the target of custom_calls.

    name: the function's name. op: the torch op. calls: the FX nodes that it serves. launches: the
    NKI kernels that compute it: one for all results, or launch i for result i where a target has
    no room for the one.
    """

    name: str
    op: str
    x_layout: str
    out_layout: str
    target: str
    calls: tuple[str, ...]
    launches: tuple[KernelLaunch, ...]

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        """The NKI sources of all launches."""
        return tuple(source for launch in self.launches for source in launch.sources)

    def attributes(self) -> dict[str, Any]:
        """Return the module's attributes of the kernel; lists have one entry per launch."""
        launches = self.launches
        specs = [json.dumps(launch.spec, sort_keys=True) for launch in launches]
        found: dict[str, Any] = {
            "op": self.op,
            "family": _one_or_all([launch.family for launch in launches]),
            "spec": _one_or_all(specs),
            "operands": _one_or_all([list(launch.operands) for launch in launches]),
            "target": self.target,
            "x_layout": self.x_layout,
            "out_layout": self.out_layout,
        }
        if self.sources:
            of_each = [launch.sources for launch in launches]
            found["source"] = _one_or_all([_one_or_all([s.file for s in e]) for e in of_each])
            found["source_sha256"] = _one_or_all(
                [_one_or_all([s.sha256 for s in e]) for e in of_each]
            )
            found["source_tokens"] = _one_or_all([s.tokens for s in of_each[0]])
        return found


def _one_or_all(entries: list[Any]) -> Any:
    return entries[0] if len(entries) == 1 else entries


@dataclass(frozen=True)
class MLIRModule:
    """An exported module.

    text: the MLIR. dialect: torch, linalg or stablehlo. mode: "call" or "inline". kernels: the
    distinct kernels in the order of first use. arguments: those of @main, weights named as in the
    model's state_dict. outputs: how many tensors @main returns.
    """

    text: str
    dialect: str
    mode: str
    kernels: tuple[ExportedKernel, ...]
    arguments: tuple[Argument, ...]
    outputs: int

    def __str__(self) -> str:
        return self.text

    def manifest(self, directory: str = ".") -> dict[str, Any]:
        """Return the map of names to files, as plain JSON data; `directory` holds the sources."""
        kernels = [
            {
                "name": kernel.name,
                "op": kernel.op,
                "target": kernel.target,
                "x_layout": kernel.x_layout,
                "out_layout": kernel.out_layout,
                "calls": list(kernel.calls),
                "launches": [launch.to_dict(directory) for launch in kernel.launches],
            }
            for kernel in self.kernels
        ]
        arguments = [
            {"name": a.name, "kind": a.kind, "shape": list(a.shape), "dtype": a.dtype}
            for a in self.arguments
        ]
        return {
            "version": 1,
            "entry": "main",
            "dialect": self.dialect,
            "kernels_mode": self.mode,
            "arguments": arguments,
            "outputs": self.outputs,
            "kernels": kernels,
        }

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write the module, its manifest and its NKI sources; return the files, the module last.

        `model.mlir` comes with `model.manifest.json` and the directory `model.kernels`. Every file
        is written beside its place and moved there; when one cannot be written, OutputError says
        which, and no new file is left.
        """
        path = Path(path)
        stem = path.name.removesuffix(".mlir") if path.suffix == ".mlir" else path.name
        sources = path.parent / f"{stem}.kernels"
        wanted = {
            sources / source.file: source.text
            for kernel in self.kernels
            for source in kernel.sources
        }
        manifest = json.dumps(self.manifest(sources.name), indent=2) + "\n"
        wanted[path.parent / f"{stem}.manifest.json"] = manifest
        wanted[path] = self.text
        return _write_all(wanted, path)


def _write_all(wanted: dict[Path, str], module: Path) -> tuple[Path, ...]:
    """Write every text beside its place, then move all of them; on failure delete the new files."""
    staged: dict[Path, Path] = {}
    made: list[Path] = []
    current = module
    try:
        if module.exists() and not module.is_file():
            raise OSError(0, "a manifest is written beside it, so it must be a file")
        for path, text in wanted.items():
            current = path
            if not path.parent.exists() and path.parent != module.parent:
                path.parent.mkdir()
                made.append(path.parent)
            staged[path] = outputs.stage(path, outputs.utf8(text))
        for path in wanted:
            current = path
            os.replace(staged[path], path)
            del staged[path]
    except OSError as error:
        for temporary in staged.values():
            with contextlib.suppress(OSError):  # only the first error is reported
                temporary.unlink()
        for directory in made:
            with contextlib.suppress(OSError):  # not empty if files were moved into it before
                directory.rmdir()
        raise outputs.cannot_write(current, error) from error
    return tuple(wanted)
