"""START HERE: the passes, in order.

    copy -> values -> canonicalize -> match (rules in order) -> assign layouts -> rewrite -> lint

`run` is a pure function on a GraphModule: it works on a copy of the graph that shares the
parameters, recurses into the graphs of higher-order operators (a shared one once), and returns a
RewriteResult. A rule that fails leaves the caller's graph as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import (
    BrokenRuleError,
    CaptureError,
    OptionTypeError,
    UnknownNameError,
)
from nmm_compiler.options import Options
from nmm_compiler.passes.calls import Call
from nmm_compiler.passes.canonicalize import PLAIN, Canonical
from nmm_compiler.passes.capture import all_graphs, to_graph
from nmm_compiler.passes.effects import fetch_attribute
from nmm_compiler.passes.forms import Leaf, owner_of
from nmm_compiler.passes.layout import assign_layouts, count_transposes
from nmm_compiler.passes.match.base import Declined, Match, Rule, module_path
from nmm_compiler.passes.match.chain import Association
from nmm_compiler.passes.match.gated_mlp import GatedMLPUp
from nmm_compiler.passes.match.lora import LoRA
from nmm_compiler.passes.match.lowrank import LowRank, products_at
from nmm_compiler.passes.match.mla import MLA
from nmm_compiler.passes.match.obstacles import in_transform
from nmm_compiler.passes.match.shared import SharedU, SharedX
from nmm_compiler.passes.match.stages import Refusal
from nmm_compiler.passes.match.whole_mlp import GatedMLP
from nmm_compiler.passes.metadata import collect_values, value_key
from nmm_compiler.passes.regions import Pointwise
from nmm_compiler.passes.result import Explanation, Opportunity, RewriteResult
from nmm_compiler.passes.rewrite import Editor
from nmm_compiler.passes.strides import settle_strides

RULES: tuple[Rule, ...] = (
    MLA(),
    GatedMLP(),
    GatedMLPUp(),
    LoRA(),
    SharedU(),
    Association(),
    LowRank(),
    SharedX(),
)
"""The built-in rules, in the order in which they get to choose."""


def run(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    options: Options | None = None,
    rules: Sequence[Rule | str] | None = None,
) -> RewriteResult:
    """Rewrite a copy of the graph and return it with all that was found.

    Raises NoShapesError for a graph without shapes and without inputs, BrokenRuleError for a rule
    that fails, UnknownNameError for a rule name that is not known.
    """
    options = Options.make(options)
    order = rule_order(options, rules)
    import nmm_compiler.ops.registration  # noqa: F401  (defines torch.ops.nmm)

    done: dict[int, fx.GraphModule] = {}
    result = RewriteResult(None, [], [], original=graph_module)
    result.graph_module = _run_graph(graph_module, example_inputs, options, order, result, done, "")
    return result


def rewrite(
    model_or_graph: Any,
    example_inputs: Any = None,
    *,
    options: Options | Mapping[str, Any] | None = None,
    rules: Sequence[Rule | str] | None = None,
) -> RewriteResult:
    """Rewrite a model's graph: find the low-rank chains, fuse them, say what was left and why.

    model_or_graph: an nn.Module or function (traced with torch.export), a GraphModule of Dynamo,
    torch.export or symbolic_trace, or an ExportedProgram. example_inputs: positional arguments as
    a tuple, keywords as a dict; needed unless the graph carries shapes. rules: see `rule_order`.

    The original is not changed; the result's graph_module shares its parameters. Raises
    CaptureError, NoShapesError, BrokenRuleError, UnknownNameError.
    """
    captured = to_graph(model_or_graph, example_inputs)
    result = run(captured.module, captured.inputs, Options.make(options), rules)
    if captured.program is not None:
        result.program = captured.program
    return result


def explain(
    model: Any,
    *args: Any,
    options: Options | Mapping[str, Any] | None = None,
    rules: Sequence[Rule | str] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Dry run of `rewrite` over every graph of a model called as model(*args, **kwargs).

    The model runs once, under torch.compile with a backend that only collects. A GraphModule or
    an ExportedProgram is read as it is.
    """
    made = Options.make(options)
    if isinstance(model, (fx.GraphModule, torch.export.ExportedProgram)):
        inputs = kwargs or (args or None)
        return Explanation([rewrite(model, inputs, options=made, rules=rules)])
    if not callable(model):
        raise CaptureError(f"cannot explain a {type(model).__name__}; pass a model or a function")
    graphs = all_graphs(model, args, kwargs)
    return Explanation([run(module, inputs, made, rules) for module, inputs in graphs])


def rule_order(options: Options, rules: Sequence[Rule | str] | None) -> tuple[Rule, ...]:
    """Return the rules to apply: "..." stands for the built-in ones not named, objects are added.

    A list of rule objects alone is added after the built-in rules.
    """
    known = {rule.name: rule for rule in RULES}
    given = list(rules or ())
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

    Its code is written by `recompile`, once the passes are done.
    """
    graph = fx.Graph(tracer_cls=getattr(module.graph, "_tracer_cls", None))
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, mapping, return_output_node=True)
    if isinstance(output, tuple):
        value, old = output
        assert isinstance(old, fx.Node)
        new = graph.output(value, type_expr=getattr(old, "type", None))
        new.meta = dict(old.meta)
    graph._codegen = module.graph._codegen
    # Setting a module's graph writes and compiles its code, which the passes do once at their end:
    # the module is made for a graph with nothing but its attributes and gets the copy as it is.
    attributes = fx.Graph()
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            attributes.get_attr(str(node.target))
    copied = fx.GraphModule(module, attributes, class_name=type(module).__name__)
    copied._graph = graph
    graph.owning_module = copied
    copied.meta = dict(module.meta)
    return copied


def _run_graph(
    original: fx.GraphModule,
    example_inputs: Sequence[Any] | None,
    options: Options,
    order: tuple[Rule, ...],
    result: RewriteResult,
    done: dict[int, fx.GraphModule],
    path: str,
    sources: dict[str, str] | None = None,
) -> fx.GraphModule:
    if id(original) in done:
        return done[id(original)]
    module = done[id(original)] = copy_graph(original)
    values = collect_values(module, example_inputs)
    for name, child, inputs, kinds in _children(module, values, sources):
        new = _run_graph(child, inputs, options, order, result, done, f"{path}{name}.", kinds)
        _set_attribute(module, name, new)
    odd = _subclasses(module, example_inputs)
    for segment in _segments(order):
        _apply(module, values, options, segment, result, path, sources, odd)
        values = {n: v for n, v in values.items() if n.graph is module.graph}
    module.recompile()
    return module


def _subclasses(module: fx.GraphModule, example_inputs: Sequence[Any] | None) -> dict[fx.Node, str]:
    """Return the inputs that are tensor subclasses, which fake tensors may hide."""
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    if example_inputs is None or len(holders) != len(example_inputs):
        return {}
    return {
        holder: type(value).__name__
        for holder, value in zip(holders, example_inputs, strict=True)
        if isinstance(value, torch.Tensor) and type(value) not in PLAIN
    }


def _segments(order: tuple[Rule, ...]) -> list[tuple[Rule, ...]]:
    """Split the rules into runs of built-in ones, rewritten together, and users' rules alone."""
    segments: list[tuple[Rule, ...]] = []
    for rule in order:
        if segments and rule in RULES and segments[-1][0] in RULES:
            segments[-1] = (*segments[-1], rule)
        else:
            segments.append((rule,))
    return segments


def _apply(
    module: fx.GraphModule,
    values: dict[fx.Node, Any],
    options: Options,
    rules: tuple[Rule, ...],
    result: RewriteResult,
    path: str,
    sources: dict[str, str] | None,
    odd: dict[fx.Node, str],
) -> None:
    c = Canonical(module, values, sources, options)
    c.subclasses.update(odd)
    matches, declined = find_matches(c, rules)
    for entry in declined:
        result.declined.append(_placed(entry, path))
    turned: list[Pointwise] = []
    if rules[0] in RULES:
        layouts = assign_layouts(c, matches)
        result.layouts.extend(layouts.choices)
        turned = layouts.turned
        result.transposes_before += count_transposes(c)
    editor = Editor(c, value_key(module.graph), options)
    taken: set[fx.Node] = set()
    seen = {n for n in c.sources if isinstance(n, fx.Node) and n.users}
    by_name = {rule.name: rule for rule in rules}
    for match in matches:
        match.graph = path.rstrip(".")
        result.matches.append(match)
        taken |= match.nodes
    covered = {n for m in matches for n in m.nodes}
    if rules[0] in RULES:
        result.opportunities.extend(opportunities(c, covered))
    position = c.effects.position
    steps: list[Match | Pointwise] = [*matches, *turned]
    for step in sorted(steps, key=lambda step: position[step.node]):
        editor.at = step.node
        if isinstance(step, Pointwise):
            new = step.emit(c, editor)
            if not step.unread:
                editor.replace(step.node, new)
        elif step.rewritten:
            _emit(c, editor, step, by_name[step.rule])
    taken |= {operation.node for operation in turned}
    editor.erase(taken | seen | set(editor.added))
    settle_strides(editor)
    if rules[0] in RULES:
        c.read_added()
        result.transposes_after += count_transposes(c)
    try:
        module.graph.lint()
    except RuntimeError as error:
        raise BrokenRuleError(", ".join(by_name), "graph", error) from error


def _emit(c: Canonical, editor: Editor, match: Match, rule: Rule) -> None:
    """Let a rule emit what replaces its match."""
    call = match.data
    try:
        new = rule.rewrite(c, match, editor)
        if not isinstance(call, Call) or not call.unread:  # else nothing reads it in this order
            _check_replacement(c, match.node, new)
            editor.replace(match.node, new)
    except Exception as error:  # any failure of a rule is reported as the rule's
        raise BrokenRuleError(match.rule, match.name, error) from error
    if isinstance(call, Call):
        made = dict.fromkeys(one.out_layout for one in call.results())
        match.info |= {"x_layout": call.x_layout, "out_layout": ",".join(made)}


def _check_replacement(c: Canonical, old: fx.Node, new: Any) -> None:
    """Raise TypeError or ValueError unless `new` is a node with the shape and dtype of `old`."""
    if not isinstance(new, fx.Node):
        raise TypeError(f"rewrite returned {new!r}; return the node that takes the match's place")
    have, want = (
        (tuple(c.shape(node) or ()), c.dtype(node)) if c.tensor(node) is not None else None
        for node in (new, old)
    )
    if have is not None and want is not None and have != want:
        raise ValueError(
            f"rewrite returned {have[1]} {list(have[0])} in place of {want[1]} {list(want[0])}; "
            "return a value of the same shape and dtype"
        )


def find_matches(c: Canonical, rules: tuple[Rule, ...]) -> tuple[list[Match], list[Declined]]:
    """Ask each rule, in order, at each node from the last to the first; the first match stays."""
    taken: set[fx.Node] = set()
    matches: list[Match] = []
    declined: list[Declined] = []
    told: list[Declined] = []
    nodes = list(c.graph.nodes)
    for rule in rules:
        for node in reversed(nodes):
            if node in taken:
                continue
            try:
                for candidate in rule.pattern(c, node):
                    found = _checked(rule, rule.check(c, candidate))
                    if found is None:
                        continue
                    if isinstance(found, Refusal):
                        if found.reason:
                            declined.append(Declined.of(rule.name, found, node))
                            told += declined[-1:] if found.told else []
                        continue
                    moving = {n for n in found.nodes if not isinstance(c.forms.get(n), Leaf)}
                    places = [c.effects.position[n] for n in (*moving, found.node)]
                    inside = c.effects.crossed_transform(min(places), max(places))
                    if found.rewritten and inside:
                        declined.append(Declined.of(rule.name, in_transform(node), node))
                        continue
                    if found.rewritten and moving & taken:
                        continue
                    if found.rewritten:
                        taken |= {n for n in moving if n not in c.constant}
                    matches.append(found)
                    break
            except Exception as error:  # any failure of a rule is reported as the rule's
                raise BrokenRuleError(rule.name, node.name, error) from error
    for rule in rules:
        matches = rule.combine(c, matches)
    names = {node.name for node in taken}
    position = c.effects.position
    matches.sort(key=lambda m: position[m.node])
    return matches, [d for d in declined if d.at not in names or d in told]


def _checked(rule: Rule, found: Any) -> Match | Refusal | None:
    """Return what a rule's check returned; raise TypeError for what is no answer."""
    if isinstance(found, Match) and found.rule != rule.name:
        raise TypeError(f"check returned a match of rule {found.rule!r}; pass rule=self.name")
    if found is not None and not isinstance(found, (Match, Refusal)):
        raise TypeError(f"check returned {found!r}; return a Match, a Refusal, or None for no")
    return found


def _placed(declined: Declined, path: str) -> Declined:
    import dataclasses

    return dataclasses.replace(declined, graph=path.rstrip("."))


Child = tuple[str, fx.GraphModule, list[Any] | None, dict[str, str]]


def _children(
    module: fx.GraphModule, values: dict[fx.Node, Any], sources: dict[str, str] | None
) -> list[Child]:
    """Return the graphs that nodes of this graph run: path, graph, inputs, sources of inputs.

    A higher-order operator hands its last arguments to each of its graphs, in order.
    """
    found: dict[str, Child] = {}
    left: set[str] = set()
    outer = Canonical(module, values, sources) if _holds_graphs(module) else None
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


def opportunities(c: Canonical, covered: set[fx.Node]) -> list[Opportunity]:
    """Return the dense products with a constant 2-D weight that factors would make smaller."""
    from nmm_compiler.passes.match.stages import read_stage

    found: list[Opportunity] = []
    for node in c.graph.nodes:
        if node in covered:
            continue
        for key, form in products_at(c, node):
            rhs = c.is_constant(form.rhs)
            data = form.lhs if rhs else form.rhs
            if c.is_constant(data) or not c.is_constant(form.rhs if rhs else form.lhs):
                continue
            stage = read_stage(c, key, form, rhs)
            if isinstance(stage, Refusal):
                continue
            k, n = stage.weight.k, stage.weight.n
            r = int(0.8 * k * n / (k + n))
            if r < 1 or min(k, n) < 2:
                continue
            saved = k * n - r * (k + n)
            dtype = c.dtype(key)
            size = dtype.itemsize if dtype is not None else 2
            break_even = -(-k * n // (k + n))
            found.append(
                Opportunity(
                    node=owner_of(key).name,
                    module=module_path(node),
                    k=k,
                    n=n,
                    r=r,
                    break_even=break_even,
                    saved_bytes=saved * size,
                    saved_flops_per_token=2 * saved,
                )
            )
    return found
