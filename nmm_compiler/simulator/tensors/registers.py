"""Virtual registers: scalars that a kernel knows at run time only.

The simulator runs programs in order, so a register has its value at once. In timing mode a value
that came from a tensor does not exist, and asking for it is an error that says so.
"""

from __future__ import annotations

from typing import Any

from nmm_compiler.errors import SimulationError, UnsupportedInstructionError
from nmm_compiler.simulator.machine import current


class VirtualRegister:
    """A 32-bit register; `frozen` for the variable of a loop on the device."""

    __slots__ = ("checks", "frozen", "known", "value")

    def __init__(self, state: Any = None, frozen: bool = False) -> None:
        self.value = 0 if state is None else int(state)
        self.known = state is not None
        self.frozen = frozen
        self.checks = 0

    def read(self) -> int:
        """Return the value; an error when there is none."""
        if not self.known:
            machine = current()
            if machine.data:
                raise machine.error(
                    SimulationError, "a register is used before it has a value; load it first"
                )
            raise machine.error(
                SimulationError,
                "a register loaded from a tensor has no value in timing mode, which computes no "
                'data; use mode="full"',
            )
        return self.value

    def write(self, value: int, known: bool = True) -> None:
        """Set the value; an error for a loop variable."""
        if self.frozen:
            raise current().error(
                SimulationError, "the variable of a dynamic loop is frozen; use another register"
            )
        self.value, self.known = int(value), known

    def __bool__(self) -> bool:
        self.checks += 1
        current().tick("a loop on a register", self.checks)
        return self.read() != 0

    def __index__(self) -> int:
        return self.read()

    def __int__(self) -> int:
        return self.read()

    def __repr__(self) -> str:
        return f"VirtualRegister({self.value if self.known else '?'})"

    def _other(self, other: Any) -> int:
        if isinstance(other, VirtualRegister):
            return other.read()
        if isinstance(other, int):
            return other
        raise current().error(
            UnsupportedInstructionError, f"register arithmetic with {type(other).__name__}"
        )

    def __add__(self, other: Any) -> VirtualRegister:
        return VirtualRegister(self.read() + self._other(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> VirtualRegister:
        return VirtualRegister(self.read() - self._other(other))

    def __rsub__(self, other: Any) -> VirtualRegister:
        return VirtualRegister(self._other(other) - self.read())

    def __mul__(self, other: Any) -> VirtualRegister:
        return VirtualRegister(self.read() * self._other(other))

    __rmul__ = __mul__
