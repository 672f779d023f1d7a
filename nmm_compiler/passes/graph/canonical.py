"""A graph in canonical forms: what each value is, for every spelling, and the queries of the rules.

The rules see only forms. A form refers to values by key: an fx node, or a `Virtual`, an
intermediate value of a node (the product inside a `linear` with bias, the first product of a
three-operand einsum). Each node has either a form (product, scale, add, ...) or a view over the
value it rearranges. `read_graph` fills the record; the handlers of its tables add intermediate
values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.options import Options
from nmm_compiler.passes.faults import Faults
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.effects import Effects
from nmm_compiler.passes.graph.views import Dims, Size
from nmm_compiler.targets import Target

_T = TypeVar("_T")
TORCHAO_MX = "MXTensor"
# What torchao's weights hold where their product rounds x, too; None where it does not.
_ROUNDING_OF_X = ("act_quant_kwargs", "activation_quantization", "input_quant_func")


class Virtual:
    """A value inside a node: it has a shape and a dtype, and exactly one reader, its owner.

    attribute and tensor are set for a parameter of a called module: the path for `get_attr`, and
    its tensor.
    """

    __slots__ = ("attribute", "dtype", "name", "owner", "shape", "tensor")

    def __init__(
        self,
        owner: Node,
        label: str,
        shape: tuple[Size, ...],
        dtype: torch.dtype | None,
        attribute: str | None = None,
        tensor: torch.Tensor | None = None,
    ) -> None:
        self.owner, self.name = owner, f"{owner.name}.{label}"
        self.shape, self.dtype = shape, dtype
        self.attribute, self.tensor = attribute, tensor

    def __repr__(self) -> str:
        return self.name


Key = Node | Virtual
Side = tuple[Key, tuple[int, ...]]
"""An operand of a product, and a label for each of its dimensions."""


def owner_of(key: Key) -> Node:
    """Return the fx node that computes the value."""
    return key.owner if isinstance(key, Virtual) else key


@dataclass(frozen=True)
class Leaf:
    """A value from outside the graph: an input, or stored by the model; a part of a weight, too."""

    stored: bool = True


@dataclass(frozen=True)
class Product:
    """A contraction of two operands; each dimension carries a label, as in an einsum.

    Labels in lhs and rhs but not in out are contracted.
    """

    lhs: Key
    rhs: Key
    lhs_labels: tuple[int, ...]
    rhs_labels: tuple[int, ...]
    out_labels: tuple[int, ...]

    @property
    def orders(self) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
        """Return both orders of the operands, each with its labels."""
        one, two = (self.lhs, self.lhs_labels), (self.rhs, self.rhs_labels)
        return (one, two), (two, one)


@dataclass(frozen=True)
class Scale:
    """value * factor, where factor is a number or another tensor of any kind."""

    value: Key
    factor: float | Key

    @property
    def orders(self) -> tuple[tuple[Key, Key], ...]:
        """Return both orders of two tensors; nothing where the factor is a number."""
        if isinstance(self.factor, float):
            return ()
        return (self.value, self.factor), (self.factor, self.value)


@dataclass(frozen=True)
class Add:
    """alpha * a + beta * b; b may be a number."""

    a: Key
    b: Key | float
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def orders(self) -> tuple[tuple[Key, Key], ...]:
        """Return both orders of a plain sum of two tensors; nothing for other sums."""
        if isinstance(self.b, float) or (self.alpha, self.beta) != (1.0, 1.0):
            return ()
        return (self.a, self.b), (self.b, self.a)


@dataclass(frozen=True)
class Cast:
    """A change of dtype."""

    value: Key
    dtype: torch.dtype


@dataclass(frozen=True)
class Activation:
    """A pointwise function by name: relu, silu, gelu, gelu_tanh, sigmoid, tanh, ..."""

    value: Key
    name: str


@dataclass(frozen=True)
class Norm:
    """RMS or layer normalization over the last dimension; weight and bias may be absent.

    kind: "rms" or "layer". eps stands under the root; None where it is not known. offset: a number
    that is added to the weight.
    """

    value: Key
    kind: str
    weight: Key | None
    bias: Key | None = None
    eps: float | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Diagonal:
    """A square matrix with the vector on its diagonal."""

    vector: Key


@dataclass(frozen=True)
class Opaque:
    """Anything else; `name` says what, `inputs` are its tensor arguments."""

    name: str
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class AlongLast(Opaque):
    """An operation along the last dimension that keeps the shape: the logarithm of a softmax."""


@dataclass(frozen=True)
class Softmax(AlongLast):
    """Softmax over the last dimension."""


@dataclass(frozen=True)
class Concatenation(Opaque):
    """The inputs, one after the other along an axis."""

    axis: int


@dataclass(frozen=True)
class DeviceSum(Opaque):
    """The sum of the one input over the devices of a mesh with one axis, whole on each of them."""


Form = Leaf | Product | Scale | Add | Cast | Activation | Norm | Diagonal | Opaque


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype as kernels and messages say it."""
    return str(dtype).removeprefix("torch.")


def describe(form: Form) -> str:
    """Return two or three words for messages."""
    if isinstance(form, Opaque):
        return form.name
    if isinstance(form, Activation):
        return f"activation {form.name}"
    if isinstance(form, Norm):
        return f"{form.kind} norm"
    if isinstance(form, Cast):
        return f"cast to {dtype_name(form.dtype)}"
    return type(form).__name__.lower()


View = tuple[Key, Dims]
Result = Form | tuple[Key, Dims | None] | None
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class Canonical:
    """A graph in canonical forms.

    forms: form of each base value. views: for each key, (base, dims). sources: the value that a
    view rearranges, one at most: `w.view_as(y)` and `w.to(y)` are views of w, and no views of y.
    values: the metadata tensor of each node. options: the user's. effects: writes and aliases.
    Users of fx nodes are read from the graph itself.
    """

    def __init__(
        self,
        module: GraphModule,
        values: dict[Node, Any],
        options: Options | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.module, self.graph, self.values = module, module.graph, values
        self.faults = faults or Faults()
        self.options = options or Options()
        self.effects = Effects(module, values)
        self.forms: dict[Key, Form] = {}
        self.views: dict[Key, View] = {}
        self.sources: dict[Key, Key] = {}
        self.virtuals: dict[Node, list[Virtual]] = {}
        # The products that compute the same as one, with it, in order.
        self.twins: dict[Key, list[Key]] = {}
        self._products: dict[Any, list[Key]] = {}
        # Further nodes that make a value, for forms that consist of several nodes.
        self.helpers: dict[Key, frozenset[Node]] = {}
        # Of a graph of a higher-order operator, which inputs the model stores, by their names.
        self.given: Mapping[str, bool] = {}
        # Values that are leaves but for views, and values computed from such alone.
        self.constant: set[Key] = set()
        # Values computed from constants without a product: a cast, scaled or joined weight.
        self.made: set[Key] = set()
        # Nodes that constants alone are the source of; whether a product has a part in them.
        self.derived: dict[Node, bool] = {}
        # Tensor subclasses among the leaves, by the name of their class.
        self.subclasses: dict[Node, str] = {}
        # Those that hold a quantized weight and can return it as a plain tensor.
        self.quantized: set[Node] = set()
        # Values that may be a part of an activation or a norm that is spelled out.
        self.bent: set[Node] = set()
        self.trains = False
        # A graph without stored matrices has its weights among its inputs.
        self.inputs_are_weights = False
        # Inputs that could be factors: adapters that are passed beside x.
        self.input_matrices: set[Node] = set()
        self._shapes: dict[Key, tuple[Size, ...]] = {}
        # What was read and priced of the graph, which several rules ask for (`once`).
        self.known: dict[Any, Any] = {}

    def note_subclass(self, node: Node, value: Any) -> None:
        """Note the class of a leaf that is a tensor subclass.

        A weight that rounds x, too, computes something else than a product with its plain tensor;
        kernels of MX blocks round x as such weights do.
        """
        kind = type(value)
        if not isinstance(value, torch.Tensor) or kind in PLAIN:
            return
        self.subclasses[node] = kind.__name__
        rounds_x = any(getattr(value, name, None) is not None for name in _ROUNDING_OF_X)
        if kind.dequantize is not torch.Tensor.dequantize and (
            not rounds_x or kind.__name__ == TORCHAO_MX
        ):
            self.quantized.add(node)

    @functools.cached_property
    def chip(self) -> Target:
        """The target whose kernels have prices, as this machine is known to be."""
        return machine_target(self.options.target, self.options)

    # -- what is known of a value ---------------------------------------------------------

    def tensor(self, key: Key) -> torch.Tensor | None:
        """Return the metadata tensor of a node, None when it is not a tensor."""
        value = key.tensor if isinstance(key, Virtual) else self.values.get(key)
        return value if isinstance(value, torch.Tensor) else None

    def shape(self, key: Key) -> tuple[Size, ...] | None:
        """Return the shape, with symbolic sizes as expressions; None for no tensor."""
        known_shape = key.shape if isinstance(key, Virtual) else self._shapes.get(key)
        value = self.tensor(key) if known_shape is None else None
        if value is not None:
            known_shape = self._shapes[key] = views.sizes_of(value)
        return known_shape

    def sizes(self, key: Key) -> tuple[Size, ...]:
        """Return the shape, () for no tensor."""
        return self.shape(key) or ()

    def whole(self, key: Key) -> Dims:
        """Return the dimensions of a base as it lies."""
        base, dims = self.views.get(key, (None, ()))
        return dims if base is key else views.identity(self.sizes(key))

    def dtype(self, key: Key) -> torch.dtype | None:
        """Return the dtype, None for no tensor."""
        value = key if isinstance(key, Virtual) else self.tensor(key)
        return None if value is None else value.dtype

    def base(self, key: Key) -> View:
        """Return (base, dims): what the value is a rearrangement of."""
        return self.views[key]

    def form(self, key: Key) -> Form:
        """Return the form of the base that the value is a rearrangement of."""
        return self.forms[self.views[key][0]]

    def is_whole(self, key: Key) -> bool:
        """Return whether a value is its base as it lies."""
        base, dims = self.views[key]
        return dims == self.whole(base)

    def uncast(self, key: Key) -> Key:
        """Return what a value is cast or copied from, as it lies."""
        base = self.base(key)[0] if self.is_whole(key) else key
        form = self.forms.get(base)
        return self.uncast(form.value) if isinstance(form, Cast) else base

    def is_constant(self, key: Key) -> bool:
        """Return whether the value comes from outside the graph, by nothing but views."""
        return key in self.constant

    def is_weight(self, key: Key) -> bool:
        """Return whether the value is a constant, or made of constants without a product."""
        return key in self.constant or key in self.made

    # -- building -------------------------------------------------------------------------

    def define(self, key: Key, form: Form, shape: tuple[Size, ...]) -> None:
        """Give a value its form, as a base of its own; a product with diag(s) is a scale."""
        self.forms[key] = form = self._without_diagonal(owner_of(key), form)
        self.views[key] = (key, views.identity(shape))
        if isinstance(form, Product):
            operands = self.views[form.lhs], self.views[form.rhs]
            labels = form.lhs_labels, form.rhs_labels, form.out_labels
            self.twins[key] = self._products.setdefault((operands, labels), [])
            self.twins[key].append(key)

    def virtual(self, owner: Node, label: str, form: Form, shape: tuple[Size, ...]) -> Virtual:
        """Add an intermediate value of `owner`."""
        key = Virtual(owner, label, shape, self.dtype(owner))
        self.virtuals.setdefault(owner, []).append(key)
        self.define(key, form, shape)
        return key

    def _without_diagonal(self, owner: Node, form: Form) -> Form:
        """Return a product with diag(s) as the scale that it is; other forms as they are."""
        if not isinstance(form, Product):
            return form
        for (value, own), (other, labels) in form.orders:
            diagonal = self.form(other)
            inside = [label for label in labels if label in own]
            if not isinstance(diagonal, Diagonal) or len(inside) != 1 or len(labels) != 2:
                continue
            renamed = {inside[0]: sum(labels) - inside[0]}
            if form.out_labels == tuple(renamed.get(label, label) for label in own):
                (along,) = self.whole(diagonal.vector)
                dims = tuple(along if label in inside else () for label in own)
                return Scale(value, self.viewed(owner, "diagonal", diagonal.vector, dims))
        return form

    def attribute(self, owner: Node, name: str, tensor: torch.Tensor) -> Virtual:
        """Add a parameter of the module that `owner` calls."""
        shape = tuple(tensor.shape)
        key = Virtual(owner, name, shape, tensor.dtype, f"{owner.target}.{name}", tensor)
        self.define(key, Leaf(), shape)
        self.constant.add(key)
        return key

    def viewed(self, owner: Node, label: str, source: Key, dims: Dims) -> Key:
        """Add a rearrangement of `source` inside of `owner`."""
        base, inner = self.views[source]
        composed = views.compose(dims, inner)
        assert composed is not None
        key = Virtual(owner, label, views.shape_of(dims), self.dtype(source))
        self.note_view(key, source, (base, composed))
        return key

    def note_view(self, key: Key, source: Key, view: View) -> None:
        """Note that a value rearranges a source, and is a constant where that is one."""
        self.views[key], self.sources[key] = view, source
        for known in (self.constant, self.made):
            if source in known:
                known.add(key)

    def through(self, key: Key) -> list[Key]:
        """Return the value and the rearrangements below it, without its base."""
        seen: list[Key] = []
        while key in self.sources:
            seen.append(key)
            key = self.sources[key]
        return seen


def once(ask: Callable[..., _T]) -> Callable[..., _T]:
    """Keep what a question about a graph returns, since several rules ask it."""

    @functools.wraps(ask)
    def asked(c: Canonical, *about: Any) -> _T:
        question = (ask.__name__, about)
        answer = c.known.get(question, c)
        if answer is c:  # it was not asked before
            answer = c.known[question] = ask(c, *about)
        return answer

    return asked
