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

Each has an op of fp8 weights, `<op>_scaled`, with `scales` behind x: one tensor for each weight, in
their order; base, norm and residual are left out. x is of 16 bits (or more, on the reference), or
float8_e4m3fn with the number `x_scale`, which reaches kernels in the scales of the weights that x
meets; then `out_dtype` is the dtype of biases and results.

    corrected_matmul            activation(x w + (x u) v + bias)
    corrected_matmul_shared_x   several of one x
    corrected_mlp               (activation(x gate) * (x up)) down

have weights of few bits w, with branches u and v. These may be fp8 numbers, too, with branch_scale
[rank]; beside fp8 weights v is then relative to w_scale. Of several, an empty branch_scale is of a
linear without a branch. A kernel rounds x to MXFP8 beside MX weights. References multiply weights
out, so that gradients reach x, biases and plain branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.kernels.linear.corrected import (
    MULTIPLIED,
    CorrectedMLPSpec,
    CorrectedSpec,
    first_layout,
    operand_name,
)
from nmm_compiler.kernels.linear.layer import NORMS
from nmm_compiler.kernels.linear.specs import (
    GatedMLPSpec,
    GatedMLPUpSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.ops import references
from nmm_compiler.ops.by_kernels import ByKernels
from nmm_compiler.ops.definition import EACH, LAYOUTS, NORM, WHERE, Op, Operand, Placements
from nmm_compiler.ops.launches import (
    TOKEN_AXES,
    Launch,
    Transpose,
    dtype_name,
    inputs_of,
    turned,
)
from nmm_compiler.ops.operands import (
    Given,
    check_dtypes,
    check_same,
    check_vector,
    empty_result,
    of_each,
    read_layouts,
    tokens_of,
)
from nmm_compiler.ops.sharding import layout_name, placements
from nmm_compiler.ops.stored import (
    FP8_DTYPE,
    Matrix,
    refuse_gradients,
    stored_operands,
)

SUFFIX = "_scaled"
OF_X = {"x_scale": None, "out_dtype": "bfloat16"}
"""The keywords of ops of fp8 weights that the plain ones do not have."""
_FLAGS = {"w": "base", "inner_gain": "inner_norm"}
"""The fields of specs that say that an operand is there, where their names differ."""
_BETWEEN = ("inner_bias", "inner_gain")
_OF_PAIR = (
    "scale", "inner_activation", "inner_eps", "inner_factor", "tp", "tp_axis", "group",
)  # fmt: skip
"""The keywords of an op of one linear that its reference takes, beside layouts and activation."""


@dataclasses.dataclass(frozen=True)
class LinearOfCall:
    """One linear of a call; end: of the names of its operands in a kernel.

    weights: u and v, w, or all three, by these letters. between: vectors between u and v, by name.
    """

    end: str
    weights: dict[str, Matrix]
    bias: Tensor | None
    activation: str
    layout: str
    between: dict[str, Tensor | None]

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """Its inputs, rank (0 of a dense weight) and outputs."""
        if "v" not in self.weights:
            k, n = self.weights["w"].sizes
            return k, 0, n
        k, rank = self.weights["u"].sizes
        return k, rank, self.weights["v"].sizes[1]

    def outputs(self, k: Any, of: str = "x") -> Any:
        """Return the output features of `of` with k features; ShapeError for what differs."""
        (inputs, rank, n), weights = self.sizes, self.weights
        for one in weights.values():
            one.check_scale()
        first, *_ = weights.values()
        check_same(f"features of {of} and {first.name}", k, inputs)
        if "u" in weights:
            check_same(f"rank of {first.name} and {weights['v'].name}", rank, weights["v"].sizes[0])
            if "w" in weights:
                check_same("shapes of the dense w and of u v", weights["w"].sizes, (k, n))
        check_vector(operand_name("bias", self.end), self.bias, n)
        for name, vector in self.between.items():
            check_vector(name, vector, rank)
        return n

    def of(self, x: Tensor, **said: Any) -> Tensor:
        """Return what it computes of x; said: keywords of the reference of one linear."""
        wide = {letter: one.wide(x.dtype) for letter, one in self.weights.items()}
        said |= {f"{letter}_layout": one.layout for letter, one in self.weights.items()}
        if "v" not in wide:
            return references.matmul(x, wide["w"], self.bias, **said)
        between = self.between.values()
        return references.lowrank_matmul(
            x, wide["u"], wide["v"], self.bias, wide.get("w"), *between, **said
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearOp(Op):
    """An op of linear layers.

    spec: of its kernels. ends: of the names of the operands of linears that a gate joins, gate
    first, and then down where there is one. kept: weights that kernels take as they are stored.
    """

    spec: type[Any]
    ends: tuple[str, ...] = ()
    kept: str = ""

    def ends_of(self, given: Given) -> Sequence[str]:
        """Return what tells the linears of a call apart."""
        if self.ends:
            return self.ends
        return [str(i) for i in range(len(given["vs"]))] if self.many else ("",)

    def linears(self, given: Given) -> list[LinearOfCall]:
        """Return the linears of a call, from its arguments by name."""
        ends = self.ends_of(given)
        rows: dict[str, dict[str, Any]] = {end: {} for end in ends}
        for held in self.tensors(given):
            for end in [held.end] if held.end in rows else ends:
                rows[end][held.letter] = held.tensor
        if "format" in given:
            check_name("format", given["format"], MULTIPLIED)
        activations = of_each(given, "activations", given.get("activation", "identity"), len(ends))
        layouts = of_each(given, "out_layouts", given["out_layout"], len(ends))
        between = {name: given[name] for name in _BETWEEN if name in given}
        made = []
        for end, activation, layout in zip(ends, activations, layouts, strict=True):
            row = rows[end]
            weights = {
                letter: Matrix(
                    operand_name(letter, end), row[letter], given[layout_name(given, letter)],
                    *_stored_as(letter, row, given),
                )
                for letter in "uvw" if row.get(letter) is not None
            }  # fmt: skip
            check_same("factors u and v", "u" in weights, "v" in weights)
            for one in weights.values():
                one.check()
            made.append(LinearOfCall(end, weights, row.get("bias"), activation, layout, between))
        return made

    def reference(self, *args: Any, by: Any = references.ByTorch, **kw: Any) -> Any:
        """Return what the op computes, in plain PyTorch; by: what computes its products."""
        given = self.bound(args, kw)
        x, dtype = given["x"], _result_dtype(given)
        if x.dtype != dtype:
            refuse_gradients(x=x)
            x = x.to(dtype) * given["x_scale"]
        x, linears = references.normed(x, given), self.linears(given)
        said: Given = {"x_layout": given["x_layout"], "by": by}
        if self.ends:
            gate, up, *down = linears
            inside = said | {"out_layout": "row" if down else up.layout, "read": True}
            h = gate.of(x, activation=gate.activation, **inside) * up.of(x, **inside)
            made = [one.of(h, out_layout=one.layout, by=by) for one in down] or [h]
        elif "u" in given and self.many:
            u = LinearOfCall("", {"w": linears[0].weights["u"]}, None, "", "", {})
            vs = [dataclasses.replace(one, weights={"w": one.weights["v"]}) for one in linears]
            read = any(one.weights["w"].tensor.requires_grad for one in vs)
            h = u.of(x, read=read, **said)
            made = [one.of(h, out_layout=one.layout, by=by) for one in vs]
        else:
            said |= {name: given[name] for name in _OF_PAIR if name in given}
            made = [
                one.of(x, activation=one.activation, out_layout=one.layout, **said)
                for one in linears
            ]
        if given.get("residual") is not None:
            made = [y + given["residual"] for y in made]  # with y's strides: contiguous
        return made if self.many else made[0]

    def by_kernels(self, args: tuple, kw: Given) -> Any:
        """Return the results again, differentiable by calls of this package's ops."""
        if kw.get("tp", 1) > 1:
            raise SpecError(
                f"{self.name} with tp > 1 has gradients with executor 'reference' only; pass that"
            )
        where = {name: kw.get(name, default) for name, default in WHERE.items()}
        return self.reference(*args, **kw, by=ByKernels(**where))

    def fake(self, given: Given) -> Any:
        """Return empty results; raises NmmError for operands that do not fit."""
        read_layouts(given)
        x, dtype = given["x"], _result_dtype(given)
        like = x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype)
        linears = self.linears(given)
        check_dtypes(like, *of_one_dtype(given, linears))
        tokens, k = tokens_of(x, given["x_layout"])
        check_name("token_axis", given.get("token_axis", "m"), TOKEN_AXES)
        if "norm" in given:
            check_norm_of(given, k)
        sizes = [one.outputs(k) for one in linears[: 2 if self.ends else None]]
        if self.ends:
            check_same("output features of gate and up", *sizes)
            sizes = [one.outputs(sizes[0], "h") for one in linears[2:]] or sizes[:1]
        last = linears[-len(sizes) :]
        made = [
            empty_result(like, tokens, n, one.layout) for n, one in zip(sizes, last, strict=True)
        ]
        residual = given.get("residual")
        if residual is not None and residual.shape != made[0].shape:
            raise ShapeError(
                f"residual has shape {tuple(residual.shape)}; pass the result's, "
                f"{tuple(made[0].shape)}"
            )
        return made if self.many else made[0]

    def lower(self, given: Given, rows: Tensor, m: int, transpose: Transpose | None) -> Launch:
        """Return the launch of a call whose x, as a matrix of m tokens, is `rows`."""
        linears = self.linears(given)
        named = {name: one for name, one in given.items() if isinstance(one, Tensor)}
        has = {_FLAGS.get(one.name, one.name): one.name in named for one in self.operands}
        said = {name: given[name] for name in self.keywords if name not in OF_X} | has
        said |= {"m": m, "dtype": dtype_name(rows), **self.sizes(given, linears)}
        if "scales" in given:
            channel = any(one.shape[0] > 1 for one in given["scales"])
            said |= {"dtype": FP8, "scales": "channel" if channel else "tensor"}
            if rows.dtype == FP8_DTYPE:
                said["out_dtype"] = given["out_dtype"]
            else:
                said["x_dtype"] = dtype_name(rows)
        if "format" in given:
            transpose = transpose or turned
            named |= _branch_scales(linears)
            said["branch"] = "fp8" * ("branch_scale" in named)
        elif given.get("token_axis"):
            transpose = None
        for linear in linears:
            if linear.bias is not None:
                named[operand_name("bias", linear.end)] = linear.bias
            first = first_layout(given.get("format", ""), linear.sizes[0], linear.end == "down")
            named |= stored_operands(linear.weights, transpose, first, self.kept)
            if rows.dtype == FP8_DTYPE and linear.end != "down":
                own = next(iter(linear.weights.values())).name + "_scale"
                named[own] = named[own].float() * given["x_scale"]
            for letter, one in linear.weights.items():
                as_is = transpose is None or letter in self.kept
                said[layout_name(given, letter)] = one.layout if as_is else "row"
        known = self.spec.__dataclass_fields__
        spec = self.spec(**{name: value for name, value in said.items() if name in known})
        named["x"] = rows
        if "residual" in named and spec.result_layouts()[0] == "row":
            named["residual"] = references.as_matrix(named["residual"])
        operands = tuple(_fitting(named[t.name], t) for t in inputs_of(spec) if t.name in named)
        return Launch(spec, operands, given.get("token_axis", "m"))

    def sizes(self, given: Given, linears: Sequence[LinearOfCall]) -> Given:
        """Return the sizes of a spec, and what it says of each of several linears."""
        k, r, n = linears[0].sizes
        ranks, ns = (tuple(one.sizes[i] for one in linears) for i in (1, 2))
        if len(self.ends) == 3 and ns[2] != k:
            raise SpecError(
                f"{self.name}: the down projection returns {ns[2]} features, a kernel x's {k}"
            )
        made = {
            "k": k, "n": n, "r": r, "weight": given.get("format"),
            "pairs": ((r, ns),) if "u" in given else tuple(zip(ranks, ns, strict=True)),
            "rank": ranks if self.many or self.ends else r,
            **{f"{end}_r": rank for end, rank in zip(self.ends, ranks, strict=False)},
        }  # fmt: skip
        each = {
            "n": ns, "bias": tuple(one.bias is not None for one in linears),
            "activation": tuple(one.activation for one in linears),
            "out_layout": tuple(one.layout for one in linears),
        }  # fmt: skip
        return made | each if self.many else made

    def sharding(self, given: Given) -> Placements:
        """Return the placements that DTensor may use; ShapeError for blocks that ranks would cut.

        Scales lie as the outputs of their weight. Bytes and scales of MX weights are cut along the
        inputs only between blocks.
        """
        return placements(given, self.tensors(given), self.ends)


def _stored_as(letter: str, row: Mapping[str, Any], given: Given) -> tuple[str, Tensor | None]:
    """Return the format of a weight of a linear, and its scales."""
    if "scales" in given:
        return "fp8", row[f"{letter}_scale"]
    if letter == "w" and "format" in given:
        return given["format"], row["w_scale"]
    if row.get("branch_scale") is None:
        return "", None
    of_v = row["w_scale"] if given["format"] == "fp8" else None
    return "fp8", row["branch_scale"] if letter == "u" else of_v


def _result_dtype(given: Given) -> torch.dtype:
    """Return the dtype of results and biases: that of x, or of the name beside an fp8 x."""
    x = given["x"]
    if "scales" not in given:
        return x.dtype
    if (x.dtype == FP8_DTYPE) == (given["x_scale"] is None):
        raise SpecError(
            f"x is {x.dtype} and x_scale is {given['x_scale']}; an x of {FP8_DTYPE} takes a scale, "
            "any other takes none"
        )
    if x.dtype != FP8_DTYPE:
        return x.dtype
    made = getattr(torch, given["out_dtype"], None)
    if not isinstance(made, torch.dtype):
        raise SpecError(f"out_dtype is {given['out_dtype']!r}; pass bfloat16, float16 or float32")
    return made


def of_one_dtype(given: Given, linears: Sequence[LinearOfCall]) -> Iterator[Tensor | None]:
    """Yield the tensors, or None, that have the dtype of the results."""
    for linear in linears:
        yield from (one.tensor for one in linear.weights.values() if not one.form)
        yield linear.bias
        yield from linear.between.values()
    yield from (given.get(one.name) for one in ENDS)


def _branch_scales(linears: Sequence[LinearOfCall]) -> dict[str, Tensor]:
    """Return the scales of fp8 branches as one operand, each filled up with ones."""
    ranks = [one.sizes[1] for one in linears if one.sizes[1]]
    us = [one.weights["u"] for one in linears if "u" in one.weights]
    scales = [one.scale.float().expand(one.sizes[1]) for one in us if one.scale is not None]
    if not scales:
        return {}
    if len(scales) < len(ranks):
        raise SpecError("branches of one call are all fp8 numbers, or none is")
    wide = 128 * (-(-max(ranks) // 128))
    pad = torch.nn.functional.pad
    return {"branch_scale": torch.stack([pad(s, (0, wide - len(s)), value=1.0) for s in scales])}


def _fitting(operand: Tensor, wanted: Any) -> Tensor:
    """Return an operand, scales as numbers for each output where the kernel takes them so."""
    if wanted.name.endswith("_scale") and wanted.dtype == "float32":
        return operand.float().expand(wanted.shape)
    return operand


def check_norm_of(given: Given, k: Any) -> None:
    """Raise UnknownNameError, SpecError or ShapeError unless the norm fits k features of x."""
    vectors = {name: given[name] for name in ("norm_gain", "norm_bias")}
    check_name("norm", given["norm"], NORMS)
    if given["norm"] == "none" and any(vector is not None for vector in vectors.values()):
        raise SpecError("norm_gain and norm_bias belong to a norm; pass norm='rms' or 'layer'")
    for name, vector in vectors.items():
        check_vector(name, vector, k)


_X, _BIAS = Operand("x"), Operand("bias", "Tensor?", "bias")
_U, _V, _W = (Operand(letter, letter=letter) for letter in "uvw")
_US, _VS = (Operand(f"{letter}s", "Tensor[]", letter, EACH) for letter in "uv")
_BIASES = Operand("biases", "Tensor?[]", "bias", EACH)
_BASE = dataclasses.replace(_W, kind="Tensor?")
_INNER = tuple(Operand(name, "Tensor?", name) for name in _BETWEEN)
ENDS = tuple(Operand(name, "Tensor?") for name in ("norm_gain", "norm_bias", "residual"))
MLP_ENDS = ("gate", "up", "down")
_GATE, _UP, _DOWN = (Operand(end, "Tensor[]", "uvw", end) for end in MLP_ENDS)
_GATE_BIAS, _UP_BIAS, _DOWN_BIAS = (
    Operand(f"{end}_bias", "Tensor?", "bias", end) for end in MLP_ENDS
)
UV = {**LAYOUTS, "u_layout": "row", "v_layout": "row"}
_INSIDE = {"inner_activation": "identity", "inner_eps": 1e-6}
_RANKS = {"tp": 1, "tp_axis": "", "group": ""}
_GATED = {"activation": "silu", **LAYOUTS, "weight_layout": "row"}
_IDENTITY = {"activation": "identity"}


def _op(
    name: str, spec: Any, operands: tuple[Operand, ...], keywords: Given, last: int = 3,
    behind: tuple[Operand, ...] = (), **more: Any,
) -> LinearOp:  # fmt: skip
    """Return an op; last: 3 with a norm and a residual, 2 with a norm, 0 with neither; behind: the
    operands after these."""
    return LinearOp(
        name=name, spec=spec, operands=(_X, *operands, *ENDS[:last], *behind),
        keywords={**(NORM if last else {}), **keywords, **WHERE}, **more,
    )  # fmt: skip


PLAIN_OPS = (
    _op(
        "lowrank_matmul", LowRankSpec, (_U, _V, _BIAS, _BASE, *_INNER),
        {"scale": 1.0, **_IDENTITY, **_INSIDE, **UV, "w_layout": "row", **_RANKS},
        bare=references.lowrank_matmul,
    ),
    _op(
        "lowrank_matmul_shared_x", LowRankSharedSpec, (_US, _VS, _BIASES),
        {"activations": None, **UV, "out_layouts": None}, 2,
    ),
    _op(
        "lowrank_matmul_shared_u", LowRankSharedSpec, (_U, _VS, _BIASES),
        {**UV, "out_layouts": None}, 2,
    ),
    _op(
        "matmul", MatmulSpec, (_W, _BIAS), {**_IDENTITY, **LAYOUTS, "w_layout": "row"},
        bare=references.matmul,
    ),
    _op(
        "gated_mlp_up", GatedMLPUpSpec, (_GATE, _UP, _GATE_BIAS, _UP_BIAS), _GATED, 2,
        ends=MLP_ENDS[:2],
    ),
    _op(
        "gated_mlp", GatedMLPSpec, (_GATE, _UP, _DOWN, _GATE_BIAS, _UP_BIAS, _DOWN_BIAS), _GATED,
        ends=MLP_ENDS,
    ),
)  # fmt: skip


def _scaled(plain: LinearOp) -> LinearOp:
    """Return the op of fp8 weights that belongs to an op."""
    behind = {*ENDS, *_INNER}
    x, *others = (one for one in plain.operands if one not in behind and one != _BASE)
    unused = {*NORM, *_INSIDE, *_RANKS, *(["w_layout"] if _BASE in plain.operands else [])}
    own = {name: value for name, value in plain.keywords.items() if name not in unused}
    return dataclasses.replace(
        plain, name=plain.name + SUFFIX, keywords={**OF_X, **own}, bare=None,
        operands=(x, Operand("scales", "Tensor[]", "scale"), *others),
    )  # fmt: skip


_FEW_BITS = {**UV, "w_layout": "col"}
_OF_MANY = (
    Operand("ws", "Tensor[]", "w", EACH), Operand("w_scales", "Tensor[]", "w_scale", EACH),
    Operand("us", "Tensor?[]", "u", EACH), Operand("vs", "Tensor?[]", "v", EACH),
)  # fmt: skip
_BRANCHES = (Operand("branch_scales", "Tensor[]?", "branch_scale", EACH),)
CORRECTED = _op(
    "corrected_matmul", CorrectedSpec,
    (
        _W, Operand("w_scale", letter="w_scale"), dataclasses.replace(_U, kind="Tensor?"),
        dataclasses.replace(_V, kind="Tensor?"), _BIAS,
    ),
    {"format": "mxfp4", **_IDENTITY, **_FEW_BITS},
    behind=(Operand("branch_scale", "Tensor?", "branch_scale"),),
)  # fmt: skip
CORRECTED_SHARED = _op(
    "corrected_matmul_shared_x", CorrectedSpec, (*_OF_MANY, _BIASES),
    {"format": "mxfp4", "activations": None, "out_layouts": None, **_FEW_BITS}, 2, _BRANCHES,
)  # fmt: skip
CORRECTED_MLP = _op(
    "corrected_mlp", CorrectedMLPSpec, _OF_MANY,
    {"format": "mxfp4", "activation": "silu", **_FEW_BITS}, behind=_BRANCHES, ends=MLP_ENDS,
)  # fmt: skip
LINEAR_OPS = (
    *PLAIN_OPS, *map(_scaled, PLAIN_OPS), CORRECTED, CORRECTED_SHARED, CORRECTED_MLP,
    _op(
        "matmul_as_stored", MatmulSpec, (_W, _BIAS),
        {"token_axis": "m", **LAYOUTS, "w_layout": "row"}, 0,
    ),
)  # fmt: skip
