"""What `rewrite` and `explain` hand back: the graph, the matches, the refusals, and a table."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from nmm_compiler.passes.rules.base import Declined, Match


@dataclass(frozen=True)
class Opportunity:
    """A dense product that could be factorized, and what rank `r` would save.

    r is the rank that keeps 80 % of the parameters; break_even is the first rank at which the
    factors are no smaller than the dense matrix. saved_bytes are bytes of weight read per call,
    saved_flops are floating-point operations per token.
    """

    node: str
    module: str
    k: int
    n: int
    r: int
    break_even: int
    saved_bytes: int
    saved_flops_per_token: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass
class RewriteResult:
    """A rewritten graph and what happened to it.

    graph_module is a new GraphModule that shares parameters with the original.
    """

    graph_module: Any
    matches: list[Match]
    declined: list[Declined]
    opportunities: list[Opportunity] = field(default_factory=list)
    original: Any = None
    program: Any = None
    layouts: list[Any] = field(default_factory=list)
    transposes_before: int = 0
    transposes_after: int = 0

    def check(self, *inputs: Any, **keywords: Any) -> float:
        """Run the graph before and after on real inputs; raise where the results differ.

        Return the largest error as a fraction of the bound, which is derived from dtypes and
        contraction lengths (`verify`). Raises VerificationError, NoRealInputsError.
        """
        from nmm_compiler.passes.verify import check

        return check(self, inputs, keywords)

    def add(self, part: RewriteResult) -> None:
        """Add what was found in one of the graphs."""
        self.matches += part.matches
        self.declined += part.declined
        self.opportunities += part.opportunities
        self.layouts += part.layouts
        self.transposes_before += part.transposes_before
        self.transposes_after += part.transposes_after

    @property
    def rewritten(self) -> list[Match]:
        """Return the matches that changed the graph."""
        return [m for m in self.matches if m.rewritten]

    @property
    def chains(self) -> int:
        """Return how many factor pairs the matches hold; groups hold several."""
        return sum(int(m.info.get("chains", 1)) for m in self.matches)

    @property
    def nearest(self) -> dict[str, Declined]:
        """Return, per rule, the refusal that came closest to a match."""
        best: dict[str, Declined] = {}
        for declined in self.declined:
            known = best.get(declined.rule)
            if known is None or _distance(declined) < _distance(known):
                best[declined.rule] = declined
        return best

    def diff(self) -> str:
        """Return a unified diff of the graph's readable code, before against after."""
        return "\n".join(
            difflib.unified_diff(
                readable(self.original).splitlines(),
                readable(self.graph_module).splitlines(),
                "before",
                "after",
                lineterm="",
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "matches": [m.to_dict() for m in self.matches],
            "declined": [d.to_dict() for d in self.declined],
            "nearest": {rule: d.to_dict() for rule, d in self.nearest.items()},
            "opportunities": [o.to_dict() for o in self.opportunities],
            "layouts": [str(choice) for choice in self.layouts],
            "transposes": {"before": self.transposes_before, "after": self.transposes_after},
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the matches, refusals and opportunities as JSON."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True)

    def table(self, width: int | None = None) -> str:
        """Return the report as text of at most `width` columns; by default the terminal's."""
        from nmm_compiler.passes.result_text import render

        return render(self, width)

    def __str__(self) -> str:
        return self.table()


# From a chain that only something outside of it hinders, to one that hardly is a chain.
_NEARNESS = (
    "other_user", "mutation", "region", "dtype", "dtype_unsupported", "device", "subclass",
    "rank_too_large", "scaled_gate", "other_x", "inner_reshaped", "factor_shape",
    "factors_multiplied", "weight_computed",
    "symbolic_weight", "dropout", "norm", "activation", "activation_factor", "activation_addend",
)  # fmt: skip


def _distance(declined: Declined) -> int:
    return _NEARNESS.index(declined.code) if declined.code in _NEARNESS else len(_NEARNESS)


def readable(module: Any) -> str:
    """Return the code of a graph and of the graphs inside it."""
    parts: list[str] = []
    for name, child in [("", module), *module.named_modules()]:
        if isinstance(child, fx.GraphModule) and (name or child is module):
            if name == "" and parts:
                continue
            parts.append((f"# {name}\n" if name else "") + child.code.strip())
    return "\n\n".join(parts)


@dataclass
class Explanation:
    """The results of every graph of a model: what would be rewritten, what not, what could be."""

    results: list[RewriteResult]

    @property
    def matches(self) -> list[Match]:
        """Return the matches of all graphs."""
        return [m for r in self.results for m in r.matches]

    @property
    def declined(self) -> list[Declined]:
        """Return the refusals of all graphs."""
        return [d for r in self.results for d in r.declined]

    @property
    def opportunities(self) -> list[Opportunity]:
        """Return the dense products that could be factorized, of all graphs."""
        return [o for r in self.results for o in r.opportunities]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, one entry per graph."""
        return {"graphs": [r.to_dict() for r in self.results]}

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True)

    def table(self, width: int | None = None) -> str:
        """Return the reports of all graphs as text of at most `width` columns."""
        if not self.results:
            return "no graph was traced"
        if len(self.results) == 1:
            return self.results[0].table(width)
        return "\n\n".join(f"graph {i}: {r.table(width)}" for i, r in enumerate(self.results))

    def __str__(self) -> str:
        return self.table()
