"""Shape equations: how the sizes of an instruction's operands depend on each other.

`stationary[K M], moving[K N] -> dst[M N]` gives partitions and elements per partition. A size is a
letter, a number, or both: `4*F`, `F+1`. One letter alone is a tensor's number of elements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nmm_compiler.errors import TensorShapeError
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_TERM = re.compile(r"(?:(\d+)\*)?([A-Z]?)\+?(\d*)$")
Term = tuple[int, str, int]


def _term(text: str) -> Term:
    """Return (times, letter, plus) of a size."""
    found = _TERM.match(text)
    assert found is not None, text
    times, letter, plus = found.groups()
    return int(times or 1), letter, int(plus or 0)


class Equation:
    """The sizes of the operands of an instruction: text for each, "" for any.

    limits: the sizes that a letter may have.
    """

    def __init__(self, sizes: Mapping[str, str], limits: Mapping[str, range]) -> None:
        self.limits = limits
        given = {role: text.split() for role, text in sizes.items() if text}
        self.terms = {role: [_term(size) for size in texts] for role, texts in given.items()}
        self.says = ", ".join(
            [f"{role} [{', '.join(texts)}]" for role, texts in given.items()]
            + [f"{letter} in {_shown(allowed)}" for letter, allowed in limits.items()]
        )

    def solve(
        self, machine: Machine, op: str, given: list[tuple[str, NkiTensor]]
    ) -> dict[str, int]:
        """Return the size of each letter; refuse operands that do not fit together."""
        sizes: dict[str, int] = {}
        fit = True
        for role, view in given:
            terms = self.terms.get(role, ())
            have = (view.size,) if len(terms) == 1 else (view.shape[0], view.free_size)
            for (times, letter, plus), size in zip(terms, have, strict=False):
                known = sizes.setdefault(letter, (size - plus) // times) if letter else 0
                fit = fit and known >= 0 and known * times + plus == size
        if fit and all(sizes.get(x, known.start) in known for x, known in self.limits.items()):
            return sizes
        shown = ", ".join(f"{role} {view.shape}" for role, view in given if role in self.terms)
        raise machine.error(
            TensorShapeError,
            f"nisa.{op}: shapes {shown} of partitions and elements per partition; they must be "
            f"{self.says}",
        )


def _shown(allowed: range) -> str:
    step = f" in steps of {allowed.step}" if allowed.step > 1 else ""
    return f"{allowed[0]}..{allowed[-1]}{step}"
