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

Weights of few bits have other kernels than dense weights and factors. `in_form`, of MX weights and
of those with a branch:

(matmul, matmul, matmul) of one x     ->   one kernel of three linears, or three kernels
(gated_mlp,)                          ->   one kernel of gate, up and down
(gated_mlp_up, matmul)                ->   gate and up in one kernel, down in another

and of others: experts in the form, kernels with fp8 weights or factors; what takes no MX blocks
keeps the model's dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nmm_compiler.errors import ModelError, OptionTypeError, SpecError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.experts.spec import ExpertsSpec
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.linear.spec import LinearSpec
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec, MatmulSpec
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.prediction.forms import BF16, Form, read_form
from nmm_compiler.prediction.model import PhaseLine
from nmm_compiler.prediction.stacks import STACKS, Stack
from nmm_compiler.prediction.walk import Piece
from nmm_compiler.prices.kernel import (
    COLLECTIVES,
    LAUNCH_GAP_US,
    NO_KERNEL,
    collective_us,
    launch_us,
)
from nmm_compiler.prices.ways import Row, spec_of
from nmm_compiler.report.text import counted
from nmm_compiler.targets import Target

# Share of the HBM rate at which decode reads the cache: 5 to 11 ns per token and layer were
# published for Llama-2 70b and 13b on trn1 with one and two key heads (512 B a token and head).
CACHE_RATE_SHARE = 0.23


@dataclass(frozen=True)
class Cores:
    """The hardware: a target, physical cores per logical one, logical cores that share the model.

    lnc: 1 is how our kernels run. form: of the weights. price: of a kernel, one of
    `prices.kernel.PRICES`. stack: what runs the programs there. routing: how often each expert of a
    layer was chosen, empty for equally often; experts_on: how many cores have other experts.
    """

    target: Target
    lnc: int = 1
    tp: int = 1
    form: Form = BF16
    price: str = "simulated"
    stack: Stack = STACKS["own"]
    routing: tuple[float, ...] = ()
    experts_on: int = 1

    @property
    def of_head(self) -> Cores:
        """The same for the output head, which has no weights of four bits and no branch: fp8."""
        return replace(self, form=read_form("fp8")) if self.form.base else self

    @property
    def bytes_per_second(self) -> float:
        """HBM traffic that one logical core can reach."""
        return self.target.memory_bytes_per_second * self.lnc


def price(piece: Piece, machine: Cores) -> list[PhaseLine]:
    """Return the launches that compute one piece, computed once, the fastest way."""
    rows = in_form(piece.ways, machine.form, machine.target)
    each = [[kernel_price(spec, machine) for spec in row] for row in rows]
    if piece.kind == "attention":  # beside a kernel's bound, its pieces have a law or a bound
        each = [row for row in each if row[0].source != "bound"]
    if each:
        return min(each, key=_with_gaps)
    if piece.kind in COLLECTIVES:
        us = collective_us(piece.kind, piece.bytes, machine.tp, machine.target)
        how = f"{piece.bytes:,} B over {machine.tp} cores"
        return [PhaseLine(each_us=us, source="published law", what=how)]
    if piece.kind != "attention" or piece.elements:
        return [_bound(piece, machine)]
    least = 1e6 * (piece.bytes / machine.bytes_per_second)
    us, how = least / CACHE_RATE_SHARE, f"{piece.bytes:,} B of the cache"
    return [PhaseLine(each_us=us, source="published law", what=how, bytes_us=least, floor_us=least)]


def fastest(piece: Piece, machine: Cores) -> list[PhaseLine]:
    """Return the lines of a piece, or those of what computes it apart where that takes less,
    launches included."""
    whole = price(piece, machine)
    parts = [part for one in piece.apart for part in fastest(one, machine)]
    if parts:
        inside, apart = _with_gaps(whole), _with_gaps(parts)
        if not inside < apart:
            return parts
        whole = [replace(line, what=f"{line.what}; {apart:.1f} us apart") for line in whole]
    own: dict[str, Any] = {"module": piece.module or "(model)", "kind": piece.kind}
    return [replace(line, **own, calls=piece.count) for line in whole]


def _with_gaps(lines: Sequence[PhaseLine]) -> float:
    return sum(line.each_us + LAUNCH_GAP_US for line in lines)


def kernel_price(spec: KernelSpec, machine: Cores) -> PhaseLine:
    """Return the price of a kernel on one logical core, as our backend launches it there.

    A sum over cores that no target computes inside of a kernel takes infinitely long, and so does a
    norm or a residual in one that takes none.
    """
    stored = as_chosen(spec, machine)
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
        how += f" on {stored.tp} cores, the sum of {summed:,} B inside"
        source = f"{ours} + law"
    elif machine.lnc > 1 and replace(stored, lnc=machine.lnc).splits():
        how += f" on {machine.lnc} cores"
    return PhaseLine(
        each_us=us, source=source, what=how, bytes_us=bytes_us, floor_us=min(floor, us), spec=stored
    )


def _bound(piece: Piece, machine: Cores) -> PhaseLine:
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
    us = 1e6 * (start + longest)
    return PhaseLine(each_us=us, source="bound", what=f"{many}{piece.bytes:,} B")


# -- kernels of few-bit weights -------------------------------------------------------------------


def in_form(rows: tuple[Row, ...], form: Form, target: Target) -> tuple[Row, ...]:
    """Return rows that compute the same with weights of a form, kernels as they are that take none.

    Rows of joined dense weights are left out where each weight has a branch of its own.
    """
    if form.rank or form.base not in ("", "fp8"):
        gated = [row for row in rows if isinstance(row[0], GatedMLPUpSpec)]
        most = max(map(len, rows), default=0)
        longest = gated or [row for row in rows if len(row) == most]
        with contextlib.suppress(*NO_KERNEL):
            each = tuple(tuple(_corrected((one,), form) for one in row) for row in longest)
            joined = [] if gated or most < 2 else [(_corrected(row, form),) for row in longest]
            return (*each, *joined)
    return tuple(tuple(_one_in_form(spec, form, target) for spec in row) for row in rows)


def _one_in_form(spec: Any, form: Form, target: Target) -> Any:
    """Return the spec of experts, or of fp8 weights and factors; the same where no kernel of the
    target takes it. x has the format of fp8 weights, too, unless its norm is inside."""
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
        made = replace(spec, **changes)
        made.check(target)
        return made
    return spec


def _corrected(row: Sequence[Any], form: Form) -> CorrectedSpec:
    """Return the kernel in a form of dense kernels of one x; SpecError for what has none."""
    first, *others = row
    ranks = [one.rank(branch) for one in row for branch in getattr(one, "branches", ())]
    if any(ranks) or not all(isinstance(one, (MatmulSpec, GatedMLPUpSpec)) for one in row):
        raise SpecError(f"{first.short()} is no dense kernel")
    own: dict[str, Any] = {"rank": form.rank, "weight": form.base, "branch": form.branch}
    if isinstance(first, GatedMLPUpSpec):
        return spec_of(CorrectedMLPSpec, first, down=isinstance(first, GatedMLPSpec), **own)
    if others:
        own |= {name: tuple(getattr(one, name) for one in row) for name in ("n", "bias")}
    return spec_of(CorrectedSpec, first, **own)


# -- experts that tokens choose -----------------------------------------------------------------


def as_chosen(spec: Any, machine: Cores) -> Any:
    """Return a call, of experts with the distinct ones that the counts let expect.

    Without counts all experts of the model are equally likely, those of other cores too.
    """
    if not isinstance(spec, ExpertsSpec) or not (machine.routing or machine.experts_on > 1):
        return spec
    groups = spec.groups * machine.experts_on
    counts = machine.routing or (1.0,) * groups
    if len(counts) != groups:
        raise ModelError(
            f"routing has {len(counts)} counts, and a layer has {groups} experts; pass one "
            "count for each"
        )
    whole = sum(counts)
    shares = (min(1.0, spec.top_k * count / whole) for count in counts)
    distinct = sum(1 - (1 - share) ** spec.m for share in shares)
    return replace(spec, distinct=distinct / machine.experts_on)


def check_routing(given: Any, said: Any) -> tuple[float, ...]:
    """Return counts, which are numbers of 0 or more and not all 0; raise OptionTypeError.

    said: the counts, or the file that they are from.
    """
    numbers = isinstance(given, Sequence) and all(
        isinstance(n, (int, float)) and n >= 0 for n in given
    )
    if not numbers or (given and not sum(given)):
        raise OptionTypeError("routing", said, "a list of counts, one for each expert, not all 0")
    return tuple(map(float, given))
