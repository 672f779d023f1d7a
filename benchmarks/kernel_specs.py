"""The kernels of the benchmarks: sizes of models, and specs that data/kernel_specs.toml lists."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import KernelSpec

RATIO = 0.2
Named = Iterator[tuple[str, Any]]
"""(name or "", spec) of each kernel."""


class Sizes(NamedTuple):
    """Features of the hidden state, of the MLP, of all queries, and of all keys."""

    hidden: int
    intermediate: int
    queries: int
    keys: int

    def mlp(self, part: str) -> tuple[int, int]:
        """Return the inputs and outputs of "down", or of "up" and every other part."""
        both = (self.hidden, self.intermediate)
        return both if part != "down" else (both[1], both[0])


_FILE = Path(__file__).parent / "data" / "kernel_specs.toml"
TABLES_OF_SPECS: dict[str, Any] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
MODELS = {name: Sizes(*sizes) for name, sizes in TABLES_OF_SPECS["models"].items()}


def rank(k: int, n: int, tile: int = 128) -> int:
    """Return the rank that keeps 1 - RATIO of the parameters, to the nearest tile."""
    return tile * round(k * n * (1 - RATIO) / ((k + n) * tile))


def listed(table: str, sizes: Sequence[int] = (), **more: Any) -> list[KernelSpec]:
    """Return the specs of a table; one without m with each of `sizes`, `more` for all."""
    found = []
    for row in TABLES_OF_SPECS[table]:
        fields = {**more, **row}
        kind = FAMILIES[fields.pop("family")].spec_class
        most = fields.pop("at_most", max(sizes, default=0))
        for m in [fields.pop("m")] if "m" in fields else [m for m in sizes if m <= most]:
            found.append(kind.from_dict({"m": m, **fields}))
    return found
