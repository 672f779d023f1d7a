"""Faults of this package, and programs that show one graph or one match alone.

An exception at one place of a graph drops that place, not the graph. `Faults.guard` stands around
the reading of the graph and of each node, each question to a rule, the layout of each region and
each emission. Under `strict` it raises; otherwise the fault is kept, the caller goes on without the
place, and `warn` says once, at the end, how to reproduce it. Exceptions of a user's own rule are
raised as BrokenRuleError, since the user has to mend it.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import TO_MEND, InternalFaultError, ModelError, broken_rule, internal_fault

# A built-in rule that fails at more places than this is left out of the graph.
_MOST_PLACES = 8


@dataclass(frozen=True)
class Fault:
    """An exception of this package: in which step, for which rule, at which node of which graph."""

    stage: str
    rule: str
    at: fx.Node
    graph: str
    error: Exception

    def __str__(self) -> str:
        rule = f" for rule {self.rule!r}" if self.rule else ""
        return (
            f"{type(self.error).__name__} while {self.stage} {self.at.name!r}{rule}: {self.error}"
        )


class Faults:
    """The faults of one rewrite, by stage, rule, node and graph, and the places that its next
    attempt leaves alone."""

    def __init__(self, strict: bool = True, built_in: Sequence[Any] = ()) -> None:
        self.strict, self.built_in = strict, tuple(built_in)
        self.graph = ""
        self.found: dict[tuple[str, ...], Fault] = {}
        self._left: set[tuple[str, str, str]] = set()
        self._count = Counter[tuple[str, str]]()

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
        fault = Fault(stage, name, node, self.graph, error)
        if self.strict:
            raise internal_fault(str(fault)) from error
        self.found.setdefault((stage, name, node.name, self.graph), fault)

    @contextlib.contextmanager
    def only_reading(self, rule: Any, graph: fx.Graph) -> Iterator[None]:
        """Raise BrokenRuleError for a rule of a user that edits the graph in the block."""
        if self.is_built_in(rule):
            yield
            return
        before = _parts(graph)
        yield
        for was, now in itertools.zip_longest(before, _parts(graph), fillvalue=(None,)):
            if any(a is not b for a, b in itertools.zip_longest(was, now)):
                raise broken_rule(
                    rule.name,
                    str(was[0] or now[0]),
                    "pattern, check or combine edited the graph, which they only read; add nodes "
                    "in rewrite, with the editor",
                )

    def leave(self, rule: str, *names: str, fault: bool = False) -> None:
        """Leave a rule's match at these nodes alone from now on; all of them after many faults."""
        self._left.update((self.graph, rule, name) for name in names)
        self._count[self.graph, rule] += len(set(names)) if fault else 0
        if self._count[self.graph, rule] > _MOST_PLACES:
            self._left.add((self.graph, rule, ""))

    def is_left(self, rule: str, name: str) -> bool:
        """Return whether a rule's match at a node is to be left alone."""
        return any((self.graph, rule, at) in self._left for at in (name, ""))

    def warn(self, module: fx.GraphModule, inputs: Sequence[Any] | None, options: Any) -> None:
        """Warn of all faults at once, with the command that reproduces the first."""
        if not self.found:
            return
        first, *others = self.found.values()
        more = f" (and {len(others)} more)" if others else ""
        warnings.warn(
            f"nmm: a fault in nmm_compiler, {first}{more}. What it met stays as it was; "
            "everything else is rewritten, and results are right. To reproduce it run: "
            f"{_command(module, inputs, options)} ; please report it with what that prints",
            stacklevel=4,
        )


def _parts(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return what an edit of a graph replaces: its nodes, and what each of them holds."""
    return [(node, node.op, node.target, node.args, node.kwargs) for node in graph.nodes]


def _command(module: fx.GraphModule, inputs: Sequence[Any] | None, options: Any) -> str:
    """Write a program that compiles the graph alone under strict; return how to run it."""
    try:
        text = program_text(module, inputs, options.target)
        with tempfile.NamedTemporaryFile(
            "w", prefix="nmm_fault_", suffix=".py", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
    except Exception:  # no text, or no place to write it: run the user's own program
        return "your program with options={'strict': True}"
    return f"python {Path(file.name)}"


def program_text(module: fx.GraphModule, inputs: Sequence[Any] | None, target: str) -> str:
    """Return a program that compiles a graph, with random weights and inputs, under strict.

    Raises ValueError for a graph whose modules cannot be written down.
    """
    from torch._dynamo.debug_utils import NNModuleToString

    if not NNModuleToString.can_convert_to_string(module):
        raise ValueError("the graph calls modules that cannot be written down")
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    if inputs is None:
        inputs = [n.meta.get("example_value", n.meta.get("val")) for n in holders]
    lines = ",\n    ".join(literal(value) for value in inputs)
    return (
        '"""A fault of nmm_compiler: running this shows it. Written by nmm_compiler."""\n'
        "import torch\nimport torch.fx\nfrom torch import device, inf, nan, tensor\n\n"
        f"{NNModuleToString.convert(module)}\n\n"
        f"inputs = (\n    {lines},\n)\n"
        f"options = {{'inner': 'eager', 'strict': True, 'target': {target!r}}}\n"
        "with torch.no_grad():\n"
        "    torch.compile(Repro(), backend='nmm', options=options)(*inputs)\n"
        "print('no fault')\n"
    )


def literal(value: Any) -> str:
    """Return Python code for an input like this one: its shape and dtype, with random numbers."""
    if isinstance(value, torch.Tensor):
        size, stride = ([_number(n) for n in part] for part in (value.shape, value.stride()))
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        held = last + 1 if all(size) else 0  # elements of the memory below; a view may repeat them
        make = "randn" if value.is_floating_point() else "zeros"
        return f"torch.{make}({held}).to({value.dtype}).as_strided({size}, {stride})"
    return repr(_number(value) if isinstance(value, torch.SymInt) else value)


def _number(size: Any) -> int:
    """Return a size; one that depends on data counts as 4."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 4
    return int(size)
