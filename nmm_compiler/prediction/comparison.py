"""What fusing one chain is predicted to save: fused, as separate products, and dense.

The separate products hand the intermediate through HBM in the layout that the second one wants, so
that the comparison is against the best unfused pair and not against its transposes.
All figures are predictions of the simulator's timing model; none is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.records import Record


@dataclass(frozen=True, kw_only=True)
class Cost(Record):
    """Predicted cost of one way to compute a product: microseconds and HBM bytes."""

    latency_us: float
    hbm_bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            latency_us=self.latency_us + other.latency_us,
            hbm_bytes=self.hbm_bytes + other.hbm_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """One kernel's computation three ways, on one target."""

    kernel: str
    target: str
    fused: Cost
    separate: Cost
    dense: Cost

    def ways(self) -> tuple[Cost, Cost, Cost]:
        """Return the costs fused, as separate products, and dense."""
        return self.fused, self.separate, self.dense


def cost_of(spec: KernelSpec, target: str) -> Cost:
    """Return the predicted cost of the kernel that is built for `spec`."""
    profile = build_kernel(spec, target).profile()
    return Cost(
        latency_us=profile.latency_us,
        hbm_bytes=profile.hbm_read_bytes + profile.hbm_write_bytes,
    )


def compare(spec: KernelSpec, target: str) -> Comparison:
    """Return the predicted costs of `spec` fused, as separate matmuls, and dense.

    A family that has no separate or dense form here (a plain matmul) is compared with itself.
    """
    separate, dense = _PRODUCTS.get(spec.family, _same)(spec)
    return Comparison(
        kernel=spec.short(),
        target=target,
        fused=cost_of(spec, target),
        separate=_total(separate, target),
        dense=_total(dense, target),
    )


def _total(specs: tuple[KernelSpec, ...], target: str) -> Cost:
    total = Cost(latency_us=0.0, hbm_bytes=0)
    for spec in specs:
        total = total + cost_of(spec, target)
    return total


Products = tuple[tuple[KernelSpec, ...], tuple[KernelSpec, ...]]


def _same(spec: KernelSpec) -> Products:
    return (spec,), (spec,)


def _lowrank(spec: Any) -> Products:
    """Return (two products and the base product, one dense product) of a low-rank chain."""
    first = MatmulSpec(
        m=spec.m, k=spec.k, n=spec.r, dtype=spec.dtype,
        x_layout=spec.x_layout, w_layout=spec.u_layout, out_layout="col",
    )  # fmt: skip
    second = MatmulSpec(
        m=spec.m, k=spec.r, n=spec.n, dtype=spec.dtype, x_layout="col", w_layout=spec.v_layout,
        out_layout=spec.out_layout, bias=spec.bias, activation=spec.activation,
    )  # fmt: skip
    dense = MatmulSpec(
        m=spec.m, k=spec.k, n=spec.n, dtype=spec.dtype, x_layout=spec.x_layout,
        w_layout="col" if spec.u_layout == "col" else "row", out_layout=spec.out_layout,
        bias=spec.bias, activation=spec.activation,
    )  # fmt: skip
    base = (dense,) if spec.base else ()
    return (first, second, *base), (dense,)


def _shared(spec: Any) -> Products:
    """Return (every u and every v as a product, every result dense) of chains that share x."""
    common: dict[str, Any] = {"m": spec.m, "dtype": spec.dtype}
    separate: list[KernelSpec] = [
        MatmulSpec(
            k=spec.k, n=r, x_layout=spec.x_layout, w_layout=spec.u_layout, out_layout="col",
            **common,
        )
        for r in spec.ranks
    ]  # fmt: skip
    dense: list[KernelSpec] = []
    for y in spec.results():
        ends = {"out_layout": y.layout, "bias": y.bias, "activation": y.activation}
        separate.append(
            MatmulSpec(k=y.r, n=y.n, x_layout="col", w_layout=spec.v_layout, **ends, **common)
        )
        dense.append(
            MatmulSpec(
                k=spec.k, n=y.n, x_layout=spec.x_layout, w_layout=spec.u_layout, **ends, **common
            )
        )
    return tuple(separate), tuple(dense)


def _gated(spec: Any) -> Products:
    """Return (every product, every projection dense) of a gated MLP.

    The elementwise product between up and down is left out of both: to the unfused forms' favour.
    """
    separate: list[KernelSpec] = []
    dense: list[KernelSpec] = []
    for branch in spec.branches:
        rank, (first, last) = spec.rank(branch), spec.ends(branch)
        down = branch == "down"
        ends: dict[str, Any] = {
            "x_layout": "col" if down else spec.x_layout,
            "out_layout": spec.out_layout if down or len(spec.branches) == 2 else "col",
            "activation": spec.activation if branch == "gate" else "identity",
            "bias": getattr(spec, f"{branch}_bias"),
        }
        common = {"m": spec.m, "dtype": spec.dtype, "w_layout": spec.weight_layout}
        whole = MatmulSpec(k=first, n=last, **common, **ends)
        dense.append(whole)
        if rank:
            separate.append(
                MatmulSpec(k=first, n=rank, x_layout=ends["x_layout"], out_layout="col", **common)
            )
            separate.append(MatmulSpec(k=rank, n=last, **common, **{**ends, "x_layout": "col"}))
        else:
            separate.append(whole)
    return tuple(separate), tuple(dense)


_PRODUCTS: dict[str, Callable[[Any], Products]] = {
    "lowrank": _lowrank,
    "lowrank_shared": _shared,
    "gated_mlp_up": _gated,
    "gated_mlp": _gated,
}
