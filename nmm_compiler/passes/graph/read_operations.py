"""The table: canonical name of an operation -> how to read it as a form or a view.

A handler gets the graph read so far and the bound call. It returns a form, (source, dims) when the
call only rearranges its source, or None when this use of the operation is not understood.
`read_module` reads the modules that `symbolic_trace` leaves as calls.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    Cast,
    Concatenation,
    Diagonal,
    Handler,
    Norm,
    Part,
    Result,
    Scale,
    Softmax,
    Virtual,
)
from nmm_compiler.passes.graph.contractions import (
    CONTRACTIONS,
    DECOMPOSED,
    spread_product,
)
from nmm_compiler.passes.graph.distributed import DISTRIBUTED
from nmm_compiler.passes.graph.torch_names import Call


def _first(c: Canonical, call: Call) -> fx.Node | None:
    source = call.get(0, "input", "self", "a", "x")
    return source if isinstance(source, fx.Node) and c.shape(source) is not None else None


def _same(c: Canonical, source: fx.Node) -> Result:
    shape = c.shape(source)
    return None if shape is None else (source, views.identity(shape))


# -- rearrangements -------------------------------------------------------------------------


def _regroup(c: Canonical, call: Call) -> Result:
    """Read view, reshape, flatten, squeeze, ...: the target shape is in the metadata."""
    source = _first(c, call)
    if source is None or c.dtype(source) != c.dtype(call.node):
        return None
    shape, new = c.shape(source), c.shape(call.node)
    if shape is None or new is None:
        return None
    dims = views.reshape(views.identity(shape), new)
    return None if dims is None else (source, dims)


def _turned(c: Canonical, call: Call) -> Result:
    """Read permute, transpose, .T and the like: the order of sizes that are all different.

    The operation runs on a tensor of these sizes, which has no data.
    """
    source, node = _first(c, call), call.node
    shape = c.shape(source) if source is not None else None
    if source is None or shape is None or len(shape) > len(_DIFFERENT):
        return None
    sizes = _DIFFERENT[: len(shape)]
    with _disable_current_modes():
        probe = torch.empty(sizes, device="meta")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: probe)
        if node.op == "call_method":
            turned = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            turned = node.target(*args, **kwargs)  # type: ignore[operator]
    order = [sizes.index(size) for size in turned.shape]
    return source, views.permute(views.identity(shape), order)


_DIFFERENT = (2, 3, 5, 7, 11, 13, 17, 19)
_TURNED = (
    "permute", "permute_copy", "transpose", "transpose_copy", "t", "t_copy", "T", "mT", "mH",
    "movedim",
)  # fmt: skip


def _getattr(c: Canonical, call: Call) -> Result:
    name = call.get(1, "name")
    if name == "data":
        return _detach(c, call)
    return _turned(c, call) if name in ("T", "mT", "H", "mH") else None


def _expand(c: Canonical, call: Call) -> Result:
    source = _first(c, call)
    shape, new = (c.shape(source) if source is not None else None), c.shape(call.node)
    if source is None or shape is None or new is None:
        return None
    dims = views.expand(views.identity(shape), new)
    return None if dims is None else (source, dims)


def _getitem(c: Canonical, call: Call) -> Result:
    """Indexing by full slices, None and Ellipsis only adds dimensions."""
    source = _first(c, call)
    if source is None:
        return None
    index = call.get(1, "key")
    entries = list(index) if isinstance(index, tuple) else [index]
    cut = [i for i, e in enumerate(entries) if not (e is None or e is Ellipsis or _is_full(e))]
    if not cut:
        return _regroup(c, call)
    if len(cut) > 1 or None in entries or not isinstance(entries[cut[0]], slice):
        return None
    rank, after = len(c.shape(source) or ()), entries[cut[0] + 1 :]
    axis = rank - 1 - len(after) if Ellipsis in entries[: cut[0]] else cut[0]
    kept: slice = entries[cut[0]]
    return _part(c, call, source, axis, (kept.start, kept.stop, kept.step))


def _is_full(entry: Any) -> bool:
    return isinstance(entry, slice) and (entry.start, entry.stop, entry.step) in _FULL


_FULL = ((None, None, None), (None, None, 1), (0, None, None), (0, None, 1))


def _slice(c: Canonical, call: Call) -> Result:
    source, axis = _first(c, call), call.get(1, "dim", default=0)
    ends = (call.get(2, "start"), call.get(3, "end"), call.get(4, "step"))
    return None if source is None else _part(c, call, source, axis, ends)


def _part(c: Canonical, call: Call, source: fx.Node, axis: Any, ends: tuple[Any, ...]) -> Result:
    """Read a slice with step 1 of one axis; the same value where it leaves nothing out."""
    shape = c.shape(source) or ()
    if not isinstance(axis, int) or not shape or ends[2] not in (None, 1):
        return None
    if shape == c.shape(call.node) and ends[0] in (0, None):
        return _same(c, source)
    size = shape[axis]
    if not all(isinstance(n, int) for n in (size, ends[0] or 0, 0 if ends[1] is None else ends[1])):
        return None
    start, stop, _ = slice(*ends).indices(size)
    return Part(call.name, (source,), axis % len(shape), start, stop)


def _concatenate(c: Canonical, call: Call) -> Result:
    parts, axis = call.get(0, "tensors"), call.get(1, "dim", "axis", default=0)
    if not isinstance(parts, (tuple, list)) or not isinstance(axis, int):
        return None
    return Concatenation(call.name, tuple(parts), axis % max(len(c.shape(call.node) or ()), 1))


def _repeat(c: Canonical, call: Call) -> Result:
    """Read repeat_interleave: each element of an axis several times."""
    source, times, axis = _first(c, call), call.get(1, "repeats"), call.get(2, "dim")
    if source is None or not isinstance(times, int) or not isinstance(axis, int):
        return None
    dims = list(views.identity(c.shape(source) or ()))
    dims[axis] = (*dims[axis], views.Atom(views.BROADCAST, times, 0))
    return source, tuple(dims)


def _softmax(c: Canonical, call: Call) -> Result:
    source, axis = _first(c, call), call.get(1, "dim")
    rank = len(c.shape(call.node) or ())
    last = source is not None and isinstance(axis, int) and axis in (-1, rank - 1)
    return Softmax(call.name, (source,)) if last else None


# -- copies, casts, and what does nothing -----------------------------------------------------


def _identity(c: Canonical, call: Call) -> Result:
    source = _first(c, call)
    if source is None or c.shape(source) != c.shape(call.node):
        return None
    return _same(c, source)


def _detach(c: Canonical, call: Call) -> Result:
    return None if c.trains else _identity(c, call)


def _to(c: Canonical, call: Call) -> Result:
    source = _first(c, call)
    if source is None:
        return None
    old, new = c.tensor(source), c.tensor(call.node)
    if old is None or new is None or old.device != new.device or type(old) is not type(new):
        return None
    if c.shape(source) != c.shape(call.node):
        return None
    return _same(c, source) if old.dtype == new.dtype else Cast(source, new.dtype)


def _dropout(c: Canonical, call: Call) -> Result:
    off = call.get(2, "training", "train", default=True) is False
    return _identity(c, call) if off or call.get(1, "p", default=0.5) == 0 else None


# -- pointwise ------------------------------------------------------------------------------


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _multiply(c: Canonical, call: Call) -> Result:
    a, b = call.get(0, "input", "self"), call.get(1, "other")
    if _number(a):
        a, b = b, a
    if not isinstance(a, fx.Node) or c.dtype(call.node) is None:
        return None
    out = c.shape(call.node)
    if _number(b):
        return Scale(a, float(b)) if _kept(c, a, call.node) else None
    if not isinstance(b, fx.Node) or c.shape(a) is None or c.shape(b) is None:
        return None
    if c.shape(a) != out:
        a, b = b, a
    if c.shape(a) != out:
        return spread_product(c, call.node, a, b)
    if c.shape(b) == () and c.is_constant(a):
        spread = spread_product(c, call.node, b, a)  # one number, made by a product
        if spread is not None:
            return spread
    return Scale(a, b) if _kept(c, a, call.node) else None


def _kept(c: Canonical, source: fx.Node, node: fx.Node) -> bool:
    return c.dtype(source) == c.dtype(node) and c.shape(source) == c.shape(node)


def _addcmul(c: Canonical, call: Call) -> Result:
    """Read input + value * a * b."""
    addend, a, b = (call.get(i, n) for i, n in enumerate(("input", "tensor1", "tensor2")))
    number = call.get(3, "value", default=1)
    if not _number(number) or not all(isinstance(t, fx.Node) for t in (addend, a, b)):
        return None
    if c.shape(a) != c.shape(call.node):
        a, b = b, a
    if not _kept(c, a, call.node) or c.shape(b) is None or c.dtype(addend) != c.dtype(call.node):
        return None
    shape = c.shape(call.node)
    assert shape is not None
    return Add(c.virtual(call.node, "product", Scale(a, b), shape), addend, float(number), 1.0)


def _divide(c: Canonical, call: Call) -> Result:
    a, b = call.get(0, "input", "self"), call.get(1, "other")
    if call.get(2, "rounding_mode") is not None or not isinstance(a, fx.Node):
        return None
    if not _number(b) or b == 0 or not _kept(c, a, call.node):
        return None
    return Scale(a, 1.0 / float(b))


def _negate(c: Canonical, call: Call) -> Result:
    source = _first(c, call)
    return None if source is None or not _kept(c, source, call.node) else Scale(source, -1.0)


def _sum(c: Canonical, call: Call, sign: float) -> Result:
    a, b = call.get(0, "input", "self"), call.get(1, "other")
    alpha = call.get(2, "alpha", default=1)
    if not _number(alpha):
        return None
    alphas = [1.0, sign * float(alpha)]
    if not isinstance(a, fx.Node):
        a, b = b, a
        alphas.reverse()
    if not isinstance(a, fx.Node) or c.shape(a) is None:
        return None
    out = c.shape(call.node)
    if isinstance(b, fx.Node):
        if c.shape(b) is None:
            return None
        if c.shape(a) != out:
            a, b = b, a
            alphas.reverse()
    elif _number(b):
        b = float(b)
    else:
        return None
    if c.shape(a) != out or c.dtype(a) != c.dtype(call.node):
        return None
    return Add(a, b, alphas[0], alphas[1])


def _add(c: Canonical, call: Call) -> Result:
    return _sum(c, call, 1.0)


def _subtract(c: Canonical, call: Call) -> Result:
    return _sum(c, call, -1.0)


def _activation(name: str) -> Handler:
    def read(c: Canonical, call: Call) -> Result:
        source = _first(c, call)
        if source is None or not _kept(c, source, call.node):
            return None
        shown = name
        if name == "gelu" and call.get(1, "approximate", default="none") == "tanh":
            shown = "gelu_tanh"
        return Activation(source, shown)

    return read


_ACTIVATIONS = (
    "relu", "silu", "gelu", "sigmoid", "tanh", "relu6", "hardswish", "mish", "leaky_relu", "elu",
    "selu", "celu", "softplus", "softsign", "hardtanh", "hardsigmoid", "logsigmoid",
)  # fmt: skip


def _clamp(c: Canonical, call: Call) -> Result:
    """Read a clamp from below at zero, and nothing else, as relu."""
    source = _first(c, call)
    if call.name == "threshold":
        low, high = call.get(1, "threshold"), call.get(2, "value") or None
    else:
        low, high = call.get(1, "min"), call.get(2, "max")
    if source is None or not _kept(c, source, call.node) or not _number(low) or low != 0:
        return None
    return Activation(source, "relu") if high is None else None


# -- the rest -------------------------------------------------------------------------------


def _norm(c: Canonical, call: Call) -> Result:
    """Read rms_norm and layer_norm over the last dimension alone."""
    source, layer = _first(c, call), call.name == "layer_norm"
    shape = call.get(1, "normalized_shape")
    dtype = None if source is None else c.dtype(source)
    if source is None or dtype is None or not _kept(c, source, call.node):
        return None
    if not isinstance(shape, (list, tuple)) or len(shape) != 1:
        return None
    gain, bias = call.get(2, "weight"), call.get(3, "bias") if layer else None
    eps = call.get(4 if layer else 3, "eps", default=1e-5 if layer else None)
    eps = torch.finfo(dtype).eps if eps is None else eps
    gain, bias = (t if isinstance(t, (fx.Node, Virtual)) else None for t in (gain, bias))
    return Norm(source, "layer" if layer else "rms", gain, bias, eps if _number(eps) else None)


def _diagonal(c: Canonical, call: Call) -> Result:
    source = _first(c, call)
    shape = None if source is None else c.shape(source)
    if source is None or shape is None or len(shape) != 1:
        return None
    if any(call.get(i, n, default=0) not in (0, d) for i, n, d in _DIAGONAL_DEFAULTS):
        return None
    return Diagonal(source)


_DIAGONAL_DEFAULTS = ((1, "diagonal", 0), (2, "dim1", -2), (3, "dim2", -1))


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
        ),
        _regroup,
    ),
    **dict.fromkeys(_TURNED, _turned),
    "getattr": _getattr,
    "getitem": _getitem,
    "slice": _slice,
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    "repeat_interleave": _repeat,
    **dict.fromkeys(("expand", "expand_as", "expand_copy"), _expand),
    **dict.fromkeys(("contiguous", "clone", "alias", "positive", "resolve_conj"), _identity),
    "detach": _detach,
    **dict.fromkeys(
        ("to", "type_as", "type", "float", "half", "bfloat16", "double", "cpu", "cuda"), _to
    ),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "dropout1d"), _dropout),
    "mul": _multiply,
    "addcmul": _addcmul,
    "div": _divide,
    "neg": _negate,
    "add": _add,
    "sub": _subtract,
    # an in-place sum reads as the sum; the rules decide whether it may be fused
    "add_": _add,
    "sub_": _subtract,
    **{name: _activation(name) for name in _ACTIVATIONS},
    **dict.fromkeys(("clamp", "clamp_min", "clip", "threshold"), _clamp),
    **dict.fromkeys(("rms_norm", "layer_norm"), _norm),
    **dict.fromkeys(("diag", "diag_embed"), _diagonal),
    **CONTRACTIONS,
    **DECOMPOSED,
    **DISTRIBUTED,
    **dict.fromkeys(("addmm_", "baddbmm_"), CONTRACTIONS["addmm"]),
}


# What a called module computes: a function of the table, with these of its attributes by keyword.
_MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Linear: ("linear", ("weight", "bias")),
    **dict.fromkeys(
        (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        ("conv2d", ("weight", "bias", "stride", "padding", "groups")),
    ),
    nn.Identity: ("alias", ()),
    **dict.fromkeys(
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
        ("dropout", ("p", "training")),
    ),
    **dict.fromkeys((nn.Flatten, nn.Unflatten), ("flatten", ())),
    nn.ReLU: ("relu", ()),
    nn.SiLU: ("silu", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.Tanh: ("tanh", ()),
    nn.GELU: ("gelu", ("approximate",)),
    nn.RMSNorm: ("rms_norm", ("normalized_shape", "weight", "eps")),
    nn.LayerNorm: ("layer_norm", ("normalized_shape", "weight", "bias", "eps")),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def read_module(c: Canonical, node: fx.Node, module: Any) -> Result:
    """Return the form of a called module; None for hooks, subclasses and all other modules."""
    source = node.args[0] if len(node.args) == 1 else node.kwargs.get("input")
    if type(module) not in _MODULES or getattr(module, "inplace", False):
        return None
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return None
    name, attributes = _MODULES[type(module)]
    call = Call(node, name)
    call.args, call.kwargs = (source,), {a: _own(c, node, module, a) for a in attributes}
    return TABLE[name](c, call)


def _own(c: Canonical, node: fx.Node, module: nn.Module, name: str) -> Any:
    # A parametrized weight (weight_norm) is computed on access, so it is no parameter.
    if name not in ("weight", "bias"):
        return getattr(module, name)
    value = module._parameters.get(name)
    return None if value is None else c.attribute(node, name, value)
