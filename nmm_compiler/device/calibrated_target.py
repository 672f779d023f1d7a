"""A target whose constants are those of one machine, from measured and predicted times.

Pairs of rungs do the same few and many times, each on one engine. What a launch costs besides, the
host's part included, is the same for both and cancels in the difference, and the factor of an
engine is

    (many - few measured) / (many - few predicted).

Its constants are scaled by that factor: a clock and a rate become lower by it, a time longer. The
constants of an engine whose factor is outside TRUSTED stay as they are: so large an error is one of
the measurement, or of the model's form, and no constant mends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmm_compiler import targets
from nmm_compiler.device import ladder
from nmm_compiler.errors import FileError
from nmm_compiler.outputs import read_json
from nmm_compiler.records import Record
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.shown import Shown
from nmm_compiler.targets import Target
from nmm_compiler.targets.this_machine import number

TRUSTED = (0.25, 4.0)
"""Factors that are believed."""
BUSY_US = 5.0
"""Microseconds that a pair must differ by, predicted; the launch itself varies by about as much."""

# What the pair of rungs "NAME, few" and "NAME, many" keeps busy: constants that are divided by its
# factor (clocks and rates), and those that are multiplied by it (times).
ENGINES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "matmuls": ("TensorE", ("tensor_clock_hz",), ("tensor_latency_seconds",)),
    "additions": ("VectorE", ("vector_clock_hz",), ()),
    "activations": ("ScalarE", ("scalar_clock_hz",), ()),
    "long loads": (
        "DMA, bytes", ("dma_bytes_per_second_per_engine", "hbm_bytes_per_second"), (),
    ),
    "short loads": (
        "DMA, issue", (),
        ("dma_issue_seconds", "dma_issue_descriptor_seconds", "dma_static_issue_seconds",
         "dma_hardware_issue_seconds"),
    ),
    "transposing loads": ("DMA, transposes", ("dma_transpose_fraction",), ()),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Calibration(Shown, Record):
    """The factor of each engine, or why its constants stay as they are, and the constants that
    follow: name -> (old, new)."""

    base: str
    source: str
    engines: dict[str, float | str]
    numbers: dict[str, tuple[float, float]]

    def file(self) -> dict[str, Any]:
        """Return what `targets.get("FILE.json")` reads."""
        numbers = {name: [new, self.source] for name, (_, new) in self.numbers.items()}
        return {"base": self.base, "numbers": numbers}

    def parts(self) -> list[Part]:
        """Return a table of the engines and one of the constants."""
        engines = [
            (engine, found, "") if isinstance(found, str) else (engine, "", f"{found:.3g}")
            for engine, found in self.engines.items()
        ]
        numbers = [(name, f"{old:.4g}", f"{new:.4g}") for name, (old, new) in self.numbers.items()]
        of_base, own = f"of {self.base}", "of this machine"
        return [
            Grid.of(("engine", "left alone because", "factor"), engines, ("factor",)),
            Grid.of(("constant", of_base, own), numbers, (of_base, own)),
            Line(f"{len(self.numbers)} constants of {self.base} changed, from {self.source}",
                 "headline"),
        ]  # fmt: skip


def calibrate(path: Path) -> Calibration:
    """Return the constants of the machine whose ladder is in a file of `nmm doctor --device`.

    Raises FileError for a file without times, which a run without a device has not.
    """
    told = read_json(path)
    base = told.get("target")
    if base not in targets.names():
        raise FileError(f"{path} names no target; write it with: nmm doctor --device")
    verdicts = told.get("verdicts")
    times = {
        str(v.get("rung")): number(v.get("time_us"))
        for v in (verdicts if isinstance(verdicts, list) else ())
        if isinstance(v, dict) and v.get("verdict") == "passed"
    }
    if not any(t is not None for t in times.values()):
        raise FileError(
            f"{path} holds no times: they are of a device, and this is of executor "
            f"{told.get('executor')!r}; run nmm doctor --device where one is"
        )
    target = targets.get(base)
    found = {name: _factor(name, times, target) for name in ENGINES}
    numbers: dict[str, tuple[float, float]] = {}
    for name, factor in found.items():
        if isinstance(factor, str):
            continue
        _, divided, multiplied = ENGINES[name]
        whole = found["long loads"]
        if name == "transposing loads" and not isinstance(whole, str):
            factor /= whole  # a share of the DMA's rate, which has a factor of its own
        shares = {**dict.fromkeys(divided, 1 / factor), **dict.fromkeys(multiplied, factor)}
        for constant, share in shares.items():
            old = float(getattr(target, constant))
            numbers[constant] = (old, old * share)
    source = f"nmm doctor --fit {path.name}"
    engines = {ENGINES[name][0]: factor for name, factor in found.items()}
    return Calibration(base=base, source=source, engines=engines, numbers=numbers)


def _factor(name: str, times: dict[str, float | None], target: Target) -> float | str:
    """Return the factor of an engine by the names of its rungs, or why it has none."""
    pair = [rung for rung in ladder.TIMED if rung.name.partition(",")[0] == name]
    few, many = (times.get(rung.name) for rung in pair)
    if few is None or many is None:
        return "its rungs did not both pass"
    less, more = (ladder.predicted_us(rung, target) or 0.0 for rung in pair)
    if more - less < BUSY_US:
        return f"the pair differs by under {BUSY_US} us"
    factor = (many - few) / (more - less)
    if not TRUSTED[0] <= factor <= TRUSTED[1]:
        return f"a factor of {factor:.3g} is not believed"
    return factor
