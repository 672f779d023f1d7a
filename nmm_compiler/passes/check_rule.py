"""Checks a rewrite rule: compares the graph before and after it on random inputs.

The bound is that of `verify`: the effect, measured in the graph, of the roundings that the rule may
move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from nmm_compiler.errors import rule_not_fired
from nmm_compiler.options import Options
from nmm_compiler.passes import rules
from nmm_compiler.passes.graph.capture import arguments, to_graph
from nmm_compiler.passes.patterns.two_functions import PatternRule
from nmm_compiler.passes.pipeline import rewrite_in_order, rule_order
from nmm_compiler.passes.result import Explanation, RewriteResult, RuleCount


def check_rule(
    rule: rules.Rule,
    inputs: Any,
    *,
    model: Any = None,
    trials: int = 3,
    options: Options | Mapping[str, Any] | None = None,
) -> float:
    """Run the rule's pattern and its replacement on random inputs and compare the results.

    Args:
        rule: a rule of two functions, or a class.
        inputs: example tensors for the parameters of a rule of two functions, in order or by
            name; or a RewriteResult or Explanation: the shapes that the rule met there, each
            once. Random numbers take the place of floating-point inputs; others are used as they
            are.
        model: where a rule that is a class is checked, on its `inputs`.
        trials: random inputs of each shape.
        options: of the rewrite.

    Returns:
        The largest error as a fraction of the bound, which follows from the dtype and the lengths
        of contractions.

    Raises:
        VerificationError: results differ.
        ModelError: the rule matches nothing.
    """
    made = Options.make(options)
    worst = 0.0
    if model is not None or not isinstance(rule, PatternRule):
        if model is None:
            raise rule_not_fired(rule.name, "it is a class; pass model= and the model's inputs")
        captured = to_graph(model, inputs)
        order = rule_order(made, [rule])
        result = rewrite_in_order(captured.module, captured.inputs, made, order)
        args, kwargs = arguments(inputs)
        return _proved(rule, result, args, kwargs, trials)
    for tensors in _sets(rule, inputs):
        values = list(tensors.values())

        def pattern(*given: torch.Tensor, names: Sequence[str] = tuple(tensors)) -> Any:
            return rule.function(**dict(zip(names, given, strict=True)))

        with torch.no_grad():
            graph = make_fx(pattern, tracing_mode="fake", pre_dispatch=True)(*values)
        result = rewrite_in_order(graph, values, made, (rule,))
        worst = max(worst, _proved(rule, result, values, {}, trials))
    return worst


def _proved(
    rule: rules.Rule,
    result: RewriteResult,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    trials: int,
) -> float:
    if not any(match.rule == rule.name and match.rewritten for match in result.matches):
        refused = [str(one) for one in result.declined if one.rule == rule.name]
        count = result.rules.get(rule.name, RuleCount(rule.name))
        raise rule_not_fired(rule.name, "; ".join([str(count), *refused]))
    worst = 0.0
    for trial in range(trials):
        generator = torch.Generator().manual_seed(trial)
        drawn = [_random(value, generator) for value in args]
        named = {name: _random(value, generator) for name, value in kwargs.items()}
        worst = max(worst, result.check(*drawn, **named))
    return worst


def _sets(rule: PatternRule, inputs: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors for the parameters of a rule of two functions, by name."""
    names = rule.parameters.tensors
    if isinstance(inputs, (RewriteResult, Explanation)):
        met = [m.info for m in inputs.matches if m.rule == rule.name]
        if not met:
            raise rule_not_fired(rule.name, "it has no match in this result")
        seen = {(i["dtype"], *(tuple(i["operands"][n]) for n in names)) for i in met}
        for dtype, *shapes in sorted(seen, key=str):
            sizes = [[s if isinstance(s, int) else 16 for s in shape] for shape in shapes]
            made = [torch.empty(s, dtype=getattr(torch, dtype)) for s in sizes]
            yield dict(zip(names, made, strict=True))
        return
    args, kwargs = arguments(inputs)
    yield {**dict(zip(names, args, strict=False)), **kwargs}


def _random(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float32)
    return drawn.to(value.device, value.dtype)
