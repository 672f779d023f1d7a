"""Reads sums of elementwise products as products, and core ATen's `diag` as a diagonal matrix.

mv(a, x) becomes sum(a * x, 1), diag(s) becomes where(arange == arange.unsqueeze(-1), s, 0) there.
`vecdot(a, x)` is such a sum in one operation.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Handler, Result
from nmm_compiler.passes.graph.canonical_forms import Diagonal, Product, owner_of
from nmm_compiler.passes.graph.torch_names import Call, target_name


def _sum(c: Canonical, call: Call) -> Result:
    """Read the sum over an axis of a constant matrix times a value as their product."""
    source = call.get(0, "input", "self")
    shape = c.shape(source) if isinstance(source, fx.Node) else None
    if shape is None or target_name(source) != "mul" or call.get(3, "dtype") is not None:
        return None
    operands = source.all_input_nodes
    if len(operands) != 2 or len(source.args) != 2 or any(c.shape(o) is None for o in operands):
        return None
    given = call.get(1, "dim", "axis")
    axes = list(given) if isinstance(given, (tuple, list)) else [given]
    form = _summed(c, call.node, operands, shape, axes)
    if form is None:
        return None
    summed = {a % len(shape) for a in axes}
    out = form.out_labels
    c.helpers[call.node] = frozenset((source,))
    if not call.get(2, "keepdim", default=False):
        return form
    sizes = tuple(shape[i] for i in out)
    made = c.virtual(call.node, "product", form, sizes)
    c.helpers[made] = frozenset((source,))
    dims = iter(views.identity(sizes))
    return made, tuple(() if i in summed else next(dims) for i in range(len(shape)))


def _summed(
    c: Canonical, node: fx.Node, operands: list[fx.Node], shape: tuple[Any, ...], axes: list[Any]
) -> Product | None:
    """Return the sum over axes of two operands' elementwise product, which has this shape.

    One operand has to be given by constants.
    """
    if any(c.dtype(o) != c.dtype(node) for o in operands):
        return None
    if not any(_is_given(c, o) for o in operands):
        return None
    if not axes or not all(isinstance(a, int) for a in axes):
        return None
    summed = {a % len(shape) for a in axes}
    labels = []
    for operand in operands:
        own = c.shape(operand) or ()
        places = range(len(shape) - len(own), len(shape))
        if any(a not in places or own[a - len(shape)] != shape[a] for a in summed):
            return None  # a sum over an axis that is repeated counts it several times
        # A dimension that is repeated has a label of its own: it is not the result's.
        spread = (own[i - len(shape)] == 1 != shape[i] for i in places)
        labels.append(tuple(-1 - i if one else i for i, one in zip(places, spread, strict=True)))
    out = tuple(i for i in range(len(shape)) if i not in summed)
    return Product(operands[0], operands[1], labels[0], labels[1], out)


def _vecdot(c: Canonical, call: Call) -> Result:
    """Read vecdot(a, b, dim) of real tensors as the sum over `dim` of a * b."""
    a, b = call.get(0, "x", "input"), call.get(1, "y", "other")
    axis = call.get(2, "dim", default=-1)
    shapes = [c.shape(o) if isinstance(o, fx.Node) else None for o in (a, b)]
    dtype = c.dtype(call.node)
    if None in shapes or not isinstance(axis, int) or dtype is None or dtype.is_complex:
        return None
    first, second = (shape or () for shape in shapes)
    rank = max(len(first), len(second))
    if rank - 1 != len(c.shape(call.node) or ()):
        return None
    pairs = zip(*(((1,) * (rank - len(s)) + s) for s in (first, second)), strict=True)
    whole = tuple(y if x == 1 else x for x, y in pairs)
    return _summed(c, call.node, [a, b], whole, [axis])


def _is_given(c: Canonical, key: Any) -> bool:
    diagonal = key in c.views and isinstance(c.form(key), Diagonal)
    return c.is_constant(key) or owner_of(key) in c.derived or diagonal


def _where(c: Canonical, call: Call) -> Result:
    """Read where(eye, vector over the columns, 0) as the matrix with the vector on its diagonal."""
    mask, vector, other = (call.get(i, n) for i, n in enumerate(("condition", "input", "other")))
    shape = c.shape(call.node) or ()
    if not isinstance(vector, fx.Node) or len(shape) != 2 or shape[0] != shape[1]:
        return None
    if not _is_zero(other) or not isinstance(mask, fx.Node) or not _is_eye(c, mask, shape[0]):
        return None
    base, dims = c.base(vector)
    if c.shape(base) != shape[:1] or views.expand(dims, shape) is None:
        return None
    along = views.expand(dims, shape)
    columns = along is not None and along[1] == views.identity(shape[:1])[0]
    return Diagonal(base) if columns else None


def _is_zero(value: Any) -> bool:
    if isinstance(value, fx.Node):
        full = target_name(value) == "full" and list(value.args[0]) == []  # type: ignore[arg-type]
        if target_name(value) != "scalar_tensor" and not full:
            return False
        value = value.args[1 if full else 0]
    return isinstance(value, (int, float)) and value == 0


def _is_eye(c: Canonical, mask: fx.Node, size: Any) -> bool:
    """Return whether a mask is arange(size) == arange(size).unsqueeze(-1), either way round."""
    node = owner_of(c.base(mask)[0])
    if target_name(node) != "eq" or c.shape(node) != (size, size):
        return False
    seen = []
    for operand in node.args[:2]:
        if not isinstance(operand, fx.Node):
            return False
        base, dims = c.base(operand)
        source = owner_of(base)
        numbers = [a for a in source.args if a != 0] if target_name(source) == "arange" else []
        over = views.expand(dims, (size, size))
        if numbers != [size] or c.shape(base) != (size,) or over is None:
            return False
        seen.append(tuple(bool(d) and d[0].axis == 0 for d in over))
    return sorted(seen) == [(False, True), (True, False)]


DECOMPOSED: dict[str, Handler] = {
    "sum": _sum,
    "where": _where,
    **dict.fromkeys(("vecdot", "linalg_vecdot"), _vecdot),
}
