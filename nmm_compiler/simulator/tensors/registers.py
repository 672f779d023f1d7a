"""What a kernel knows at run time only: virtual registers, and the indices of indirect views.

The simulator runs programs in order, so a register has its value at once. The device's compiler
does not, so Python may not ask for it: a comparison, a condition and a conversion are refused. In
timing mode a value that came from a tensor does not exist, and its use is an error that says so.
"""

from __future__ import annotations

import functools
import operator
from operator import index as as_index
from typing import Any, NoReturn

from nmm_compiler.errors import KernelArgumentError, UnsupportedInstructionError
from nmm_compiler.simulator.machine import current

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class VirtualRegister:
    """A 32-bit register; `frozen` for the variable of a loop on the device.

    symbol: where the value comes from, and not what it is: a number of its own, or what arithmetic
    on other registers, and on integers as text, made it.
    """

    def __init__(self, state: Any = None, frozen: bool = False, symbol: Any = None) -> None:
        self.value = 0 if state is None else int(state)
        self.known = state is not None
        self.frozen = frozen
        self.symbol: Any = current().new_identity() if symbol is None else symbol

    def read(self) -> int:
        """Return the value; an error when there is none."""
        current().need(
            self.known,
            "a register is used before it has a value: load it first; one loaded from a tensor has "
            'no value in timing mode, which computes no data, so use mode="full"',
        )
        return self.value

    def write(self, value: int, known: bool = True) -> None:
        """Set the value; an error for a loop variable."""
        current().need(
            not self.frozen, "the variable of a dynamic loop is frozen; use another register"
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

    def _arithmetic(self, other: Any, symbol: str, turned: bool = False) -> VirtualRegister:
        current().need(
            isinstance(other, (VirtualRegister, int)),
            f"register arithmetic with {type(other).__name__}",
            UnsupportedInstructionError,
        )
        if not isinstance(other, VirtualRegister):
            other = VirtualRegister(other, symbol=str(other))
        left, right = (other, self) if turned else (self, other)
        value = _OPERATORS[symbol](left.read(), right.read())
        return VirtualRegister(value, symbol=(symbol, left.symbol, right.symbol))

    __add__ = __radd__ = functools.partialmethod(_arithmetic, symbol="+")
    __mul__ = __rmul__ = functools.partialmethod(_arithmetic, symbol="*")
    __sub__ = functools.partialmethod(_arithmetic, symbol="-")
    __rsub__ = functools.partialmethod(_arithmetic, symbol="-", turned=True)


def whole(value: Any) -> int | None:
    """Return an integer that is one, also a NumPy one, else None."""
    try:
        return as_index(value)
    except TypeError:
        return int(value) if isinstance(value, float) and value.is_integer() else None


class Indirection:
    """The runtime index of an indirect view.

    kind: "vector" (one index per row of dim 0), "scalar" (resolved already, and kept for the checks
        of views), or "columns" (tensor indirection of trn3).
    step: elements from one index to the next. columns: that "columns" choose among.
    """

    def __init__(self, kind: str, index: Any, step: int, columns: int = 0) -> None:
        self.kind, self.index, self.step, self.columns = kind, index, step, columns
