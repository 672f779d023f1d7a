"""Why a place is no match: one of a dozen codes, with the remedy that belongs to the code.

A rule refuses with a code, a reason and the value where its walk stopped. `Declined` adds the
operation, its line in the model's source, and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from nmm_compiler.passes.graph.canonical_forms import Key, Virtual, owner_of

REMEDIES: dict[str, str] = {
    "other_user": "let only the chain read its inner values",
    "mutation": "use the functional form, or write before or after the chain",
    "region": "keep both products on one side of the region, transform or graph break",
    "dtype": "keep one dtype through the chain: bfloat16, float16 or float32",
    "device": "keep plain tensors on one device, or cut both factors over the devices alike",
    "rank_too_large": "use a smaller rank, or store one dense weight",
    "other_x": "feed both products the same tensor, in one dtype",
    "order": "write (x @ u) @ v, or set Options(reassociate=True)",
    "weight": "store each factor as one 2-D parameter or buffer of static size",
    "training": "call model.eval()",
    "shape": "keep tokens and features apart: contract exactly what the first product made",
    "between": "do it before the first product or behind the second, or fold it into a factor once",
    "slower": "nothing: the graph runs as it is written",
    "no_kernel": "nothing: PyTorch computes it",
    "pattern": "change the model, or the rule's pattern or condition",
    "internal": "report it with the command that the warning names",
}
"""What would have to change, by the code of a refusal; the nearest miss comes first."""

_RANK = {code: rank for rank, code in enumerate(REMEDIES)}


def distance(code: str) -> int:
    """Return how far a refusal is from a match, as a rank; a user's own codes rank last."""
    return _RANK.get(code, len(_RANK))


@dataclass(frozen=True)
class Refusal:
    """Why a place is no match of a rule: a code, a reason, and the value where the walk stopped.

    remedy: what would have to change; by default that of the code.
    report_even_if_superseded: the report has it even where another rule takes the place. agreed:
    for a place that is no match of a pattern, how many of its values agree; where the rule matches
    nothing, the report shows the place with most of them.
    """

    code: str
    reason: str
    key: Key
    remedy: str = ""
    report_even_if_superseded: bool = False
    agreed: int = 0

    @property
    def node(self) -> fx.Node:
        """Return the fx node to blame."""
        return owner_of(self.key)


def part_of_one(key: Key) -> Refusal | None:
    """Refuse a value inside one operation of several products: no node of the graph holds it."""
    if not isinstance(key, Virtual) or key.attribute is not None:
        return None
    return Refusal("between", "the two products are a part of one operation of more", key)
