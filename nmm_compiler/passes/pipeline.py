"""START HERE: the passes, in order, in the list PASSES.

`run` is a pure function on a GraphModule: it works on a copy of the graph that shares the
parameters, recurses into the graphs of higher-order operators (a shared one once), and returns a
RewriteResult. The caller's graph never changes. A fault of this package drops only its place
(`faults`), or raises under strict.

An `Attempt` at a graph goes step by step. A half-made emission is never repaired: the attempt's
copy of the graph is discarded, and the next attempt skips the place that failed. After a fault
without a single place, the graph is not rewritten. The check of a step raises ValueError with
what is wrong, which is such a fault.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import (
    OptionTypeError,
    UnknownNameError,
    broken_rule,
    no_real_inputs,
)
from nmm_compiler.options import Options, setting
from nmm_compiler.passes.chains.safety import Refusal, moving, tokens_to_judge
from nmm_compiler.passes.emit.calls import Call
from nmm_compiler.passes.emit.editor import Editor, NotEmittedError
from nmm_compiler.passes.faults import Faults
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.capture import (
    all_graphs,
    arguments,
    collect_values,
    to_graph,
    value_key,
)
from nmm_compiler.passes.graph.read_graph import read_graph, sweep
from nmm_compiler.passes.graph.written import follow_writes
from nmm_compiler.passes.layout import assign_layouts, count_transposes
from nmm_compiler.passes.reproduce import fault_command
from nmm_compiler.passes.result import RewriteResult, opportunities
from nmm_compiler.passes.rules.adapters import Adapters
from nmm_compiler.passes.rules.attention import Attention
from nmm_compiler.passes.rules.base import Declined, Match, Rule
from nmm_compiler.passes.rules.experts import Experts
from nmm_compiler.passes.rules.few_bits import Quantized, StaticFP8
from nmm_compiler.passes.rules.gated_mlp import CorrectedMLP, GatedMLP, GatedMLPUp
from nmm_compiler.passes.rules.inside_calls import NormInside, ResidualInside
from nmm_compiler.passes.rules.lora import LoRA
from nmm_compiler.passes.rules.lowrank import MLA, Adapter, LowRankChain, products_at
from nmm_compiler.passes.rules.shared import SharedU, SharedX


@dataclasses.dataclass
class Attempt:
    """A copy of a graph that is being rewritten in a run; `result` collects the findings.

    stored: whether the model stores the placeholders of a graph of a higher-order operator. inputs:
    examples, which may be tensor subclasses that metadata hides. rules: those of this attempt. The
    methods are the steps of `pipeline.PASSES`; the fields after `rules` pass their results on.
    """

    module: fx.GraphModule
    values: dict[fx.Node, Any]
    run: _Run
    stored: Mapping[str, bool] | None
    inputs: Sequence[Any] | None
    result: RewriteResult
    rules: tuple[Rule, ...] = ()
    c: Canonical = dataclasses.field(init=False)
    matches: list[Match] = dataclasses.field(default_factory=list)
    editor: Editor = dataclasses.field(init=False)
    dropped: bool = False

    @property
    def built_in(self) -> bool:
        """Return whether the rules at work are the package's own."""
        return self.run.faults.is_built_in(self.rules[0])

    @property
    def taken(self) -> set[fx.Node]:
        """Return the nodes that the matches take over."""
        return {node for match in self.matches for node in match.nodes}

    def read(self) -> None:
        """Read the graph into canonical forms."""
        given = (self.module, self.values, self.stored, self.run.options, self.run.faults)
        self.c = read_graph(*given)
        if self.c.effects.writers and follow_writes(self.c):
            self.c = read_graph(*given)
        holders = self.module.graph.find_nodes(op="placeholder")
        for holder, value in zip(holders, self.inputs or (), strict=False):
            self.c.note_subclass(holder, value)

    def match(self) -> None:
        """Ask each rule, in order, at each node, last node first; the first match stays."""
        c = self.c
        self.matches = []
        moved, declined = set[fx.Node](), list[tuple[Declined, bool]]()
        values = ((node, (node, *c.virtuals.get(node, ()))) for node in reversed(c.graph.nodes))
        nodes = [
            (node, {kind for key in keys for kind in type(c.forms.get(key)).__mro__})
            for node, keys in values
        ]
        for rule in self.rules:
            if not self.built_in:
                self.result.nearest[rule.name] = (0, "")
            ends = (object,) if rule.ends_at is None else rule.ends_at
            with self.run.faults.only_reading(rule, c.graph):
                for node, kinds in nodes:
                    if kinds.isdisjoint(ends) or node in moved:
                        continue
                    try:
                        self._ask(rule, node, moved, declined)
                    except Exception as error:  # kept, or raised again
                        self.run.faults.keep(error, "matching", node, rule)
        names = {node.name for node in moved}
        self.result.declined += [one for one, kept in declined if kept or one.at not in names]

    def _ask(
        self, rule: Rule, node: fx.Node, taken: set[fx.Node], declined: list[tuple[Declined, bool]]
    ) -> None:
        """Keep the first match of a rule at a node, or why there is none.

        taken: nodes that matches take over. declined: refusals, and whether the report has them
        where another rule matches.
        """
        c = self.c
        for candidate in rule.pattern(c, node):
            answer = _checked(rule, rule.check(c, candidate))
            if isinstance(answer, Match) and not self.run.faults.is_left(rule.name, answer.name):
                moved = moving(c, answer.nodes)
                if moved.isdisjoint(taken):
                    taken |= moved
                    self.matches.append(answer)
                    return
            elif isinstance(answer, Refusal) and answer.agreed:
                near = (answer.agreed, f"at {answer.node.name} {answer.reason}")
                self.result.nearest[rule.name] = max(self.result.nearest[rule.name], near)
            elif isinstance(answer, Refusal) and answer.reason:
                why = Declined.of(rule.name, answer, node, self.run.faults.graph)
                declined.append((why, answer.report_even_if_superseded))

    def combine(self) -> None:
        """Let rules join matches into groups, and add the findings to the report."""
        last = next(iter(reversed(self.c.graph.nodes)))
        for rule in self.rules:
            with self.run.faults.guard("joining matches of the graph that ends at", last, rule):
                left = [m for m in self.matches if self.run.faults.is_left(rule.name, m.name)]
                free = [m for m in self.matches if m not in left] if left else self.matches
                with self.run.faults.only_reading(rule, self.c.graph):
                    joined = rule.combine(self.c, list(free))
                joined = _combined(rule, free, joined)
                self.matches = [*(one for one in joined if isinstance(one, Match)), *left]
                self.result.declined += [
                    Declined.of(rule.name, one, one.node, self.run.faults.graph)
                    for one in joined if isinstance(one, Refusal)
                ]  # fmt: skip
        position = self.c.effects.position
        self.matches.sort(key=lambda m: position[m.node])
        for match in self.matches:
            match.graph, match.length = self.run.faults.graph, _terms(self.c, match.nodes)
        matches_are_apart(self)

    def lay_out(self) -> None:
        """Give every tensor between calls a layout; built-in rules only."""
        self.result.matches += self.matches
        if self.built_in:
            assign_layouts(self.c, self.matches)
            self.result.transposes_before += count_transposes(self.c)
            self.result.opportunities += opportunities(self.c, self.taken)

    def emit(self) -> None:
        """Change the graph once, and erase nodes without readers; set `dropped` if a place
        failed."""
        c = self.c
        read = {node for node in c.graph.nodes if node.users}
        self.editor = Editor(c, value_key(self.module.graph), self.run.options, self.taken)
        by_name = {rule.name: rule for rule in self.rules}
        for match in sorted(self.matches, key=lambda match: c.effects.position[match.node]):
            self._emit_one(match, by_name[match.rule])
            if self.dropped:
                return
        self.editor.erase(self.taken.union(self.editor.added), read)
        if self.built_in:
            sweep(c)
            self.result.transposes_after += count_transposes(c)

    def lint(self) -> None:
        """Lint the graph and keep its values for the next rules; BrokenRuleError for a user's."""
        try:
            self.module.graph.lint()
        except RuntimeError as error:
            if self.built_in:
                raise
            raise broken_rule(self.rules[0].name, "graph", error) from error
        self.values = {n: v for n, v in self.c.values.items() if n.graph is self.module.graph}

    def _emit_one(self, match: Match, rule: Rule) -> None:
        """Let a rule emit what replaces its match; set `dropped` where it fails."""
        editor, call = self.editor, match.data
        editor.begin(match.node)
        before = len(editor.added)
        results = call.results() if isinstance(call, Call) else ()
        finals = [one.final for one in results] or [match.node]
        try:
            new = rule.rewrite(self.c, match, editor)
            if not isinstance(new, fx.Node):
                said = f"rewrite returned {new!r}; return the node that takes the match's place"
                raise TypeError(said)
            editor.replace(match.node, new)
            match.emitted = tuple((old.name, editor.replaced[old].name) for old in finals)
            match.added = tuple(node.name for node in editor.added[before:])
            if results:
                layouts = dict.fromkeys(one.out_layout for one in results)
                match.info |= {"x_layout": call.x_layout, "out_layout": ",".join(layouts)}
            return
        except NotEmittedError as error:
            (why,) = error.args
            declined = Declined.of(rule.name, why, match.node, self.run.faults.graph)
            self.run.result.declined.append(declined)  # that of this attempt is discarded
        except Exception as error:  # kept, or raised again
            self.run.faults.keep(error, "emitting", match.node, rule)
        self.dropped = True
        # the nodes at which the next attempt would meet a match
        self.run.faults.leave(rule.name, match.name, *(one.name for one in finals))


def _terms(c: Canonical, nodes: frozenset[fx.Node]) -> int:
    """Return how many terms the products of some nodes sum up, one product after the other."""
    total = 0
    for _, form in (product for node in nodes for product in products_at(c, node)):
        labelled = zip(form.lhs_labels, c.sizes(form.lhs), strict=False)
        summed = (size for label, size in labelled if label not in form.out_labels)
        total += sum(map(tokens_to_judge, summed))
    return total


def _combined(rule: Rule, given: list[Match], joined: Any) -> list[Match | Refusal]:
    """Return the result of a rule's combine; raise TypeError for what is no match of the rule."""
    kinds = (Match, Refusal)
    if not isinstance(joined, (list, tuple)) or not all(isinstance(m, kinds) for m in joined):
        raise TypeError(f"combine returned {joined!r}; return a list of matches")
    known = set(map(id, given))
    for match in joined:
        if id(match) not in known:
            _checked(rule, match, "combine")
    return list(joined)


def _checked(rule: Rule, answer: Any, method: str = "check") -> Match | Refusal | None:
    """Return the result of a rule's check; raise TypeError for a wrong type."""
    if isinstance(answer, Match) and answer.rule != rule.name:
        raise TypeError(f"{method} returned a match of rule {answer.rule!r}; pass rule=self.name")
    if answer is not None and not isinstance(answer, (Match, Refusal)):
        raise TypeError(f"check returned {answer!r}; return a Match, a Refusal, or None for no")
    return answer


def matches_are_apart(attempt: Attempt) -> None:
    """No two matches take over the same node; constants may be shared."""
    c = attempt.c
    owners: dict[fx.Node, Any] = {}
    for match in attempt.matches:
        for node in moving(c, match.nodes):
            other = owners.setdefault(node, match)
            if other is not match:
                both = f"{match} and {other} both take over node {node.name}"
                if not attempt.built_in:
                    raise broken_rule(attempt.rules[0].name, node.name, both)
                raise ValueError(both)


def _dump(folder: Path, step: str, attempt: Attempt) -> None:
    """Write `<number>_<path of the graph>_<step>.py` behind the files of the folder: what was found
    as comments, then the code of the graph."""
    entries = [str(match) for match in attempt.matches]
    if step == "read":
        entries += [f"{key.name}: {form}" for key, form in attempt.c.forms.items()]
    calls = [match.data for match in attempt.matches if isinstance(match.data, Call)]
    results = (one for call in calls for one in call.results())
    entries += [f"{one.final.name}: {one.out_layout}" for one in results]
    entries += [f"declined: {one}" for one in attempt.result.declined]
    lines = [f"# {line}" for line in "\n".join([f"after {step}", *entries]).splitlines()]
    code = attempt.module.graph.python_code("self").src.strip()
    folder.mkdir(parents=True, exist_ok=True)
    words = (f"{len([*folder.iterdir()]):03d}", attempt.run.faults.graph, step)
    file = folder / ("_".join(filter(None, words)) + ".py")
    file.write_text("\n".join([*lines, "", code, ""]), encoding="utf-8")


RULES: tuple[Rule, ...] = (
    MLA(),
    Experts(),
    Adapters(),
    GatedMLP(),
    GatedMLPUp(),
    CorrectedMLP(),
    LoRA(),
    SharedU(),
    Adapter(),
    LowRankChain(),
    StaticFP8(),
    Quantized(),
    SharedX(),
    Attention(),
    NormInside(),
    ResidualInside(),
)
"""The built-in rules, in the order in which they are asked."""


PASSES: tuple[Callable[[Attempt], None], ...] = (
    Attempt.read,
    Attempt.match,
    Attempt.combine,
    Attempt.lay_out,
    Attempt.emit,
    Attempt.lint,
)
"""The steps of a rewrite, in order: the built-in rules at once, then each rule of a user."""


def apply(attempt: Attempt, rules: tuple[Rule, ...]) -> bool:
    """Rewrite by built-in rules, or by one of a user; False when a place had to be dropped.

    Raises BrokenRuleError for a user's rule that fails or breaks the graph.
    """
    attempt.rules, folder = rules, setting("NMM_DUMP")
    for step in PASSES:
        step(attempt)
        if attempt.dropped:
            return False
        if folder is not None:
            _dump(Path(folder).expanduser(), step.__name__, attempt)
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
    order = rule_order(options, rules)
    result = RewriteResult(graph_module, [], [], original=graph_module, target=options.target)
    work = _Run(options, order, result)
    result.graph_module = work.graph(graph_module, example_inputs)
    for (graph, text), (rule, node) in work.faults.found.items():
        why = Refusal("internal", f"a fault in nmm_compiler, {text}", node)
        result.declined.append(Declined.of(rule or "reading", why, node, graph))
    if work.faults.found:
        work.faults.warn(fault_command(graph_module, example_inputs, options.target))
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
    module, inputs = to_graph(model_or_graph, example_inputs)
    settings = Options.make(options)
    return run(
        module, inputs, dataclasses.replace(settings, verify=verify or settings.verify), rules
    )


def explain(
    model_or_graph: Any,
    example_inputs: Any = None,
    *,
    options: Options | Mapping[str, Any] | None = None,
    rules: Sequence[Rule | str] | None = None,
) -> RewriteResult:
    """Say what `rewrite` would do in every graph of a model, without doing it.

    The model runs once, under torch.compile with a backend that only collects. A GraphModule or
    an ExportedProgram is read as it is.

    Args:
        model_or_graph: as for `rewrite`.
        example_inputs: as for `rewrite`.
        options: as for `rewrite`.
        rules: as for `rewrite`.

    Returns:
        What matches, what is left alone and why, and what could be factorized; of several graphs
        together, with `results` for each.

    Raises:
        ModelError, BrokenRuleError, UnknownNameError: as `rewrite`.
    """
    settings = Options.make(options)
    is_graph = isinstance(model_or_graph, (fx.GraphModule, torch.export.ExportedProgram))
    if is_graph or not callable(model_or_graph):
        return rewrite(model_or_graph, example_inputs, options=settings, rules=rules)
    graphs = all_graphs(model_or_graph, *arguments(example_inputs))
    results = [run(module, inputs, settings, rules) for module, inputs in graphs]
    if len(results) == 1:
        return results[0]
    whole = RewriteResult(None, [], [], target=settings.target, results=results)
    for result in results:
        whole.add(result)
    return whole


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
    objects = [entry.name for entry in given if isinstance(entry, Rule)]
    order: list[Rule] = []
    for entry in given:
        named = known.get(entry) if isinstance(entry, str) else entry
        if entry == "...":
            order += (rule for rule in RULES if rule.name not in (*given, *objects))
        elif isinstance(named, Rule) and objects.count(named.name) <= 1:
            order.append(named)
        elif isinstance(entry, str):
            raise UnknownNameError("rule", entry, [*known, "..."])
        else:
            wanted = (
                "names of built-in rules, or rules as objects, MyRule(), each with its own name"
            )
            raise OptionTypeError("rules", entry, wanted)
    names = {rule.name for rule in order} | set(known)
    for name in options.disable:
        if name not in names:
            raise UnknownNameError("rule", name, sorted(names))
    return tuple(rule for rule in order if rule.name not in options.disable)


def copy_graph(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return a module with a copy of the graph, which shares parameters, submodules and what else
    was set on the module, and the copy of each node.

    `recompile` writes its code, after the passes; or when it is first called, in a module of
    Dynamo's class, which the copy keeps.
    """
    graph = fx.Graph(tracer_cls=getattr(module.graph, "_tracer_cls", None))
    new: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        new[node] = twin = graph.create_node(
            node.op, node.target, name=node.name, type_expr=node.type
        )
        # Set afterwards, since `create_node` searches all arguments for a reason to warn.
        twin.args = fx.map_arg(node.args, new.__getitem__)
        if node.kwargs:
            twin.kwargs = fx.map_arg(node.kwargs, new.__getitem__)
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
        twin.meta.update(node.meta)
    graph._codegen = module.graph._codegen
    # Setting a module's graph compiles its code, which the passes do once at their end. So the
    # module is made without a call of its class, and then gets what the given one holds.
    copied: fx.GraphModule = fx.GraphModule.__new__(type(module))
    type(copied).__name__ = type(module).__name__
    vars(copied).update(
        (name, copy.copy(value) if isinstance(value, (dict, list)) else value)
        for name, value in vars(module).items()
    )
    copied._graph = graph
    graph.owning_module = copied
    return copied, new


# With more faults than this a graph in which a place had to be dropped is not rewritten.
_MOST_FAULTS = 8


class _Run:
    """One rewrite: the state of all its graphs. A graph that occurs twice is rewritten once."""

    def __init__(self, options: Options, order: tuple[Rule, ...], result: RewriteResult) -> None:
        self.options, self.result = options, result
        # Runs of built-in rules, rewritten together, and users' rules alone.
        alike = itertools.groupby(order, lambda rule: "built in" if rule in RULES else rule.name)
        self.segments = [tuple(rules) for _, rules in alike]
        self.faults = Faults(options.strict, RULES)
        self.done: dict[int, fx.GraphModule] = {}

    def graph(
        self,
        original: fx.GraphModule,
        example_inputs: Sequence[Any] | None,
        path: str = "",
        stored: Mapping[str, bool] | None = None,
    ) -> fx.GraphModule:
        """Return a rewritten copy of a graph and of the graphs in it.

        Each attempt starts from a fresh copy. After an attempt that dropped a place, the next one
        leaves that place alone. After a fault without a place, or many, the graph is not rewritten.
        """
        if id(original) in self.done:
            return self.done[id(original)]
        values: dict[fx.Node, Any] | None = None
        children: dict[str, fx.GraphModule] = {}
        last = next(iter(reversed(original.graph.nodes)))
        self.faults.graph = path
        with self.faults.guard("reading the graph that ends at", last):
            read = collect_values(original, example_inputs)
            for name, (child, inputs, kinds) in _children(original, read, stored).items():
                children[name] = self.graph(child, inputs, f"{path}.{name}".lstrip("."), kinds)
            values = read
        self.faults.graph = path
        whole = False
        while not whole:
            module, new = copy_graph(original)
            result = RewriteResult(module, [], [])
            for name, child in children.items():
                setattr(module, name, child)
            if values is None:
                break
            own = {new[node]: value for node, value in values.items()}
            attempt, values = Attempt(module, own, self, stored, example_inputs, result), None
            with self.faults.guard("rewriting the graph that ends at", last):
                whole = all(apply(attempt, rules) for rules in self.segments)
                values = read if len(self.faults.found) <= _MOST_FAULTS else None
        self.result.add(result)
        module.recompile()
        self.done[id(original)] = module
        return module


def _children(
    module: fx.GraphModule, values: dict[fx.Node, Any], stored: Mapping[str, bool] | None
) -> dict[str, tuple[fx.GraphModule, list[Any] | None, dict[str, bool]]]:
    """Return the graphs that nodes of this graph run, by name: graph, inputs, which are stored.

    A higher-order operator passes its last arguments to each of its graphs, in order.
    """
    bodies = {
        name: child for name, child in module.named_children()
        if isinstance(child, fx.GraphModule) and name != "_guards_fn"
    }  # fmt: skip
    if not bodies:
        return {}
    outer = read_graph(module, values, stored)
    children: dict[str, Any] = {}
    left: set[str] = set()
    for node in module.graph.nodes:
        graphs = [n for n in node.all_input_nodes if n.op == "get_attr" and n.target in bodies]
        flat = [n for n in node.all_input_nodes if n not in graphs]
        called = [node] if node.op == "call_module" else graphs
        for name in (str(one.target) for one in called if one.target in bodies):
            holders = [str(n.target) for n in bodies[name].graph.find_nodes(op="placeholder")]
            given = flat[len(flat) - len(holders) :] if len(holders) <= len(flat) else None
            kinds = {h: a in outer.constant for h, a in zip(holders, given or (), strict=False)}
            inputs = None if given is None else [values.get(a) for a in given]
            children.setdefault(name, (bodies[name], inputs, kinds))
            if node in outer.effects.transformed:
                left.add(name)
    return {name: child for name, child in children.items() if name not in left}
