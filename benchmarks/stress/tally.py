"""What an area of `make stress` counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of one area.

    right: the result was exact, or the fault was refused with one clear line. wrong: a wrong result
    was served in silence. lost: something that was stored before is gone or unusable. tracebacks:
    a Python traceback reached the user. examples: one line for each attempt that was not right.
    """

    attempts: int = 0
    right: int = 0
    wrong: int = 0
    lost: int = 0
    tracebacks: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether every attempt was right."""
        return self.right == self.attempts and not (self.wrong or self.lost or self.tracebacks)
