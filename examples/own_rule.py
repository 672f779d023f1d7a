"""Write your own rewrite rule: a scaled residual goes into the epilogue of a low-rank call.

    y = residual + c * up(down(x))   ->   y = mine.lowrank_residual(x, u, v, residual, c)

Twice: as two functions, which find the products before the built-in rules do, and as a class, which
finds the call that the built-in rules made of them. docs/own-rule.md explains both.

Run it: python examples/own_rule.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

import nmm_compiler as nmm
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Add, Canonical, Scale

Match, Refusal, Rule = nmm.Match, nmm.Refusal, nmm.Rule
LOWRANK = "nmm::lowrank_matmul"

# 1. An op of your own for the fused kernel; here PyTorch computes it.
library = torch.library.Library("mine", "DEF")
library.define("lowrank_residual(Tensor x, Tensor u, Tensor v, Tensor residual, float c) -> Tensor")


def _lowrank_residual(
    x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, residual: torch.Tensor, c: float
) -> torch.Tensor:
    return residual + c * (x @ u.t() @ v.t())


library.impl("lowrank_residual", _lowrank_residual, "CompositeImplicitAutograd")


# 2. The rule as two functions: what to look for, and what to compute in its place.
def residual_chain(
    x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, residual: torch.Tensor, c: float = 1.0
) -> torch.Tensor:
    """Return residual + c * (x u^T) v^T."""
    return residual + c * nn.functional.linear(nn.functional.linear(x, u), v)


residual_rule = nmm.rule(
    residual_chain, torch.ops.mine.lowrank_residual, constants=("u", "v"), ranks={"residual": 2}
)


# 3. The rule as a class: pattern proposes, check decides, rewrite emits.
class ScaledResidual(Rule):
    """residual + c * lowrank_matmul(x, u, v), without bias, base or activation."""

    name = "scaled_residual"

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every sum of a low-rank call (scaled or not) and something else."""
        form = graph.forms.get(node)
        if not isinstance(form, Add) or isinstance(form.b, float):
            return
        for call, factor, residual, own in (
            (form.a, form.alpha, form.b, form.beta),
            (form.b, form.beta, form.a, form.alpha),
        ):
            scale = graph.forms.get(call)
            if isinstance(scale, Scale) and isinstance(scale.factor, float):
                yield node, scale.value, factor * scale.factor, residual, own, {node, call}
            yield node, call, factor, residual, own, {node}

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Return the match, or why the call cannot take the residual."""
        node, call, c, residual, own, nodes = candidate
        if not isinstance(call, fx.Node) or call.target is not torch.ops.nmm.lowrank_matmul.default:
            return None  # nothing to report
        if own != 1.0 or len(call.args) != 3 or "activation" in call.kwargs:
            return Refusal("epilogue", "the call has an epilogue", call, "apply it afterwards")
        if len(call.users) != 1:
            return Refusal("other_user", "the product is used elsewhere", call, "use it once")
        if (call.kwargs["u_layout"], call.kwargs["v_layout"]) != ("col", "col"):
            return Refusal("layout", "the kernel wants weights as nn.Linear stores them", call, "")
        c *= call.kwargs.get("scale", 1.0)
        covered = frozenset({*nodes, call})
        return Match(rule=self.name, node=node, nodes=covered, data=(call, residual, c))

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call; the editor copies metadata and the pipeline erases the old nodes."""
        call, residual, c = match.data
        x, u, v = call.args
        value = graph.values[match.node]
        return editor.call(
            torch.ops.mine.lowrank_residual.default,
            x, u, v, editor.node(residual), c, meta_value=value,
        )  # fmt: skip


class Block(nn.Module):
    """x + 0.5 * up(down(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(64, 8, bias=False)
        self.up = nn.Linear(8, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * self.up(self.down(x)).contiguous()


def main() -> None:
    """Rewrite a block with the rule and show what changed."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 64)
    for rules in ([residual_rule, "..."], [ScaledResidual()]):
        result = nmm.rewrite(block, (x,), rules=rules, verify=True)
        print(result)
        print(result.diff())
        torch._dynamo.reset()
        compiled = torch.compile(block, backend="nmm", options={"rules": rules, "inner": "eager"})
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)
        print(nmm.last_report())
    print(f"largest error: {result.check(x):.2f} of the bound")


if __name__ == "__main__":
    main()
