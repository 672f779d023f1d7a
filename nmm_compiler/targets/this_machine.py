"""The target of one machine: a registered one, less what failed there, with what was measured.

What a machine differs in comes from a ladder's JSON (`nmm doctor --device`), whose failed
constructs kernels then do without while the NKI that it ran is installed, and from a file that
`nmm doctor --fit` wrote. The target keeps its
name, which says what hardware it is; `differences` says the rest, for the cache key.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nmm_compiler.errors import FileError
from nmm_compiler.outputs import read_json
from nmm_compiler.targets.base import Source, Target

WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "double row": {"fp8_double_row": False},
    "double row, odd": {"fp8_double_row": False},
    "DMA transpose 512": {"dma_transposes": False},
    "DMA transpose 77": {"dma_transposes": False},
    "DMA transpose 8": {"dma_transposes": False},
    "DMA transpose 3-D": {"dma_transposes": False},
    "loop to a register": {"device_loops": False},
}
"""Rung of the ladder -> the capabilities that a target lacks where it does not pass.

The other rungs have no other form that a kernel could take.
"""

FILE = ".json"
"""How the name of a target ends that is a file."""
DEVICE = "neuron"
"""The executor whose verdicts are of a device; a simulator's say nothing of one."""


def differences(target: Target, registered: Target) -> dict[str, Any]:
    """Return the numbers and capabilities that a target does not share with the registered one."""
    return {
        name: getattr(target, name)
        for name in sorted(target.sources)
        if getattr(target, name) != getattr(registered, name)
    }


def changed(target: Target, values: Mapping[str, Any], source: Source) -> Target:
    """Return a target with other values, whose source is the given one."""
    told = {**target.sources, **dict.fromkeys(values, source)}
    return dataclasses.replace(target, **values, sources=told)


def with_verdicts(target: Target, path: Path, nki: Callable[[], str | None]) -> Target:
    """Return the target as a ladder on a device of its kind found it; itself if there is no file.

    nki: returns the installed version of NKI, or None. Verdicts of another version are ignored,
    with one warning; where none is installed they hold, for kernels that are built for another
    machine. Raises FileError for a file that is no ladder's.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in the cache directory's name
        return target
    return _with_verdicts(target, path, (found.st_mtime_ns, found.st_size), nki)


@functools.lru_cache(maxsize=64)
def _with_verdicts(
    target: Target, path: Path, written: tuple[int, int], nki: Callable[[], str | None]
) -> Target:
    told = read_json(path)
    verdicts = told.get("verdicts")
    if not isinstance(verdicts, list) or not all(
        isinstance(v, dict) and isinstance(v.get("rung"), str) and "verdict" in v for v in verdicts
    ):
        raise FileError(f"{path} holds no verdicts of rungs; write it with: nmm doctor --device")
    if told.get("executor") != DEVICE or told.get("target") != target.name:
        return target
    machine, installed = told.get("machine"), nki()
    seen = machine.get("nki") if isinstance(machine, dict) else None
    if installed is not None and installed != seen:
        warnings.warn(
            f"nmm: {path} is ignored: its verdicts are of NKI {seen}, and {installed} is "
            "installed; run: nmm doctor --device",
            stacklevel=2,
        )
        return target
    values: dict[str, Any] = {}
    for verdict in verdicts:
        failed = verdict["verdict"] in ("failed", "wrong")
        values |= WITHOUT.get(verdict["rung"], {}) if failed else {}
    return changed(target, values, Source("measured", f"nmm doctor --device: {path}"))


def from_file(path: Path, registered: Mapping[str, Target]) -> Target:
    """Return the target of a file of `nmm doctor --fit`: {"base": "trn2", "numbers": {}}.

    Each number is [value, where it comes from]. Raises FileError for anything else.
    """
    told = read_json(path)
    base, numbers = registered.get(str(told.get("base"))), told.get("numbers")
    if base is None or not isinstance(numbers, dict):
        raise FileError(
            f"{path} describes no target; write it with: nmm doctor --fit VERDICTS --out {path}"
        )
    for name, given in numbers.items():
        known = getattr(base, name, None) if name in base.sources else None
        value = number(given[0]) if isinstance(given, list) and len(given) == 2 else None
        if not isinstance(known, float) or value is None or not 1e-3 < value / known < 1e3:
            raise FileError(
                f"{path}: {name} is {given!r:.80}, and must be [a number, its source] of a "
                f"measurable number of a target, here within 1000 times of {known!r:.80}"
            )
        base = changed(base, {name: value}, Source("measured", str(given[1])))
    return base


def number(value: Any) -> float | None:
    """Return a value of a JSON file as a finite number, or None where it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None  # False of NaN
