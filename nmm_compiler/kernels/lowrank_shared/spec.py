"""Family `lowrank_shared`: several low-rank products of one x, as q, k and v of an attention.

y_ij = activation((x u_i) v_ij + bias)     one x, several u, several v for each u
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    Array,
    KernelSpec,
    Products,
    TensorSpec,
    check_arrays,
    check_name,
    check_sizes,
)
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    activation_error,
    activation_value,
    combine,
    product_error,
    rounding_error,
)
from nmm_compiler.kernels.lowrank.spec import LowRankSpec
from nmm_compiler.kernels.matmul.spec import MatmulSpec
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
class LowRankSharedSpec(KernelSpec):
    """y_ij = activation((x u_i) v_ij + bias), x [m, k], u_i [k, r_i], v_ij [r_i, n_ij].

    pairs: (r_i, (n_i1, n_i2, ...)) for each u; a single n may be given as a number, a pair as the
    text "r:n,n". bias, activation and out_layout: one value, or one per result, in the order of
    the pairs. u_layout and v_layout hold for all u and all v. A "col" layout means passed, or
    returned, transposed. Operands: x, every u, every v, then the biases there are.
    """

    m: int
    k: int
    pairs: tuple[Pair, ...]
    dtype: str = "bfloat16"
    x_layout: str = "row"
    u_layout: str = "row"
    v_layout: str = "row"
    bias: bool | tuple[bool, ...] = False
    activation: str | tuple[str, ...] = "identity"
    out_layout: str | tuple[str, ...] = "row"

    family: ClassVar[str] = "lowrank_shared"

    def __post_init__(self) -> None:
        check_sizes(self.family, {"m": self.m, "k": self.k})
        object.__setattr__(self, "pairs", read_pairs(self.pairs))
        for i, (r, ns) in enumerate(self.pairs):
            check_sizes(self.family, {f"r of pair {i}": r} | {f"n of pair {i}": n for n in ns})
        check_name("dtype", self.dtype, DTYPES[:3])
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
        """Return what there is to know about every result, in order."""
        names = ("bias", "activation", "out_layout")
        epilogues = zip(*(self._each(name) for name in names), strict=True)
        sizes = ((i, r, n) for i, (r, ns) in enumerate(self.pairs) for n in ns)
        return tuple(Output(*size, *rest) for size, rest in zip(sizes, epilogues, strict=True))

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, every u, every v, then the biases that there are."""
        x = ("x", lay((self.m, self.k), self.x_layout))
        us = [(f"u{i}", lay((self.k, r), self.u_layout)) for i, r in enumerate(self.ranks)]
        results = self.results()
        vs = [(f"v{j}", lay((y.r, y.n), self.v_layout)) for j, y in enumerate(results)]
        biases: list[tuple[str, tuple[int, ...]]] = [
            (f"bias{j}", (y.n,)) for j, y in enumerate(results) if y.bias
        ]
        return tuple(
            TensorSpec(name=name, shape=shape, dtype=self.dtype)
            for name, shape in (x, *us, *vs, *biases)
        )

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return every y, in the order of the pairs."""
        return tuple(
            TensorSpec(name=f"y{j}", shape=lay((self.m, y.n), y.layout), dtype=self.dtype)
            for j, y in enumerate(self.results())
        )

    def result_layouts(self) -> tuple[str, ...]:
        """Return the layout of every y."""
        return self._each("out_layout")

    def flops(self) -> int:
        """Return 2 m r_i (k + n_i1 + n_i2 + ...), summed: every x u_i is made once."""
        return sum(2 * self.m * r * (self.k + sum(ns)) for r, ns in self.pairs)

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
            )
            bias = (f"bias{j}",) if y.bias else ()
            made.append((spec, ("x", f"u{y.pair}", f"v{j}", *bias)))
        return tuple(made)

    def as_products(self) -> Products:
        """Return (every u and every v as a product, every result dense) of chains that share x."""
        common: dict[str, Any] = {"m": self.m, "dtype": self.dtype}
        separate: list[KernelSpec] = [
            MatmulSpec(
                k=self.k, n=r, x_layout=self.x_layout, w_layout=self.u_layout, out_layout="col",
                **common,
            )
            for r in self.ranks
        ]  # fmt: skip
        dense: list[KernelSpec] = []
        for y in self.results():
            ends: dict[str, Any] = {
                "out_layout": y.layout,
                "bias": y.bias,
                "activation": y.activation,
            }
            separate.append(
                MatmulSpec(k=y.r, n=y.n, x_layout="col", w_layout=self.v_layout, **ends, **common)
            )
            dense.append(
                MatmulSpec(
                    k=self.k,
                    n=y.n,
                    x_layout=self.x_layout,
                    w_layout=self.u_layout,
                    **ends,
                    **common,
                )
            )
        return tuple(separate), tuple(dense)

    def notes(self) -> tuple[str, ...]:
        """Say which pairs would be cheaper as dense products."""
        return tuple(
            f"pair {i}: r (k + n) >= k n, the dense product x (u v) is cheaper; multiply the "
            "factors once and use family matmul"
            for i, (r, ns) in enumerate(self.pairs)
            if r * (self.k + sum(ns)) >= self.k * sum(ns)
        )

    def reference(self, *arrays: Array) -> tuple[Array, ...]:
        """Return every y in float64, laid out as its out_layout says."""
        made = zip(self.results(), self._before_activation(arrays), strict=True)
        return tuple(_laid(activation_value(t, y.activation), y.layout) for y, (t, _) in made)

    def error_bound(self, *arrays: Array) -> tuple[Array, ...]:
        """Return elementwise bounds: two fp32 accumulations, p rounded once, y rounded once."""
        return self._errors(arrays)

    def typical_error(self, *arrays: Array) -> tuple[Array, ...]:
        """Return the error per element if roundings are independent."""
        return self._errors(arrays, typical=True)

    def _errors(self, arrays: tuple[Array, ...], typical: bool = False) -> tuple[Array, ...]:
        errors = []
        made = zip(self.results(), self._before_activation(arrays, typical), strict=True)
        for y, (total, error) in made:
            error = activation_error(total, error, y.activation)
            magnitude = np.abs(activation_value(total, y.activation)) + error
            error = combine(error, rounding_error(magnitude, self.dtype), typical)
            errors.append(_laid(error, y.layout))
        return tuple(errors)

    def _before_activation(
        self, arrays: tuple[Array, ...], typical: bool = False
    ) -> list[tuple[Array, Array]]:
        """Return each result before its activation, and its error, both [m, n]."""
        check_arrays(self, arrays)
        named = zip(self.inputs(), arrays, strict=True)
        held = {t.name: np.asarray(a, dtype=np.float64) for t, a in named}
        x = held["x"] if self.x_layout == "row" else held["x"].T
        middle = []
        for i in range(len(self.pairs)):
            u = held[f"u{i}"] if self.u_layout == "row" else held[f"u{i}"].T
            p, error = x @ u, product_error(np.abs(x), np.abs(u), 0.0, self.k, typical)
            rounded = rounding_error(np.abs(p) + error, self.dtype)
            middle.append((p, combine(error, rounded, typical)))
        made = []
        for j, y in enumerate(self.results()):
            v = held[f"v{j}"] if self.v_layout == "row" else held[f"v{j}"].T
            p, p_error = middle[y.pair]
            total, error = p @ v, product_error(np.abs(p), np.abs(v), p_error, y.r, typical)
            if y.bias:
                total = total + held[f"bias{j}"]
                error = combine(error, FP32_ROUNDOFF * (np.abs(total) + error), typical)
            made.append((total, error))
        return made

    def short(self) -> str:
        """Return family, sizes and dtype: 256x2048 128x512_512 is one v, then two v of one u."""
        pairs = " ".join(f"{r}x{'_'.join(map(str, ns))}" for r, ns in self.pairs)
        return f"lowrank_shared m{self.m} k{self.k} {pairs} {self.dtype}"


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


def _laid(y: Array, layout: str) -> Array:
    return y if layout == "row" else np.ascontiguousarray(y.T)
