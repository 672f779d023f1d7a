"""The schedules of a kernel that tuning may time: its family's candidates, or the legal grid.

The grid has every combination of the values that the candidates give to each field; those that the
target cannot run are left out. Candidates are few and good. The grid is large, and is searched with
a sampler of Optuna.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from nmm_compiler.codegen.choose import Choice, on_device, priced, rank
from nmm_compiler.errors import CapacityError, OptionTypeError, SpecError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.records import Record
from nmm_compiler.targets import Target

LARGEST_GRID = 20_000  # their times fill a fifth of what a cache entry holds


@dataclasses.dataclass(frozen=True)
class Space:
    """The schedules of one kernel: `candidates`, ranked, and the values of each field."""

    spec: KernelSpec
    target: Target
    budget: int

    @functools.cached_property
    def candidates(self) -> tuple[Choice, ...]:
        """The legal candidates, in the order of the closed form."""
        return rank(self.spec, self.target, self.budget)

    @functools.cached_property
    def values(self) -> dict[str, list[Any]]:
        """Field -> its values in the candidates; only the fields that differ."""
        seen: dict[str, dict[Any, None]] = {}
        for choice in self.candidates:
            for name, value in flat(choice.schedule).items():
                seen.setdefault(name, {})[value] = None
        return {name: list(found) for name, found in seen.items() if len(found) > 1}

    def grid(self) -> Iterator[Choice]:
        """Yield every legal schedule of the grid. Raises OptionTypeError for a very large one."""
        size = math.prod(len(found) for found in self.values.values())
        if size > LARGEST_GRID:
            raise OptionTypeError(
                "search", "grid", f"'guided' for {self.spec.short()}: its grid has {size:,} points"
            )
        seen = set()
        for values in itertools.product(*self.values.values()):
            choice = self.legal(dict(zip(self.values, values, strict=True)))
            if choice is not None and choice.schedule not in seen:
                seen.add(choice.schedule)
                yield choice

    def legal(self, changes: dict[str, Any]) -> Choice | None:
        """Return the first candidate with these values, with its price; None if it is illegal."""
        first = self.candidates[0].schedule
        try:
            made = first.changed(changes)
            made.check(self.spec, self.target)
        except (CapacityError, SpecError):
            return None
        choice = priced(self.spec, made, self.target)
        if choice.instructions > self.budget and on_device(self.spec, made, self.target):
            return None  # its loop on the device is a point of its own
        return choice


def flat(record: Record, above: str = "") -> dict[str, Any]:
    """Return the fields of nested records by their paths: {"u.block": 512}."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Record):
            found |= flat(value, f"{above}{field.name}.")
        else:
            found[above + field.name] = value
    return found
