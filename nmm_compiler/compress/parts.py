"""Chooses the parts in which a model is calibrated, and collects each part's statistics.

Where all moments fit into memory, the whole model is one part. Else each block is one
(`blocks.py`): the passages of the original model through every block are recorded first, so that a
block can be calibrated by itself after other blocks were changed. Sequential calibration also goes
through the blocks, with the compressed model's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nmm_compiler.compress import memory
from nmm_compiler.compress.blocks import find_blocks
from nmm_compiler.compress.calibrate import (
    OutputFn,
    Statistics,
    collect,
    frozen,
    readers,
    trace,
)
from nmm_compiler.compress.select import Site
from nmm_compiler.compress.sequential import Originals, Pairs, collect_pairs
from nmm_compiler.errors import MemoryBudgetError, NotInBlocksError


@dataclass
class Part:
    """A module of the model ("" for all of it), the names of its sites, and its batches.

    batches: of the model, or the passages of the original model through this block.
    """

    name: str
    sites: tuple[str, ...]
    batches: list[Any]


class Calibration:
    """The parts of one call in the order of work, and their statistics on request."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        batches: list[Any],
        *,
        gradients: bool,
        output: OutputFn | None,
        sequential: bool,
        limit: str | int | None,
        progress: bool,
    ) -> None:
        """Choose the parts; raises MemoryBudgetError when they do not fit, before any work."""
        self.model, self.batches, self.sequential = model, batches, sequential
        self.gradients, self.output, self.progress = gradients, output, progress
        self.originals = Originals(model)
        self.whole = Part("", tuple(site.name for site in sites), batches)
        self.parts = [self.whole]
        self._held: dict[tuple[str, ...], Statistics] = {}
        self._hidden: list[torch.Tensor] | None = None
        room = self._room_by_blocks(sites, limit)
        self.limited = room is not None
        if self.limited or sequential:
            try:
                self._cut(sites, room)
            except NotInBlocksError as reason:
                if self.limited:
                    raise MemoryBudgetError(
                        f"{type(model).__name__} cannot be calibrated block by block, as memory="
                        f"{limit!r} asks: {reason}; pass more, or include= some layers at a time"
                    ) from reason
        if not self.limited:  # now, because the model is changed later
            self._held[self.whole.sites] = self._collect(model, sites, batches)

    def _room_by_blocks(self, sites: Sequence[Site], limit: str | int | None) -> int | None:
        """Return None where everything fits at once, else the bytes left beside one block."""
        most = memory.available_bytes() if limit is None else memory.read_bytes(limit)

        def need(some: Sequence[Site], reads: dict[str, str] | None) -> int:
            work = memory.work_needs(some, self.sequential)
            return memory.moments_need(some, self.gradients, reads) + work

        if most is None or need(sites, None) <= most:
            return None
        reads = readers(self.model, sites, self.batches[0])
        whole = need(sites, reads)
        if whole <= most:
            return None
        if limit is None:
            raise memory.refusal(
                f"calibrating {len(sites)} layers at once", whole, most,
                'pass memory="8GiB" (or what there is) to go block by block, '
                'sensitivity="output" for about half of it, or include= some layers at a time',
            )  # fmt: skip
        blocks, rest = find_blocks(self.model, sites)
        parts = [block.sites for block in blocks] or [tuple(sites)]
        least = max(need(part, reads) for part in parts)
        least += memory.moments_need(rest, self.gradients, reads) if blocks else 0
        if least > most:
            raise memory.refusal(
                "calibrating one block at a time", least, most,
                f'pass memory="{least / 2**30 + 0.01:.2f}GiB" or more, or include= fewer layers',
            )  # fmt: skip
        return most - least

    def _cut(self, sites: Sequence[Site], room: int | None) -> None:
        """Make one part per block; raise NotInBlocksError for a model that has none."""
        blocks, rest = find_blocks(self.model, sites)
        if not blocks:
            raise NotInBlocksError("it holds no list of blocks")
        tracer = trace(
            self.model, blocks, self.batches, gradients=self.gradients and self.limited,
            output=self.output, progress=self.progress, room=room,
        )  # fmt: skip
        if self.sequential and not tracer.chained:
            raise NotInBlocksError("its blocks do not feed each other")
        parts = [
            Part(block.name, tuple(s.name for s in block.sites), tracer.passages[block.name])
            for block in blocks
        ]
        early = {site.name for site in rest}
        if rest and self.sequential:
            order = list(readers(self.model, sites, self.batches[0]))
            early = set(order[: order.index(blocks[0].sites[0].name)])
        before = tuple(site.name for site in rest if site.name in early)
        after = tuple(site.name for site in rest if site.name not in early)
        self._first_block, self._keeps_originals = blocks[0], bool(rest)
        whole = [Part("", names, self.batches) for names in (before, after)]
        self.parts = [part for part in (whole[0], *parts, whole[1]) if part.sites]

    def statistics(self, part: Part, sites: Sequence[Site]) -> Statistics:
        """Return the statistics of a part's sites in the original model, maybe of others too.

        Where they do not all fit into memory, each call collects those of its block.
        """
        part = part if self.limited else self.whole
        if part.sites in self._held:
            return self._held[part.sites]
        with self.originals.restored():
            found = self._collect(self.model.get_submodule(part.name), sites, part.batches)
        if not part.name:  # the model is changed later
            self._held[part.sites] = found
        return found

    def _collect(self, module: nn.Module, sites: Sequence[Site], batches: list[Any]) -> Statistics:
        return collect(
            module, sites, batches, gradients=self.gradients, output=self.output,
            progress=self.progress,
        )  # fmt: skip

    def pairs(self, part: Part, sites: Sequence[Site]) -> tuple[Statistics, dict[str, Pairs]]:
        """Return what `collect_pairs` finds for sites of a part, behind all that was compressed."""
        batches = part.batches
        if part.name:
            batches = [
                replace(passage, hidden=hidden, original=passage)
                for passage, hidden in zip(batches, self._hidden_here(), strict=True)
            ]
        return collect_pairs(self.originals, self.model.get_submodule(part.name), sites, batches)

    def _hidden_here(self) -> list[torch.Tensor]:
        """Return the compressed model's hidden states at the entry of this block."""
        if self._hidden is None:
            tracer = trace(self.model, [self._first_block], self.batches)
            self._hidden = [p.hidden for p in tracer.passages[self._first_block.name]]
        return self._hidden

    def finish(self, part: Part) -> None:
        """Finish a part whose sites are done: its outputs are the next block's inputs."""
        if not self.sequential or not part.name:
            return
        module = self.model.get_submodule(part.name)
        with frozen(module), torch.no_grad():
            self._hidden = [
                replace(passage, hidden=hidden).run(module)
                for passage, hidden in zip(part.batches, self._hidden_here(), strict=True)
            ]
        if not self._keeps_originals:
            self.originals.forget()
        part.batches.clear()
