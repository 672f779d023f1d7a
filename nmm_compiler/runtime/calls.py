"""From an op call to kernel launches: which specs, and which operands in which order.

The same function serves the backend, which asks for the kernels of a graph before it runs (on
tensors without data), and the executors, which launch them. A weight stored [outputs, inputs] is
handed over transposed when a `transpose` function is given, and as it is when not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import SpecError, UnknownNameError

Transpose = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the spec for m tokens, and its operands, activations first."""

    spec: Any
    operands: tuple[Tensor, ...]

    def split(self) -> tuple[Launch, ...]:
        """Return launches that give the results one by one; none where there is no such way."""
        named = zip(self.spec.inputs(), self.operands, strict=True)
        held = {tensor.name: operand for tensor, operand in named}
        return tuple(
            Launch(spec, tuple(held[name] for name in names)) for spec, names in self.spec.parts()
        )


@dataclass(frozen=True)
class Lowered:
    """An op call as launches on x, and how their results become the op's.

    lead: the token dimensions of a "row" result. many: the op returns a list.
    """

    launches: tuple[Launch, ...]
    lead: tuple[Any, ...]
    x_layout: str
    many: bool = False

    @property
    def out_layouts(self) -> tuple[str, ...]:
        """The layout of each result."""
        return tuple(way for launch in self.launches for way in launch.spec.result_layouts())


def tokens(x: Tensor, kwargs: dict[str, Any]) -> Any:
    """Return the token count of a call: an int, or a SymInt while tracing."""
    if kwargs.get("x_layout", "row") == "col":
        return x.shape[1]
    return math.prod(x.shape[:-1])


def lower(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    m: int,
    transpose: Transpose | None = None,
) -> Lowered:
    """Return the launches of op `name` for m tokens.

    Raises SpecError, ShapeError or UnknownNameError where no kernel family can compute the call.
    """
    lowering = _LOWERINGS.get(name)
    if lowering is None:
        raise UnknownNameError("op", name, tuple(_LOWERINGS))
    x = args[0]
    x_layout = kwargs.get("x_layout", "row")
    rows = x.reshape(-1, x.shape[-1]) if x_layout == "row" else x
    lead = tuple(x.shape[:-1]) if x_layout == "row" else (x.shape[1],)
    many = name.startswith("lowrank_matmul_shared")
    launches = lowering(rows, args, kwargs, m, transpose)
    for operand in (t for launch in launches for t in launch.operands):
        if operand.dtype != x.dtype:
            raise SpecError(f"{name}: operands have dtypes {x.dtype} and {operand.dtype}")
    return Lowered(tuple(launches), lead, x_layout, many)


def too_large(spec: Any, target: str) -> str | None:
    """Return why a spec has to be launched as its parts on a target, None where it need not be."""
    from nmm_compiler import targets
    from nmm_compiler.codegen.schedule import refusal

    error = refusal(spec, targets.get(target)) if spec.parts() else None
    return None if error is None else f"{error}; a kernel for each result"


def fitting(launches: Sequence[Launch], target: str) -> tuple[Launch, ...]:
    """Return the launches, those that do not fit the target as their parts."""
    return tuple(
        part
        for launch in launches
        for part in (launch.split() if too_large(launch.spec, target) else (launch,))
    )


def dtype_name(t: Tensor) -> str:
    """Return the dtype's name in specs, as "bfloat16"."""
    return str(t.dtype).removeprefix("torch.")


def _weight(w: Tensor, layout: str, transpose: Transpose | None) -> tuple[Tensor, str]:
    if layout == "col" and transpose is not None:
        return transpose(w), "row"
    return w, layout


def _features(w: Tensor, layout: str) -> tuple[int, int]:
    rows, columns = w.shape
    return (rows, columns) if layout == "row" else (columns, rows)


def _layouts(kwargs: dict[str, Any]) -> dict[str, str]:
    return {name: kwargs.get(name, "row") for name in ("x_layout", "out_layout")}


def _lowrank(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    from nmm_compiler.kernels.lowrank import LowRankSpec

    _, u, v, bias, w = (*args, None, None)[:5]
    u, u_layout = _weight(u, kw.get("u_layout", "row"), transpose)
    v, v_layout = _weight(v, kw.get("v_layout", "row"), transpose)
    w_layout = "row"
    if w is not None:
        w, w_layout = _weight(w, kw.get("w_layout", "row"), transpose)
    k, r = _features(u, u_layout)
    spec = LowRankSpec(
        m=m,
        k=k,
        r=r,
        n=_features(v, v_layout)[1],
        dtype=dtype_name(rows),
        **_layouts(kw),
        u_layout=u_layout,
        v_layout=v_layout,
        w_layout=w_layout,
        bias=bias is not None,
        base=w is not None,
        activation=kw.get("activation", "identity"),
        scale=float(kw.get("scale", 1.0)),
    )
    return [Launch(spec, tuple(t for t in (rows, u, v, w, bias) if t is not None))]


def _shared_x(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    _, us, vs, biases = args
    return [_shared(rows, us, [[v] for v in vs], biases, kw, m, transpose)]


def _shared_u(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    _, u, vs, biases = args
    return [_shared(rows, [u], [vs], biases, kw, m, transpose)]


def _shared(
    rows: Tensor,
    us: Sequence[Tensor],
    vs_of: Sequence[Sequence[Tensor]],
    biases: Sequence[Tensor | None],
    kw: dict[str, Any],
    m: int,
    transpose: Transpose | None,
) -> Launch:
    """Return the one launch that gives every (x u) v, for each u and each v of it."""
    from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec

    u_layout, v_layout = kw.get("u_layout", "row"), kw.get("v_layout", "row")
    laid_us = [_weight(u, u_layout, transpose) for u in us]
    laid_vs = [[_weight(v, v_layout, transpose) for v in vs] for vs in vs_of]
    flat = [v for vs in laid_vs for v in vs]
    spec = LowRankSharedSpec(
        m=m,
        k=_features(*laid_us[0])[0],
        pairs=tuple(
            (_features(*u)[1], tuple(_features(*v)[1] for v in vs))
            for u, vs in zip(laid_us, laid_vs, strict=True)
        ),
        dtype=dtype_name(rows),
        x_layout=kw.get("x_layout", "row"),
        out_layout=tuple(kw.get("out_layouts") or [kw.get("out_layout", "row")] * len(flat)),
        u_layout=laid_us[0][1],
        v_layout=flat[0][1],
        bias=tuple(bias is not None for bias in biases),
        activation=tuple(kw.get("activations") or ["identity"] * len(flat)),
    )
    given = [bias for bias in biases if bias is not None]
    return Launch(spec, (rows, *(u for u, _ in laid_us), *(v for v, _ in flat), *given))


def _matmul(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    from nmm_compiler.kernels.matmul import MatmulSpec

    _, w, bias = (*args, None)[:3]
    w, w_layout = _weight(w, kw.get("w_layout", "row"), transpose)
    k, n = _features(w, w_layout)
    spec = MatmulSpec(
        m=m,
        k=k,
        n=n,
        dtype=dtype_name(rows),
        **_layouts(kw),
        w_layout=w_layout,
        bias=bias is not None,
        activation=kw.get("activation", "identity"),
    )
    return [Launch(spec, tuple(t for t in (rows, w, bias) if t is not None))]


def _gated(
    rows: Tensor,
    projections: dict[str, Sequence[Tensor]],
    biases: dict[str, Tensor | None],
    kw: dict[str, Any],
    m: int,
    transpose: Transpose | None,
) -> list[Launch]:
    """Return the launch of a gated MLP: its weights in order, then its biases in the same order."""
    from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec

    stored = kw.get("weight_layout", "row")
    weights: dict[str, list[Tensor]] = {}
    layout = stored
    for name, projection in projections.items():
        laid = [_weight(w, stored, transpose) for w in projection]
        weights[name] = [w for w, _ in laid]
        layout = laid[0][1]
    k = _features(weights["gate"][0], layout)[0]
    fields: dict[str, Any] = {
        "m": m,
        "k": k,
        "n": _features(weights["gate"][-1], layout)[1],
        "dtype": dtype_name(rows),
        "activation": kw.get("activation", "silu"),
        "weight_layout": layout,
        **_layouts(kw),
    }
    for name, ws in weights.items():
        fields[f"{name}_r"] = _features(ws[0], layout)[1] if len(ws) == 2 else 0
        fields[f"{name}_bias"] = biases[name] is not None
    if "down" in weights and _features(weights["down"][-1], layout)[1] != k:
        raise SpecError("gated_mlp: a kernel's down projection returns to the input's features")
    spec = GatedMLPSpec(**fields) if "down" in weights else GatedMLPUpSpec(**fields)
    flat = [w for ws in weights.values() for w in ws]
    given = [b for b in biases.values() if b is not None]
    return [Launch(spec, (rows, *flat, *given))]


def _gated_mlp_up(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    _, gate, up, gate_bias, up_bias = (*args, None, None)[:5]
    biases = {"gate": gate_bias, "up": up_bias}
    return _gated(rows, {"gate": gate, "up": up}, biases, kw, m, transpose)


def _gated_mlp(
    rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int, transpose: Transpose | None
) -> list[Launch]:
    _, gate, up, down, gate_bias, up_bias, down_bias = (*args, None, None, None)[:7]
    projections = {"gate": gate, "up": up, "down": down}
    biases = {"gate": gate_bias, "up": up_bias, "down": down_bias}
    return _gated(rows, projections, biases, kw, m, transpose)


_LOWERINGS: dict[str, Callable[..., list[Launch]]] = {
    "lowrank_matmul": _lowrank,
    "lowrank_matmul_shared_x": _shared_x,
    "lowrank_matmul_shared_u": _shared_u,
    "gated_mlp_up": _gated_mlp_up,
    "gated_mlp": _gated_mlp,
    "matmul": _matmul,
}


def op_name(target: Any) -> str | None:
    """Return the name of a graph target that is an op of this package, or None."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, rest = str(target).partition(".")
        if namespace == "nmm":
            return rest.partition(".")[0]
    return None
