"""Virtual registers: scalars that a kernel knows at run time only.

The simulator runs programs in order, so a register has its value at once. The device's compiler
does not, so Python may not ask for it: a comparison, a condition and a conversion are refused. In
timing mode a value that came from a tensor does not exist, and its use is an error that says so.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nmm_compiler.errors import KernelArgumentError, SimulationError, UnsupportedInstructionError
from nmm_compiler.simulator.machine import current


class VirtualRegister:
    """A 32-bit register; `frozen` for the variable of a loop on the device.

    symbol: where the value comes from, and not what it is: a number of its own, or what arithmetic
    on other registers made it.
    """

    __slots__ = ("frozen", "known", "symbol", "value")

    def __init__(self, state: Any = None, frozen: bool = False, symbol: Any = None) -> None:
        self.value = 0 if state is None else int(state)
        self.known = state is not None
        self.frozen = frozen
        self.symbol = current().new_identity() if symbol is None else symbol

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

    def _in_python(self, *others: Any) -> NoReturn:
        raise current().error(
            KernelArgumentError,
            "Python asks for the value of a register (a condition, a comparison, int() or range()),"
            " which is not known while the kernel is traced; keep the value on the device: "
            "nl.fori_loop or nl.while_loop for a loop, an index of a tensor, register_store",
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _in_python
    __bool__ = __int__ = __index__ = __float__ = _in_python

    def __repr__(self) -> str:
        return f"VirtualRegister({self.value if self.known else '?'})"

    def _made(self, operator: str, value: int, other: Any, turned: bool = False) -> VirtualRegister:
        pair = self.symbol, other.symbol if isinstance(other, VirtualRegister) else other
        return VirtualRegister(value, symbol=(operator, *(pair[::-1] if turned else pair)))

    def _other(self, other: Any) -> int:
        if isinstance(other, VirtualRegister):
            return other.read()
        if isinstance(other, int):
            return other
        raise current().error(
            UnsupportedInstructionError, f"register arithmetic with {type(other).__name__}"
        )

    def __add__(self, other: Any) -> VirtualRegister:
        return self._made("+", self.read() + self._other(other), other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> VirtualRegister:
        return self._made("-", self.read() - self._other(other), other)

    def __rsub__(self, other: Any) -> VirtualRegister:
        return self._made("-", self._other(other) - self.read(), other, turned=True)

    def __mul__(self, other: Any) -> VirtualRegister:
        return self._made("*", self.read() * self._other(other), other)

    __rmul__ = __mul__
