"""One attempt at a graph, step by step. After a fault, the next attempt leaves its place alone.

A half-made emission is never repaired: the attempt's copy of the graph is discarded, and the next
attempt skips the place that failed. After a fault without a single place, the graph is not
rewritten.

The checks after each step raise ValueError with what is wrong, which is such a fault.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import broken_rule
from nmm_compiler.options import Options
from nmm_compiler.passes.chains.prices import TYPICAL_TOKENS
from nmm_compiler.passes.chains.safety import Refusal, in_transform
from nmm_compiler.passes.emit.calls import Call
from nmm_compiler.passes.emit.editor import Editor, NotEmittedError
from nmm_compiler.passes.emit.strides import settle_strides
from nmm_compiler.passes.faults import Faults
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Leaf, Product
from nmm_compiler.passes.graph.effects import is_pure
from nmm_compiler.passes.graph.metadata import value_key
from nmm_compiler.passes.graph.read_graph import read_added, read_graph
from nmm_compiler.passes.layout import LAYOUT, Pointwise, assign_layouts, count_transposes
from nmm_compiler.passes.opportunities import opportunities
from nmm_compiler.passes.result import RewriteResult, RuleCount
from nmm_compiler.passes.rules.base import Declined, Match, Rule
from nmm_compiler.passes.rules.inside_calls import kernel_call


@dataclasses.dataclass
class Attempt:
    """A copy of a graph that is being rewritten; `result` collects the findings.

    path: of the graph among the graphs of higher-order operators. sources: the values of its
    placeholders, for such a graph. odd: inputs that are tensor subclasses. refused: what this and
    earlier attempts could not emit. rules: those of this attempt; later: rules of a user that run
    after them. The methods are the steps of `pipeline.PASSES`; the fields after `later` pass their
    results on. findings: of the last step, as lines for a dump; they are made when it reads them.
    """

    module: fx.GraphModule
    values: dict[fx.Node, Any]
    options: Options
    faults: Faults
    path: str
    sources: dict[str, str] | None
    odd: dict[fx.Node, type[torch.Tensor]]
    result: RewriteResult
    refused: list[Declined]
    rules: tuple[Rule, ...] = ()
    later: tuple[Rule, ...] = ()
    c: Canonical = dataclasses.field(init=False)
    matches: list[Match] = dataclasses.field(default_factory=list)
    turned: list[Pointwise] = dataclasses.field(default_factory=list)
    editor: Editor = dataclasses.field(init=False)
    dropped: bool = False
    findings: Iterable[str] = ()

    @property
    def built_in(self) -> bool:
        """Return whether the rules at work are the package's own."""
        return self.faults.is_built_in(self.rules[0])

    @property
    def makes_calls(self) -> bool:
        """Return whether the rules at work are those of the package that make calls."""
        return self.built_in and not self.rules[0].after_calls

    def has_calls_to_change(self) -> bool:
        """Return whether rules that read calls have any to read."""
        return self.options.norms and any(map(kernel_call, self.module.graph.nodes))

    def read(self) -> None:
        """Read the graph into canonical forms."""
        self.c = read_graph(self.module, self.values, self.sources, self.options, self.faults)
        for node, kind in self.odd.items():
            self.c.note_subclass(node, kind)
        self.findings = (f"{key.name}: {form}" for key, form in self.c.forms.items())

    def match(self) -> None:
        """Ask each rule, in order, at each node, last node first; the first match stays."""
        search = _Search(self.c)
        for rule in self.rules:
            count = self.count(rule)
            with self.faults.only_reading(rule, self.c.graph):
                for node in search.places(rule):
                    if node not in search.taken:
                        try:
                            search.ask(rule, node, count)
                        except Exception as error:  # kept, or raised again
                            self.faults.keep(error, "matching", node, rule)
        for rule in self.later:
            with self.faults.only_reading(rule, self.c.graph):
                search.ask_who_took(rule, self.count(rule))
        self.matches = search.matches
        names = {node.name for node in search.taken}
        declined = [d for d in search.declined if d.at not in names or d in search.kept]
        graph = self.path.rstrip(".")
        self.result.declined += [dataclasses.replace(d, graph=graph) for d in declined]
        lines = (f"declined: {d}" for d in declined)
        self.findings = itertools.chain(map(str, self.matches), lines)

    def count(self, rule: Rule) -> RuleCount:
        """Return the count of a rule; those of the package are not kept."""
        count = RuleCount(rule.name)
        built_in = self.faults.is_built_in(rule)
        return count if built_in else self.result.rules.setdefault(rule.name, count)

    def combine(self) -> None:
        """Let rules join matches into groups, and add the findings to the report."""
        last = next(iter(reversed(self.c.graph.nodes)))
        for rule in self.rules:
            with self.faults.guard("joining matches of the graph that ends at", last, rule):
                left = [m for m in self.matches if self.faults.is_dropped(rule.name, m.name)]
                free = [m for m in self.matches if m not in left] if left else self.matches
                with self.faults.only_reading(rule, self.c.graph):
                    joined = rule.combine(self.c, list(free))
                self.matches = [*_combined(rule, free, joined), *left]
        position = self.c.effects.position
        self.matches.sort(key=lambda m: position[m.node])
        for match in self.matches:
            match.graph, match.length = self.path.rstrip("."), _terms(self.c, match.nodes)
        self.findings = map(str, self.matches)

    def lay_out(self) -> None:
        """Give every tensor between calls a layout; built-in rules only."""
        self.turned, self.findings = [], ()
        if self.makes_calls:
            choices, self.turned = assign_layouts(self.c, self.matches)
            self.result.layouts += choices
            self.result.transposes_before += count_transposes(self.c)
            self.findings = map(str, choices)
        self.result.matches += self.matches
        if self.makes_calls:
            taken = {n for match in self.matches for n in match.nodes}
            self.result.opportunities += opportunities(self.c, taken)

    def emit(self) -> None:
        """Change the graph once, and erase nodes without readers; set `dropped` if a place
        failed."""
        c = self.c
        read = {n for n in c.graph.nodes if n.users and is_pure(n, c.effects)}
        self.editor = Editor(c, value_key(self.module.graph), self.options)
        self.dropped = not self._emit_all(c, self.editor, self.rules, [*self.matches, *self.turned])
        if self.dropped:
            return
        taken = {n for match in self.matches for n in match.nodes}
        taken |= {operation.node for operation in self.turned}
        self.editor.erase(taken | read | set(self.editor.added))
        new = {old.name: one.name for old, one in self.editor.replaced.items()}
        for match in self.result.matches:
            if match not in self.matches:  # an earlier one, whose call may have been replaced
                match.emitted = tuple((old, new.get(made, made)) for old, made in match.emitted)
        replaced = self.editor.replaced.items()
        self.findings = (f"{old.name} -> {new.name}" for old, new in replaced)

    def settle_strides(self) -> None:
        """Restore the original strides of results whose readers depend on strides."""
        restrided = [node.name for node in self.editor.restrided]
        graph = self.path.rstrip(".")
        for node in settle_strides(self.editor):
            terms = _terms(self.c, frozenset((node,)))
            if terms:
                self.result.reordered.append((graph, node.name, terms))
        self.findings = restrided
        if self.makes_calls:
            read_added(self.c)
            self.result.transposes_after += count_transposes(self.c)

    def lint(self) -> None:
        """Lint the graph and keep its values for the next rules; BrokenRuleError for a user's."""
        try:
            self.module.graph.lint()
        except RuntimeError as error:
            if self.built_in:
                raise
            raise broken_rule(self.rules[0].name, "graph", error) from error
        self.values = {n: v for n, v in self.c.values.items() if n.graph is self.module.graph}
        self.findings = ()

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
                done = True
            if not done:
                self.faults.drop(*_place(step))
                return False
        return True


def _place(step: Match | Pointwise) -> tuple[str, ...]:
    """Return the rule of a step and the names of the nodes at which the next attempt would meet
    it."""
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
    before = len(editor.added)
    new = rule.rewrite(c, match, editor)
    if not isinstance(call, Call) or not call.unread:  # else it has no reader in this order
        _check_replacement(c, match.node, new)
        editor.replace(match.node, new)
    finals = [one.final for one in call.results()] if isinstance(call, Call) else [match.node]
    replaced = editor.replaced
    match.added = tuple(node.name for node in editor.added[before:])
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


class _Search:
    """The matches so far, and the nodes that they take over."""

    def __init__(self, c: Canonical) -> None:
        self.c = c
        self.taken: dict[fx.Node, str] = {}
        self.matches: list[Match] = []
        self.declined: list[Declined] = []
        self.kept: list[Declined] = []
        self._nodes = list(reversed(c.graph.nodes))
        self._by_form: dict[type, list[int]] = {}
        for index, node in enumerate(self._nodes):
            for key in (node, *c.virtuals.get(node, ())):
                self._by_form.setdefault(type(c.forms.get(key)), []).append(index)

    def places(self, rule: Rule) -> list[fx.Node]:
        """Return the nodes at which a match of a rule may end, last first."""
        if rule.ends_at is None:
            return self._nodes
        forms = (form for form in self._by_form if issubclass(form, rule.ends_at))
        found = {index for form in forms for index in self._by_form[form]}
        return [self._nodes[index] for index in sorted(found)]

    def ask(self, rule: Rule, node: fx.Node, count: RuleCount) -> None:
        """Keep the first match of a rule at a node, or why there is none."""
        c = self.c
        for candidate in rule.pattern(c, node):
            found = _checked(rule, rule.check(c, candidate))
            if found is None:
                continue
            if isinstance(found, Refusal) and found.agreed:
                near = (found.agreed, f"at {found.node.name} {found.reason}")
                count.nearest = max(count.nearest, near)
                continue
            if isinstance(found, Refusal):
                count.refused += 1
                if found.reason:
                    self.declined.append(Declined.of(rule.name, found, node))
                    self.kept += self.declined[-1:] if found.report_even_if_superseded else []
                continue
            if c.faults.is_dropped(rule.name, found.name):
                continue
            leaves = (n for n in found.nodes if c.is_weight(n) or isinstance(c.forms.get(n), Leaf))
            moving = found.nodes - set(leaves)
            places = [c.effects.position[n] for n in (*moving, found.node)]
            inside = c.effects.crossed_transform(min(places), max(places))
            if found.rewritten and inside:
                self.declined.append(Declined.of(rule.name, in_transform(node), node))
                count.refused += 1
                continue
            if found.rewritten and moving & self.taken.keys():
                count.lost[self._taker(moving)] += 1
                continue
            if found.rewritten:
                self.taken |= dict.fromkeys(moving, rule.name)
            self.matches.append(found)
            count.matched += 1
            return

    def _taker(self, nodes: Collection[fx.Node]) -> str:
        return next(self.taken[n] for n in self.c.graph.nodes if n in nodes and n in self.taken)

    def ask_who_took(self, rule: Rule, count: RuleCount) -> None:
        """Count the places of a later rule that this attempt's rules have taken.

        The later rule will get another graph than this one, so an exception here is only told.
        """
        for node in self.places(rule):
            try:
                found = [rule.check(self.c, candidate) for candidate in rule.pattern(self.c, node)]
            except Exception as error:  # a rule may be made for the rewritten graph alone
                why = f"on the graph as it came it raised {type(error).__name__}: {error}"
                count.nearest = max(count.nearest, (0, why))
                return
            for match in (one for one in found if isinstance(one, Match)):
                if match.nodes & self.taken.keys():
                    count.lost[self._taker(match.nodes)] += 1
                    break


def _combined(rule: Rule, given: list[Match], joined: Any) -> list[Match]:
    """Return the result of a rule's combine; raise TypeError for what is no match of the rule."""
    if not isinstance(joined, (list, tuple)) or not all(isinstance(m, Match) for m in joined):
        raise TypeError(f"combine returned {joined!r}; return a list of matches")
    for match in joined:
        if not any(match is known for known in given):
            _checked(rule, match, "combine")
    return list(joined)


def _checked(rule: Rule, found: Any, method: str = "check") -> Match | Refusal | None:
    """Return the result of a rule's check; raise TypeError for a wrong type."""
    if isinstance(found, Match) and found.rule != rule.name:
        raise TypeError(f"{method} returned a match of rule {found.rule!r}; pass rule=self.name")
    if found is not None and not isinstance(found, (Match, Refusal)):
        raise TypeError(f"check returned {found!r}; return a Match, a Refusal, or None for no")
    return found


def every_node_is_read(attempt: Attempt) -> None:
    """Every node has a form, or is a view of a value that has one."""
    c = attempt.c
    for node in c.graph.nodes:
        if node not in c.views or c.views[node][0] not in c.forms:
            raise ValueError(f"node {node.name} has neither a form nor a view")


def matches_are_apart(attempt: Attempt) -> None:
    """No two matches take over the same node; constants may be shared."""
    c = attempt.c
    owners: dict[fx.Node, Any] = {}
    for match in attempt.matches:
        for node in match.nodes if match.rewritten else ():
            if c.is_weight(node) or isinstance(c.forms.get(node), Leaf):
                continue
            other = owners.setdefault(node, match)
            if other is not match:
                both = f"{match} and {other} both take over node {node.name}"
                if not attempt.built_in:
                    raise broken_rule(attempt.rules[0].name, node.name, both)
                raise ValueError(both)


def _calls(attempt: Attempt) -> Iterator[Call]:
    for match in attempt.matches:
        if match.rewritten and isinstance(match.data, Call):
            yield match.data


def layouts_agree(attempt: Attempt) -> None:
    """A call that reads [features, tokens] gets such a result; only those have transposed
    readers."""
    results: list[Call | Pointwise] = [r for call in _calls(attempt) for r in call.results()]
    results += attempt.turned
    made: dict[Any, Call | Pointwise] = {one.final: one for one in results}
    for one in results:
        if one.out_layout == "row" and (one.direct or one.unread):
            raise ValueError(f"{one.final.name} is [tokens, features] and read as the transpose")
    for call in _calls(attempt):
        if not call.is_whole and (call.out_layout != "row" or call.direct or call.unread):
            raise ValueError(f"{call.final.name} is turned, and changed outside of its kernel")
        source = made.get(attempt.c.base(call.source.key)[0])
        given = call.source.is_col() or (source is not None and source.out_layout == "col")
        if call.x_layout == "col" and not given:
            raise ValueError(f"{call.final.name} reads x as the transpose that nothing makes")


def values_agree(attempt: Attempt) -> None:
    """The replacement of a value has its dtype and rank, and its sizes where both are numbers."""
    values = attempt.c.values
    for old, new in attempt.editor.replaced.items():
        was, now = values.get(old), values.get(new)
        if was is None or now is None or not hasattr(was, "dtype"):
            continue
        pairs = zip(views.sizes_of(was), views.sizes_of(now), strict=False)
        same = all(a == b for a, b in pairs if views.is_static(a) and views.is_static(b))
        if was.dtype != now.dtype or was.dim() != now.dim() or not same:
            raise ValueError(
                f"{new.name} is {now.dtype} {list(now.shape)} in place of {old.name}, "
                f"{was.dtype} {list(was.shape)}"
            )


def added_nodes_are_read(attempt: Attempt) -> None:
    """Every node that a rewrite added has a value and a reader."""
    for node in attempt.editor.added:
        if node.graph is not attempt.module.graph or node._erased:
            continue
        if node not in attempt.c.values:
            raise ValueError(f"the new node {node.name} has no value")
        if not node.users and attempt.built_in:
            raise ValueError(f"nothing reads the new node {node.name}")
