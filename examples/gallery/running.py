"""Traces a case at a level, rewrites it, and says what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from gallery.case import Case, Holder
from nmm_compiler.options import Options
from nmm_compiler.passes.pipeline import run
from nmm_compiler.passes.result import RewriteResult

LEVELS = ("D", "A", "E", "C", "S")


def capture(one: Case, level: str) -> tuple[fx.GraphModule, list[Any]]:
    """Trace a case at a level; returns the graph and its inputs."""
    torch.manual_seed(1)
    model, x = Holder(one.function), one.x()
    if x.dtype == torch.float64:
        model = model.double()
    if level in "DA":
        seen: list[tuple[fx.GraphModule, list[Any]]] = []

        def collect(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            real: list[Any] = []
            seen.append((module, real))

            def compiled(*arguments: Any) -> Any:
                copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
                real.extend(copies)
                return module(*arguments)

            return compiled

        backend: Any = collect
        if level == "A":
            from torch._dynamo.backends.common import aot_autograd

            backend = aot_autograd(fw_compiler=collect)
        torch._dynamo.reset()
        with torch.no_grad() if level == "A" else torch.enable_grad():
            torch.compile(model, backend=backend, dynamic=False)(x)
        if len(seen) != 1:
            raise RuntimeError(f"{one.name}: {len(seen)} graphs")
        return seen[0]
    if level == "S":
        return fx.symbolic_trace(model), [x]
    program = torch.export.export(model, (x,))
    if level == "C":
        program = program.run_decompositions()
    return program.module(), [x]  # type: ignore[return-value]


def outcome(result: RewriteResult) -> str:
    """Return the kinds found, or the first reason for none."""
    kinds = Counter(m.kind for m in result.matches)
    if kinds:
        return " ".join(k if n == 1 else f"{n}x{k}" for k, n in sorted(kinds.items()))
    return f"no:{result.declined[0].code}" if result.declined else "-"


def largest_error(one: fx.GraphModule, two: fx.GraphModule, inputs: list[Any]) -> float:
    """Return the largest error of `two` against `one`, relative to the size of the values."""

    def flat(value: Any) -> list[torch.Tensor]:
        leaves = torch.utils._pytree.tree_leaves(value)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def fresh() -> list[Any]:
        return [i.detach().clone() if isinstance(i, torch.Tensor) else i for i in inputs]

    with torch.no_grad():
        torch.manual_seed(3)
        want = flat(one(*fresh()))
        torch.manual_seed(3)
        got = flat(two(*fresh()))
    worst = 0.0
    for a, b in zip(want, got, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        size = a.double().abs().max().clamp_min(1e-6)
        worst = max(worst, float((a.double() - b.double()).abs().max() / size))
    return worst


def try_case(one: Case, level: str) -> tuple[str, float, RewriteResult]:
    """Rewrite a case at a level; return the outcome, the error and the result."""
    module, inputs = capture(one, level)
    result = run(module, inputs, Options(**one.options))
    return outcome(result), largest_error(module, result.graph_module, inputs), result
