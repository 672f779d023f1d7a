"""Sequential calibration: each layer is fitted to its original outputs, on the inputs it will get.

Behind compressed layers a layer gets x' instead of x. Weighing its error with E[x' x'^T] alone
keeps the error of x'. Here W' is chosen to approximate W x itself:

    min E|W x - W' x'|^2 = min |(W* - W') B^1/2|^2 + const,   W* = W C B^-1,
    B = E[x' x'^T], C = E[x x'^T],

so the factorization is the one of `factorize.py`, applied to the least-squares solution W*. Pulling
both C and B to the same multiple of the identity (`moments.regularize`) pulls W* to W: with few
tokens, or where x' = x, nothing is changed. The original modules are kept and put back for one pass
per stage, a group of layers that read the same tensor. Where the model is a chain of blocks
(`parts.py`), a pass runs one block, so the work is linear in depth and only one block's originals
are kept; else a pass runs the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nmm_compiler.compress.blocks import Passage
from nmm_compiler.compress.calibrate import Collector, OutputFn, Statistics, call, collect
from nmm_compiler.compress.modules import put
from nmm_compiler.compress.moments import Moment, SecondMoment
from nmm_compiler.compress.select import Site


class Originals:
    """The dense modules that were replaced so far; `restored` puts them back for a pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._kept: list[Site] = []

    def forget(self) -> None:
        """Release the originals, which no later pass needs."""
        self._kept.clear()

    def keep(self, site: Site) -> None:
        """Remember a site that is about to be replaced."""
        self._kept.append(site)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The model as it was before any replacement."""
        replaced = [self.model.get_submodule(site.name) for site in self._kept]
        try:
            for site in self._kept:
                put(self.model, site.names, site.module)
            yield
        finally:
            for site, layer in zip(self._kept, replaced, strict=True):
                put(self.model, site.names, layer)


@dataclass
class Pairs:
    """Sums over the tokens of one input: cross of x x'^T [k, k], and per layer of |W x|^2."""

    cross: torch.Tensor
    outputs: dict[str, float]


def collect_pairs(
    originals: Originals, module: nn.Module, sites: Sequence[Site], batches: Sequence[Any]
) -> tuple[Statistics, dict[str, Pairs]]:
    """Return the statistics of x', as `collect` does, and the pairs by layer name.

    module: the module that runs the batches: the model, or the block of the passages.

    A layer has no pairs where other tokens reach it than in the original model (experts).
    """
    collectors: list[_PairCollector] = []

    def make(*arguments: Any) -> _PairCollector:
        collectors.append(_PairCollector(originals, *arguments))
        return collectors[-1]

    statistics = collect(module, sites, batches, collector=make)
    last = collectors[-1]
    found = {site.name: last.pairs.get(last.leader[site.name]) for site in sites}
    return statistics, {name: pairs for name, pairs in found.items() if pairs is not None}


class _PairCollector(Collector):
    """Runs every batch twice, through the model as it is and through the original."""

    carries = False  # W* needs the inverse of the whole moment

    def __init__(self, originals: Originals, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.originals = originals
        self.pairs: dict[str, Pairs | None] = {}
        self._new: dict[str, list[torch.Tensor]] = {}
        self._old: dict[str, list[torch.Tensor]] | None = None

    def run(
        self, model: nn.Module, batch: Any, output: OutputFn | None, generator: torch.Generator
    ) -> None:
        """Run one batch through both models and add up their products."""
        self._new, self._old = {}, None
        super().run(model, batch, output, generator)
        self._old = {name: [] for name in self._new}
        with torch.no_grad(), self.originals.restored():
            call(model, (isinstance(batch, Passage) and batch.original) or batch)
        for name, pieces in self._new.items():
            self._pair(name, torch.cat(pieces), self._old[name])

    def _pair(self, leader: str, new: torch.Tensor, pieces: list[torch.Tensor]) -> None:
        old = torch.cat(pieces) if pieces else new[:0]
        known = self.pairs.get(leader, Pairs(new.new_zeros(()), {}))
        if known is None or old.shape != new.shape:
            self.pairs[leader] = None
            return
        wide = old.double()
        known.cross = known.cross + wide.T @ new.double()
        for site in self.sites:
            if self.leader.get(site.name) == leader:
                y = old @ site.weight.T
                known.outputs[site.name] = known.outputs.get(site.name, 0.0) + float(
                    y.square().sum(dtype=torch.float64)
                )
        self.pairs[leader] = known

    def _take_input(self, site: Site, x: torch.Tensor) -> None:
        if self._old is None:
            super()._take_input(site, x)
        elif site.name in self._old:
            self._old[site.name].append(self._rows(x, site.k, f"the input of {site.name}"))

    def _add(self, name: str, rows: torch.Tensor) -> None:
        super()._add(name, rows)
        self._new.setdefault(name, []).append(rows)


def least_squares(weight: torch.Tensor, inputs: Moment, pairs: Pairs) -> torch.Tensor:
    """Return W* = W C B^-1 [n, k] in float64, the dense weight that fits W x best given x'.

    inputs: B, regularized; C gets the same scale and shift.
    """
    cross = Moment(pairs.cross.to(weight.device), inputs.scale, inputs.shift)
    right = cross.times(weight.double())
    b = inputs.dense()
    triangle, failed = torch.linalg.cholesky_ex(b)
    if not failed:
        return torch.cholesky_solve(right.T, triangle).T
    # Without damping B may be singular; directions that x' does not span are left out.
    return torch.linalg.lstsq(b, right.T, driver="gelsd").solution.T


def paired_error(
    weight: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    inputs: SecondMoment,
    pairs: Pairs,
    name: str,
) -> float:
    """Return |W x - up down x'| / |W x| over the calibration tokens, from their sums."""
    whole = pairs.outputs[name]
    if not whole > 0:
        return 0.0
    up, down = up.double(), down.double()
    gram = up.T @ up
    reduced = down @ inputs.total.to(down.device)
    square = float(((gram @ reduced) * down).sum())
    mixed = float(((up.T @ weight.double()) @ pairs.cross.to(down.device) * down).sum())
    return (max(whole - 2 * mixed + square, 0.0) / whole) ** 0.5
