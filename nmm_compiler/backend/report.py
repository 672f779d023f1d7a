"""What compiling one graph did: chains found and left alone, kernels, cache, time per phase.

The record goes to Options.report, to `nmm_compiler.backend.reports()`, and as JSON into torch's
structured trace, where tlparse shows it. `str(report)` is the table people read. Latencies are the
simulator's predictions, never measurements.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmm_compiler.records import Record

_NAMES_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class KernelLine(Record):
    """One kernel of a graph. calls: launches of it in the graph; origin: "built" or "cache"."""

    name: str
    spec: str
    schedule: str
    path: str
    calls: int
    origin: str
    hbm_bytes: int
    predicted_us: float


@dataclass(frozen=True, kw_only=True)
class Refusal(Record):
    """A chain that was left alone: why, and the node to blame."""

    reason: str
    node: str


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What happened to one graph.

    chains: low-rank chains that were rewritten. matches: one line per call they became, fewer where
    chains share an input. fallback: why the graph went to the inner
    backend as it was, or None. notes: what a reader should know besides. phases_ms: wall time of
    "passes", "kernels" and "inner". built: the Kernel objects, in the order of `kernels`.
    """

    graph: int
    nodes: int
    target: str
    executor: str
    inner: str
    chains: int
    matches: tuple[str, ...]
    declined: tuple[Refusal, ...]
    kernels: tuple[KernelLine, ...]
    phases_ms: dict[str, float]
    fallback: str | None = None
    notes: tuple[str, ...] = ()
    built: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def cache_hits(self) -> int:
        """Kernels that came whole from the cache."""
        return sum(line.origin == "cache" for line in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: everything but the Kernel objects."""
        plain = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "built"
        }
        plain["matches"] = list(self.matches)
        plain["notes"] = list(self.notes)
        plain["declined"] = [refusal.to_dict() for refusal in self.declined]
        plain["kernels"] = [line.to_dict() for line in self.kernels]
        plain["cache_hits"] = self.cache_hits
        return plain

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def summary(self) -> str:
        """Return one line: counts, kernels from the cache, times."""
        times = ", ".join(f"{name} {ms:.0f} ms" for name, ms in self.phases_ms.items())
        return (
            f"graph {self.graph}: {self.chains} chains rewritten as {len(self.matches)} calls, "
            f"{len(self.declined)} left alone, {len(self.kernels)} kernels "
            f"({self.cache_hits} from the cache) for "
            f"{self.target}; executor {self.executor}, inner {self.inner}; {times}"
        )

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        tables: list[Any] = []
        if self.matches:
            found = Table("calls", "at", box=None, pad_edge=False)
            places: dict[str, list[str]] = {}
            for line in self.matches:
                what, _, where = line.partition(" at ")
                places.setdefault(what, []).append(where)
            for what, nodes in places.items():
                found.add_row(f"{len(nodes)} x {what}", _some(nodes, 2))
            tables.append(found)
        if self.declined:
            left = Table("chains left alone: reason", "nodes", box=None, pad_edge=False)
            for reason in dict.fromkeys(refusal.reason for refusal in self.declined):
                nodes = [r.node for r in self.declined if r.reason == reason]
                left.add_row(reason, _some(nodes))
            tables.append(left)
        if self.kernels:
            made = Table(
                "kernel", "schedule", "calls", "from", "HBM MB", "predicted us",
                box=None, pad_edge=False,
            )  # fmt: skip
            for kernel in self.kernels:
                made.add_row(
                    kernel.spec, kernel.schedule, str(kernel.calls), kernel.origin,
                    f"{kernel.hbm_bytes / 1e6:.2f}", f"{kernel.predicted_us:.1f}",
                )  # fmt: skip
            tables.append(made)
        out = io.StringIO()
        console = Console(file=out, width=120, color_system=None, markup=False, highlight=False)
        console.print(self.summary(), soft_wrap=True)
        for table in tables:
            console.print(table)
        if self.fallback is not None:
            console.print(f"the graph was left as it was: {self.fallback}", soft_wrap=True)
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True)
        return out.getvalue().rstrip()


def _some(names: Sequence[str], count: int = _NAMES_SHOWN) -> str:
    shown = ", ".join(names[:count])
    more = len(names) - count
    return f"{shown} and {more} more" if more > 0 else shown
