"""What would change a predicted time: the same model predicted again with one thing changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nmm_compiler.errors import NmmError
from nmm_compiler.prediction.forms import read_form
from nmm_compiler.prediction.model import ModelPrediction
from nmm_compiler.prediction.stacks import STACKS
from nmm_compiler.prices.ways import ERRORS
from nmm_compiler.records import Record
from nmm_compiler.report.headline import told_apart

Again = Callable[..., ModelPrediction]
"""Predicts the same setting with some arguments of `predict` changed."""


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """One change, the time of a step with it, and how many times more tokens a second it gives.

    us: microseconds per token, or of the pass. gain: of the tokens a second of all sequences, so
    that a larger batch counts for what it brings. told_apart: whether the gain is beyond the error
    of the prices. fits: whether a core's memory holds the model then.
    """

    name: str
    us: float
    gain: float
    told_apart: bool
    fits: bool

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table."""
        note = "" if self.told_apart else "not told apart"
        return (
            self.name, f"{self.us / 1e3:.2f}", f"{self.gain:.2f}x",
            note if self.fits else "DOES NOT FIT",
        )  # fmt: skip


def settings(base: ModelPrediction) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each change of one thing: its name, and what `predict` is given instead."""
    for form in ("bf16", "fp8", "int8", "mxfp4+64"):
        if form != base.form:
            yield f"weights {form}", {"weights": base.dtype, **read_form(form).predicted()}
    other = 1 if base.lnc > 1 else 2
    yield f"{other} physical core{'s' * (other > 1)} a logical one", {"lnc": other}
    for tp in (2 * base.tp, base.tp // 2):
        yield f"tp {tp}", {"tp": tp}
    yield f"batch {4 * base.batch}", {"batch": 4 * base.batch}
    size = "prompt" if base.phase("decode") is None else "context"
    half = max(1, getattr(base, size) // 2)
    yield f"a bucket of {half:,} tokens", {size: half}
    for name in STACKS:
        if name != base.stack:
            yield f"stack {name}", {"stack": name}


def changes(
    base: ModelPrediction, again: Again, low_rank: Mapping[float, ModelPrediction]
) -> tuple[Change, ...]:
    """Return what each change would bring, the largest gain first.

    low_rank: predictions at other ratios, which are at hand. What cannot be predicted, as a format
    that the target lacks, is left out.
    """
    made = [_change(f"low rank, ratio {ratio:g}", base, one) for ratio, one in low_rank.items()]
    for name, changed in settings(base):
        with contextlib.suppress(NmmError):
            made.append(_change(name, base, again(**changed)))
    made += _one_launch_a_layer(base)
    return tuple(sorted(made, key=lambda change: -change.gain))


def _change(name: str, base: ModelPrediction, other: ModelPrediction) -> Change:
    gain = base.step_us / other.step_us * other.batch / base.batch
    if other.prompt != base.prompt:  # a pass over fewer tokens
        gain *= other.prompt / base.prompt
    return _of(name, base, other.step_us, gain, other.memory.fits)


def _of(name: str, base: ModelPrediction, us: float, gain: float, fits: bool) -> Change:
    told = told_apart(gain, ERRORS[base.price])
    return Change(name=name, us=us, gain=gain, told_apart=told, fits=fits)


def _one_launch_a_layer(base: ModelPrediction) -> Iterator[Change]:
    """Yield what one kernel a layer would bring: the gaps between its launches saved."""
    lines = base.phases[-1].lines
    launches = [line for line in lines if line.module == "(program)" and line.source == "fitted"]
    layers = max((line.calls for line in lines if "*" in line.module), default=0)
    if launches and 0 < layers < launches[0].calls:
        us = base.step_us - (launches[0].calls - layers) * launches[0].each_us
        yield _of("one launch a layer", base, us, base.step_us / us, base.memory.fits)
