"""Names an operation between two products that no kernel takes, with the way out that is true.

    ((x @ u)[:, -1]) @ v     ->   "getitem between the products"; take the tokens before or behind
    (x @ u).chunk(2, -1)     ->   "chunk between the products"; cut the first factor instead

What helps depends on where the operation works: on tokens, which both products leave alone, or on
features, which a factor can take over once.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from nmm_compiler.passes.chains.linear_map import Refusal
from nmm_compiler.passes.chains.steps import trace_back
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key, Opaque, Product
from nmm_compiler.passes.graph.torch_names import Call, target_name

_CUTS = frozenset(
    {"chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk",
     "unsafe_split", "narrow", "slice", "select", "hsplit", "vsplit"}
)  # fmt: skip
_PICKS = frozenset({"getitem", "index_select", "index", "gather", "take_along_dim", "flip", "roll"})
JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack"})
_COPIES = frozenset({"repeat", "repeat_interleave", "tile"})
_SUMS = frozenset(
    {"mean", "sum", "cumsum", "pad", "constant_pad_nd", "avg_pool1d", "avg_pool2d", "avg_pool3d",
     "adaptive_avg_pool1d", "adaptive_avg_pool2d", "index_add", "scatter_add", "interpolate"}
)  # fmt: skip
_CURVED = frozenset(
    {"softmax", "log_softmax", "square", "pow", "abs", "clamp", "exp", "log", "sin", "cos", "sqrt",
     "rsqrt", "reciprocal", "round", "floor", "ceil", "sign", "prelu", "glu", "normalize", "sort",
     "topk", "amax", "amin", "max", "min", "max_pool1d", "max_pool2d", "nan_to_num", "erf",
     "scaled_dot_product_attention"}
)  # fmt: skip
_NOT_LINEAR = "nothing: not linear"
_TOKENS = "do it before the first product or behind the second one: both leave tokens alone"
_BIAS = "; a bias between the products counts once for each term"
_FUSED = (
    "fold it into the layer before, in eval mode: fuse_linear_bn_eval or fuse_conv_bn_eval of "
    "torch.nn.utils.fusion"
)
_OTHER = "nothing: only scales and biases of the rank, views and casts may stand there"


def name_operation(c: Canonical, key: Key, why: Refusal) -> Refusal:
    """Return the refusal of an opaque operation between products, with its name and a remedy."""
    form = c.forms[key]
    if not isinstance(form, Opaque) or not isinstance(key, fx.Node) or why.code != "opaque":
        return why
    call = _call(key, form.name)
    return Refusal(why.code, f"{call.name} between the products", key, _remedy(c, call))


def _call(node: fx.Node, name: str) -> Call:
    """Return the operation, seen through the getitem that takes one of its several results."""
    source = node.args[0] if name == "getitem" and node.args else None
    if isinstance(source, fx.Node) and isinstance(node.args[1], int):
        made = target_name(source)
        if source.op != "placeholder" and made in _CUTS | _CURVED:
            return Call(source, str(made))
    return Call(node, name)


def _remedy(c: Canonical, call: Call) -> str:
    if call.name in _CURVED:
        return _NOT_LINEAR
    if call.name == "div":
        return "multiply by the reciprocal: h * (1 / d)"
    if "batch_norm" in call.name or call.name.startswith("BatchNorm"):
        return _FUSED
    if call.name in ("where", "masked_fill"):
        zero = call.get(2, "other", "value")
        good = isinstance(zero, (int, float)) and zero == 0
        return (
            "multiply by the mask, h * mask, if it is one for each token" if good else _NOT_LINEAR
        )
    added = call.name in ("index_add", "scatter_add")  # the first operand is added to
    source = call.get(3, "source", "src") if added else call.get(0, "input", "self")
    axes = _axes(call, len(c.shape(source) or ())) if isinstance(source, fx.Node) else None
    if axes is None or call.name not in _CUTS | _PICKS | _COPIES | _SUMS:
        return _OTHER
    if not are_features(c, source, axes):
        return _TOKENS + (_BIAS if call.name in _SUMS - {"mean", "interpolate"} else "")
    if call.name in _CUTS or (call.name == "getitem" and _is_slice(call)):
        return "cut the first factor instead, and write a product for each part: x @ u[:, :4] @ v"
    if call.name in _PICKS:
        return "reorder the features of a factor once instead"
    return "fold it into a factor once: it is linear"


def _is_slice(call: Call) -> bool:
    index = call.get(1, "key")
    entries = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(entry, (fx.Node, list)) for entry in entries)


def are_features(c: Canonical, value: Key, axes: set[int]) -> bool:
    """Return whether any of these axes of a value holds features of the product that made it."""
    walk, inner = trace_back(c, value)
    if not isinstance(inner, Product):
        return True
    labels = inner.rhs_labels if c.is_weight(inner.rhs) else inner.lhs_labels
    atoms = [atom for axis in axes if axis < len(walk.dims) for atom in walk.dims[axis]]
    return any(inner.out_labels[atom.axis] in labels for atom in atoms if atom.axis >= 0)


# Where the axis stands among the arguments.
_AXIS_AT = {
    **dict.fromkeys(("roll", "take_along_dim", "repeat_interleave", "chunk", "split"), 2),
    **dict.fromkeys(("split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split"), 2),
}
_AXIS_FIRST = frozenset(
    {"index_add", "scatter_add", "index_select", "gather", "select", "narrow", "slice", "mean",
     "sum", "cumsum", "flip", "unbind"}
)  # fmt: skip


def _axes(call: Call, rank: int) -> set[int] | None:
    """Return the axes of its operand that an operation works on; None where that is not known."""
    name = call.name
    if name == "getitem":
        return _indexed(call.get(1, "key"), rank)
    if name in ("pad", "constant_pad_nd"):
        widths = call.get(1, "pad")
        pairs = enumerate(zip(widths[::2], widths[1::2], strict=True))
        return {rank - 1 - i for i, pair in pairs if pair != (0, 0)}
    if name in ("repeat", "tile"):
        times = call.ints(1, "repeats", "dims")
        return {rank - len(times) + i for i, count in enumerate(times) if count != 1}
    if name[-1:] == "d" and name[-2:-1].isdigit():  # a pool over the last axes
        return set(range(rank - int(name[-2]), rank))
    if name == "interpolate":
        return set(range(2, rank))
    if name not in _AXIS_AT and name not in _AXIS_FIRST:
        return None
    given = call.get(_AXIS_AT.get(name, 1), "dim", "dims", "axis", default=0)
    axes = given if isinstance(given, (tuple, list)) else (given,)
    return {axis % rank for axis in axes if isinstance(axis, int)}


def _indexed(index: Any, rank: int) -> set[int]:
    """Return the axes that an index changes."""
    entries = list(index) if isinstance(index, tuple) else [index]
    real = sum(entry is not None and entry is not Ellipsis for entry in entries)
    found, axis = set(), 0
    for entry in entries:
        if entry is Ellipsis:
            axis += rank - real
        elif entry is not None:
            if not isinstance(entry, slice) or entry != slice(None):
                found.add(axis)
            axis += 1
    return found


def follow(c: Canonical, key: Key) -> list[Key]:
    """Return the values that an operation of one activation, or a join of several, computes from.

    Other operations of several activations (a residual sum, attention) end one layer of a model.
    """
    form = c.forms[key]
    if not isinstance(form, Opaque) or not isinstance(key, fx.Node):
        return []
    found = [n for n in key.all_input_nodes if n in c.views and not c.is_weight(n)]
    parts = [source for n in found if c.shape(n) is None for source in n.all_input_nodes]
    found = [n for n in found if c.shape(n) is not None] + parts
    return list(found) if len(found) == 1 or form.name in JOINS else []
