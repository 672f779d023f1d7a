"""The norm of x before an op's products, and the residual behind them: the same for all families.

`ended` takes the definition of an op and returns one whose calls may also have a norm (its gain and
bias, eps and kind) and a residual. The norm's statistics are in float32, its value is rounded once;
the result is rounded, then the residual is added, as in `residual + linear(norm(x))`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels.normed_x import NORMS
from nmm_compiler.ops.definition import Op
from nmm_compiler.ops.gradients import Grads, back_to, rows_of
from nmm_compiler.ops.launches import Launch
from nmm_compiler.ops.operands import check_dtypes, check_vector, read_layouts, tokens_of
from nmm_compiler.ops.products import as_matrix
from nmm_compiler.ops.sharding import Placements, features_dim

_VECTORS = ("norm_gain", "norm_bias")
_KEYWORDS = {"norm": "none", "norm_offset": 0.0, "norm_eps": 1e-6}
_SCHEMA = "str norm='none', float norm_offset=0.0, float norm_eps=1e-06"


@dataclasses.dataclass(frozen=True)
class Ends:
    """The norm and the residual of one call."""

    kind: str = "none"
    gain: Tensor | None = None
    bias: Tensor | None = None
    offset: float = 0.0
    eps: float = 1e-6
    residual: Tensor | None = None

    @property
    def factor(self) -> Tensor | None:
        """What the normalized x is multiplied by, in float32 at least."""
        return None if self.gain is None else _wide(self.gain) + self.offset

    def of(self, x: Tensor, layout: str) -> Tensor:
        """Return the norm of x over its features, as x lies."""
        if self.kind == "none":
            return x
        rows = x.t() if layout == "col" else x
        made, _ = self.unit(rows)
        if self.factor is not None:
            made = made * self.factor
        if self.bias is not None:
            made = made + _wide(self.bias)
        made = made.to(x.dtype)
        return made.t() if layout == "col" else made

    def unit(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows over the root of their mean square, and one over that root."""
        wide = _wide(rows)
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide * inverse, inverse

    def backward(self, grad: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of x, of the gain and of the bias, from that of the norm."""
        unit, inverse = self.unit(rows)
        grad = _wide(grad)
        grad_gain, grad_bias = (grad * unit).sum(0), grad.sum(0)
        if self.factor is not None:
            grad = grad * self.factor
        along = grad - unit * (grad * unit).mean(-1, keepdim=True)
        if self.kind == "layer":
            along = along - grad.mean(-1, keepdim=True)
        return tuple(g.to(rows.dtype) for g in (inverse * along, grad_gain, grad_bias))  # type: ignore[return-value]


def ended(op: Op, *, residual: bool = True) -> Op:
    """Return the definition of an op whose calls may have a norm of x, and a residual.

    The vectors and the residual come behind the op's own operands. residual: whether the op's
    kernels add one.
    """
    own, keywords = op.schema.split(", *, ")
    count = own.count(",") + 1
    names = (*_VECTORS, *(["residual"] * residual))
    operands = ", ".join(f"Tensor? {name}=None" for name in names)

    def read(args: tuple, kw: dict) -> tuple[tuple, dict, Ends]:
        """Return the arguments of the op alone, and its norm and residual."""
        more = dict(zip(names, args[count:], strict=False))
        more |= {name: kw[name] for name in names if name in kw}
        rest = {n: v for n, v in kw.items() if n not in names and n not in _KEYWORDS}
        said = {n.removeprefix("norm_"): kw.get(n, v) for n, v in _KEYWORDS.items()}
        kind = said.pop("norm")
        vectors = {n.removeprefix("norm_"): tensor for n, tensor in more.items()}
        return args[:count], rest, Ends(kind=kind, **said, **vectors)

    @functools.wraps(op.reference)
    def reference(*args: Any, **kw: Any) -> Any:
        own_args, rest, ends = read(args, kw)
        x = ends.of(own_args[0], rest.get("x_layout", "row"))
        y = op.reference(x, *own_args[1:], **rest)
        return y if ends.residual is None else ends.residual + y

    def fake(*args: Any, **kw: Any) -> Any:
        own_args, rest, ends = read(args, kw)
        _check(own_args[0], ends, rest)
        y = op.fake(*own_args, **rest)
        if ends.residual is not None and ends.residual.shape != y.shape:
            raise ShapeError(
                f"residual has shape {tuple(ends.residual.shape)}; pass the result's, "
                f"{tuple(y.shape)}"
            )
        return y

    def gradient(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
        own_args, rest, ends = read(args, kw)
        x, layout = own_args[0], rest["x_layout"]
        needs = [*need[count:], False, False, False][:3]
        made: list[Any] = [None, None, grads[0] if needs[2] else None]
        if ends.kind == "none":
            found = op.gradient(own_args, rest, grads, need[:count])
        else:
            through = need[0] or needs[0] or needs[1]
            of_norm = (ends.of(x, layout), *own_args[1:])
            found = op.gradient(of_norm, rest, grads, (through, *need[1:count]))
            if through:
                grad = rows_of(found[0], layout)
                grad_x, *of_vectors = ends.backward(grad, rows_of(x, layout))
                found = [back_to(x, grad_x, layout) if need[0] else None, *found[1:]]
                made[:2] = [g if n else None for g, n in zip(of_vectors, needs, strict=False)]
        return [*found, *made][: len(args)]

    def lower(rows: Tensor, args: Any, kw: dict, m: int, transpose: Any) -> list[Launch]:
        own_args, rest, ends = read(tuple(args), kw)
        launches = op.lower(rows, own_args, rest, m, transpose)
        if ends == Ends():
            return launches
        (launch,) = launches
        return [_launch(launch, ends)]

    sharding = None if op.sharding is None else _sharding(op.sharding, count, read)
    return dataclasses.replace(
        op,
        schema=f"{own}, {operands}, *, {_SCHEMA}, {keywords}",
        reference=reference,
        fake=fake,
        gradient=gradient,
        lower=lower,
        sharding=sharding,
        bare=op.reference,
        own=count,
    )


def _launch(launch: Launch, ends: Ends) -> Launch:
    """Return a launch with the norm and the residual."""
    spec = dataclasses.replace(
        launch.spec,
        norm=ends.kind,
        norm_gain=ends.gain is not None,
        norm_bias=ends.bias is not None,
        norm_offset=float(ends.offset),
        norm_eps=float(ends.eps),
        residual=ends.residual is not None,
    )
    residual = ends.residual
    if residual is not None and spec.result_layouts()[0] == "row":
        residual = as_matrix(residual)
    given = (t for t in (ends.gain, ends.bias, residual) if t is not None)
    return Launch(spec, (*launch.operands, *given))


def _check(x: Tensor, ends: Ends, kw: dict[str, Any]) -> None:
    """Raise UnknownNameError, SpecError or ShapeError unless the norm and residual fit x."""
    if ends.kind not in NORMS:
        raise UnknownNameError("norm", ends.kind, NORMS)
    if ends.kind == "none" and (ends.gain is not None or ends.bias is not None):
        raise SpecError("norm_gain and norm_bias belong to a norm; pass norm='rms' or 'layer'")
    check_dtypes(x, ends.gain, ends.bias, ends.residual)
    _, k = tokens_of(x, read_layouts(kw)["x_layout"])
    check_vector("norm_gain", ends.gain, k)
    check_vector("norm_bias", ends.bias, k)


def _sharding(rule: Callable, count: int, read: Callable) -> Callable:
    """Return the placements of a call with a norm and a residual.

    A norm takes all features of x, so x is not cut along them. A residual lies as the result: what
    is Partial in the result is Partial in the residual.
    """
    from nmm_compiler.ops.definition import ROW

    def placements(*args: Any, **kw: Any) -> Placements:
        own_args, rest, ends = read(args, kw)
        rows = rule(*own_args, **rest)
        if len(args) <= count and ends.kind == "none":
            return rows
        from torch.distributed.tensor import Replicate, Shard

        x = args[0]
        along = features_dim(x.ndim, (ROW | rest)["x_layout"])
        made: Placements = []
        for outs, ins in rows:
            cut = ins[0] == Shard(along)
            if ends.kind != "none" and cut:
                continue
            vectors = [None if t is None else Replicate() for t in (ends.gain, ends.bias)]
            last = [None if ends.residual is None else outs[0]]
            more = [*vectors, *last][: max(0, len(args) - count)]
            made.append((outs, [*ins, *more]))
        return made

    return placements


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
