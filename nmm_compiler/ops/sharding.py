"""DTensor rules of the `torch.ops.nmm.*` ops: which placements a call accepts without resharding.

Five rows for y = (x u) v, with what moves between devices afterwards:

    replicate   x, u, v whole                              nothing
    token       x and y cut by tokens, u and v whole       nothing
    column      v cut by outputs (column parallel)         nothing; x u is made on every device
    row         x and u cut by inputs (row parallel)       y is Partial: a sum of width n
    rank        u cut by outputs, v by inputs              y is Partial: a sum of width n

A gated MLP has "column" for its gate and up, whose features "row" of its down projection sums. An
activation or a gate is not linear, so a call that has one refuses the Partial rows; a bias of a
Partial result is Partial too, which DTensor makes of a whole one without moving anything.
Row parallelism that sums at width r needs the collective between the two products: a call with
tp_axis "rows" has it inside, and is cut by inputs alone. Each row cuts one size: tokens, outputs,
inputs, the rank, or the features between a gate and its down projection.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.definition import Held, Placements
from nmm_compiler.ops.operands import Given, of_each
from nmm_compiler.ops.stored import between_blocks

_AXES = {"u": "kr", "v": "rn", "w": "kn", "bias": "n", "inner_bias": "r"}
"""The sizes along which each part of a linear lies: inputs, rank and outputs.

Gate and up before a down projection have outputs h, its inputs; its rank is q."""
_BEHIND, _BEFORE = str.maketrans("kr", "hq"), str.maketrans("n", "h")


def layout_name(given: Given, letter: str) -> str:
    """Return the keyword that says how u, v or w of a call is stored."""
    return "weight_layout" if "weight_layout" in given else f"{letter}_layout"


def _axes(held: Held, given: Given, gated: Sequence[str]) -> str:
    """Return the size along each dimension of a part of a linear, "" for what is never cut.

    Scales are of the outputs of their weight, those of MX blocks of its blocks.
    """
    letter = held.letter.removesuffix("_scale")
    axes = "" if held.tensor is None else _AXES.get(letter, "")
    if axes and letter != held.letter and given.get("format") not in MX:
        axes = axes[1:] * (held.tensor.shape[0] > 1)
    elif len(axes) == 2 and given[layout_name(given, letter)] == "col":
        axes = axes[::-1]
    if "down" in gated:
        axes = axes.translate(_BEHIND if held.end == "down" else _BEFORE)
    return axes


def _cuts(given: Given, parts: Sequence[Held], gated: Sequence[str]) -> str:
    """Return the sizes of linears along which devices may cut a call.

    Results are sums over all but n. A norm takes all features of x.
    """
    normed = given.get("norm", "none") != "none"
    if given.get("tp_axis"):
        return "k" * (not normed)
    if gated:
        return "nh" if "down" in gated else "n"
    activations = {given.get("activation", "identity"), *(given.get("activations") or ())}
    has = {one.letter for one in parts if one.tensor is not None}
    if activations != {"identity"} or "inner_gain" in has:
        return "n"
    inner = given.get("inner_activation", "identity") != "identity" or "inner_bias" in has
    return "n" + "k" * (not inner and not normed) + "r" * ("w" not in has)


def placements(given: Given, parts: Sequence[Held], gated: Sequence[str]) -> Placements:
    """Return what a call accepts: the rows of the table above; given: its arguments by name.

    gated: the linears that a gate joins. A residual lies as the result, and of a Partial result it
    is Partial, as a bias is.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, x_layout, summed = given["x"], given["x_layout"], bool(given.get("tp_axis"))
    tokens = [str(dim) for dim in range(x.ndim - 1)]

    def lying(features: str, layout: str) -> Sequence[str]:
        if layout == "row":
            return [*tokens, features]
        return [features, *(tokens if len(tokens) == 1 else ["all tokens"])]

    results = len(given["vs"]) if "vs" in given and not gated else 1
    layouts = of_each(given, "out_layouts", given["out_layout"], results)
    outs = [lying("n", layout) for layout in layouts]
    known = {"x": lying("k", x_layout), "residual": outs[0]}
    lies = [known.get(one.name) or _axes(one, given, gated) for one in parts]
    cuts = [] if summed else ["", *(one for one in tokens if all(one in out for out in outs))]
    rows: Placements = []
    for cut in [*cuts, *_cuts(given, parts, gated)]:
        whole = Partial() if cut in ("k", "r", "h") and not summed else Replicate()

        def placed(axes: Sequence[str], added: bool, cut: str = cut, whole: Any = whole) -> Any:
            if cut and cut in axes:
                return Shard(axes.index(cut))
            return whole if added else Replicate()

        ins = [
            None
            if one.tensor is None
            else placed(axes, one.letter == "bias" or one.name == "residual")
            for one, axes in zip(parts, lies, strict=True)
        ]
        rows.append(([placed(out, True) for out in outs], ins))
    form = MX.get(given.get("format", ""))
    for place, one in enumerate(parts):
        if form is not None and one.letter in ("w", "w_scale"):
            of_block = 1 if one.letter == "w_scale" else 32 * form.bits // 8
            rows = between_blocks(rows, place, one.tensor, one.tensor.shape[1] // of_block)
    return rows


_registered: set[Any] = set()


def register_when_used(rules: dict[Any, Callable]) -> None:
    """Register the rules, op -> function, with DTensor, once, if the program has it loaded.

    Importing it costs most of a second. torch's own `register_sharding` knows no op that returns a
    list.
    """
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    for op, rule in rules.items():
        keywords = [one.name for one in op._schema.arguments if one.kwarg_only] or None
        # no positional argument is a number: the first would stand behind all
        info = RuntimeSchemaInfo(100, keywords, needs_pytree=True)
        propagator.register_op_strategy(op, functools.partial(_strategy, rule), info)
        _registered.add(op)


def _strategy(rule: Callable, op_schema: Any) -> Any:
    """Return the strategies of a call, over all dimensions of its mesh."""
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    args = tuple(map(_spec, op_schema.args_schema))
    keywords = {name: _spec(value) for name, value in op_schema.kwargs_schema.items()}
    found = rule(*args, **keywords)
    combined = [[*outs, *(p for p in ins if p is not None)] for outs, ins in found]
    mesh, results = op_schema.get_mesh_from_args(), len(found[0][0])
    return expand_to_full_mesh_op_strategy(mesh, op_schema, combined, input_index=results)


def _spec(strategy: Any) -> Any:
    """Return the placements that an argument has: a list of them for a list of tensors."""
    from torch.distributed.tensor._op_schema import OpStrategy, TupleStrategy

    if isinstance(strategy, OpStrategy):
        return strategy.strategies[0].output_spec
    if isinstance(strategy, (TupleStrategy, tuple, list)):
        children: Any = getattr(strategy, "children", strategy)
        return tuple(map(_spec, children))
    return strategy
