"""`ways(call, target, lnc, source)`: what one computation takes as one call, in smaller calls,
and dense.

Passes, `compress`, `predict`, `plan` and every report ask this function, so that one call has one
price. `alternatives` lists the rows of launches that compute a call; the fastest row without the
call itself is `separate`. Dense is the fastest row of the call with dense weights, so that it is
the strongest dense rival that we have. All three are of one source.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, TypeVar

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.linear.specs import (
    GatedMLPSpec,
    GatedMLPUpSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.prices.kernel import LAUNCH_GAP_US, collective_us, row_us
from nmm_compiler.records import Record
from nmm_compiler.simulator.timing.evidence import mean_error
from nmm_compiler.targets import Target

Row = tuple[KernelSpec, ...]
Spec = TypeVar("Spec", bound=KernelSpec)

ERRORS = {"closed_form": 0.35, "simulated": mean_error(), "tuned": mean_error()}
"""How far a gain has to be from 1 to be told from none, by source. Of the simulator it is the mean
error for published kernels that were held out: errors of two kernels for one computation do not
cancel (`make bench-timing` prints the error of such gains). The closed form's gains are within so
much of the simulator's for 9 of 10 calls (tests/prices/test_estimate.py)."""
FP8_ERROR = 0.6
"""The same of the closed form for fp8 operands, whose scales it counts in part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ways(Record):
    """Microseconds of one computation at a token count, from its first instruction to its last.

    Several launches have a gap between two of them, so that one call takes what its kernel takes.

    fused: one call. separate: the fastest row of smaller calls. dense: the fastest dense way; None
    for a call that stands for no dense product, as adapters on a dense weight do. source: of every
    figure, one of `prices.kernel.PRICES`. tp: ranks that share the call (`LowRankSpec.sharded`),
    whose sum is in fused and separate. error: how far `gain` has to be from 1 to be told from none.
    """

    fused: float
    separate: float
    dense: float | None
    tokens: int
    target: str
    source: str
    tp: int = 1
    error: float = ERRORS["closed_form"]

    @property
    def low(self) -> float:
        """The time of the faster way that keeps low rank."""
        return min(self.fused, self.separate)

    @property
    def gain(self) -> float | None:
        """How many times faster than dense low rank is; None where nothing is dense."""
        return None if self.dense is None else self.dense / self.low


def ways(call: Any, target: str | Target, lnc: int = 1, source: str = "closed_form") -> Ways:
    """Return the times of a call.

    Args:
        call: the spec of the kernel that computes it.
        target: where; lnc: physical cores of a logical one.
        source: of every figure, one of `prices.kernel.PRICES`.
    """
    chip = machine_target(target)
    fused, *smaller = (row_us(row, chip, lnc, source) for row in alternatives(call))
    ranks = getattr(call, "tp", 1)
    exchanged = call.exchanged_bytes()
    if exchanged:
        between = collective_us("all_reduce", exchanged, ranks, chip) + LAUNCH_GAP_US
        smaller = [us + between for us in smaller]
    dense: float | None = None
    if ranks == 1 and not getattr(call, "base", False) and not getattr(call, "inner", False):
        dense = min(row_us(row, chip, lnc, source) for row in dense_rows(call))
    return Ways(
        fused=fused,
        separate=min(smaller, default=fused),
        dense=dense,
        tokens=int(getattr(call, "m", 0)),
        target=chip.name,
        source=source,
        tp=ranks,
        error=FP8_ERROR
        if source == "closed_form" and getattr(call, "fp8", False)
        else ERRORS[source],
    )


@functools.lru_cache(maxsize=4096)
def alternatives(call: KernelSpec) -> tuple[Row, ...]:
    """Return the rows of launches that compute a call; the first is the call alone.

    The elementwise product of gate and up is left out where both are kernels of their own, which
    favours these rows, low-rank and dense alike.
    """
    return ((call,), *itertools.chain.from_iterable(map(_each, _smaller(call))))


def _each(row: Row) -> tuple[Row, ...]:
    """Return the rows in which the calls of a row can be computed, equal calls in the same way."""
    kinds = tuple(dict.fromkeys(row))
    rows = []
    for chosen in itertools.product(*map(alternatives, kinds)):
        way = dict(zip(kinds, chosen, strict=True))
        rows.append(tuple(itertools.chain.from_iterable(way[call] for call in row)))
    return tuple(rows)


def dense_rows(call: Any) -> tuple[Row, ...]:
    """Return the rows of launches that compute a call with dense weights."""
    if isinstance(call, GatedMLPUpSpec):
        ranks: Any = {f"{branch}_r": 0 for branch in call.branches}
        return alternatives(dataclasses.replace(call, **ranks))
    return beside(call.as_products()[1])


def beside(products: Row) -> tuple[Row, ...]:
    """Return the rows that compute products of one x: each a call, or those of one kind as one.

    products: specs of families `matmul` and `lowrank`.
    """
    low = tuple(one for one in products if isinstance(one, LowRankSpec))
    dense = tuple(one for one in products if not isinstance(one, LowRankSpec))
    each = [_each(low), _each(dense)]
    if len(low) > 1:
        ends = ("bias", "activation", "out_layout")
        each_end = {name: tuple(getattr(one, name) for one in low) for name in ends}
        pairs = tuple((one.r, (one.n,)) for one in low)
        joined = spec_of(LowRankSharedSpec, low[0], pairs=pairs, residual=False, **each_end)
        each[0] += ((joined,),)
    if len(dense) > 1 and all(isinstance(one, MatmulSpec) for one in dense):
        outputs = sum(getattr(one, "n", 0) for one in dense)
        whole = spec_of(MatmulSpec, dense[0], n=outputs, bias=False, activation="identity")
        each[1] += ((whole,),)
    return tuple((*one, *other) for one, other in itertools.product(*each))


def spec_of(kind: type[Spec], call: KernelSpec, **own: Any) -> Spec:
    """Return a spec of another kind: its own fields, and those that both kinds have of a call."""
    shared = {
        f.name: getattr(call, f.name) for f in dataclasses.fields(kind) if hasattr(call, f.name)
    }
    return kind(**shared | own)


def _smaller(call: Any) -> tuple[Row, ...]:
    """Return the rows of smaller calls that a call can be cut into once."""
    if isinstance(call, GatedMLPSpec):
        turned = "row" if call.m == 1 else "col"  # one token lies alike by rows and by columns
        half = spec_of(GatedMLPUpSpec, call, out_layout=turned, residual=False)
        plain = {"norm": "none", "norm_gain": False, "norm_bias": False}
        return ((half, _projection(call, "down", x_layout=turned, **plain)),)
    if isinstance(call, GatedMLPUpSpec):
        return beside(tuple(_projection(call, branch) for branch in call.branches))
    if isinstance(call, LowRankSharedSpec):
        return call.parts(), call.as_products()[0]
    products = call.as_products()[0]
    return () if products == (call,) else (products,)


def _projection(call: GatedMLPUpSpec, branch: str, **ends: Any) -> LowRankSpec | MatmulSpec:
    """Return one projection of a gated MLP as a call of its own."""
    rank, (first, last), layout = call.rank(branch), call.ends(branch), call.weight_layout
    own: dict[str, Any] = {
        "k": first, "n": last, "bias": getattr(call, f"{branch}_bias"),
        "activation": call.activation if branch == "gate" else "identity", **ends,
    }  # fmt: skip
    if not rank:
        return spec_of(MatmulSpec, call, w_layout=layout, **own)
    return spec_of(LowRankSpec, call, r=rank, u_layout=layout, v_layout=layout, **own)
