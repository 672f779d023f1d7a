"""How far two right evaluations of one graph may differ: probabilistic error analysis, op by op.

The graph is interpreted on pairs (exact value in float64, deviation of a computed one). Every op
adds the rounding of its dtype (unit roundoff 2^-24 for float32, 2^-8 for bfloat16), a contraction
of length n adds sqrt(n) roundings of its float32 accumulator, deviations of operands are carried
through by the op's derivative, and independent deviations add in quadrature (Higham and Mary, "A
new approach to probabilistic rounding error analysis", 2019). `CONFIDENCE` deviations bound one
evaluation, so two evaluations differ by at most twice that. The worst case instead of the probable
one grows by the length of every contraction, and says nothing after a layer in bfloat16.
"""

import math
from typing import Any

import torch
from torch import Tensor

CONFIDENCE = 6.0
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
aten = torch.ops.aten

_MOVES = {
    aten.view.default,
    aten.permute.default,
    aten.expand.default,
    aten.clone.default,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.alias.default,
}


class Pair:
    """A value and, per element, how far a computed one may be from it."""

    def __init__(self, value: Tensor, error: Tensor | None = None) -> None:
        self.value = value
        self.error = torch.zeros_like(value) if error is None else error


def error_bound(graph: torch.fx.Graph, arguments: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (exact result, how far a computed one may be) for the graph's first output."""
    known: dict[torch.fx.Node, Any] = {}
    given = iter(arguments)
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = Pair(next(given).detach().double())
        elif node.op == "call_function":
            args = torch.fx.map_arg(node.args, lambda n: known[n])
            known[node] = _op(node, args, dict(node.kwargs))
        elif node.op == "output":
            first = known[node.args[0][0]]
            return first.value, CONFIDENCE * first.error
    raise AssertionError("a graph without output")


def _op(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    target: Any = node.target
    unit = UNIT.get(node.meta["val"].dtype, 0.0)
    if target in _MOVES:
        move = aten.reshape.default if target == aten.view.default else target
        kwargs.pop("memory_format", None)
        return Pair(*(move(part, *args[1:], **kwargs) for part in _parts(args[0])))
    if target == aten.cat.default:
        values = torch.cat([a.value for a in args[0]], *args[1:])
        return Pair(values, torch.cat([a.error for a in args[0]], *args[1:]))
    if target in (aten.eq.Scalar, aten.all.dim, aten.full_like.default):
        value = target(args[0].value, *args[1:])
        return Pair(value, torch.zeros(value.shape, dtype=torch.float64))
    if target == aten.where.self:
        chosen = args[0].value
        return Pair(*(torch.where(chosen, *p) for p in zip(*map(_parts, args[1:]), strict=True)))
    made = _arithmetic(target, args, kwargs)
    made.error = _rss(made.error, unit * made.value.abs())
    return made


def _parts(pair: Pair) -> tuple[Tensor, Tensor]:
    return pair.value, pair.error


def _arithmetic(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    """Return value and carried deviation; the rounding of the result is added by the caller."""
    x = args[0]
    single = UNIT[torch.float32]
    if target in (aten.mm.default, aten.bmm.default):
        y = args[1]
        length = x.value.shape[-1]
        accumulated = math.sqrt(length) * single * (x.value.abs() @ y.value.abs())
        carried = x.error**2 @ (y.value**2 + y.error**2) + x.value**2 @ y.error**2
        return Pair(x.value @ y.value, _rss(carried.sqrt(), accumulated))
    if target in (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar):
        y = _operand(args[1])
        alpha = kwargs.get("alpha", 1)
        scaled = abs(alpha) * _rss(y.error, single * y.value.abs())  # alpha may round on its own
        return Pair(target(x.value, y.value, alpha=alpha), _rss(x.error, scaled))
    if target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor):
        y = _operand(args[1])
        if target == aten.div.Tensor:
            y = Pair(1 / y.value, y.error / y.value**2)
        same = 2.0 if x is args[1] else 1.0  # a square: the two deviations are one
        carried = _rss(x.error * y.value.abs(), y.error * x.value.abs()) * math.sqrt(same)
        return Pair(x.value * y.value, carried)
    if target == aten.mean.dim:
        mean = target(x.value, *args[1:])
        size = x.value.numel() / mean.numel()
        accumulated = math.sqrt(size) * single * target(x.value.abs(), *args[1:])
        return Pair(mean, _rss((target(x.error**2, *args[1:]) / size).sqrt(), accumulated))
    if target == aten.rsqrt.default:
        root = x.value.rsqrt()
        return Pair(root, _rss(0.5 * root**3 * x.error, 4 * single * root))
    if target == aten._softmax.default:
        return _softmax(x, args[1], single)
    if target in (aten.silu.default, aten.gelu.default, aten.relu.default):
        # |silu'| <= 1.1, |gelu'| <= 1.13; the functions are computed from x in a few roundings
        return Pair(target(x.value), _rss(1.13 * x.error, 8 * single * x.value.abs()))
    if target == aten.sigmoid.default:
        return Pair(target(x.value), _rss(0.25 * x.error, 8 * single * target(x.value)))
    if target in (aten._to_copy.default, torch.ops.prims.convert_element_type.default):
        return Pair(x.value, x.error)
    raise NotImplementedError(f"{target} has no error bound yet")


def _softmax(x: Pair, dim: int, single: float) -> Pair:
    value = torch.softmax(x.value, dim)
    moved = _rss(x.error, 2 * single * x.value.abs())
    common = (value**2 * moved**2).sum(dim, keepdim=True).sqrt()
    own = (math.sqrt(value.shape[dim]) + 8) * single
    return Pair(value, value * _rss(_rss(moved, common), torch.tensor(own).double()))


def _operand(given: Any) -> Pair:
    return given if isinstance(given, Pair) else Pair(torch.tensor(float(given)).double())


def _rss(a: Tensor, b: Tensor) -> Tensor:
    return (a**2 + b**2).sqrt()
