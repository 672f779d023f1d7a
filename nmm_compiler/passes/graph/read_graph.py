"""Reads a graph into canonical forms: one sweep for Dynamo, export, symbolic_trace and ATen graphs.

Shapes come from metadata, so a `view(-1)` never needs arithmetic. An operation without effect on
values (eval dropout, no-op casts, copies, identities) is a view that rearranges nothing.

`TABLE`: canonical name of an operation -> how to read it as a form or a view.
A handler gets the graph read so far, the node, and those arguments that it has parameters for
(`ALIASES` has torch's names of these; `name` is that of the operation): `_TENSORS` are tensors, and
the result has the shape and dtype of `like`. It returns a form, (source, dims) when the call only
rearranges its source, or None when this use of the operation is not understood. `read_module` reads
the modules that `symbolic_trace` leaves as calls.

Every spelling of a contraction becomes labelled products of two operands, as an einsum says it.
Labels are integers, one per dimension: those of "..." count from the right, which is how
broadcasting lines them up. Core ATen's sums of elementwise products are products too: mv(a, x)
becomes sum(a * x, 1), and diag(s) becomes where(arange == arange.unsqueeze(-1), s, 0) there.

Tensor parallelism puts steps between the two products of a chain that is cut along its rank:

    h = linear(x, a)                          # a cut by outputs, h cut by features
    h = from_local(to_local(h.redistribute([Shard(-1)])), mesh, [Shard(-1)])
    y = linear(h, b)                          # b cut by inputs, y a sum over the devices
    y.redistribute([Replicate()])

A redistribution to where a tensor (DTensor) is already, and a local tensor that becomes the same
tensor again, are rearrangements that rearrange nothing. Every other one moves data.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node, map_arg
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from nmm_compiler.options import Options
from nmm_compiler.passes.faults import Faults
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    AlongLast,
    Canonical,
    Cast,
    Concatenation,
    DeviceSum,
    Diagonal,
    Key,
    Leaf,
    Norm,
    Opaque,
    Product,
    Result,
    Scale,
    Softmax,
    View,
    Virtual,
    owner_of,
)
from nmm_compiler.passes.graph.effects import fetch_attribute, is_pure, upstream
from nmm_compiler.passes.graph.spelled_out import norm_around, spelled_out
from nmm_compiler.passes.graph.torch_names import (
    applied,
    changes_gradient,
    is_inplace_name,
    signature,
    target_name,
)
from nmm_compiler.passes.graph.views import Dim, Dims, identity
from nmm_compiler.passes.graph.written import memory_of

Handler = Callable[..., Result]
_TENSORS = frozenset({"source", "other", "mat1", "like"})
_FIRST = ("input", "self", "a", "x", "local_tensor")
# What torch calls the parameters of handlers, beside the names that these have here.
ALIASES: dict[str, tuple[str, ...]] = {
    "source": _FIRST, "like": _FIRST, "one": _FIRST, "two": ("other",),
    "other": ("weight", "b", "mat2", "batch2", "vec", "tensor"), "mat1": ("batch1", "mat"),
    "low": ("min", "threshold"), "high": ("max", "value"), "dim": ("axis",), "index": ("key",),
    "training": ("train",), "dims": ("dims_self",), "diagonal": ("offset",),
    "operands": ("tensors",), "tensors": ("matrices",),
}  # fmt: skip


@functools.cache
def _parameters(handler: Handler) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the parameters of a handler behind graph and node, and each by all of its names."""
    names = signature(handler)[2:]
    return names, {other: one for one in names for other in (one, *ALIASES.get(one, ()))}


def read_call(
    c: Canonical, node: Node, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Result:
    """Return what a call is; None for an operation, or a use of it, that no handler understands."""
    handler = TABLE.get(name)
    if handler is None:
        return None
    names, known = _parameters(handler)
    given = dict(zip(names, args, strict=False))
    said = {**kwargs, "name": name}
    given |= {known[keyword]: value for keyword, value in said.items() if keyword in known}
    if not all(_is_tensor(c, given.get(one)) for one in names if one in _TENSORS):
        return None
    if "like" in names and not _kept(c, given["like"], node):
        return None
    return handler(c, node, **given)


LARGEST_ELEMENTS = 1 << 26  # of a value that is computed to be read: 8192 queries and keys
# Functions of their arguments alone: nothing random, nothing that writes, no memory as it is.
_PURE = frozenset(
    {
        "add", "alias", "all", "any",
        "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bool", "cat",
        "chunk", "clamp", "clone", "constant_pad_nd", "contiguous", "cumsum", "detach", "diff",
        "eq", "expand", "expand_as", "flatten", "float", "full", "full_like", "ge", "getitem",
        "gt", "index", "int", "le", "logical_and",
        "logical_not", "logical_or", "long", "lt", "masked_fill", "maximum", "minimum", "mul",
        "ne", "neg", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute",
        "repeat", "reshape", "rsub", "scalar_tensor", "select", "slice", "squeeze", "stack",
        "sub", "t", "to", "transpose", "tril", "triu", "type", "unsqueeze", "view", "where",
        "zeros", "zeros_like",
    }
)  # fmt: skip


def constant_value(graph: Canonical, node: Node) -> torch.Tensor | Node:
    """Return the value of a node, or the node because of which it is not known."""
    cone = upstream([node])
    for current in cone:
        elements = views.product(graph.sizes(current))
        known = target_name(current) in _PURE and not graph.effects.is_written(current)
        if not known or not isinstance(elements, int) or elements > LARGEST_ELEMENTS:
            return current
    values: dict[Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for current in sorted(cone, key=graph.effects.position.__getitem__):
            given = map_arg((current.args, current.kwargs), values.__getitem__)
            try:
                values[current] = applied(current, *map_aggregate(given, _on_cpu))
            except (TypeError, RuntimeError, ValueError, IndexError):
                return current
    value = values[node]
    return value if isinstance(value, torch.Tensor) else node


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def is_distributed(value: Any) -> bool:
    """Say whether a value is a DTensor; the class itself takes most of a second to import."""
    return isinstance(value, torch.Tensor) and type(value).__name__ == "DTensor"


def local_part(value: Any) -> Any:
    """Return what a value is on this device."""
    return value._local_tensor if is_distributed(value) else value


Labels = tuple[list[tuple[int, ...]], tuple[int, ...]]
"""The labels of each operand of a contraction, and of the result."""


def _is_tensor(c: Canonical, value: Any) -> bool:
    return isinstance(value, (Node, Virtual)) and c.shape(value) is not None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _from_local(c: Canonical, node: Node, source: Node) -> Result:
    """Read a local tensor as the DTensor that it is a part of, unless gradients may change."""
    changes = any(node.kwargs.get(name) for name in ("grad_placements", "run_check"))
    if target_name(source) != "to_local" or changes:
        return None
    result = _redistribute(c, node, source.all_input_nodes[0])
    if not isinstance(result, tuple):
        return None
    c.helpers[node] = frozenset((source,))
    return result


def _redistribute(c: Canonical, node: Node, source: Node) -> Result:
    """Read a node as its source where both are one tensor, cut in one way over one mesh; as the sum
    over its devices where that is what each of them gets."""
    old, new = c.tensor(source), c.tensor(node)
    if not is_distributed(old) or not is_distributed(new):
        return None
    before, after = old._spec, new._spec  # type: ignore[union-attr]
    if c.shape(source) != c.shape(node) or before.mesh != after.mesh:
        return None
    if before.placements == after.placements:
        return _same(c, source)
    was, now = before.placements[0], after.placements[0]
    summed = was.is_partial() and getattr(was, "reduce_op", "") == "sum" and now.is_replicate()
    return DeviceSum("redistribute", (source,)) if summed and before.mesh.ndim == 1 else None


DISTRIBUTED: dict[str, Handler] = {
    "redistribute": _redistribute,
    "from_local": _from_local,
    "torch.distributed.tensor.from_local": _from_local,
    "torch.distributed.tensor._api.from_local": _from_local,
}


def matmul_labels(a: int, b: int) -> Labels | None:
    """Return the labels of both operands and the result of a matmul of ranks a and b."""
    left, right = "k" if a == 1 else "...mk", "k" if b == 1 else "...kn"
    return einsum_labels(f"{left},{right}->...{'m' * (a > 1)}{'n' * (b > 1)}", (a, b))


def _product(a: Key, b: Key, labels: Labels | None) -> Product | None:
    if labels is None:
        return None
    (left, right), out = labels
    return Product(a, b, left, right, out)


def _matmul(c: Canonical, node: Node, source: Key, other: Key) -> Product | None:
    return _product(source, other, matmul_labels(len(c.sizes(source)), len(c.sizes(other))))


def _linear(c: Canonical, node: Node, source: Key, other: Key, bias: Any = None) -> Result:
    labels = einsum_labels("...k,nk->...n", (len(c.sizes(source)), len(c.sizes(other))))
    return with_addend(c, node, _product(source, other, labels), bias)


def with_addend(
    c: Canonical,
    node: Node,
    form: Product | None,
    addend: Any,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Result:
    """Return alpha * product + beta * addend; the product alone when there is no addend."""
    if form is None:
        return None
    if addend is None and alpha == 1.0:
        return form
    value = c.virtual(node, "product", form, c.sizes(node))
    return Add(value, 0.0 if addend is None else addend, float(alpha), float(beta))


def _addmm(
    c: Canonical,
    node: Node,
    source: Key,
    mat1: Key,
    other: Key,
    beta: Any = 1,
    alpha: Any = 1,
) -> Result:
    inner = _matmul(c, node, mat1, other)
    # torch also has the deprecated addmm(beta, input, alpha, mat1, mat2), which is not read.
    if not _number(beta) or not _number(alpha):
        return None
    # PyTorch does not read the addend where beta is 0: it may hold NaN.
    return with_addend(c, node, inner, source if beta else None, alpha, beta)


_TERM = re.compile(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*")


@functools.lru_cache(maxsize=1024)
def einsum_labels(equation: str, ranks: tuple[int, ...]) -> Labels | None:
    """Return labels per operand and of the result; None for traces and unknown notation."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks) or not all(map(_TERM.fullmatch, (*terms, right))):
        return None
    pairs = [
        (term, rank - len(term.replace("...", ""))) for term, rank in zip(terms, ranks, strict=True)
    ]
    if any(extra < 0 or (extra and "..." not in term) for term, extra in pairs):
        return None
    # A letter for each dimension that "..." is, of which the last ones line up.
    dots = "".join(chr(1000 + i) for i in reversed(range(max(extra for _, extra in pairs))))
    filled = [term.replace("...", dots[len(dots) - extra :]) for term, extra in pairs]
    if not arrow:
        letters = "".join(terms).replace(".", "")
        right = "..." + "".join(sorted(x for x in letters if letters.count(x) == 1))
    if any(len({*term}) < len(term) for term in filled) or (dots and "..." not in right):
        return None
    operands = [tuple(map(ord, term)) for term in filled]
    return operands, tuple(map(ord, right.replace("...", dots)))


def _einsum(c: Canonical, node: Node, equation: Any = None, operands: Any = None) -> Result:
    given: Any = operands if isinstance(operands, (tuple, list)) else node.args[1:]
    if not isinstance(equation, str) or not all(_is_tensor(c, o) for o in given):
        return None
    read = einsum_labels(equation, tuple(len(c.sizes(o)) for o in given))
    return None if read is None or len(given) < 2 else chain(c, node, [*given], *read)


def chain(
    c: Canonical,
    node: Node,
    operands: list[Any],
    labels: list[tuple[int, ...]],
    out: tuple[int, ...],
) -> Result:
    """Read a contraction of several operands as products, starting at the one that is no weight.

    Each step takes an operand that shares a contracted label with the result so far.
    """
    shapes = [size for operand in operands for size in c.sizes(operand)]
    known = zip([label for own in labels for label in own], shapes, strict=True)
    sizes = dict(sorted(known, key=lambda one: one[1] != 1))  # a size of 1 is that of the others
    rest = list(range(len(operands)))
    moving = [i for i in rest if not c.is_constant(operands[i])]
    if len(moving) > 1 and len(operands) > 2:
        return None
    ends = [i for i in rest if set(labels[i]) & set(out)]
    first = moving[0] if moving else max(ends or rest, key=lambda i: len(labels[i]))
    rest.remove(first)
    value: Key = operands[first]
    have = labels[first]
    while True:
        for step in rest:
            kept = set(out).union(*(labels[i] for i in rest if i != step))
            if (set(have) & set(labels[step])) - kept:
                break
        else:
            return None
        rest.remove(step)
        other = labels[step]
        result = tuple(x for x in dict.fromkeys((*have, *other)) if x in kept)
        summed_alone = (set(have) ^ set(other)) - kept
        if summed_alone or (not rest and set(result) != set(out)):
            return None
        form = Product(value, operands[step], have, other, result if rest else out)
        if not rest:
            return form
        shape = tuple(sizes[x] for x in result)
        value, have = c.virtual(node, f"step{len(rest)}", form, shape), result


def _multi_dot(c: Canonical, node: Node, tensors: Any = None) -> Result:
    given: Any = tensors if isinstance(tensors, (tuple, list)) else node.args
    count = len(given)
    if count < 2 or not all(_is_tensor(c, one) and len(c.sizes(one)) == 2 for one in given):
        return None
    return chain(c, node, [*given], [(i, i + 1) for i in range(count)], (0, count))


def _tensordot(
    c: Canonical,
    node: Node,
    source: Key,
    other: Key,
    dims: Any = 2,
    dims_other: Any = None,
) -> Result:
    ranks = len(c.sizes(source)), len(c.sizes(other))
    if dims_other is not None:
        dims = (dims, dims_other)
    if isinstance(dims, int):
        dims = [range(-dims, 0), range(dims)]
    lists = all(ranks) and isinstance(dims, (tuple, list)) and len(dims) == 2
    if not lists or not all(isinstance(one, (tuple, list, range)) and len(one) for one in dims):
        return None
    labels, others = [*range(ranks[0])], [100 + i for i in range(ranks[1])]
    for p, q in zip(*dims, strict=True):
        others[q] = labels[p]
    out = tuple(x for x in (*labels, *others) if (x in labels) != (x in others))
    return Product(source, other, tuple(labels), tuple(others), out)


def _convolution(
    c: Canonical,
    node: Node,
    source: Key,
    other: Key,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    name: str = "",
) -> Result:
    """Read a convolution whose kernel has one element as a product over channels.

    Without padding a result has as many places as the source only with strides of one.
    """
    shape, kernel = c.sizes(source), c.sizes(other)
    spatial = len(kernel) - 2
    if spatial < 1 or len(shape) != len(kernel) or any(size != 1 for size in kernel[2:]):
        return None
    plain = padding in (0, (0,) * spatial, [0] * spatial, "same", "valid")
    turned = name == "convolution" and node.args[6:7] != (False,)
    moved = turned or shape[2:] != c.sizes(node)[2:]
    if not plain or moved or shape[1] != kernel[1]:  # channels differ where they are in groups
        return None
    labels = einsum_labels("bk...,nk...->bn...", (len(shape), len(kernel)))
    if bias is not None:
        dims: tuple[Dim, ...] = (*identity(c.sizes(bias)), *((),) * spatial)
        bias = c.viewed(node, "bias", bias, dims)
    return with_addend(c, node, _product(source, other, labels), bias)


def _sum_over(
    c: Canonical,
    node: Node,
    source: Node,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Result:
    """Read the sum over axes of a constant matrix times a value as their product."""
    shape, operands = c.sizes(source), source.all_input_nodes
    axes = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    multiplied = target_name(source) == "mul" and len(source.args) == len(operands) == 2
    if not multiplied or dtype is not None or not all(isinstance(a, int) for a in axes):
        return None
    constant = (
        c.is_constant(o) or o in c.derived or isinstance(c.form(o), Diagonal) for o in operands
    )
    alike = all(c.dtype(o) == c.dtype(node) for o in operands)
    if not axes or not alike or not any(constant):
        return None
    summed = {a % len(shape) for a in axes}
    labels = []
    for operand in operands:
        own = c.sizes(operand)
        places = enumerate(own, len(shape) - len(own))
        # A dimension that is repeated has a label of its own: it is not the result's.
        labels.append(tuple(-1 - i if size == 1 != shape[i] else i for i, size in places))
    if not all(summed <= {*own} for own in labels):
        return None  # a sum over an axis that is repeated counts it several times
    kept = [i for i in range(len(shape)) if keepdim or i not in summed]
    # A summed axis that stays, of size 1, has a label of its own: it is no operand's.
    out = tuple(-1 - len(shape) - i if i in summed else i for i in kept)
    c.helpers[node] = frozenset((source,))
    return Product(operands[0], operands[1], labels[0], labels[1], out)


def _where(c: Canonical, node: Node, condition: Any, source: Node, two: Any = None) -> Result:
    """Read where(eye, vector over the columns, 0) as the matrix with the vector on its diagonal."""
    shape = c.sizes(node)
    if len(shape) != 2 or shape[0] != shape[1]:
        return None
    base, dims = c.base(source)
    along = views.expand(dims, shape)
    if c.shape(base) != shape[:1] or along is None or along[1] != views.identity(shape[:1])[0]:
        return None
    eye, zero = (constant_value(c, v) if isinstance(v, Node) else v for v in (condition, two))
    if not isinstance(eye, torch.Tensor) or isinstance(zero, Node) or not bool(zero == 0):
        return None
    return Diagonal(base) if torch.equal(eye, torch.eye(shape[0], dtype=torch.bool)) else None


def _same(c: Canonical, source: Node) -> View:
    return source, c.whole(source)


# -- rearrangements -------------------------------------------------------------------------


def _regroup(c: Canonical, node: Node, source: Node) -> Result:
    """Read view, reshape, flatten, clone, ...: the target shape is in the metadata.

    A slice that leaves something out has fewer elements, and is no such view.
    """
    if c.dtype(source) != c.dtype(node):
        return None
    return source, views.reshape(c.whole(source), c.sizes(node))


def _turned(c: Canonical, node: Node, source: Node) -> Result:
    """Read permute, transpose, .T and the like: the order of sizes that are all different.

    The operation runs on a tensor of these sizes, which has no data.
    """
    dims = c.whole(source)
    if len(dims) > len(_DIFFERENT):
        return None
    sizes = _DIFFERENT[: len(dims)]
    with _disable_current_modes():
        probe = torch.empty(sizes, device="meta")
        turned = applied(node, *map_arg((node.args, node.kwargs), lambda _: probe))
    return source, tuple(dims[sizes.index(size)] for size in turned.shape)


_DIFFERENT = (2, 3, 5, 7, 11, 13, 17, 19)
TURNED = (
    "permute", "permute_copy", "transpose", "transpose_copy", "t", "t_copy", "T", "mT", "mH",
    "movedim",
)  # fmt: skip


def _expand(c: Canonical, node: Node, source: Node) -> Result:
    return source, views.expand(c.whole(source), c.sizes(node))


def _getitem(c: Canonical, node: Node, source: Node, index: Any = None) -> Result:
    """Read slices that leave nothing out, None and Ellipsis, which only add dimensions."""
    entries = index if isinstance(index, tuple) else (index,)
    plain = all(e is None or e is Ellipsis or isinstance(e, slice) for e in entries)
    return _regroup(c, node, source) if plain else None


def _concatenate(
    c: Canonical, node: Node, tensors: Any = None, dim: Any = 0, name: str = ""
) -> Result:
    if not isinstance(tensors, (tuple, list)) or not isinstance(dim, int):
        return None
    return Concatenation(name, tuple(tensors), dim % max(len(c.sizes(node)), 1))


def _repeat(c: Canonical, node: Node, source: Node, repeats: Any = None, dim: Any = None) -> Result:
    """Read repeat_interleave: each element of an axis several times."""
    if not isinstance(repeats, int) or not isinstance(dim, int):
        return None
    dims = list(c.whole(source))
    dims[dim] = (*dims[dim], views.Atom(views.BROADCAST, repeats, 0))
    return source, tuple(dims)


def _softmax(c: Canonical, node: Node, source: Node, dim: Any = None, name: str = "") -> Result:
    if not isinstance(dim, int) or dim not in (-1, len(c.sizes(node)) - 1):
        return None
    kind = AlongLast if "log" in name else Softmax
    return kind(name, (source,))


# -- copies, casts, and what does nothing -----------------------------------------------------


def _detach(c: Canonical, node: Node, source: Node) -> Result:
    return None if c.trains else _regroup(c, node, source)


def _to(c: Canonical, node: Node, source: Node) -> Result:
    old, new = c.tensor(source), c.tensor(node)
    if old is None or new is None or old.device != new.device or type(old) is not type(new):
        return None
    return _same(c, source) if old.dtype == new.dtype else Cast(source, new.dtype)


def _dropout(c: Canonical, node: Node, source: Node, p: Any = 0.5, training: Any = True) -> Result:
    return _regroup(c, node, source) if training is False or p == 0 else None


# -- pointwise ------------------------------------------------------------------------------


def _pair(c: Canonical, node: Node, a: Any, b: Any) -> tuple[Key, Any, bool] | None:
    """Return the operand that the result is like, the other one or a number, and whether they
    changed places; None for other operands."""
    turned = not _is_tensor(c, a) or (_is_tensor(c, b) and c.shape(a) != c.shape(node))
    if turned:
        a, b = b, a
    if not _is_tensor(c, a) or not _kept(c, a, node):
        return None
    if _number(b):
        return a, float(b), turned
    return (a, b, turned) if _is_tensor(c, b) else None


def _multiply(c: Canonical, node: Node, one: Any = None, two: Any = None) -> Result:
    pair = _pair(c, node, one, two)
    return None if pair is None else Scale(*pair[:2])


def _kept(c: Canonical, source: Key, node: Node) -> bool:
    return c.dtype(source) == c.dtype(node) and c.shape(source) == c.shape(node)


def _divide(
    c: Canonical,
    node: Node,
    like: Node,
    two: Any = None,
    rounding_mode: Any = None,
) -> Result:
    if rounding_mode is not None or not _number(two) or two == 0:
        return None
    return Scale(like, 1.0 / float(two))


def _sum(
    c: Canonical, node: Node, one: Any = None, two: Any = None, alpha: Any = 1, name: str = ""
) -> Result:
    pair = _pair(c, node, one, two)
    if pair is None or not _number(alpha):
        return None
    a, b, turned = pair
    factors = (1.0, float(-alpha if name.startswith("sub") else alpha))
    return Add(a, b, *(factors[::-1] if turned else factors))


def _activation(
    c: Canonical, node: Node, like: Node, approximate: Any = "none", name: str = ""
) -> Result:
    by_tanh = name == "gelu" and approximate == "tanh"
    return Activation(like, "gelu_tanh" if by_tanh else name)


_ACTIVATIONS = (
    "relu", "silu", "gelu", "sigmoid", "tanh", "relu6", "hardswish", "mish", "leaky_relu", "elu",
    "selu", "celu", "softplus", "softsign", "hardtanh", "hardsigmoid", "logsigmoid",
)  # fmt: skip


def _clamp(
    c: Canonical, node: Node, like: Node, low: Any = None, high: Any = None, name: str = ""
) -> Result:
    """Read a clamp from below at zero, and nothing else, as relu."""
    if name == "threshold":
        high = high or None
    return Activation(like, "relu") if _number(low) and low == 0 and high is None else None


# -- the rest -------------------------------------------------------------------------------


def _layer_norm(
    c: Canonical,
    node: Node,
    like: Node,
    normalized_shape: Any = None,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    name: str = "",
) -> Result:
    """Read layer_norm, and by its name rms_norm, over the last dimension alone."""
    dtype, shape = c.dtype(like), normalized_shape
    if dtype is None or not isinstance(shape, (list, tuple)) or len(shape) != 1:
        return None
    eps = torch.finfo(dtype).eps if eps is None else eps
    gain, shift = (t if isinstance(t, (Node, Virtual)) else None for t in (weight, bias))
    kind = name.removesuffix("_norm")
    return Norm(like, kind, gain, shift, eps if _number(eps) else None)


def _rms_norm(
    c: Canonical,
    node: Node,
    like: Node,
    normalized_shape: Any = None,
    weight: Any = None,
    eps: Any = None,
    name: str = "",
) -> Result:
    return _layer_norm(c, node, like, normalized_shape, weight, eps=eps, name=name)


def _diagonal(
    c: Canonical,
    node: Node,
    source: Node,
    diagonal: Any = 0,
    dim1: Any = -2,
    dim2: Any = -1,
) -> Result:
    plain = (diagonal, dim1, dim2) in ((0, -2, -1), (0, 0, 1)) and len(c.sizes(source)) == 1
    return Diagonal(source) if plain else None


TABLE: dict[str, Handler] = {
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
            "view_as",
            "reshape_as",
            "ravel",
            "view_copy",
            "_reshape_alias",
            "contiguous",
            "clone",
            "alias",
            "positive",
            "resolve_conj",
            "slice",
        ),
        _regroup,
    ),
    **dict.fromkeys(TURNED, _turned),
    "getitem": _getitem,
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _softmax),
    "repeat_interleave": _repeat,
    **dict.fromkeys(("expand", "expand_as", "expand_copy"), _expand),
    "detach": _detach,
    **dict.fromkeys(
        ("to", "type_as", "type", "float", "half", "bfloat16", "double", "cpu", "cuda"), _to
    ),
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d"),
        _dropout,
    ),
    "mul": _multiply,
    "div": _divide,
    "neg": lambda c, node, like: _divide(c, node, like, -1.0),
    "add": _sum,
    "sub": _sum,
    # an in-place sum reads as the sum; the rules decide whether it may be fused
    "add_": _sum,
    "sub_": _sum,
    **dict.fromkeys(_ACTIVATIONS, _activation),
    **dict.fromkeys(("clamp", "clamp_min", "clip", "threshold"), _clamp),
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    **dict.fromkeys(("diag", "diag_embed"), _diagonal),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), _matmul),
    "linear": _linear,
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addmm_", "baddbmm_"), _addmm),
    "einsum": _einsum,
    **dict.fromkeys(("multi_dot", "chain_matmul"), _multi_dot),
    "tensordot": _tensordot,
    "inner": lambda c, node, source, other: _tensordot(c, node, source, other, dims=([-1], [-1])),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    "sum": _sum_over,
    "where": _where,
    **DISTRIBUTED,
}


# What modules of torch compute is in the table under their names, but for these.
_MODULES = {
    "identity": "alias",
    "rmsnorm": "rms_norm",
    "layernorm": "layer_norm",
    "alphadropout": "alpha_dropout",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def read_module(c: Canonical, node: Node, module: Any) -> Result:
    """Return the form of a module of torch that a node calls; None for one with hooks, and for a
    module of others."""
    source = node.args[0] if len(node.args) == 1 else node.kwargs.get("input")
    name = type(module).__name__.lower()
    name = _MODULES.get(name, name)
    own = type(module).__module__.startswith("torch.nn.modules.") and name in TABLE
    if not own or any(getattr(module, flag, False) for flag in ("inplace", *_HOOKS)):
        return None
    # A parametrized weight (weight_norm) is computed on access, so it is no parameter.
    held: Any = {
        own: None if value is None else c.attribute(node, own, value)
        for own, value in module._parameters.items()
    }
    return read_call(c, node, name, (source,), {**vars(module), **held})


# -- the sweep --------------------------------------------------------------------------------

_LEAVES = ("placeholder", "get_attr")


def read_graph(
    module: GraphModule,
    values: dict[Node, Any],
    stored: Mapping[str, bool] | None = None,
    options: Options | None = None,
    faults: Faults | None = None,
) -> Canonical:
    """Return a graph in canonical forms.

    values: metadata value of each node. stored: in a graph of a higher-order operator, whether the
    model stores the values of its placeholders, by their names. faults: keeps an exception of this
    package at one node.
    """
    c = Canonical(module, values, options, faults)
    c.given = stored or {}
    leaves = [n for n in c.graph.nodes if n.op in _LEAVES]
    trained = (*map(c.tensor, leaves), *module.parameters())
    c.trains = any(t is not None and t.requires_grad for t in trained)
    own = {n for n in leaves if _is_stored(c, n)}
    held = any(_is_matrix(c, n) or c.dtype(n) == torch.uint8 for n in own)  # blocks are bytes
    c.inputs_are_weights = not held and not any(p.dim() > 1 for p in module.parameters())
    given = (n for n in leaves if n not in own and len(c.sizes(n)) == 2)
    c.input_matrices = {n for n in given if _is_matrix(c, n)}
    sweep(c)
    return c


def sweep(c: Canonical) -> None:
    """Read the nodes that were not read yet: all of them, or those that a rewrite has added."""
    for node in c.graph.nodes:
        if node not in c.views:
            _visit(c, node)


# -- leaves -----------------------------------------------------------------------------------


def _is_stored(c: Canonical, node: Node) -> bool:
    """Return whether the model stores a leaf: a parameter, a buffer or an attribute."""
    if node.op == "get_attr":
        c.note_subclass(node, fetch_attribute(c.module, str(node.target)))
        return True
    name = str(node.target)
    named = name.startswith(("p_", "b_")) or name.lower().startswith("l_self_")
    named = named or "_parameters_" in name or "_buffers_" in name
    return c.given.get(name, named or isinstance(c.values.get(node), nn.Parameter))


def _is_matrix(c: Canonical, node: Node) -> bool:
    value = c.tensor(node)
    return value is not None and value.is_floating_point() and value.dim() >= 2


# -- one node ---------------------------------------------------------------------------------


def _visit(c: Canonical, node: Node) -> None:
    shape, inputs = c.shape(node), tuple(node.all_input_nodes)
    result: Result = None
    try:
        if shape is not None:  # else it has several results, as of a split
            result = _read(c, node)
        if isinstance(result, tuple):
            source = result[0]
            result = _over_base(c, node, *result)
    except Exception as error:  # kept, or raised again
        c.faults.keep(error, "reading", node)
        result = None
        c.virtuals.pop(node, None)
        c.helpers.pop(node, None)
    shared = result is None and _alias_of(c, node) in c.constant
    if isinstance(result, tuple):
        c.note_view(node, source, result)
    elif shared and shape is not None:
        c.define(node, Leaf(), shape)
    else:
        if result is None:
            result = Opaque(_opaque_name(c, node), () if shape is None else inputs)
        c.define(node, result, shape or ())
    own, *parts = (c.forms.get(key) for key in (node, *c.virtuals.get(node, ())))
    is_product = any(isinstance(form, Product) for form in (own, *parts))
    if inputs and all(n in c.constant or n in c.derived for n in inputs):
        c.derived[node] = is_product or any(map(c.derived.get, inputs))
    if shared or (isinstance(own, Leaf) and (own.stored or c.inputs_are_weights)):
        c.constant.add(node)
    elif own and shape is not None and inputs and all(map(c.is_weight, inputs)):
        has_x = c.inputs_are_weights and not isinstance(own, Cast)  # among its inputs
        if not has_x and not is_product and is_pure(node, c.effects):
            c.made.add(node)


def _opaque_name(c: Canonical, node: Node) -> str:
    """Return the operation of a node that no form describes, or the class of a called module."""
    if node.op == "call_module":
        return type(fetch_attribute(c.module, str(node.target))).__name__
    return target_name(node) or str(node.target)


def _read(c: Canonical, node: Node) -> Result:
    if node.op in _LEAVES:
        return Leaf(_is_stored(c, node))
    if node.op == "call_module":
        return read_module(c, node, fetch_attribute(c.module, str(node.target)))
    name = target_name(node) if node.op != "output" else None
    if name is None:
        return None
    result: Result = spelled_out(c, node, name)
    if result is None:
        result = read_call(c, node, name, node.args, node.kwargs)
    if result is None and not is_inplace_name(name):
        result = _by_strides(c, node)
    if not isinstance(result, tuple):
        result = norm_around(c, node, name, result) or result
    return result


def _over_base(c: Canonical, node: Node, source: Key, dims: Dims | None) -> View | None:
    """Return a rearrangement of `source` as one of its base, or None."""
    base, inner = c.views[source]
    composed = None if dims is None else views.compose(dims, inner)
    if composed is None or len(composed) != len(c.sizes(node)):
        return None
    if c.effects.writers:
        shared = c.effects.storages(node) & c.effects.storages(owner_of(source))
        if not shared and c.effects.is_written(node, owner_of(source)):
            return None  # a copy and its source may come to differ
    return base, composed


def _by_strides(c: Canonical, node: Node) -> Result:
    """Read an unknown operation as a view when it shares memory with its first argument."""
    source = _alias_of(c, node)
    if source is None or (c.trains and changes_gradient(node)):
        return None  # the same memory, but other gradients
    old, new = c.tensor(source), c.tensor(node)
    if old is None or new is None or type(old) is not type(new) or old.layout != torch.strided:
        return None
    (dtype, sizes, steps), start, _ = memory_of(c, source)
    (new_dtype, new_sizes, new_steps), new_start, _ = memory_of(c, node)
    if (dtype, start) != (new_dtype, new_start):
        return None
    return source, views.from_strides(sizes, steps, new_sizes, new_steps)


def _alias_of(c: Canonical, node: Node) -> Node | None:
    """Return the first argument of a node that only names a part of its memory."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or node in c.effects.writers:
        return None
    own = c.effects.storages(node)
    return source if own and own <= c.effects.storages(source) else None
