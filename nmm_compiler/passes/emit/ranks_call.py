"""The call of a chain whose kernel sums over the devices between its products."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import Chain
from nmm_compiler.passes.chains.over_ranks import devices_of
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.emit.fused_calls import LowRankCall
from nmm_compiler.passes.graph.canonical import Canonical


@dataclasses.dataclass
class RowsCall(LowRankCall):
    """nmm.lowrank_matmul on one of `tp` ranks of a process group, with tp_axis "rows"."""

    tp: int = 1
    group: str = ""

    @classmethod
    def over(cls, c: Canonical, chain: Chain) -> RowsCall:
        """Return the call of a chain that sums over devices."""
        made = cls.of(c, chain)
        assert isinstance(made, RowsCall)
        made.tp, made.group = devices_of(c, chain)
        return made

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        return super().info() | {"tp": self.tp}

    def notes(self) -> tuple[str, ...]:
        """Return that the call sums, besides what the reader should know about any call."""
        return (*super().notes(), f"the sum over {self.tp} devices is inside of the call")

    def op_call(
        self, editor: Editor, args: tuple[Any, ...], keywords: dict[str, Any], value: Any
    ) -> fx.Node:
        """Emit the op with the ranks that sum."""
        ranks = {"tp": self.tp, "tp_axis": "rows", "group": self.group}
        return super().op_call(editor, args, keywords | ranks, value)
