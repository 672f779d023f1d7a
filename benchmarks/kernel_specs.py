"""The kernels of the benchmarks, as data/kernel_specs.toml lists them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nmm_compiler.kernels import FAMILIES

RATIO = 0.2


class Sizes(NamedTuple):
    """Features of the hidden state, of the MLP, of all queries, and of all keys."""

    hidden: int
    intermediate: int
    queries: int
    keys: int

    def part(self, name: str, ratio: bool) -> dict[str, Any]:
        """Return the fields of a product, or of "qkv"; with the ranks at RATIO, or small ones."""
        if name == "qkv":
            k, outputs = self.hidden, (self.queries, self.keys, self.keys)
            small = [256 if n >= k else 128 for n in outputs]
            ranks = [rank(k, n) for n in outputs] if ratio else small
            pairs = [[r, [n]] for r, n in zip(ranks, outputs, strict=True)]
            return {"k": k, "pairs": pairs}
        k, n = {
            "up": (self.hidden, self.intermediate), "down": (self.intermediate, self.hidden),
            "q": (self.hidden, self.queries), "kv": (self.hidden, self.keys),
            "out": (self.queries, self.hidden),
        }[name]  # fmt: skip
        return {"k": k, "n": n, **({"r": rank(k, n)} if ratio else {})}


TABLES_OF_SPECS: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "data" / "kernel_specs.toml").read_text(encoding="utf-8")
)
MODELS = {name: Sizes(*sizes) for name, sizes in TABLES_OF_SPECS["models"].items()}


def facts(table: str) -> dict[str, Any]:
    """Return token counts, bars on means, and whose kernels a table of kernel_rows.py has."""
    known = TABLES_OF_SPECS["tables"]
    return {"kernels_of": table, **known["every"], **known.get(table, {})}


def rank(k: int, n: int) -> int:
    """Return the rank that keeps 1 - RATIO of the parameters, to the nearest tile of 128."""
    return 128 * round(k * n * (1 - RATIO) / ((k + n) * 128))


def listed(
    table: str, sizes: Sequence[int] = (), models: Sequence[str] = (), **more: Any
) -> Iterator[tuple[str, Any]]:
    """Yield (name, spec) of a table; one without m with each of `sizes`, `more` for all."""
    for row in TABLES_OF_SPECS[table]:
        own = TABLES_OF_SPECS["layers"].get(row.get("layer"), {})
        fields = {"each": [{}], "at_most": max(sizes, default=0), **more, **own, **row}
        kind = FAMILIES[fields.pop("family")].spec_class
        keys = ("name", "part", "ratio", "each", "at_most", "layer")
        name, part, ratio, each, most, _ = (fields.pop(key, "") for key in keys)
        for model in models if part else ("",):
            of_model = MODELS[model].part(part, bool(ratio)) if part else {}
            for chosen in each:
                given = {**fields, **of_model, **chosen}
                for m in [given["m"]] if "m" in given else [m for m in sizes if m <= most]:
                    spec = kind.from_dict({**given, "m": m})
                    yield name.format(**{**given, "model": model, "m": m}) or spec.short(), spec
