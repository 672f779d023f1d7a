"""One function prices a piece: `price(piece, machine)`, in microseconds, with its source.

    kernel       simulated: the kernel that codegen makes, in the simulator's timing mode; or
                 estimated: the closed form of the schedule with the least one
    attention    simulated or estimated: the kernel of our family `attention`; where it has none,
                 bound or law: products and engine passes in prefill, bytes of the cache in decode
    pointwise    bound: HBM bytes of the region, or its engine operations
    copy         bound: bytes
    collective   published law (`prices/kernel.py`)
    one of many  a kernel that sums over the cores between its products: simulated or estimated,
                 with the published law of the sum and of the wait for the other cores

A logical core is one physical core, as our kernels are launched (`kernels.base.CORES`), unless two
are asked for, as published systems on trn2 run. Then it is our kernel of two cores, which is what
the backend launches with `lnc=2`, with the published times of a barrier and of its exchanges; where
a family has none for the sizes, one core's kernel, for which the other core waits.

Weights of few bits have other kernels than dense weights and factors. `corrected_rows`, of MX
weights and of those with a branch:

(matmul, matmul, matmul) of one x     ->   one kernel of three linears, or three kernels
(gated_mlp,)                          ->   one kernel of gate, up and down
(gated_mlp_up, matmul)                ->   gate and up in one kernel, down in another

`in_form`, of one kernel: experts in the form, others with fp8 weights or factors; what takes no MX
blocks keeps the model's dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.experts.spec import ExpertsSpec
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.linear.layer import NORMED
from nmm_compiler.kernels.linear.spec import LinearSpec
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec, MatmulSpec
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.prediction.forms import BF16, Form, read_form
from nmm_compiler.prediction.model import Line
from nmm_compiler.prediction.tensor_parallel import COLLECTIVES
from nmm_compiler.prediction.walk import Piece
from nmm_compiler.prices.kernel import LAUNCH_GAP_US, NO_KERNEL, collective_us, launch_us
from nmm_compiler.prices.ways import Row
from nmm_compiler.report.text import counted
from nmm_compiler.targets import Target

# Share of a line's figure that such figures have been off by, below and above, and why.
BANDS = {
    "simulated": (0.15, 0.15, "the timing model against published kernels (docs/timing.md)"),
    "estimated": (0.25, 0.8, "the closed form is 0.65 to 1.15 of what the simulator says"),
    # Such kernels wait for their sum for about half of their time: half of both bands.
    "simulated + law": (0.38, 1.1, "a kernel of ours, with the published law of its sum"),
    "estimated + law": (0.43, 1.4, "its closed form, with the published law of its sum"),
    "bound": (0.1, 1.0, "a bound: real kernels are slower"),
    "published law": (0.6, 2.0, "spread of the published measurements"),
    "fitted": (0.6, 2.0, "one constant, chosen on the published runs marked calibrate"),
}

# Share of the HBM rate at which decode reads the cache: 5 to 11 ns per token and layer were
# published for Llama-2 70b and 13b on trn1 with one and two key heads (512 B a token and head).
CACHE_RATE_SHARE = 0.23


@dataclass(frozen=True)
class Machine:
    """The hardware: a target, physical cores per logical one, logical cores that share the model.

    stack: what runs the programs there (`stacks.STACKS`).
    lnc: 1 is how our kernels run. form: of the weights. price: of a kernel, one of
    `prices.kernel.PRICES`.
    """

    target: Target
    lnc: int = 1
    tp: int = 1
    form: Form = BF16
    price: str = "simulated"
    stack: str = "own"

    @property
    def of_head(self) -> Machine:
        """The same for the output head, which has no weights of four bits and no branch: fp8."""
        return dataclasses.replace(self, form=read_form("fp8")) if self.form.base else self

    @property
    def bytes_per_second(self) -> float:
        """HBM traffic that one logical core can reach."""
        return self.target.memory_bytes_per_second * self.lnc


def line_of(
    us: float, source: str, what: str, *, module: str = "", kind: str = "kernel", calls: int = 1,
    launches: int = 1, bytes_us: float = 0.0, floor_us: float = 0.0,
) -> Line:  # fmt: skip
    """Return the line of a figure, with the error of such figures."""
    below, above, _ = BANDS[source]
    return Line(
        module=module, kind=kind, calls=calls, each_us=us, source=source, what=what,
        error_band=(-below, above), launches=launches, bytes_us=bytes_us, floor_us=floor_us,
    )  # fmt: skip


def price(piece: Piece, machine: Machine) -> Line:
    """Return the price of one piece, computed once."""
    if piece.kind == "kernel":
        rows = []
        for specs in corrected_rows(piece.ways, machine.form) or piece.ways:
            lines = [kernel_price(spec, machine) for spec in specs]
            sources = {line.source for line in lines}
            us, moved, floor = (
                sum(getattr(line, name) for line in lines)
                for name in ("each_us", "bytes_us", "floor_us")
            )
            rows.append(
                line_of(
                    us, sources.pop() if len(sources) == 1 else "bound",
                    " + ".join(line.what for line in lines), launches=len(lines),
                    bytes_us=moved, floor_us=floor,
                )
            )  # fmt: skip
        return min(rows, key=_with_gaps)
    if piece.kind in COLLECTIVES:
        us = collective_us(piece.kind, piece.bytes, machine.tp, machine.target)
        return line_of(us, "published law", f"{piece.bytes:,} B over {machine.tp} cores")
    return (_attention if piece.kind == "attention" else _bound)(piece, machine)


def fastest(piece: Piece, machine: Machine) -> list[Line]:
    """Return the line of a piece, or those of what computes it apart where that takes less,
    launches included."""
    whole = price(piece, machine)
    parts = [part for one in piece.apart for part in fastest(one, machine)]
    if parts:
        inside, apart = _with_gaps(whole), sum(map(_with_gaps, parts))
        if not inside < apart:
            return parts
        whole = dataclasses.replace(whole, what=f"{whole.what}; {apart:.1f} us apart")
    module = piece.module or "(model)"
    return [dataclasses.replace(whole, module=module, kind=piece.kind, calls=piece.count)]


def _with_gaps(line: Line) -> float:
    return line.each_us + line.launches * LAUNCH_GAP_US


def kernel_price(spec: KernelSpec, machine: Machine) -> Line:
    """Return the price of a kernel on one logical core, as our backend launches it there.

    A sum over cores that no target computes inside of a kernel takes infinitely long, and so does a
    norm or a residual in one that takes none.
    """
    stored = in_form(spec, machine.form, machine.target)
    bytes_us = 1e6 * stored.minimal_hbm_bytes() / machine.bytes_per_second
    floor = max(bytes_us, stored.roofline_us(machine.target) * stored.lnc / machine.lnc)
    how, summed = stored.short(), stored.exchanged_bytes()
    source = ours = "estimated" if machine.price == "closed_form" else "simulated"
    takes_in = isinstance(spec, LinearSpec) and (spec.norm != "none" or spec.residual)
    try:
        us = launch_us(stored, machine.target, machine.lnc, machine.price)
    except NO_KERNEL:
        us, source = math.inf if summed or takes_in else stored.roofline_us(machine.target), "bound"
    if summed:
        how += f" on {stored.world_size} cores, the sum of {summed:,} B inside"
        source = f"{ours} + law"
    elif machine.lnc > 1 and dataclasses.replace(stored, lnc=machine.lnc).splits():
        how += f" on {machine.lnc} cores"
    return line_of(us, source, how, bytes_us=bytes_us, floor_us=min(floor, us))


def _attention(piece: Piece, machine: Machine) -> Line:
    """Return the price of our kernel; a bound or a law where there is none."""
    for (spec,) in piece.ways:
        ours = kernel_price(spec, machine)
        if ours.source != "bound":
            return ours
    if piece.queries > 1:
        return _bound(piece, machine)
    memory = 1e6 * (piece.bytes / machine.bytes_per_second)
    how = f"{piece.bytes:,} B of the cache"
    us = memory / CACHE_RATE_SHARE
    return line_of(us, "published law", how, bytes_us=memory, floor_us=memory)


def _bound(piece: Piece, machine: Machine) -> Line:
    """Return the time of a region of operations, a copy or a product: what takes longest of its
    bytes, its engine operations and its flops."""
    target = machine.target
    fixed = (
        target.engine_isolated_overhead_cycles / target.vector_clock_hz
        + target.engine_semaphore_seconds
    )
    lanes = target.partitions * machine.lnc
    rate = lanes * (target.vector_clock_hz + target.scalar_clock_hz)
    longest = max(
        sum(fixed + size / rate for size in piece.elements),
        piece.flops / (target.peak_flops_per_second(piece.dtype) * machine.lnc),
        piece.bytes / machine.bytes_per_second,
    )
    start = target.dma_start_latency_seconds + target.semaphore_seconds
    many = f"{counted(len(piece.elements), 'operation')}, " if piece.elements else ""
    return line_of(1e6 * (start + longest), "bound", f"{many}{piece.bytes:,} B")


# -- kernels of few-bit weights -------------------------------------------------------------------

_PLAIN = ("m", "k", "dtype", "lnc", "x_layout", "out_layout", "activation", *NORMED)


def in_form(spec: Any, form: Form, target: Target) -> Any:
    """Return the spec for weights of a form, the same where no kernel of the target takes it.

    x has the format of fp8 weights, too, unless its norm is inside.
    """
    changes: dict[str, Any] = {}
    if getattr(spec, "weight", "") or not form.base:
        return spec
    if isinstance(spec, ExpertsSpec):
        changes = {
            "weight": form.base, "ranks": (form.rank, form.rank), "halves": "joined",
            "weight_layout": "row",
        }  # fmt: skip
    elif form.base == "fp8" and hasattr(spec, "scales"):
        x_dtype = None if spec.norm == "none" else spec.dtype
        changes = {"dtype": FP8, "scales": "channel", "x_dtype": x_dtype}
    with contextlib.suppress(*NO_KERNEL):
        made = dataclasses.replace(spec, **changes)
        made.check(target)
        return made
    return spec


def corrected_rows(rows: tuple[Row, ...], form: Form) -> tuple[Row, ...]:
    """Return the rows in a form; empty for a form that is none of few bits, and for plain fp8.

    Rows of joined dense weights are left out: each has a branch of its own.
    """
    if form.base in ("", "fp8") and not form.rank:
        return ()
    gated = [row for row in rows if isinstance(row[0], GatedMLPUpSpec)]
    most = max(map(len, rows), default=0)
    made: list[Row] = []
    try:
        for row in gated or [row for row in rows if len(row) == most]:
            made.append(tuple(_corrected((one,), form) for one in row))
            if len(row) > 1 and not gated:
                made.append((_corrected(row, form),))
    except NO_KERNEL:
        return ()
    return tuple(made)


def _corrected(row: Row, form: Form) -> CorrectedSpec:
    """Return the kernel in a form of dense kernels of one x; SpecError for what has none."""
    every: list[Any] = list(row)
    ranks = [one.rank(branch) for one in every for branch in getattr(one, "branches", ())]
    if any(ranks) or not all(isinstance(one, (MatmulSpec, GatedMLPUpSpec)) for one in every):
        raise SpecError(f"{every[0].short()} is no dense kernel")
    first = every[0]
    kept = {name: getattr(first, name) for name in _PLAIN}
    kept |= {"rank": form.rank, "weight": form.base, "branch": form.branch}
    if isinstance(first, GatedMLPUpSpec):
        return CorrectedMLPSpec(**kept, n=first.n, down=isinstance(first, GatedMLPSpec))
    if len(every) == 1:
        return CorrectedSpec(**kept, n=first.n, bias=first.bias)
    outputs, biases = (tuple(getattr(one, name) for one in every) for name in ("n", "bias"))
    return CorrectedSpec(**kept, n=outputs, bias=biases)
