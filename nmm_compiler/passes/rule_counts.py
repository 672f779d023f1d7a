"""The outcome of each rule's proposals, so that a rule without matches has a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RuleCount:
    """How often a rule proposed a place, and the outcomes.

    refused: the rule's own check refused, with a reason. lost: another rule, by name, took the
    place. nearest: of a rule of two functions, the place where most of the pattern was found, and
    the difference there. failed: the exception that the rule raised for the original graph.
    """

    rule: str
    built_in: bool = True
    proposed: int = 0
    matched: int = 0
    refused: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    nearest: tuple[int, str] | None = None
    failed: str | None = None

    def add(self, other: RuleCount) -> None:
        """Add the outcome of the rule's proposals in another graph."""
        self.proposed += other.proposed
        self.matched += other.matched
        self.refused += other.refused
        self.lost += other.lost
        self.nearest = max(filter(None, (self.nearest, other.nearest)), default=None)
        self.failed = self.failed or other.failed

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "rule": self.rule,
            "built_in": self.built_in,
            "proposed": self.proposed,
            "matched": self.matched,
            "refused": self.refused,
            "lost": dict(self.lost),
            "nearest": self.nearest[1] if self.nearest else None,
            "failed": self.failed,
        }

    def __str__(self) -> str:
        """Return one sentence for people."""
        if not (self.proposed or self.lost or self.failed):
            return f"rule {self.rule}: no node of the graph is what the pattern ends with"
        said = [f"{self.matched} matched", f"{self.refused} refused"]
        said += [f"{count} lost to {other}" for other, count in self.lost.items()]
        text = f"rule {self.rule}: {self.proposed} places proposed, {', '.join(said)}"
        if self.lost and not self.matched:
            text += f'; rules=[{self.rule}, "..."] asks it first'
        if self.nearest and not self.matched:
            text += f"; the nearest: {self.nearest[1]}"
        return text + (f"; on the graph as it came it raised {self.failed}" if self.failed else "")


def merged(counts: Iterable[RuleCount]) -> dict[str, RuleCount]:
    """Return the counts of several graphs by rule."""
    found: dict[str, RuleCount] = {}
    for count in counts:
        found.setdefault(count.rule, RuleCount(count.rule, count.built_in)).add(count)
    return found
