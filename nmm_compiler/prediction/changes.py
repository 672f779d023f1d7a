"""What would change a predicted time: the same model predicted again with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nmm_compiler.errors import NmmError
from nmm_compiler.options import WEIGHTS
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
    for form in WEIGHTS:
        if form != base.weights and form not in ("float16", "float32"):
            yield f"weights {form}", {"weights": form}
    other = 1 if base.lnc > 1 else 2
    yield f"{other} physical core{'s' * (other > 1)} a logical one", {"lnc": other}
    yield f"tp {2 * base.tp}", {"tp": 2 * base.tp}
    if base.tp > 1:
        yield f"tp {base.tp // 2}", {"tp": base.tp // 2}
    yield f"batch {4 * base.batch}", {"batch": 4 * base.batch}
    if base.phase("decode") is None:
        yield f"a bucket of {base.prompt // 2:,} tokens", {"prompt": max(1, base.prompt // 2)}
    else:
        yield f"a bucket of {base.context // 2:,} tokens", {"context": max(1, base.context // 2)}
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
        try:
            other = again(**changed)
        except NmmError:
            continue
        made.append(_change(name, base, other))
    one_launch = _one_launch_a_layer(base)
    if one_launch is not None:
        made.append(one_launch)
    return tuple(sorted(made, key=lambda change: -change.gain))


def _change(name: str, base: ModelPrediction, other: ModelPrediction) -> Change:
    gain = base.step_us / other.step_us * other.batch / base.batch
    if other.prompt != base.prompt:  # a pass over fewer tokens
        gain *= other.prompt / base.prompt
    return _of(name, base, other.step_us, gain, other.memory.fits)


def _of(name: str, base: ModelPrediction, us: float, gain: float, fits: bool) -> Change:
    told = told_apart(gain, ERRORS[base.price])
    return Change(name=name, us=us, gain=gain, told_apart=told, fits=fits)


def _one_launch_a_layer(base: ModelPrediction) -> Change | None:
    """Return what one kernel a layer would bring: the gaps between its launches saved."""
    lines = base.phases[-1].lines
    launches = [line for line in lines if line.module == "(program)" and line.source == "fitted"]
    layers = max((line.calls for line in lines if "*" in line.module), default=0)
    if not launches or not 0 < layers < launches[0].calls:
        return None
    saved = (launches[0].calls - layers) * launches[0].each_us
    us = base.step_us - saved
    return _of("one launch a layer", base, us, base.step_us / us, base.memory.fits)
