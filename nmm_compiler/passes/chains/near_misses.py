"""Names graphs that look like low-rank chains but have no kernel, with the way out.

conv2d(conv2d(x, 3x3), 1x1), patch embedding then projection, embedding then projection,
linear(cat(h1, h2), [b1 | b2]), 1x1 convolutions with a stride, (x @ a)[..., None] * b without a
sum, weights of experts or requests that an index picks, one einsum of several activations, bilinear
forms of the inner value, Kronecker products, factors that each call makes anew
"""

from __future__ import annotations

import math

from torch import fx

from nmm_compiler.passes.chains.between import JOINS, are_features
from nmm_compiler.passes.chains.linear_map import Refusal
from nmm_compiler.passes.chains.steps import trace_back
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key, Opaque, Product, owner_of
from nmm_compiler.passes.graph.torch_names import Call, target_name

_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"}) | _TRANSPOSED
SPREAD = "mul"  # opaque where it is larger than both of its operands, else a scale
EINSUM = "einsum"  # opaque where it has several activations
_BILINEAR = "bilinear"
WORTH_ASKING = CONVOLUTIONS | {SPREAD, EINSUM, _BILINEAR}
_PICKS = frozenset({"index_select", "getitem", "index"})
_STRIDE = "take every n-th pixel of x, x[:, :, ::n, ::n], in place of the stride"
_PADDING = "pad x before the first factor, F.pad(x, ...), which may have no bias then"
_GROUPS = "nothing: groups are several products"
_TABLES = _PICKS | {"embedding", "embedding_bag"}
# Operations whose result depends on the shape of their operands at most.
_FACTORIES = frozenset(
    {f"{kind}{suffix}" for kind in ("ones", "zeros", "full", "rand", "randn", "randint", "empty")
     for suffix in ("", "_like")}
    | {"new_ones", "new_zeros", "new_full", "eye", "arange", "linspace", "logspace", "tensor",
       "scalar_tensor", "as_tensor", "hamming_window", "hann_window"}
)  # fmt: skip
_MOST_STEPS = 8


def near_miss(c: Canonical, key: Key, form: Product | Opaque) -> Refusal | None:
    """Return why a product or a convolution is not part of the chain that it resembles."""
    if isinstance(form, Opaque) and form.name == SPREAD:
        assert isinstance(key, fx.Node)
        return _unsummed(c, key)
    if isinstance(form, Opaque) and form.name == EINSUM:
        assert isinstance(key, fx.Node)
        return _one_einsum(c, key, form)
    if isinstance(form, Opaque) and form.name == _BILINEAR:
        return _bilinear(c, key, form)
    if isinstance(form, Opaque):
        assert isinstance(key, fx.Node)
        call = Call(key, form.name)
        return _convolution(c, key, call.get(0, "input"), call.get(1, "weight"))
    for weight, data in ((form.rhs, form.lhs), (form.lhs, form.rhs)):
        if c.is_weight(data):
            continue
        new = _made_anew(c, form, weight, data)
        if new is not None:
            return new
        if _is_picked_before(c, data) and (c.is_weight(weight) or _is_picked(c, weight)):
            return Refusal("batched_weight", "an index picks the weight at each call", weight,
                           "nothing: group what has one weight, and call each group with "
                           "it")  # fmt: skip
        if not c.is_weight(weight):
            continue
        made = c.form(weight)
        if isinstance(made, Opaque) and made.name == "kron":
            return Refusal("weight_computed", "the weight is a Kronecker product of two factors",
                           weight, "nothing: they are no chain of two products")  # fmt: skip
        base = trace_back(c, data)[0].key
        behind = c.forms[base]
        if not isinstance(behind, Opaque) or not isinstance(base, fx.Node):
            continue
        sizes = c.shape(c.base(weight)[0]) or ()
        if len(sizes) < 2 or not all(isinstance(s, int) for s in sizes):
            continue
        outputs = math.prod(sizes) // max(1, _inner(c, form, weight))
        call = Call(base, behind.name)
        if behind.name in CONVOLUTIONS:
            found = _pair(c, call.get(1, "weight"), outputs)
            if found:
                return Refusal("convolution", f"the first factor is a convolution {found}", base,
                               _remedy(call, found))  # fmt: skip
        if behind.name in _TABLES:
            return _table(c, base, call, outputs)
        if behind.name in JOINS and _of_products(c, base):
            return _joined(c, base, call)
    return None


def _made_anew(c: Canonical, form: Product, weight: Key, data: Key) -> Refusal | None:
    """Name a factor that an operation without operands makes at each call."""
    inner = trace_back(c, data)[1]
    if not isinstance(inner, Product):
        return None
    names = {key: _factory(c, key) for key in (weight, inner.lhs, inner.rhs)}
    first = next((key for key in (inner.rhs, inner.lhs) if c.is_weight(key) or names[key]), None)
    new = next((key for key in (weight, first) if key is not None and names[key]), None)
    if new is None or first is None or not (c.is_weight(weight) or names[weight]):
        return None
    r = _inner(c, form, weight)
    shapes = [c.shape(c.base(key)[0]) or () for key in (first, weight)]
    if r == 0 or not all(isinstance(size, int) for shape in shapes for size in shape):
        return None
    k, n = (math.prod(map(int, shape)) // r for shape in shapes)
    if r * (k + n) >= k * n:
        return None
    return Refusal("weight_computed", f"a factor is made by `{names[new]}` in each call", new,
                   "store it as a buffer")  # fmt: skip


def _factory(c: Canonical, key: Key) -> str | None:
    """Return the operation that makes a value of nothing but numbers and shapes, or None."""
    made, queue = None, [owner_of(c.base(key)[0])]
    for _ in range(_MOST_STEPS):
        if not queue:
            return made
        node = queue.pop()
        name = target_name(node)
        if name in _FACTORIES:
            made = name
        elif c.is_weight(node) or node in c.derived:
            continue
        elif not node.all_input_nodes:
            return None
        else:
            queue += node.all_input_nodes
    return None


def _bilinear(c: Canonical, key: Key, form: Opaque) -> Refusal | None:
    """Name a bilinear form that takes the place of the second product."""
    for value in form.inputs:
        inner = None if c.is_weight(value) else trace_back(c, value)[1]
        if not isinstance(inner, Product):
            continue
        factor = next((side for side in (inner.rhs, inner.lhs) if c.is_weight(side)), None)
        shape = c.shape(c.base(factor)[0]) or () if factor is not None else ()
        r, n = (c.shape(value) or (None,))[-1], (c.shape(key) or (None,))[-1]
        if not shape or not all(isinstance(size, int) for size in (*shape, r, n)):
            continue
        k = math.prod(map(int, shape)) // int(r)
        if r * (k + n) < k * n:
            return Refusal("opaque", "the second product is a bilinear form", key,
                           "nothing: no kernel takes it")  # fmt: skip
    return None


def _one_einsum(c: Canonical, key: fx.Node, form: Opaque) -> Refusal | None:
    given = [n for a in key.args for n in (a if isinstance(a, (tuple, list)) else (a,))]
    operands = [n for n in given if isinstance(n, fx.Node)]  # one value may stand twice
    weights = [n for n in operands if c.is_weight(n) and len(c.shape(n) or ()) > 1]
    others = [n for n in operands if n not in weights]
    if len(weights) == 1 and len(others) == 2 and len(c.shape(weights[0]) or ()) == 3:
        return _bilinear(c, key, form)
    if len(weights) < 2 or not others:
        return None
    reason = "one einsum of several activations and several weights"
    return Refusal("part_of_one", reason, key, "write the products one by one")


def _is_picked(c: Canonical, key: Key) -> bool:
    """Return whether a value is stored matrices that an index picks from more of them."""
    base = c.base(key)[0]
    form = c.forms[base]
    if not isinstance(form, Opaque) or form.name not in _PICKS or not isinstance(base, fx.Node):
        return False
    return any(c.is_weight(n) and len(c.shape(n) or ()) > 2 for n in base.all_input_nodes)


def _is_picked_before(c: Canonical, data: Key) -> bool:
    inner = trace_back(c, data)[1]
    return isinstance(inner, Product) and (_is_picked(c, inner.rhs) or _is_picked(c, inner.lhs))


def _joined(c: Canonical, base: fx.Node, call: Call) -> Refusal:
    """Name inner values that are joined before the second product."""
    part = base.all_input_nodes[0]
    rank = len(c.shape(part) or ())
    default = rank - 1 if call.name == "hstack" else 0
    axis = call.get(1, "dim", "axis", default=default)
    features = isinstance(axis, int) and are_features(c, part, {axis % rank})
    if call.name == "stack":
        features = True
    remedy = "add up the chains: h1 @ v1 + h2 @ v2 is one call"
    if not features:
        remedy = "join the inputs before the first product, or the results"
    return Refusal(
        "concatenated", "inner values are joined before the second product", base, remedy
    )


def _remedy(call: Call, found: str) -> str:
    """Return what helps where one element of a convolution is more than a product."""
    if found.removeprefix("of ").replace("x", "").strip("1"):
        return "nothing: the second factor runs as a dense product"
    if call.get(8 if call.name == "convolution" else 6, "groups", default=1) != 1:
        return _GROUPS
    strides = call.get(3, "stride", default=1)
    strided = any(s != 1 for s in (strides if isinstance(strides, (tuple, list)) else (strides,)))
    return _STRIDE if strided else _PADDING


def _unsummed(c: Canonical, key: fx.Node) -> Refusal | None:
    """Name a second factor that multiplies element by element, with nothing summed."""
    operands = [operand for operand in key.all_input_nodes if operand in c.views]
    if len(operands) != 2:
        return None
    for value, factor in (operands, operands[::-1]):
        base = c.base(value)[0]
        inner = c.forms[base]
        made, whole = c.shape(base) or (), c.shape(key) or ()
        if not isinstance(inner, Product) or not c.is_weight(factor) or len(whole) <= len(made):
            continue
        first = inner.rhs if c.is_weight(inner.rhs) else inner.lhs
        sizes = [*(c.shape(c.base(first)[0]) or ()), *(c.shape(factor) or ())]
        if not c.is_weight(first) or not all(isinstance(s, int) for s in sizes):
            continue
        r = made[-1]
        if not isinstance(r, int):
            continue
        parts = (c.shape(c.base(first)[0]) or (), c.shape(factor) or ())
        (k, rest), (n, more) = (divmod(math.prod(map(int, shape)), r) for shape in parts)
        if rest == more == 0 and r * (k + n) < k * n:
            reason = "the second factor multiplies element by element, and nothing is summed"
            remedy = "sum over the inner dimension, as (x @ a) @ b does"
            return Refusal("unsummed", reason, key, remedy)
    return None


def _inner(c: Canonical, form: Product, weight: Key) -> int:
    labels = form.rhs_labels if weight is form.rhs else form.lhs_labels
    sizes = zip(labels, c.shape(weight) or (), strict=True)
    return math.prod(int(s) for label, s in sizes if label not in form.out_labels)


def _kernel(c: Canonical, weight: object) -> tuple[int, ...] | None:
    shape = c.shape(weight) if isinstance(weight, fx.Node) and c.is_weight(weight) else None
    static = shape is not None and len(shape) > 2 and all(isinstance(s, int) for s in shape)
    return shape if static else None


def _pair(c: Canonical, weight: object, outputs: int) -> str:
    """Return the convolution kernel's size in words if it is a first factor that saves work."""
    kernel = _kernel(c, weight)
    if kernel is None:
        return ""
    r, inputs = kernel[0], math.prod(kernel[1:])
    low = r * (inputs + outputs) < inputs * outputs
    return f"of {'x'.join(map(str, kernel[2:]))}" if low else ""


def _convolution(c: Canonical, node: fx.Node, x: object, weight: object) -> Refusal | None:
    """Name a convolution that ends a pair of them."""
    kernel = _kernel(c, weight)
    if kernel is None or not isinstance(x, fx.Node) or x not in c.views:
        return None
    walk, behind = trace_back(c, x)
    base = walk.key
    first = None
    opaque = c.forms[base]
    if isinstance(opaque, Opaque) and opaque.name in CONVOLUTIONS and isinstance(base, fx.Node):
        first = _kernel(c, Call(base, opaque.name).get(1, "weight"))
    elif isinstance(behind, Product):
        shape = c.shape(c.base(behind.rhs)[0])
        first = (*shape, 1) if shape and all(isinstance(s, int) for s in shape) else None
    if first is None:
        return None
    name: str = c.forms[node].name  # type: ignore[union-attr]
    turned = name in _TRANSPOSED
    inputs_here, outputs = kernel[:2] if turned else (kernel[1], kernel[0])
    r, inputs, outputs = first[0], math.prod(first[1:]), outputs * math.prod(kernel[2:])
    if inputs_here != r or r * (inputs + outputs) >= inputs * outputs:
        return None
    size = "x".join(map(str, kernel[2:]))
    if turned:
        return Refusal("convolution", f"a transposed convolution of {size}", node,
                       "nothing: it is no product of matrices")  # fmt: skip
    if math.prod(kernel[2:]) > 1:
        return Refusal("convolution", f"a convolution of {size}", node,
                       "nothing: it is no product of matrices")  # fmt: skip
    return Refusal("convolution", f"a convolution of {size} with a stride, padding or groups", node,
                   _remedy(Call(node, name), size))  # fmt: skip


def _table(c: Canonical, node: fx.Node, call: Call, outputs: int) -> Refusal | None:
    table = next((a for a in node.all_input_nodes if len(c.shape(a) or ()) == 2
                  and c.is_weight(a) and c.dtype(a) == c.dtype(node)), None)  # fmt: skip
    shape = None if table is None else c.shape(table)
    if shape is None or not all(isinstance(s, int) for s in shape):
        return None
    entries, r = shape
    if r * (entries + outputs) >= entries * outputs:
        return None
    return Refusal("embedding", "the first factor is an embedding table: a lookup, no product",
                   node, "nothing: the projection runs as a dense product")  # fmt: skip


def _of_products(c: Canonical, node: fx.Node) -> bool:
    parts = [c.form(part) for part in node.all_input_nodes if part in c.views]
    return len(parts) > 1 and all(
        isinstance(form, Product) and (c.is_weight(form.rhs) or c.is_weight(form.lhs))
        for form in parts
    )
