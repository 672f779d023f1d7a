"""Faults of this package: which places they cost, and how they are told.

An exception at one place of a graph drops that place, not the graph. `Faults.guard` stands around
the reading of the graph and of each node, each question to a rule, the layout of each region and
each emission. Under `strict` it raises; otherwise the fault is kept, the caller goes on without the
place, and `warn` says once, at the end, how to reproduce it. Exceptions of a user's own rule are
raised as BrokenRuleError, since the user has to mend it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from nmm_compiler.errors import TO_MEND, InternalFaultError, ModelError, broken_rule, internal_fault


class Faults:
    """The faults of one rewrite, and the places that its next attempt leaves alone.

    found: the rule and the node of each fault, by the graph and what happened in words.
    """

    def __init__(self, strict: bool = True, built_in: Sequence[Any] = ()) -> None:
        self.strict, self.built_in = strict, tuple(built_in)
        self.graph = ""
        self.found: dict[tuple[str, str], tuple[str, fx.Node]] = {}
        self._left: set[tuple[str, str, str]] = set()

    def is_built_in(self, rule: Any) -> bool:
        """Return whether a rule is one of the package's own."""
        return any(rule is own for own in self.built_in)

    @contextlib.contextmanager
    def guard(self, stage: str, node: fx.Node, rule: Any = "") -> Iterator[None]:
        """Keep an exception of the block as a fault; raise it under strict, or of a user's rule.

        rule: a rule, or the name of another step. Raises InternalFaultError under strict,
        BrokenRuleError for a rule that is not built in, ModelError, and what the user has to
        mend.
        """
        try:
            yield
        except Exception as error:  # every exception costs only this place; `warn` reports it
            self.keep(error, stage, node, rule)

    def keep(self, error: Exception, stage: str, node: fx.Node, rule: Any = "") -> None:
        """Keep an exception as a fault, or raise it, as `guard` does.

        For loops over all nodes, where a context manager for each node costs more than its block.
        """
        told = (ModelError, *TO_MEND, *((InternalFaultError,) if self.strict else ()))
        if isinstance(error, told):
            raise error
        if not isinstance(rule, str) and not self.is_built_in(rule):
            raise broken_rule(rule.name, node.name, error) from error
        name = rule if isinstance(rule, str) else rule.name
        of = f" for rule {name!r}" if name else ""
        text = f"{type(error).__name__} while {stage} {node.name!r}{of}: {error}"
        if self.strict:
            raise internal_fault(text) from error
        self.found.setdefault((self.graph, text), (name, node))

    @contextlib.contextmanager
    def only_reading(self, rule: Any, graph: fx.Graph) -> Iterator[None]:
        """Raise BrokenRuleError for a rule of a user that edits the graph in the block."""
        before = "" if self.is_built_in(rule) else str(graph)
        yield
        if before and str(graph) != before:
            why = (
                "pattern, check or combine edited the graph, which they only read; add nodes in "
                "rewrite, with the editor"
            )
            raise broken_rule(rule.name, "graph", why)

    def leave(self, rule: str, *names: str) -> None:
        """Leave a rule's match at these nodes alone from now on."""
        self._left.update((self.graph, rule, name) for name in names)

    def is_left(self, rule: str, name: str) -> bool:
        """Return whether a rule's match at a node is to be left alone."""
        return (self.graph, rule, name) in self._left

    def warn(self, command: str) -> None:
        """Warn of all faults at once, with the command that reproduces the first."""
        (_, first), *others = self.found
        more = f" (and {len(others)} more)" if others else ""
        warnings.warn(
            f"nmm: a fault in nmm_compiler, {first}{more}. What it met stays as it was; "
            "everything else is rewritten, and results are right. To reproduce it run: "
            f"{command} ; please report it with what that prints",
            stacklevel=4,
        )
