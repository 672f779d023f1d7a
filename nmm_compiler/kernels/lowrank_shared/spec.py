"""Family `lowrank_shared`: several low-rank products of one x, as q, k and v of an attention.

y_ij = activation((x u_i) v_ij + bias)     one x, several u, several v for each u
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    LAYOUTS,
    OUTPUTS,
    WEIGHTS,
    Array,
    KernelSpec,
    Products,
    TensorSpec,
    check_name,
    check_sizes,
)
from nmm_compiler.kernels.error_bounds import Estimate, activated
from nmm_compiler.kernels.lowrank.spec import LowRankSpec
from nmm_compiler.kernels.matmul.spec import products_of
from nmm_compiler.kernels.product_spec import ProductSpec
from nmm_compiler.kernels.tiling import lay

Pair = tuple[int, tuple[int, ...]]
"""A rank, and the output features of every v that follows that u."""


@dataclasses.dataclass(frozen=True)
class Output:
    """One result: which u it comes from, its sizes and its epilogue."""

    pair: int
    r: int
    n: int
    bias: bool
    activation: str
    layout: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSharedSpec(ProductSpec):
    """y_ij = activation((x u_i) v_ij + bias), x [m, k], u_i [k, r_i], v_ij [r_i, n_ij].

    pairs: (r_i, (n_i1, n_i2, ...)) for each u; a single n may be given as a number, a pair as the
    text "r:n,n". bias, activation and out_layout: one value, or one per result, in the order of
    the pairs. u_layout and v_layout hold for all u and all v. A "col" layout means passed, or
    returned, transposed. Operands: x, every u, every v, then the biases there are.

    intermediate, scales, out_dtype: as in LowRankSpec; a quantized x u_i has a scale of its own.
    """

    pairs: tuple[Pair, ...]
    dtype: str = "bfloat16"
    x_layout: str = "row"
    u_layout: str = "row"
    v_layout: str = "row"
    bias: bool | tuple[bool, ...] = False
    activation: str | tuple[str, ...] = "identity"
    out_layout: str | tuple[str, ...] = "row"
    intermediate: str = "operand"
    scales: str | None = None
    out_dtype: str | None = None

    family: ClassVar[str] = "lowrank_shared"

    sizes: ClassVar[tuple[str, ...]] = ("m", "k")
    many: ClassVar[bool] = True
    adds_residual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", read_pairs(self.pairs))
        for i, (r, ns) in enumerate(self.pairs):
            check_sizes(self.family, {f"r of pair {i}": r} | {f"n of pair {i}": n for n in ns})
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data; the formats only where they are not plain."""
        made = super().to_dict()
        plain = {"intermediate": "operand", "scales": None, "out_dtype": None}
        return {name: value for name, value in made.items() if plain.get(name, self) != value}

    def _check_names(self) -> None:
        for name in ("x_layout", "u_layout", "v_layout"):
            check_name(name, getattr(self, name), LAYOUTS)
        for name in ("bias", "activation", "out_layout"):
            each = self._each(name)
            same = all(value == each[0] for value in each)
            object.__setattr__(self, name, each[0] if same else each)  # equal specs, equal JSON
        for y in self.results():
            check_name("activation", y.activation, ACTIVATIONS)
            check_name("out_layout", y.layout, LAYOUTS)

    def _each(self, name: str) -> tuple[Any, ...]:
        """Return a field that may be one value for all results as one value for each."""
        value = getattr(self, name)
        count = sum(len(ns) for _, ns in self.pairs)
        each = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
        if len(each) != count:
            raise ShapeError(
                f"{self.family}: {name} has {len(each)} values for {count} results; pass one for "
                "all of them, or one for each"
            )
        return each

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every u."""
        return tuple(r for r, _ in self.pairs)

    @property
    def ns(self) -> tuple[int, ...]:
        """The output features of every v."""
        return tuple(n for _, ns in self.pairs for n in ns)

    @property
    def pair_of(self) -> tuple[int, ...]:
        """The u that each v follows."""
        return tuple(i for i, (_, ns) in enumerate(self.pairs) for _ in ns)

    @property
    def bias_of(self) -> tuple[int, ...]:
        """The place of each result's bias among the biases, -1 for none."""
        each = self._each("bias")
        return tuple(sum(each[:j]) if has else -1 for j, has in enumerate(each))

    @property
    def activations(self) -> tuple[str, ...]:
        """The epilogue of each result."""
        return self._each("activation")

    @property
    def out_layouts(self) -> tuple[str, ...]:
        """The layout of each result."""
        return self._each("out_layout")

    def results(self) -> tuple[Output, ...]:
        """Return every result's description, in order."""
        names = ("bias", "activation", "out_layout")
        epilogues = zip(*(self._each(name) for name in names), strict=True)
        sizes = ((i, r, n) for i, (r, ns) in enumerate(self.pairs) for n in ns)
        return tuple(Output(*size, *rest) for size, rest in zip(sizes, epilogues, strict=True))

    def layout_of(self, name: str) -> str:
        """Return the layout in which an operand is passed: all u, and all v, have one."""
        return super().layout_of(name[0])

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return every u, then every v."""
        us = {f"u{i}": (self.k, r) for i, r in enumerate(self.ranks)}
        return us | {f"v{j}": (y.r, y.n) for j, y in enumerate(self.results())}

    def biases(self) -> dict[str, int]:
        """Return the bias of each result that has one."""
        return {f"bias{j}": y.n for j, y in enumerate(self.results()) if y.bias}

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return every y, in the order of the pairs."""
        return tuple(
            TensorSpec(name=f"y{j}", shape=lay((self.m, y.n), y.layout), dtype=self.result_dtype)
            for j, y in enumerate(self.results())
        )

    def result_layouts(self) -> tuple[str, ...]:
        """Return the layout of every y."""
        return self._each("out_layout")

    def weight_splits(self) -> tuple[str, ...]:
        """Return that the outputs of every v can be halved, and the rows of every plain u."""
        if any(n % self.lnc for n in self.ns):
            return ()
        rows = self.k % (128 * self.lnc) == 0 and not self.fp8
        return (OUTPUTS, WEIGHTS) if rows else (OUTPUTS,)

    def multiplies_kept(self, weight: str) -> bool:
        """Return whether the left factor of a weight is an intermediate; else it is x."""
        return weight.startswith("v")

    def intermediates(self) -> tuple[str, ...]:
        """Return "p0" for x u0, and so on."""
        return tuple(f"p{i}" for i in range(len(self.pairs)))

    def half_of(self, split: str) -> dict[str, Any]:
        """Return the sizes of a core's share of the weights."""
        pairs = tuple((r, tuple(n // 2 for n in ns)) for r, ns in self.pairs)
        return {"pairs": pairs} | ({"k": self.k // 2} if split == WEIGHTS else {})

    def parts(self) -> tuple[tuple[KernelSpec, tuple[str, ...]], ...]:
        """Return the lowrank kernel of every result."""
        made = []
        for j, y in enumerate(self.results()):
            spec = LowRankSpec(
                m=self.m,
                k=self.k,
                r=y.r,
                n=y.n,
                dtype=self.dtype,
                x_layout=self.x_layout,
                out_layout=y.layout,
                u_layout=self.u_layout,
                v_layout=self.v_layout,
                bias=y.bias,
                activation=y.activation,
                intermediate=self.intermediate,
                scales=self.scales,
                out_dtype=self.out_dtype,
                x_dtype=self.x_dtype,
                lnc=self.lnc,
                **self.norm_fields(),
            )
            bias = (f"bias{j}",) if y.bias else ()
            scales = [f"u{y.pair}_scale", f"v{j}_scale"] if self.fp8 else []
            scales = [*(["x_scale"] if self.fp8_x else []), *scales]
            scales += [f"p{y.pair}_scale"] if self.requantized else []
            norm = [tensor.name for tensor in self._norm_tensors()]
            made.append((spec, ("x", f"u{y.pair}", f"v{j}", *bias, *scales, *norm)))
        return tuple(made)

    def as_products(self) -> Products:
        """Return (every u and every v as a product, every result dense) of chains that share x."""
        layouts, x = (self.u_layout, self.v_layout), {"x_layout": self.x_layout}
        separate: list[KernelSpec] = []
        dense: list[KernelSpec] = []
        for r in self.ranks:
            separate += products_of(self, (self.k, r), layouts[:1], out_layout="col", **x)
        for y in self.results():
            ends = {"out_layout": y.layout, "bias": y.bias, "activation": y.activation}
            separate += products_of(self, (y.r, y.n), layouts[1:], **ends)
            dense += products_of(self, (self.k, y.n), layouts[:1], **x, **ends)
        return tuple(separate), tuple(dense)

    def notes(self) -> tuple[str, ...]:
        """Return which pairs would be cheaper as dense products."""
        return self._format_notes("the products with v") + tuple(
            f"pair {i}: r (k + n) >= k n, the dense product x (u v) is cheaper; multiply the "
            "factors once and use family matmul"
            for i, (r, ns) in enumerate(self.pairs)
            if r * (self.k + sum(ns)) >= self.k * sum(ns)
        )

    def _estimates(self, operands: dict[str, Array], typical: bool) -> Sequence[Estimate]:
        x = self._x(operands, typical)
        firsts = [self._times(x, f"u{i}", operands, typical) for i in range(len(self.pairs))]
        middle = [self._kept(p, f"p{i}", operands, typical) for i, p in enumerate(firsts)]
        made = []
        for j, y in enumerate(self.results()):
            total = self._times(middle[y.pair], f"v{j}", operands, typical)
            biased = self._biased(total, f"bias{j}", operands, typical)
            made.append(activated(biased, y.activation))
        return made

    def short(self) -> str:
        """Return family, sizes and dtype: 256x2048 128x512_512 is one v, then two v of one u."""
        pairs = " ".join(f"{r}x{'_'.join(map(str, ns))}" for r, ns in self.pairs)
        return f"lowrank_shared m{self.m} k{self.k} {pairs} {self.formats()}"


def read_pairs(pairs: Any) -> tuple[Pair, ...]:
    """Return pairs in their one form; each may be (r, n), (r, (n, n)) or the text "r:n,n".

    Raises SpecError for anything else.
    """
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        pairs = [pairs]
    made: list[Pair] = []
    for pair in pairs:
        try:
            if isinstance(pair, str):
                r, _, ns = pair.partition(":")
                made.append((int(r), tuple(int(n) for n in ns.split(","))))
            else:
                rank, after = pair
                made.append((rank, tuple(after) if isinstance(after, (tuple, list)) else (after,)))
        except (TypeError, ValueError):
            raise SpecError(
                f"lowrank_shared: pair {pair!r} is not a rank and the outputs of its v; write "
                "(256, 2048), (128, (512, 512)) or '128:512,512'"
            ) from None
    if not made or not all(ns for _, ns in made):
        raise SpecError("lowrank_shared: every u needs a v, and there must be one of each")
    return tuple(made)
