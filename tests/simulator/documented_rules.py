"""The documented rules of NKI as data: one row per rule, with a call that breaks it and one that
keeps it.

`rules()` reads `documented_rules.toml`. A row has a call with a `$`, which `breaks` and `holds`
replace, so that the two calls differ in the rule alone. The simulator does not read this table: its
checks are beside the instructions, and tests/simulator/test_rules.py runs both calls of each row,
in both modes, and expects the row's error.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from pathlib import Path

TABLE = Path(__file__).with_name("documented_rules.toml")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One documented rule.

    topic: the instruction or the subject of the rule. says: the rule in our words.
    source: page and section of the Neuron documentation (SDK 2.32 unless it says otherwise).
    error: the name of the class in errors.py that refuses its breach.
    call: kernel lines over the tiles that `RULE_KERNEL` makes, `$` where the two calls differ.
    on, holds_on: targets of the breaking and of the holding call.
    needs_data: the rule is about values, so mode="timing" cannot see its breach.
    grid: programs that the calls need.
    """

    topic: str
    says: str
    source: str
    error: str
    call: str
    breaks: str
    holds: str
    on: str = "trn2"
    holds_on: str = ""
    needs_data: bool = False
    grid: int = 1

    @property
    def breaker(self) -> str:
        """The kernel lines that break the rule."""
        return self.call.replace("$", self.breaks)

    @property
    def holder(self) -> str:
        """The kernel lines that keep it, at its limit."""
        return self.call.replace("$", self.holds)


RULE_KERNEL = """\
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


def sb(*shape, dtype=nl.float32, value=1, address=None):
    tile = nl.ndarray(shape, dtype, nl.sbuf, address=address)
    nisa.memset(dst=tile, value=0 if "_x4" in str(dtype) else value)
    return tile


def ps(*shape, dtype=nl.float32):
    tile = nl.ndarray(shape, dtype, nl.psum)
    nisa.memset(dst=tile, value=1)
    return tile


def hb(*shape, dtype=nl.float32, buffer=nl.shared_hbm):
    return nl.zeros(shape, dtype, buffer)


def idx(*values, dtype=nl.uint32, rows=None):
    tile = nl.ndarray((rows or len(values), 1), dtype, nl.sbuf)
    for row, value in enumerate(values):
        nisa.dma_copy(dst=tile[row : row + 1], src=sb(1, 1, dtype=dtype, value=value))
    if rows:
        nisa.memset(dst=tile, value=values[0])
    return tile


@nki.jit
def kernel(a):
{body}
    return a
"""
"""The kernel around a row's call: sb, ps and hb make written tensors in SBUF, PSUM and HBM."""


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return all rules in the table's order."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["rule"]
    return tuple(Rule(**row) for row in rows)
