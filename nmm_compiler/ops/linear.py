"""The ops of linear layers as one table, and what follows from it: shapes, launches, gradients.

    lowrank_matmul            activation(x w + scale * (x u) v + bias)
    lowrank_matmul_shared_x   several (x u_i) v_i + bias_i
    lowrank_matmul_shared_u   several (x u) v_i + bias_i
    matmul                    activation(x w + bias); matmul_as_stored for backward passes
    gated_mlp_up              activation(x gate) * (x up)
    gated_mlp                 (activation(x gate) * (x up)) down

All but matmul_as_stored may take a norm of x (its gain and bias, eps and kind), and some a
residual, behind their own operands. The result is rounded, then the residual is added, as in
`residual + linear(norm(x))`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels.linear.layer import NORMS
from nmm_compiler.kernels.linear.specs import (
    GatedMLPSpec,
    GatedMLPUpSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.ops import references
from nmm_compiler.ops.by_kernels import ByKernels
from nmm_compiler.ops.definition import LAYOUTS, NORM, WHERE, Op, Operand, Placements
from nmm_compiler.ops.launches import (
    TOKEN_AXES,
    Launch,
    Transpose,
    dtype_name,
    inputs_of,
    weight,
)
from nmm_compiler.ops.operands import (
    check_dtypes,
    check_same,
    check_vector,
    empty_result,
    read_layouts,
    tokens_of,
    weight_shape,
)
from nmm_compiler.ops.sharding import placements

_FLAGS = {"w": "base", "inner_gain": "inner_norm"}
"""The fields of specs that say that an operand is there, where their names differ."""


class Product(NamedTuple):
    """One linear of a call: (name, tensor, layout) of its weights, and of the dense one beside a
    pair; its bias, and the vectors between the pair, by name."""

    weights: Sequence[tuple[str, Tensor, str]]
    bias: tuple[str, Tensor | None]
    base: tuple[str, Tensor, str] | None = None
    between: Sequence[tuple[str, Tensor | None]] = ()

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """Its inputs, rank (0 of a dense weight) and outputs."""
        first, *more = (weight_shape(*one) for one in self.weights)
        return first[0], first[1] if more else 0, (more or [first])[0][1]

    def outputs(self, k: Any, of: str = "x") -> Any:
        """Return the output features of `of` with k features; ShapeError for what differs."""
        before, size = of, k
        for name, tensor, layout in self.weights:
            rows, columns = weight_shape(name, tensor, layout)
            what = "rank of" if before != of else "features of"
            check_same(f"{what} {before} and {name}", size, rows)
            before, size = name, columns
        if self.base is not None:
            check_same("shapes of the dense w and of u v", weight_shape(*self.base), (k, size))
        check_vector(*self.bias, size)
        for name, vector in self.between:
            check_vector(name, vector, weight_shape(*self.weights[0])[1])
        return size


def products_of(given: Mapping[str, Any]) -> list[Product]:
    """Return the linears of a call, from its arguments by name."""
    if "gate" in given:
        made, layout = [], given["weight_layout"]
        for name in ("gate", "up", "down"):
            if name in given:
                if not 1 <= len(given[name]) <= 2:
                    raise ShapeError(
                        f"{name} has {len(given[name])} weights; pass [u, v] or a dense [w]"
                    )
                weights = [(f"{name}[{i}]", w, layout) for i, w in enumerate(given[name])]
                made.append(Product(weights, (f"{name}_bias", given[f"{name}_bias"])))
        return made
    if "vs" in given:
        vs = given["vs"]
        us = given["us"] if "us" in given else [given["u"]] * len(vs)
        for name in ("us", "biases", "activations", "out_layouts"):
            if given.get(name) is not None:
                check_same(f"numbers of vs and {name}", len(vs), len(given[name]))
        u_layout, v_layout = given["u_layout"], given["v_layout"]
        return [
            Product([("u", u, u_layout), ("v", v, v_layout)], ("bias", bias))
            for u, v, bias in zip(us, vs, given["biases"], strict=True)
        ]
    weights = [(one, given[one], given[f"{one}_layout"]) for one in "uv" if one in given]
    base = None if given["w"] is None else ("w", given["w"], given["w_layout"])
    if not weights:
        assert base is not None
        return [Product([base], ("bias", given["bias"]))]
    between = [(name, given.get(name)) for name in ("inner_bias", "inner_gain")]
    return [Product(weights, ("bias", given["bias"]), base, between)]


def _sizes(given: Mapping[str, Any], products: Sequence[Product]) -> dict[str, Any]:
    """Return the sizes and other fields of a spec that its operands do not name."""
    k, r, n = products[0].sizes
    ranks = [one.sizes[1] for one in products]
    if "gate" in given:
        if len(products) == 3 and products[2].sizes[2] != k:
            raise SpecError("gated_mlp: a kernel's down projection returns to the input's features")
        return {"k": k, "n": n, **dict(zip(("gate_r", "up_r", "down_r"), ranks, strict=False))}
    if "vs" in given:
        count, ns = len(products), tuple(one.sizes[2] for one in products)
        return {
            "k": k,
            "pairs": ((r, ns),) if "u" in given else tuple(zip(ranks, ns, strict=True)),
            "bias": tuple(bias is not None for bias in given["biases"]),
            "activation": tuple(given.get("activations") or ["identity"] * count),
            "out_layout": tuple(
                references.layouts_of(given["out_layout"], given["out_layouts"], count)
            ),
        }
    return {"k": k, "n": n, **({"r": r} if "u" in given else {})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearOp(Op):
    """An op of linear layers; spec: of its kernels."""

    spec: type[Any]

    def reference(self, *args: Any, **kw: Any) -> Any:
        """Return what the op computes, in plain PyTorch."""
        if not self.own or self.bare is None:
            return super().reference(*args, **kw)
        given = self.bound(args, kw)
        own = [given[one.name] for one in self.operands[: self.own]]
        extra = {*NORM, *(one.name for one in self.operands)}
        rest = {name: value for name, value in kw.items() if name not in extra}
        behind = [one.name for one in self.operands[self.own :] if one not in ENDS]
        rest |= {name: given[name] for name in behind}
        y = self.bare(references.normed(own[0], given), *own[1:], **rest)
        if given.get("residual") is None:
            return y
        return y + given["residual"]  # a sum has the strides of its first operand: contiguous

    def by_kernels(self, args: tuple, kw: dict[str, Any]) -> Any:
        """Return the results again, differentiable by calls of this package's ops."""
        if kw.get("tp", 1) > 1:
            raise SpecError(
                f"{self.name} with tp > 1 has gradients with executor 'reference' only; pass that"
            )
        where = {name: kw.get(name, default) for name, default in WHERE.items()}
        return self.reference(*args, **kw, by=ByKernels(**where))

    @property
    def gated(self) -> bool:
        """Whether the second linear multiplies the first, and a third one is of the product."""
        return "gate" in self.defaults

    def of_one_dtype(self, given: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the tensors, or None, that have the dtype of x."""
        for _, _, tensor, _ in self.parts(given):
            yield tensor

    def products(self, given: Mapping[str, Any]) -> list[Product]:
        """Return the linears of a call, from its arguments by name."""
        return products_of(given)

    def fake(self, *args: Any, **kw: Any) -> Any:
        """Return empty results; raises NmmError for operands that do not fit."""
        given = self.bound(args, kw)
        read_layouts(kw)
        x = given["x"]
        check_dtypes(x, *self.of_one_dtype(given))
        tokens, k = tokens_of(x, given["x_layout"])
        if given.get("token_axis", "m") not in TOKEN_AXES:
            raise UnknownNameError("token_axis", given["token_axis"], TOKEN_AXES)
        if "norm" in given:
            check_norm_of(given, k)
        products = self.products(given)
        sizes = [one.outputs(k) for one in products[: 2 if self.gated else None]]
        if self.gated:
            check_same("output features of gate and up", *sizes)
            sizes = [one.outputs(sizes[0], "h") for one in products[2:]] or sizes[:1]
        layouts = references.layouts_of(given["out_layout"], given.get("out_layouts"), len(sizes))
        made = [empty_result(x, tokens, n, way) for n, way in zip(sizes, layouts, strict=True)]
        residual = given.get("residual")
        if residual is not None and residual.shape != made[0].shape:
            raise ShapeError(
                f"residual has shape {tuple(residual.shape)}; pass the result's, "
                f"{tuple(made[0].shape)}"
            )
        return made if self.many else made[0]

    def lower(
        self, rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int,
        transpose: Transpose | None,
    ) -> list[Launch]:  # fmt: skip
        """Return the launch of a call whose x, as a matrix of m tokens, is `rows`."""
        return [self.launch(rows, self.bound(args, kw), m, transpose, {})]

    def launch(
        self, rows: Tensor, given: dict[str, Any], m: int, transpose: Transpose | None,
        more: dict[str, Any],
    ) -> Launch:  # fmt: skip
        """Return the launch of a call; more: fields of the spec."""
        if given.get("token_axis"):
            transpose = None
        named: dict[str, Tensor] = {}
        fields: dict[str, Any] = {}
        for one, name, tensor, _ in self.parts(given):
            flag = _FLAGS.get(name, name)
            if one.kind == "Tensor?" and flag in self.spec.__dataclass_fields__:
                fields[flag] = tensor is not None
            if one.layout and tensor is not None:
                tensor, fields[one.layout] = weight(tensor, given[one.layout], transpose)
            if tensor is not None:
                named[name] = tensor
        sizes = _sizes(given, self.products(given))
        return self.of_operands(rows, given, m, named, fields | sizes | more)

    def of_operands(
        self, rows: Tensor, given: Mapping[str, Any], m: int, named: dict[str, Any],
        fields: dict[str, Any],
    ) -> Launch:  # fmt: skip
        """Return the launch on a kernel's operands by name; fields: of the spec, beside those that
        keywords say."""
        said = {
            name: given[name] for name in self.keywords if name in self.spec.__dataclass_fields__
        }
        spec = self.spec(**{**said, "m": m, "dtype": dtype_name(rows), **fields})
        named = {**named, "x": rows}
        if "residual" in named and spec.result_layouts()[0] == "row":
            named["residual"] = references.as_matrix(named["residual"])
        operands = tuple(named[t.name] for t in inputs_of(spec) if t.name in named)
        return Launch(spec, operands, given.get("token_axis") or "m")

    def sharding(self, *args: Any, **kw: Any) -> Placements:
        """Return the placements that DTensor may use."""
        given = self.bound(args, kw)
        parts = [(role, t, one.layout) for one, _, t, role in self.parts(given)]
        return placements(given, parts)


def check_norm_of(given: Mapping[str, Any], k: Any) -> None:
    """Raise UnknownNameError, SpecError or ShapeError unless the norm fits k features of x."""
    vectors = {name: given[name] for name in ("norm_gain", "norm_bias")}
    if given["norm"] not in NORMS:
        raise UnknownNameError("norm", given["norm"], NORMS)
    if given["norm"] == "none" and any(vector is not None for vector in vectors.values()):
        raise SpecError("norm_gain and norm_bias belong to a norm; pass norm='rms' or 'layer'")
    for name, vector in vectors.items():
        check_vector(name, vector, k)


_X, _BIAS = Operand("x", role="x"), Operand("bias", "Tensor?", "bias")
_U, _V, _W = (
    Operand(name, role=role, layout=f"{name}_layout", kernel=name)
    for name, role in (("u", "first"), ("v", "last"), ("w", "dense"))
)
_US = Operand("us", "Tensor[]", "first", "u_layout", "u{}")
_VS = Operand("vs", "Tensor[]", "last", "v_layout", "v{}")
_U_OF_ALL = dataclasses.replace(_U, kernel="u0")
_BIASES = Operand("biases", "Tensor?[]", "bias", "", "bias{}")
_BASE = dataclasses.replace(_W, kind="Tensor?")
_INNER = (Operand("inner_bias", "Tensor?", "inner_bias"), Operand("inner_gain", "Tensor?"))
ENDS = tuple(Operand(name, "Tensor?", name) for name in ("norm_gain", "norm_bias", "residual"))
_GATE, _UP = (Operand(name, "Tensor[]", "factors", "weight_layout") for name in ("gate", "up"))
_DOWN = Operand("down", "Tensor[]", "down_factors", "weight_layout")
_GATE_BIAS, _UP_BIAS = (Operand(f"{name}_bias", "Tensor?", "bias") for name in ("gate", "up"))
_DOWN_BIAS = Operand("down_bias", "Tensor?", "down_bias")
_UV = {**LAYOUTS, "u_layout": "row", "v_layout": "row"}
_INSIDE = {"inner_activation": "identity", "inner_eps": 1e-6}
_RANKS = {"tp": 1, "tp_axis": "", "group": ""}
_GATED = {"activation": "silu", **LAYOUTS, "weight_layout": "row"}
_IDENTITY = {"activation": "identity"}


def _op(
    name: str, bare: Any, spec: Any, operands: tuple[Operand, ...], keywords: dict[str, Any],
    ends: int = 3,
) -> LinearOp:  # fmt: skip
    """Return an op; ends: 3 with a norm and a residual, 2 with a norm, 0 with neither."""
    return LinearOp(
        name=name, bare=bare, spec=spec, own=(1 + len(operands)) * bool(ends),
        operands=(_X, *operands, *ENDS[:ends]),
        keywords={**(NORM if ends else {}), **keywords, **WHERE},
    )  # fmt: skip


LINEAR_OPS = (
    _op(
        "lowrank_matmul", references.lowrank_matmul, LowRankSpec, (_U, _V, _BIAS, _BASE, *_INNER),
        {"scale": 1.0, **_IDENTITY, **_INSIDE, **_UV, "w_layout": "row", **_RANKS},
    ),
    _op(
        "lowrank_matmul_shared_x", references.lowrank_matmul_shared_x, LowRankSharedSpec,
        (_US, _VS, _BIASES), {"activations": None, **_UV, "out_layouts": None}, 2,
    ),
    _op(
        "lowrank_matmul_shared_u", references.lowrank_matmul_shared_u, LowRankSharedSpec,
        (_U_OF_ALL, _VS, _BIASES), {**_UV, "out_layouts": None}, 2,
    ),
    _op(
        "matmul", references.matmul, MatmulSpec, (_W, _BIAS),
        {**_IDENTITY, **LAYOUTS, "w_layout": "row"},
    ),
    _op(
        "matmul_as_stored", references.matmul, MatmulSpec, (_W, _BIAS),
        {"token_axis": "m", **LAYOUTS, "w_layout": "row"}, 0,
    ),
    _op(
        "gated_mlp_up", references.gated_mlp_up, GatedMLPUpSpec,
        (_GATE, _UP, _GATE_BIAS, _UP_BIAS), _GATED, 2,
    ),
    _op(
        "gated_mlp", references.gated_mlp, GatedMLPSpec,
        (_GATE, _UP, _DOWN, _GATE_BIAS, _UP_BIAS, _DOWN_BIAS), _GATED,
    ),
)  # fmt: skip
