"""The device checks: small kernels, one construct each, that show what a machine can run.

`nmm doctor --device` runs them: each kernel of rungs.py and loop_rungs.py runs on the device, or in
AWS's simulator, or in this package's, and its results are compared with NumPy's. So a construct
that a toolchain refuses is known by name, before every kernel that uses it fails. The result is a
JSON file with a verdict, an error and times for each rung.

A fault may leave a device that runs nothing any more. After a rung that failed, the first one has
to run again, or the rest is left out: its verdicts would be of the device, not of constructs. Loops
come last, so that a fault in them costs no other verdict.

`calibrate` makes a target whose constants are those of one machine, from measured and predicted
times. Pairs of rungs do the same few and many times, each on one engine. What a launch costs
besides, the host's part included, is the same for both and cancels in the difference, and the
factor of an engine is

    (many - few measured) / (many - few predicted).

Its constants are scaled by that factor: a clock and a rate become lower by it, a time longer. The
constants of an engine whose factor is outside TRUSTED stay as they are: so large an error is one of
the measurement, or of the model's form, and no constant mends it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from nmm_compiler import targets
from nmm_compiler.codegen.check_against_float64 import compare
from nmm_compiler.errors import FileError, NeuronSetupError, NmmError
from nmm_compiler.kernels.base import numpy_dtype
from nmm_compiler.kernels.error_bounds import FP32_ROUNDOFF
from nmm_compiler.outputs import read_json
from nmm_compiler.records import Record
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.shown import Shown
from nmm_compiler.runtime import machine, neuron
from nmm_compiler.simulator.loading.source_text import read_source
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import Target
from nmm_compiler.targets.this_machine import number

KERNELS = Path(__file__).with_name("rungs.py")
LOOPS = Path(__file__).with_name("loop_rungs.py")
TIMED_RUNS = 20
COMPILER = "neuron"
"""The backend of torch.compile whose graphs hold kernels; those of torch-xla do not."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rung:
    """One kernel of a file of rungs.

    name: of the rung; kernel: the function's; construct: what it shows, in words; operands: the
    (shape, dtype) of each; wanted: float64 operands -> float64 results; result: their dtype, the
    first operand's by default; sums: how many products a result adds up; needs: the capability of a
    target without which the rung is left out; compiled: call it within torch.compile; file: where
    the kernel is; nki: the oldest version with the names of that file.
    """

    name: str
    kernel: str
    construct: str
    operands: tuple[tuple[tuple[int, ...], str], ...]
    wanted: Callable[..., tuple[Array, ...]]
    result: str | None = None
    sums: int = 0
    needs: str | None = None
    compiled: bool = False
    file: Path = KERNELS
    nki: str = "0.5"


def _same(x: Array) -> tuple[Array, ...]:
    return (x,)


def _turned(x: Array) -> tuple[Array, ...]:
    return (x.T,)


def _product(a: Array, b: Array) -> tuple[Array, ...]:
    return (a.T @ b,)


_BF16, _FP8, _FP32 = "bfloat16", "float8_e4m3", "float32"
_COPIED = (((128, 512), _BF16),)
_ROWS = (((512, 64), _BF16),)

CONSTRUCTS = (
    Rung("copy", "copy", "a copy through SBUF", _COPIED, _same),
    Rung("copy compiled", "copy", "the same in torch.compile", _COPIED, _same, compiled=True),
    Rung("two results", "two_results", "two results", _COPIED, lambda x: (x, 2 * x)),
    Rung("permuted copy", "permuted_copy", "reshape_dim and permute of a view", _ROWS, _same),
    Rung("broadcast", "broadcast_copy", "a view broadcast over partitions", (((1,), _FP32),),
         lambda x: (np.full((128, 1), x[0]),)),
    *(Rung(f"matmul {tokens}", "matmul", f"accumulate, {tokens} columns moving",
           (((512, 128), _BF16), ((512, tokens), _BF16)), _product, result=_FP32, sums=512)
      for tokens in (512, 77, 1)),
    Rung("double row", "double_row", "pairs of rows of fp8",
         (((512, 128), _FP8), ((512, 512), _FP8)), _product, result=_FP32, sums=512,
         needs="fp8_double_row"),
    Rung("double row, odd", "double_row", "a plain pass into sums of pairs of rows",
         (((640, 128), _FP8), ((640, 64), _FP8)), _product, result=_FP32, sums=640,
         needs="fp8_double_row"),
    Rung("TensorE transpose", "tensor_transpose", "nc_transpose on TensorE",
         (((128, 128), _BF16),), _turned),
    *(Rung(f"DMA transpose {rows}", "dma_transpose", f"dma_transpose of {rows} rows",
           (((rows, 128), _BF16),), _turned, needs="dma_transposes") for rows in (512, 77, 8)),
    Rung("DMA transpose 3-D", "dma_transpose_tiles", "dma_transpose, axes (2, 1, 0)",
         (((64, 512), _BF16),), _turned, needs="dma_transposes"),
)  # fmt: skip


def _pair(
    name: str, does: str, counts: tuple[int, int], operands: Callable[[int], Any],
    wanted: Callable[..., Array], sums: int = 0, needs: str | None = None,
) -> tuple[Rung, ...]:  # fmt: skip
    """Return two rungs that differ in how often one engine does the same: few, then many."""

    def rung(often: str, count: int) -> Rung:
        return Rung(
            f"{name}, {often}", name.replace(" ", "_"), f"{count} {does}", operands(count),
            lambda *arrays: (wanted(count, *arrays),), result=_FP32, sums=sums * count, needs=needs,
        )  # fmt: skip

    return tuple(map(rung, ("few", "many"), counts))


TIMED = (
    *_pair("matmuls", "matmuls into one bank", (64, 576),
           lambda count: (((128, 128), _BF16), ((128, 8 * count), _BF16)),
           lambda count, a, b: count * (a.T @ b[:, :512]), sums=128),
    *_pair("additions", "additions on VectorE", (8, 72),
           lambda count: (((128, 256 * count), _FP32),),
           lambda count, x: (1 + count) * x[:, :8], sums=1),
    *_pair("activations", "copies on ScalarE", (8, 72),
           lambda count: (((128, 256 * count), _FP32),), lambda count, x: x[:, :8]),
    *_pair("transposing loads", "DMA transposes", (4, 36),
           lambda count: (((2048 * count, 128), _BF16),),
           lambda count, x: x.reshape(-1, 2048, 128)[:, :8, :].transpose(2, 0, 1),
           needs="dma_transposes"),
    *_pair("long loads", "loads of 2 MiB", (2, 18),
           lambda count: (((128 * count, 8192), _BF16),),
           lambda count, x: x.reshape(-1, 128, 8192)[:, :, :8].transpose(1, 0, 2)),
    *_pair("short loads", "loads of 256 bytes", (64, 576), lambda count: (((count, 64), _FP32),),
           lambda count, x: x.reshape(-1, 64, 64).transpose(1, 0, 2)),
)  # fmt: skip
"""Pairs of rungs that differ in how often one engine does the same: few, then many."""

LOOPED = (
    Rung("loop to a register", "device_loop_register", "fori_loop, a register as bound", _ROWS,
         _same, file=LOOPS, nki="0.6"),
)  # fmt: skip

RUNGS = (*CONSTRUCTS, *TIMED, *LOOPED)


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """What one rung gave.

    verdict: "passed", "wrong" (results differ), "failed" (it did not run) or "left out"; error says
    more. nki: the oldest version with the names of its file. time_us: median host time of a launch,
    dispatch included, on a device only. predicted_us: by this package's timing model, None where it
    refuses the kernel.
    """

    rung: str
    construct: str
    verdict: str
    error: str = ""
    nki: str = ""
    time_us: float | None = None
    predicted_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ladder(Shown, Record):
    """Verdicts of all rungs, and the machine that gave them."""

    executor: str
    target: str
    machine: machine.NeuronProbe
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether every rung that was tried passed."""
        return all(v.verdict in ("passed", "left out") for v in self.verdicts)

    def parts(self) -> list[Part]:
        """Return a table of the rungs and a line that sums up."""
        rows = [
            (
                v.rung, v.nki, v.verdict, _us(v.time_us), _us(v.predicted_us),
                v.error or v.construct,
            )
            for v in self.verdicts
        ]  # fmt: skip
        head = ("rung", "since NKI", "verdict", "host us", "predicted us", "construct or error")
        tried = [v for v in self.verdicts if v.verdict != "left out"]
        right = sum(v.verdict == "passed" for v in tried)
        where = {
            "neuron": f"on a Neuron device ({self.machine.instance or 'unknown instance'})",
            "nki_simulate": "in AWS's simulator, no device was used",
            "simulator": "in this package's simulator, no device was used",
        }[self.executor]
        return [
            Grid.of(head, rows, right=("host us", "predicted us")),
            Line(f"{right} of {len(tried)} rungs passed {where}, target {self.target}", "headline"),
        ]


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def best_executor() -> str:
    """Return the closest to a device that this machine has: the device, or a simulator."""
    found = machine.probe()
    if found.dialect != "nki" or found.path == "none":  # the rungs are written in nki
        return "simulator"
    return "neuron" if found.devices and found.path != "simulate" else "nki_simulate"


def climb(target: str | None = None, *, on_rung: Callable[[Rung], None] | None = None) -> Ladder:
    """Run every rung by `best_executor`, and return the verdicts; no failure stops the others.

    target: by default the device's, else trn2. on_rung is called before each rung. Raises
    NeuronSetupError for a device that cannot run kernels as it is set.
    """
    found = machine.probe()
    executor = best_executor()
    if executor == "neuron" and found.problem:
        raise NeuronSetupError(found.problem)
    hardware = targets.get(target or found.target or "trn2")
    verdicts: list[Verdict] = []
    lost = ""
    for rung in RUNGS:
        if on_rung is not None:
            on_rung(rung)
        verdicts.append(_try(rung, executor, hardware, lost))
        seen = [verdicts[0].verdict, verdicts[-1].verdict]
        if executor == "neuron" and seen == ["passed", "failed"]:
            again = _try(RUNGS[0], executor, hardware)
            if again.verdict != "passed":
                lost = f"the device runs nothing after {rung.name!r} failed"
    return Ladder(executor=executor, target=hardware.name, machine=found, verdicts=tuple(verdicts))


def _try(rung: Rung, executor: str, target: Target, why: str = "") -> Verdict:
    """Run a rung; why: for what reason it is left out."""
    if rung.needs is not None and not getattr(target, rung.needs):
        why = f"{target.name} has no {rung.needs}"
    if rung.compiled and (executor != "neuron" or machine.probe().path != "torchneuron"):
        why = "only TorchNeuron has kernels in graphs of torch.compile"
    said = functools.partial(Verdict, rung=rung.name, construct=rung.construct, nki=rung.nki)
    if why:
        return said(verdict="left out", error=why)
    generator = np.random.default_rng(0)
    arrays = [
        generator.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))
        for shape, dtype in rung.operands
    ]
    wanted = rung.wanted(*(a.astype(np.float64) for a in arrays))
    said = functools.partial(said, predicted_us=predicted_us(rung, target))
    try:
        got, us = _run(rung, executor, target, arrays)
    except Exception as error:  # the vendor's tools may raise anything, and the next rung goes on
        text = f"{type(error).__name__}: {error}"[:400]
        return said(verdict="failed", error=text)
    largest = rung.wanted(*(np.abs(a.astype(np.float64)) for a in arrays))
    roundoff = float(ml_dtypes.finfo(numpy_dtype(rung.result or rung.operands[0][1])).eps)
    bounds = tuple((roundoff + rung.sums * FP32_ROUNDOFF) * most for most in largest)
    proof = compare(rung.name, tuple(got), wanted, bounds)
    if proof.passed:
        return said(verdict="passed", time_us=us)
    off = f"differs by up to {proof.max_error:.3g}, bound {proof.largest_bound:.3g}"
    return said(verdict="wrong", error=off, time_us=us)


def predicted_us(rung: Rung, target: Target) -> float | None:
    """Return the latency of a rung by this package's timing model, None where it refuses it."""
    arrays = [ArraySpec(shape, dtype) for shape, dtype in rung.operands]
    try:
        simulation = simulate(f"{rung.file}:{rung.kernel}", *arrays, target=target, mode="timing")
    except NmmError:  # the run's own verdict says what is wrong
        return None
    return round(float(simulation.profile.latency_us), 3) if simulation.profile else None


def _run(
    rung: Rung, executor: str, target: Target, arrays: list[Array]
) -> tuple[list[Array], float | None]:
    """Return the results of one run in float64, and the host time of a launch on a device."""
    if executor == "simulator":
        found = simulate(f"{rung.file}:{rung.kernel}", *arrays, target=target, mode="functional")
        return [y.astype(np.float64) for y in found.outputs or ()], None
    kernel = SimpleNamespace(  # what the launchers read of a kernel; the file is this package's own
        name=rung.kernel, target=target, source=read_source(rung.file), path=rung.file,
        dialect="nki", spec=SimpleNamespace(lnc=1), check_before_run=bool,
    )  # fmt: skip
    tensors = [neuron.tensor(array) for array in arrays]
    if executor == "nki_simulate":
        return [_array(y) for y in neuron.simulate(kernel, tensors)], None
    device = neuron.device()
    tensors = [t.to(device) for t in tensors]
    launch: Any = functools.partial(neuron.LAUNCHERS[device.type], kernel)
    if rung.compiled:
        op = neuron.registered_op(kernel)  # before Dynamo traces, which refuses its lock
        launch = torch.compile(op, backend=COMPILER, fullgraph=True)
    got = [_array(y) for y in launch(tensors)]
    times = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        [y.to("cpu") for y in launch(tensors)]
        times.append(1e6 * (time.perf_counter() - start))
    return got, round(statistics.median(times), 3)


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().to("cpu").to(torch.float64).numpy()


# -- a target from the times of a device --------------------------------------------------------

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
    pair = [rung for rung in TIMED if rung.name.partition(",")[0] == name]
    few, many = (times.get(rung.name) for rung in pair)
    if few is None or many is None:
        return "its rungs did not both pass"
    less, more = (predicted_us(rung, target) or 0.0 for rung in pair)
    if more - less < BUSY_US:
        return f"the pair differs by under {BUSY_US} us"
    factor = (many - few) / (more - less)
    if not TRUSTED[0] <= factor <= TRUSTED[1]:
        return f"a factor of {factor:.3g} is not believed"
    return factor
