"""One attempt at a graph: match, lay out, emit. A place that fails is dropped, and tried without.

A half-made emission is never mended in place: the attempt's copy of the graph is thrown away, and
the next attempt leaves alone what failed. `careful` attempts, which follow a fault that no single
place can be blamed for, check the graph after each emission and keep every stride where it stands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from nmm_compiler.errors import BrokenRuleError
from nmm_compiler.options import Options
from nmm_compiler.passes.chains.linear_map import Refusal
from nmm_compiler.passes.chains.product_order import TYPICAL_TOKENS
from nmm_compiler.passes.chains.safety import in_transform
from nmm_compiler.passes.emit.editor import Editor, NotEmittedError
from nmm_compiler.passes.emit.fused_calls import Call
from nmm_compiler.passes.emit.strides import settle_strides
from nmm_compiler.passes.faults import Faults
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Leaf, Product
from nmm_compiler.passes.graph.metadata import value_key
from nmm_compiler.passes.graph.read_graph import read_added, read_graph
from nmm_compiler.passes.layout.assignment import assign_layouts, count_transposes
from nmm_compiler.passes.layout.regions import LAYOUT, Pointwise
from nmm_compiler.passes.multiplied_back import multiplied_back
from nmm_compiler.passes.opportunities import opportunities
from nmm_compiler.passes.result import RewriteResult
from nmm_compiler.passes.rules.base import Declined, Match, Rule


@dataclasses.dataclass
class Attempt:
    """A copy of a graph being rewritten; result collects what is found in it.

    path: of the graph among the graphs of higher-order operators. sources: what its placeholders
    hold, for such a graph. odd: inputs that are tensor subclasses. mode: "quick" or "careful".
    refused: what this and earlier attempts could not emit.
    """

    module: fx.GraphModule
    values: dict[fx.Node, Any]
    options: Options
    faults: Faults
    path: str
    sources: dict[str, str] | None
    odd: dict[fx.Node, str]
    mode: str
    result: RewriteResult
    refused: list[Declined]

    def apply(self, rules: tuple[Rule, ...]) -> bool:
        """Rewrite by built-in rules, or by one of a user; False when a place had to be dropped.

        Raises BrokenRuleError for a user's rule that fails or breaks the graph.
        """
        built_in = self.faults.is_built_in(rules[0])
        c = read_graph(self.module, self.values, self.sources, self.options, self.faults)
        c.subclasses.update(self.odd)
        matches, declined = find_matches(c, rules)
        graph = self.path.rstrip(".")
        self.result.declined += [dataclasses.replace(d, graph=graph) for d in declined]
        turned: list[Pointwise] = []
        if built_in:
            layouts = assign_layouts(c, matches)
            self.result.layouts += layouts.choices
            turned = layouts.turned
            self.result.transposes_before += count_transposes(c)
        for match in matches:
            match.graph, match.length = graph, _terms(c, match.nodes)
        self.result.matches += matches
        taken = {n for match in matches for n in match.nodes}
        if built_in:
            self.result.opportunities += opportunities(c, taken)
            self._note_multiplied_back(c, taken, graph)
        seen = {n for n in c.sources if isinstance(n, fx.Node) and n.users}
        editor = Editor(c, value_key(self.module.graph), self.options)
        editor.careful = self.mode == "careful"
        if not self._emit_all(c, editor, rules, [*matches, *turned]):
            return False
        taken |= {operation.node for operation in turned}
        editor.erase(taken | seen | set(editor.added))
        settle_strides(editor)
        if built_in:
            read_added(c)
            self.result.transposes_after += count_transposes(c)
        try:
            self.module.graph.lint()
        except RuntimeError as error:
            if built_in:
                raise
            raise BrokenRuleError(rules[0].name, "graph", error) from error
        self.values = {n: v for n, v in c.values.items() if n.graph is self.module.graph}
        return True

    def _note_multiplied_back(self, c: Canonical, taken: set[fx.Node], graph: str) -> None:
        """Say where factors are multiplied back; of their use there is nothing else to say."""
        with self.faults.guard("looking for products of factors", next(iter(c.graph.nodes))):
            found = [dataclasses.replace(d, graph=graph) for d in multiplied_back(c, taken)]
            told = {(d.at, graph) for d in found}
            kept = [
                d
                for d in self.result.declined
                if d.code != "weight_computed" or (d.at, d.graph) not in told
            ]
            self.result.declined[:] = [*kept, *found]

    def _emit_all(
        self,
        c: Canonical,
        editor: Editor,
        rules: tuple[Rule, ...],
        steps: list[Match | Pointwise],
    ) -> bool:
        by_name = {rule.name: rule for rule in rules}
        position = c.effects.position
        for step in sorted(steps, key=lambda step: position[step.node]):
            if isinstance(step, Match) and not step.rewritten:
                continue
            editor.at = step.node
            rule = LAYOUT if isinstance(step, Pointwise) else by_name[step.rule]
            done = False
            with self.faults.guard("emitting", step.node, rule):
                try:
                    if isinstance(step, Pointwise):
                        step.replace(c, editor)
                    else:
                        _emit(c, editor, step, by_name[step.rule])
                except NotEmittedError as error:
                    place = _place(step)
                    why = Declined.of(place[0], error.refusal, step.node)
                    self.refused.append(dataclasses.replace(why, graph=self.path.rstrip(".")))
                    self.faults.refuse(*place)
                    return False
                if editor.careful:
                    self.module.graph.lint()
                done = True
            if not done:
                self.faults.drop(*_place(step))
                return False
        return True


def _place(step: Match | Pointwise) -> tuple[str, ...]:
    """Return the rule of a step and the names of the nodes at which it would be met again."""
    if isinstance(step, Pointwise):
        return (LAYOUT, step.node.name)
    call = step.data
    results = call.results() if isinstance(call, Call) else ()
    return (step.rule, step.name, *(one.final.name for one in results))


def _terms(c: Canonical, nodes: frozenset[fx.Node]) -> int:
    """Return how many terms the products of some nodes sum up, one product after the other."""
    total = 0
    for key in (key for node in nodes for key in (node, *c.virtuals.get(node, ()))):
        form = c.forms.get(key)
        if isinstance(form, Product):
            labelled = zip(form.lhs_labels, c.shape(form.lhs) or (), strict=False)
            sizes = [size for label, size in labelled if label not in form.out_labels]
            total += sum(size if isinstance(size, int) else TYPICAL_TOKENS for size in sizes)
    return total


def _emit(c: Canonical, editor: Editor, match: Match, rule: Rule) -> None:
    """Let a rule emit what replaces its match."""
    call = match.data
    new = rule.rewrite(c, match, editor)
    if not isinstance(call, Call) or not call.unread:  # else nothing reads it in this order
        _check_replacement(c, match.node, new)
        editor.replace(match.node, new)
    finals = [one.final for one in call.results()] if isinstance(call, Call) else [match.node]
    replaced = editor.replaced
    match.emitted = tuple((old.name, replaced[old].name) for old in finals if old in replaced)
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
    search = _Search(c)
    nodes = list(c.graph.nodes)
    for rule in rules:
        for node in reversed(nodes):
            if node not in search.taken:
                with c.faults.guard("matching", node, rule):
                    search.ask(rule, node)
    matches = search.matches
    for rule in rules:
        with c.faults.guard("joining matches of the graph that ends at", nodes[-1], rule):
            left = [m for m in matches if c.faults.is_dropped(rule.name, m.name)]
            free = [m for m in matches if m not in left] if left else matches
            matches = [*rule.combine(c, free), *left]
    names = {node.name for node in search.taken}
    position = c.effects.position
    matches.sort(key=lambda m: position[m.node])
    return matches, [d for d in search.declined if d.at not in names or d in search.told]


class _Search:
    """What the rules have found so far, and the nodes that are taken by it."""

    def __init__(self, c: Canonical) -> None:
        self.c = c
        self.taken: set[fx.Node] = set()
        self.matches: list[Match] = []
        self.declined: list[Declined] = []
        self.told: list[Declined] = []

    def ask(self, rule: Rule, node: fx.Node) -> None:
        """Keep the first match of a rule at a node, or why there is none."""
        c = self.c
        for candidate in rule.pattern(c, node):
            found = _checked(rule, rule.check(c, candidate))
            if found is None:
                continue
            if isinstance(found, Refusal):
                if found.reason:
                    self.declined.append(Declined.of(rule.name, found, node))
                    self.told += self.declined[-1:] if found.told else []
                continue
            if c.faults.is_dropped(rule.name, found.name):
                continue
            moving = {n for n in found.nodes if not isinstance(c.forms.get(n), Leaf)}
            places = [c.effects.position[n] for n in (*moving, found.node)]
            inside = c.effects.crossed_transform(min(places), max(places))
            if found.rewritten and inside:
                self.declined.append(Declined.of(rule.name, in_transform(node), node))
                continue
            if found.rewritten and moving & self.taken:
                continue
            if found.rewritten:
                self.taken |= {n for n in moving if n not in c.constant}
            self.matches.append(found)
            return


def _checked(rule: Rule, found: Any) -> Match | Refusal | None:
    """Return what a rule's check returned; raise TypeError for what is no answer."""
    if isinstance(found, Match) and found.rule != rule.name:
        raise TypeError(f"check returned a match of rule {found.rule!r}; pass rule=self.name")
    if found is not None and not isinstance(found, (Match, Refusal)):
        raise TypeError(f"check returned {found!r}; return a Match, a Refusal, or None for no")
    return found
