"""The base of rules, their matches (`Match`) and their refusals (`Declined`)."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from nmm_compiler.codegen import choose
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.passes.chains.safety import REMEDIES, Refusal, call_ways, refuse, slower
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.records import Record


def module_path(node: fx.Node) -> str:
    """Return the path of the module that a node was traced from, as far as metadata says."""
    stack = node.meta.get("nn_module_stack")
    return _readable(str(list(stack.values())[-1][0])) if stack else ""


@functools.lru_cache(maxsize=1024)
def _readable(path: str) -> str:
    """Return Dynamo's path of a module as the model's attributes name it."""
    path = re.sub(r"L\['(self'|fn'|args'\]\[0)\]\.?", "", path)
    path = re.sub(r"(?:__dict__\['_modules'\]|\b_modules)\['(\w+)'\]", r"\1", path)
    return re.sub(r"(\w)\[['\"]?(\w+)['\"]?\]", r"\1.\2", path).strip(".")


def source_line(node: fx.Node) -> str:
    """Return "file:line" of the model's code that a node was traced from, "" where unknown."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return "{}:{}".format(*frames[-1]) if frames else ""


def common_path(nodes: Iterable[fx.Node]) -> str:
    """Return the path of the innermost module that all nodes with a path were traced from."""
    paths = [path.split(".") for path in map(module_path, nodes) if path]
    levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    return ".".join(level[0] for level in levels)


@dataclass(frozen=True)
class Declined(Record):
    """A place that looks like a rule's pattern and was left alone.

    code: a key of `REMEDIES`, or a user's own. reason: what prevents the match. node: the node that
    causes it, from `source`, a "file:line" of the model where the graph has one. remedy: what would
    have to change. at: the node where the pattern would have ended.
    """

    rule: str
    code: str
    reason: str
    node: str
    remedy: str
    at: str
    module: str = ""
    graph: str = ""
    source: str = ""

    @classmethod
    def of(cls, rule: str, refusal: Refusal, at: fx.Node, graph: str = "") -> Declined:
        """Return the refusal of a rule at a node of a graph."""
        blamed = refusal.node
        return cls(
            rule=rule,
            code=refusal.code,
            reason=refusal.reason,
            node=blamed.name,
            remedy=refusal.remedy or REMEDIES.get(refusal.code, ""),
            at=at.name,
            module=module_path(at) or module_path(blamed),
            graph=graph,
            source=source_line(blamed) or source_line(at),
        )

    def __str__(self) -> str:
        place = f"{self.node}, {self.source}" if self.source else self.node
        return f"{self.rule} at {self.at}: {self.reason} ({place}); {self.remedy}"


@dataclass(repr=False, eq=False)
class Match:
    """A place where a rule applies.

    rule and kind name it; node is the last node of the pattern, whose value the rewrite replaces;
    nodes are all that it replaces. data belongs to the rule. notes are remarks for the user
    (how weights are read). length is the number of terms of its
    contractions; emitted has, for each result, the name of the node that was replaced and of the
    one that took its place. added: names of the nodes that the rewrite added. Some of these may
    have gone since, as what takes the place of a result that is only read transposed.
    """

    rule: str
    node: fx.Node
    nodes: frozenset[fx.Node]
    kind: str = ""
    data: Any = None
    notes: tuple[str, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    graph: str = ""
    name: str = ""
    length: int = 0
    emitted: tuple[tuple[str, str], ...] = ()
    added: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.kind = self.kind or self.rule
        self.name = self.name or self.node.name
        self.module = self.module or common_path(self.nodes) or module_path(self.node)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "rule": self.rule,
            "kind": self.kind,
            "node": self.name,
            "nodes": sorted(n.name for n in self.nodes),
            "module": self.module,
            "graph": self.graph,
            "notes": list(self.notes),
            **self.info,
        }

    def __repr__(self) -> str:
        return f"<Match: {self} in {self.module}>" if self.module else f"<Match: {self}>"

    def __str__(self) -> str:
        shape = ", ".join(f"{k}={self.info[k]}" for k in ("m", "k", "r", "n") if k in self.info)
        return f"{self.kind} at {self.name}" + (f" ({shape})" if shape else "")


class Rule:
    """A rewrite rule: pattern, check, rewrite.

    pattern(graph, node) proposes candidates that end at a node, cheaply: itself by default.
    check(graph, candidate) returns a Match, or a Refusal, which becomes a Declined. rewrite(graph,
    match, editor) adds nodes through the editor and returns the node that takes the place of
    match.node.
    A rule is stateless: check passes its findings in `Match.data`. ends_at: the canonical forms
    that its matches end at. It is asked only at nodes with one of them; at every node if None.
    """

    name: str = ""
    ends_at: tuple[type, ...] | None = None

    def __init_subclass__(cls) -> None:
        """Ask a rule that brings a pattern of its own at every node, unless it says where."""
        super().__init_subclass__()
        if "pattern" in vars(cls) and "ends_at" not in vars(cls):
            cls.ends_at = None

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Yield candidates that end at `node`."""
        yield node

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Return the match, or a refusal that says why there is none, or None without a reason."""
        raise NotImplementedError

    def combine(self, graph: Canonical, matches: list[Match]) -> Sequence[Match | Refusal]:
        """Return the matches of all rules, some joined into groups, and why others are not joined;
        by default the matches as they are."""
        return matches

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the replacement and return it."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.name}>"


_SIZES = ("m", "k", "r", "n", "groups", "top_k")


class KernelRule(Rule):
    """A rule whose match becomes one call of a kernel; the call is `Match.data`."""

    def matched(self, graph: Canonical, call: Any) -> Match | Refusal:
        """Return the match of a call that may stand at its last result, or why there is none."""
        ends, nodes = [one.final for one in call.results()], call.covered(graph)
        why = refuse(graph, nodes, ends[-1], call.keys(), also_final=ends)
        if why is not None:
            return why
        match = Match(
            rule=self.name,
            node=call.final,
            nodes=nodes,
            data=call,
            info=call.info(),
            notes=call.notes(graph),
        )
        return self.priced(graph, match, lambda: call.spec(graph))

    def priced(
        self, graph: Canonical, match: Match, spec_of: Callable[[], KernelSpec]
    ) -> Match | Refusal:
        """Return a match with the price of its call, or why no kernel computes it, or that smaller
        calls are predicted to be faster."""
        chip = graph.chip  # raises what the user has to mend
        try:
            spec = spec_of()
            no_kernel: Exception | None = choose.refusal(spec, chip)
        except NmmError as error:
            no_kernel = error
        if no_kernel is not None:
            return Refusal("no_kernel", str(no_kernel), match.node)
        sizes = {name: getattr(spec, name) for name in _SIZES if hasattr(spec, name)}
        times = call_ways(graph, spec)
        match.info = {**(match.info or sizes), "predicted": times.to_dict()}
        return slower(times, match.node) or match

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        return match.data.emit(graph, editor)
