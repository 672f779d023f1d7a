"""The record that defines an op. A family's op.py fills it in; registration.py reads it.

The arguments of a call hold everything: layouts ("row" x is [..., k], "col" x is [k, m]; "row" u is
[k, r], "col" u is what `nn.Linear` stores, [r, k]; a "col" result is [n, m]; out_layouts has one
layout for each result), the target, and the executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nmm_compiler.ops.gradients import Grads
from nmm_compiler.ops.launches import Launch

# Arguments of many schemas.
LAYOUTS = "str x_layout='row', str out_layout='row'"
UV = f"{LAYOUTS}, str u_layout='row', str v_layout='row'"
GATED = f"str activation='silu', {LAYOUTS}, str weight_layout='row'"
WHERE = "str target='trn2', str executor='reference'"
ROW = dict.fromkeys(
    ("x_layout", "out_layout", "u_layout", "v_layout", "w_layout", "weight_layout"), "row"
)
"""The layouts of a call that gives none."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One torch op: its arguments, its meaning, and how it reaches kernels.

    schema: arguments and results as PyTorch writes them. reference: what it computes, in plain
    PyTorch; takes exactly the schema's arguments. fake: the same without data, with checks.
    gradient: (operands, keywords with their layouts, gradients of the results, None for one that no
    loss reads, which gradients are needed) -> a gradient or None for each operand. lower: (x as a
    matrix, operands, keywords, tokens, transpose) -> launches. sharding: operands and keywords ->
    placements that DTensor may use, None for whole tensors only. bare, own: the reference of a call
    that has no more than so many operands, and neither a norm nor a residual: it saves a Python
    call.
    """

    schema: str
    reference: Callable
    fake: Callable
    gradient: Callable[[tuple, dict, tuple, tuple], Grads]
    lower: Callable[..., list[Launch]]
    sharding: Callable | None = None
    bare: Callable | None = None
    own: int = 0

    @property
    def name(self) -> str:
        """The op's name in `torch.ops.nmm`."""
        return str(self.reference.__name__)

    @property
    def many(self) -> bool:
        """Whether the op returns a list of tensors."""
        return self.schema.endswith("-> Tensor[]")
