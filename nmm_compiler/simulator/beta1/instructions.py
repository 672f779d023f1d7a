"""`neuronxcc.nki.isa`: each function issues the current instruction of the same name.

The table (`nki_api/beta1_table.py`) has a line per function: its parameters, and the rule
(`rules.py`) for the tile that it returns. An instruction without a rule writes to the destination
that is passed.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from nmm_compiler.errors import KernelArgumentError, UnsupportedInstructionError
from nmm_compiler.nki_api.beta1_api import beta_1
from nmm_compiler.nki_api.beta1_table import ISA_ENUMS, REFUSED
from nmm_compiler.simulator.beta1.index import Part, box_of
from nmm_compiler.simulator.beta1.operands import ISSUE, in_sbuf, operand, tensor
from nmm_compiler.simulator.beta1.pending import (
    leave_undefined,
    nothing_pending,
    stretched,
    written,
)
from nmm_compiler.simulator.beta1.products import Arguments
from nmm_compiler.simulator.beta1.rules import RULES
from nmm_compiler.simulator.beta1.tensor import Tensor, fail
from nmm_compiler.simulator.isa import names as current_isa
from nmm_compiler.simulator.isa.enums import engine
from nmm_compiler.simulator.language import math as language_math
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def _into(name: str, given: Arguments) -> None:
    """Issue an instruction that has a destination: tensor_copy_predicated, select_reduce, ..."""
    mask = given.pop("mask")
    given.pop("dtype")
    with nothing_pending():
        dst = tensor(name, "dst", given["dst"])
        box = box_of(mask, dst.shape)
        if box is False:
            return
        views = {
            role: stretched(value, dst.shape, name, box)
            if isinstance(value, Tensor) and value.shape == dst.shape and role != "dst"
            else operand(name, role, value, box)
            for role, value in given.items()
        }
        views["dst"] = written(dst, box)
        ISSUE[name.removeprefix("nisa.")](**views)
        if box is not True:
            leave_undefined(dst)


def hbm_or_sbuf(name: str, role: str, value: Any, box: Part = True) -> NkiTensor:
    """Return the view of a tensor that DMA reaches."""
    if not isinstance(value, Tensor):
        tensor(name, role, value)
    view = value.tile(box) if role == "src" else written(value, box)
    return in_sbuf(view) if role == "src" and view.memory == "psum" else view


def _dma_copy(name: str, given: Arguments) -> None:
    with nothing_pending():
        dst = given["dst"]
        box = box_of(given["mask"], dst.shape if isinstance(dst, Tensor) else ())
        if box is False:
            return
        source = hbm_or_sbuf(name, "src", given["src"], box)
        view = hbm_or_sbuf(name, "dst", dst, box)
        if given["dst_rmw_op"] is not None:
            ISSUE["dma_compute"](view, [view, source], given["dst_rmw_op"])
        else:
            ISSUE["dma_copy"](view, source, oob_mode=given["oob_mode"], dge_mode=given["dge_mode"])
        if box is not True and dst.memory != "hbm":
            leave_undefined(dst)


_OWN: dict[str, Callable[[str, Arguments], Any]] = {"dma_copy": _dma_copy}


def refuse(name: str, full: str) -> Callable[..., Any]:
    """Return a function that refuses its call by name, with the way out."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise fail(
            UnsupportedInstructionError,
            f"{name} has no documented semantics that the simulator could follow; use "
            f"{REFUSED[full]}",
        )

    refused.__name__ = name.rpartition(".")[2]
    return refused


def bound(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Arguments:
    """Return arguments by name with defaults; KernelArgumentError for those that do not fit."""
    try:
        found = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise current().error(
            KernelArgumentError, f"NKI Beta 1: {name}{signature}: {error}"
        ) from None
    found.apply_defaults()
    return dict(found.arguments)


def signature_of(full: str, values: dict[str, Any]) -> inspect.Signature:
    """Return the signature of a function of the table; defaults are looked up in `values`."""

    def default(text: str | None) -> Any:
        if text is None:
            return inspect.Parameter.empty
        owner, _, member = text.partition(".")
        if member and owner in values:
            return getattr(values[owner], member)
        return values[text] if text in values else ast.literal_eval(text)

    return inspect.Signature(
        [
            inspect.Parameter(
                p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default(p.default)
            )
            for p in beta_1().functions[full].parameters
        ]
    )


def _function(short: str) -> Callable[..., Any]:
    full = f"nki.isa.{short}"
    name = f"nisa.{short}"
    if full in REFUSED:
        return refuse(name, full)
    signature = signature_of(full, {**current_isa.CONSTANTS, **language_math.FUNCTIONS})
    rule, *operands = beta_1().returns.get(full, "").split() or [""]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = bound(name, signature, args, kwargs)
        if rule:
            return RULES[rule](name, operands, given)
        return _OWN.get(short, _into)(name, given)

    call.__name__ = call.__qualname__ = short
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


NAMES: dict[str, Any] = {
    short: _function(short)
    for short in beta_1().names("nki.isa")
    if f"nki.isa.{short}" in beta_1().functions
}
NAMES["get_nc_version"] = current_isa.NAMES["get_nc_version"]


for _name in ISA_ENUMS:
    NAMES[_name] = current_isa.NAMES[_name]
for _name in ("tensor", "vector", "scalar", "gpsimd", "unknown"):
    NAMES[f"{_name}_engine"] = getattr(engine, _name)
NAMES["dma_engine"] = engine.dma
