"""START HERE: the passes, in order, in the list PASSES.

`run` is a pure function on a GraphModule: it works on a copy of the graph that shares the
parameters, recurses into the graphs of higher-order operators (a shared one once), and returns a
RewriteResult. The caller's graph never changes. A fault of this package drops only its place
(`faults`), or raises under strict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import ModelError, OptionTypeError, UnknownNameError, no_real_inputs
from nmm_compiler.options import Options, dump_directory
from nmm_compiler.passes.attempt import (
    Attempt,
    added_nodes_are_read,
    every_node_is_read,
    layouts_agree,
    matches_are_apart,
    values_agree,
)
from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.dump import Dump
from nmm_compiler.passes.faults import Fault, Faults
from nmm_compiler.passes.graph.canonical import PLAIN
from nmm_compiler.passes.graph.capture import all_graphs, arguments, to_graph
from nmm_compiler.passes.graph.effects import fetch_attribute
from nmm_compiler.passes.graph.metadata import collect_values
from nmm_compiler.passes.graph.read_graph import read_graph
from nmm_compiler.passes.result import Explanation, RewriteResult
from nmm_compiler.passes.rules.attention import Attention
from nmm_compiler.passes.rules.base import Declined, Rule
from nmm_compiler.passes.rules.gated_mlp import GatedMLP, GatedMLPUp
from nmm_compiler.passes.rules.inside_calls import NormInside, ResidualInside
from nmm_compiler.passes.rules.lora import LoRA
from nmm_compiler.passes.rules.lowrank import MLA, Adapter, LowRank
from nmm_compiler.passes.rules.reassociate import Association
from nmm_compiler.passes.rules.shared import SharedU, SharedX

RULES: tuple[Rule, ...] = (
    MLA(),
    GatedMLP(),
    GatedMLPUp(),
    LoRA(),
    SharedU(),
    Association(),
    Adapter(),
    LowRank(),
    SharedX(),
    Attention(),
    NormInside(),
    ResidualInside(),
)
"""The built-in rules, in the order in which they are asked."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """A step: its method of an attempt, and the check that raises where its result is wrong."""

    name: str
    run: Callable[[Attempt], None]
    check: Callable[[Attempt], None]


PASSES: tuple[Pass, ...] = (
    Pass("read", Attempt.read, every_node_is_read),
    Pass("match", Attempt.match, matches_are_apart),
    Pass("combine", Attempt.combine, matches_are_apart),
    Pass("layout", Attempt.lay_out, layouts_agree),
    Pass("emit", Attempt.emit, values_agree),
    # After emit: it follows changed strides forward through the whole of the new graph.
    Pass("strides", Attempt.settle_strides, added_nodes_are_read),
    Pass("lint", Attempt.lint, added_nodes_are_read),
)
"""The steps of a rewrite, in order: the built-in rules that make calls at once, then each of those
that read calls, then each rule of a user."""


def apply(attempt: Attempt, rules: tuple[Rule, ...], later: tuple[Rule, ...], dump: Dump) -> bool:
    """Rewrite by built-in rules, or by one of a user; False when a place had to be dropped.

    later: the rules of the user that follow.
    Raises BrokenRuleError for a user's rule that fails or breaks the graph.
    """
    attempt.rules, attempt.later = rules, later
    if rules[0].after_calls and not attempt.has_calls_to_change():
        return True
    for step in PASSES:
        step.run(attempt)
        if attempt.dropped:
            return False
        step.check(attempt)
        dump.write(step.name, attempt.module, attempt.findings)
    return True


def run(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    options: Options | None = None,
    rules: Sequence[Rule | str] | None = None,
) -> RewriteResult:
    """Rewrite a copy of the graph and return it with all that was found.

    Raises ModelError for a graph without shapes and without inputs, BrokenRuleError for a rule
    of the user that fails, UnknownNameError for a rule name that is not known, and under strict
    InternalFaultError.
    """
    options = Options.make(options)
    return rewrite_in_order(graph_module, example_inputs, options, rule_order(options, rules))


def rewrite_in_order(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any] | None,
    options: Options,
    order: tuple[Rule, ...],
) -> RewriteResult:
    """Rewrite as `run` does, with only the rules in `order`."""
    from nmm_compiler.ops import registration, sharding  # defines torch.ops.nmm

    sharding.register_when_used(registration.RULES)
    result = RewriteResult(graph_module, [], [], original=graph_module, target=options.target)
    work = _Run(options, order, result)
    result.graph_module = work.graph(graph_module, example_inputs)
    result.declined += [*work.refused, *map(_internal, work.faults.found)]
    work.faults.warn(graph_module, example_inputs, options)
    if options.verify:
        if example_inputs is None:
            raise no_real_inputs(None)
        result.check(*example_inputs)
    return result


def rewrite(
    model_or_graph: Any,
    example_inputs: Any = None,
    *,
    options: Options | Mapping[str, Any] | None = None,
    rules: Sequence[Rule | str] | None = None,
    verify: bool = False,
) -> RewriteResult:
    """Rewrite a model's graph: find the low-rank chains, fuse them, report what was left and why.

    Args:
        model_or_graph: an nn.Module or function (traced with torch.export), a GraphModule of
            Dynamo, torch.export or symbolic_trace, or an ExportedProgram. It is not changed.
        example_inputs: positional arguments as a tuple, keywords as a dict; needed unless the
            graph carries shapes.
        options: an `Options`, or a dict of its fields.
        rules: rules of yours and names of built-in ones, in order; "..." is all others.
        verify: run the graph before and after on the example inputs and compare (`result.check`).

    Returns:
        The rewritten graph, which shares the model's parameters, and what was found.

    Raises:
        ModelError: the model cannot be traced.
        ModelError, ModelError: inputs are needed.
        BrokenRuleError: a rule of yours raises, or returns something else.
        UnknownNameError: for names of options and rules.
        VerificationError: the results differ.
    """
    captured = to_graph(model_or_graph, example_inputs)
    made = Options.make(options)
    verify, made = verify or made.verify, dataclasses.replace(made, verify=False)
    result = run(captured.module, captured.inputs, made, rules)
    if captured.program is not None:
        result.program = captured.program
    if verify:
        given = None if example_inputs is None else arguments(example_inputs)
        given = given or getattr(captured.program, "example_inputs", None)
        if given is None:
            raise no_real_inputs(None)
        args, kwargs = given
        result.check(*args, **kwargs)
    return result


def explain(
    model_or_graph: Any,
    example_inputs: Any = None,
    *,
    options: Options | Mapping[str, Any] | None = None,
    rules: Sequence[Rule | str] | None = None,
) -> Explanation:
    """Say what `rewrite` would do in every graph of a model, without doing it.

    The model runs once, under torch.compile with a backend that only collects. A GraphModule or
    an ExportedProgram is read as it is.

    Args:
        model_or_graph: as for `rewrite`.
        example_inputs: as for `rewrite`.
        options: as for `rewrite`.
        rules: as for `rewrite`.

    Returns:
        What matches, what is left alone and why, and what could be factorized.

    Raises:
        ModelError, BrokenRuleError, UnknownNameError: as `rewrite`.
    """
    made = Options.make(options)
    if isinstance(model_or_graph, (fx.GraphModule, torch.export.ExportedProgram)):
        return Explanation([rewrite(model_or_graph, example_inputs, options=made, rules=rules)])
    if not callable(model_or_graph):
        kind = type(model_or_graph).__name__
        raise ModelError(f"cannot explain a {kind}; pass a model or a function")
    graphs = all_graphs(model_or_graph, *arguments(example_inputs))
    results = [run(module, inputs, made, rules) for module, inputs in graphs]
    return Explanation(results)


def rule_order(options: Options, rules: Sequence[Rule | str] | None) -> tuple[Rule, ...]:
    """Return the rules to apply: "..." stands for the built-in ones not named, objects are added.

    A list of rule objects alone is added after the built-in rules. Without `rules`, those of the
    options are taken.
    """
    known = {rule.name: rule for rule in RULES}
    own = (r for r in options.rules if not (isinstance(r, str) and r.startswith(("+", "-"))))
    given = list(own if rules is None else rules)
    if not any(isinstance(entry, str) for entry in given):
        given = ["...", *given]
    named = {e for e in given if isinstance(e, str)} | {
        e.name for e in given if isinstance(e, Rule)
    }
    twice = [e.name for e in given if isinstance(e, Rule)]
    order: list[Rule] = []
    for entry in given:
        if isinstance(entry, type) or (isinstance(entry, Rule) and twice.count(entry.name) > 1):
            wanted = "rules as objects, MyRule(), each with a name of its own"
            raise OptionTypeError("rules", entry, wanted)
        if isinstance(entry, Rule):
            order.append(entry)
        elif not isinstance(entry, str):
            raise OptionTypeError("rules", entry, "rules, or names of built-in ones")
        elif entry == "...":
            order.extend(rule for rule in RULES if rule.name not in named)
        elif entry in known:
            order.append(known[entry])
        else:
            raise UnknownNameError("rule", entry, [*known, "..."])
    names = {rule.name for rule in order} | set(known)
    for name in options.disable:
        if name not in names:
            raise UnknownNameError("rule", name, sorted(names))
    return tuple(rule for rule in order if rule.name not in options.disable)


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module with a copy of the graph, which shares parameters and submodules.

    `recompile` writes its code, after the passes; or when it is first called, in a module of
    Dynamo's class, which the copy keeps.
    """
    graph = fx.Graph(tracer_cls=getattr(module.graph, "_tracer_cls", None))
    new: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        # Set afterwards, since `create_node` searches all arguments for a reason to warn.
        if node.args:
            copy.args = fx.map_arg(node.args, new.__getitem__)
        if node.kwargs:
            copy.kwargs = fx.map_arg(node.kwargs, new.__getitem__)
        copy.meta.update(node.meta)
        new[node] = copy
    graph._codegen = module.graph._codegen
    # Setting a module's graph compiles its code, which the passes do once at their end. So the
    # module is made for a graph with only its attributes, and then gets the copy without that.
    attributes = fx.Graph()
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            attributes.get_attr(str(node.target))
    given = type(module).__mro__[1]  # a GraphModule has a class of its own, below this one
    plain = given.__init__ is fx.GraphModule.__init__  # type: ignore[misc]
    kind = given if plain else fx.GraphModule
    copied: fx.GraphModule = kind(module, attributes, class_name=type(module).__name__)
    copied._graph = graph
    graph.owning_module = copied
    copied.meta = dict(module.meta)
    return copied


def _internal(fault: Fault) -> Declined:
    """Return a fault of this package as a refusal, which reports show."""
    why = Refusal("internal", f"a fault in nmm_compiler, {fault}", fault.at)
    declined = Declined.of(fault.rule or "reading", why, fault.at)
    return dataclasses.replace(declined, graph=fault.graph)


class _Run:
    """One rewrite: the state of all its graphs. A graph that occurs twice is rewritten once."""

    def __init__(self, options: Options, order: tuple[Rule, ...], result: RewriteResult) -> None:
        self.options, self.order, self.result = options, order, result
        self.faults = Faults(options.strict, RULES)
        self.done: dict[int, fx.GraphModule] = {}
        self.refused: list[Declined] = []

    def graph(
        self,
        original: fx.GraphModule,
        example_inputs: Sequence[Any] | None,
        path: str = "",
        sources: dict[str, str] | None = None,
    ) -> fx.GraphModule:
        """Return a rewritten copy of a graph and of the graphs in it.

        Each attempt starts from a fresh copy. After an attempt that dropped a place, the next one
        leaves that place alone. After a fault without a place, the graph is not rewritten.
        """
        if id(original) in self.done:
            return self.done[id(original)]
        children: dict[str, fx.GraphModule] = {}
        last = next(iter(reversed(original.graph.nodes)))
        dump = Dump(dump_directory(), path.rstrip("."))
        faulty = False
        while True:
            module = copy_graph(original)
            found = RewriteResult(module, [], [])
            values = None
            self.faults.graph = path.rstrip(".")
            if not faulty:
                with self.faults.guard("reading the graph that ends at", last):
                    read = collect_values(module, example_inputs)
                    for name, child, inputs, kinds in _children(module, read, sources):
                        if name not in children:
                            children[name] = self.graph(child, inputs, f"{path}{name}.", kinds)
                    values = read
            self.faults.graph = path.rstrip(".")
            for name, child in children.items():
                _set_attribute(module, name, child)
            if faulty:
                break
            whole, faulty = False, True
            if values is not None:
                odd = _subclasses(module, example_inputs)
                shared = (self.options, self.faults, path, sources, odd, found, self.refused)
                attempt = Attempt(module, values, *shared)
                with self.faults.guard("rewriting the graph that ends at", last):
                    whole = all(apply(attempt, *step, dump) for step in _segments(self.order))
                    faulty = False
            if whole:
                break
        self.result.add(found)
        module.recompile()
        self.done[id(original)] = module
        return module


def _subclasses(
    module: fx.GraphModule, example_inputs: Sequence[Any] | None
) -> dict[fx.Node, type[torch.Tensor]]:
    """Return the inputs that are tensor subclasses, which fake tensors may hide."""
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    if example_inputs is None or len(holders) != len(example_inputs):
        return {}
    return {
        holder: type(value)
        for holder, value in zip(holders, example_inputs, strict=True)
        if isinstance(value, torch.Tensor) and type(value) not in PLAIN
    }


Segment = tuple[tuple[Rule, ...], tuple[Rule, ...]]


def _segments(order: tuple[Rule, ...]) -> list[Segment]:
    """Split the rules into runs of built-in ones, rewritten together, and users' rules alone.

    Each comes with the users' rules that follow it.
    """
    segments: list[tuple[Rule, ...]] = []
    for rule in order:
        makes = rule in RULES and not rule.after_calls
        if makes and segments and segments[-1][0] in RULES and not segments[-1][0].after_calls:
            segments[-1] = (*segments[-1], rule)
        else:
            segments.append((rule,))
    return [
        (own, tuple(r for later in segments[i + 1 :] for r in later if r not in RULES))
        for i, own in enumerate(segments)
    ]


Child = tuple[str, fx.GraphModule, list[Any] | None, dict[str, str]]


def _children(
    module: fx.GraphModule, values: dict[fx.Node, Any], sources: dict[str, str] | None
) -> list[Child]:
    """Return the graphs that nodes of this graph run: path, graph, inputs, sources of inputs.

    A higher-order operator passes its last arguments to each of its graphs, in order.
    """
    found: dict[str, Child] = {}
    left: set[str] = set()
    outer = read_graph(module, values, sources) if _holds_graphs(module) else None
    for node in module.graph.nodes:
        if outer is None or node.op not in ("call_module", "call_function"):
            continue
        flat = [a for a in node.all_input_nodes if not _is_graph(module, a)]
        bodies = [str(a.target) for a in node.all_input_nodes if _is_graph(module, a)]
        if node.op == "call_module":
            bodies = [str(node.target)]
        here = outer.effects.position[node]
        if outer.effects.crossed_transform(here, here):
            left.update(bodies)
        for name in bodies:
            child = fetch_attribute(module, name)
            if not isinstance(child, fx.GraphModule) or name == "_guards_fn":
                continue
            holders = [str(n.target) for n in child.graph.nodes if n.op == "placeholder"]
            kinds: dict[str, str] = {}
            inputs = None
            if len(holders) <= len(flat):
                given = flat[len(flat) - len(holders) :]
                inputs = [values.get(a) for a in given]
                for holder, argument in zip(holders, given, strict=True):
                    stored = argument in outer.constant
                    kinds[holder] = "parameter" if stored else "input"
            found.setdefault(name, (name, child, inputs, kinds))
    return [child for name, child in found.items() if name not in left]


def _is_graph(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(
        fetch_attribute(module, str(node.target)), fx.GraphModule
    )


def _holds_graphs(module: fx.GraphModule) -> bool:
    return any(
        name != "_guards_fn" and isinstance(child, fx.GraphModule)
        for name, child in module.named_children()
    )


def _set_attribute(module: torch.nn.Module, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        module = getattr(module, part)
    setattr(module, last, value)
