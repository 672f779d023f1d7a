"""What would pay on several cores where low rank does not: ratio, layers, or fewer cores.

Larger ratios are tried in order with the closed form of every kernel, then the layers that pay at
one of them alone, then fewer cores. What seems to pay is predicted again as the plan's other
figures are, and named only if it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nmm_compiler.errors import NmmError
from nmm_compiler.prediction.model import ModelPrediction
from nmm_compiler.prices.ways import ERRORS
from nmm_compiler.records import Record
from nmm_compiler.report.headline import told_apart

RATIOS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Ratios that are tried; beyond them little is left of a model."""

Again = Callable[..., ModelPrediction]
"""Predicts the same setting again, with other ratio, layers (include), tp or price."""
GainsOf = Callable[[ModelPrediction], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class WayOut(Record):
    """A setting that does not pay on so many cores, and what would, with the predicted gain."""

    target: str
    tp: int
    setting: str
    gain: float
    pays: tuple[str, ...]

    def __str__(self) -> str:
        what = "; or ".join(self.pays) or f"nothing up to ratio {RATIOS[-1]:g}, and no fewer cores"
        return (
            f"{self.target}, tp {self.tp} does not pay: {self.gain:.2f}x at best ({self.setting}); "
            f"there pays: {what}"
        )


def pays(gain: float) -> bool:
    """Return whether a gain is one, and more than the error of the simulated prices."""
    return gain > 1.0 and told_apart(gain, ERRORS["simulated"])


def step_gain(prediction: ModelPrediction) -> float:
    """Return the gain of a token, or of the pass of a model that does not generate."""
    return prediction.gain.get(prediction.phases[-1].name, 0.0)


def ways_out(
    best: ModelPrediction,
    again: Again,
    gains_of: GainsOf,
    fewer: Sequence[int],
    progress: Callable[[str], None] = lambda said: None,
) -> tuple[str, ...]:
    """Return what pays where `best`, the best of its cores, does not.

    gains_of: the gains of a prediction's layers by their names. fewer: other numbers of cores, in
    the order in which they are tried.
    """
    made: list[str] = []
    seen: set[str] = set()
    for ratio in RATIOS:
        if best.ratio is not None and ratio <= best.ratio:
            continue
        progress(f"ratio {ratio:g}")
        tried = _tried(again, ratio=ratio, price="closed_form")
        if tried is None:
            break
        for include in _worth_trying(tried, gains_of(tried)):
            kind = "layers" if include else "ratio"
            found = None if kind in seen else _tried(again, ratio=ratio, include=include)
            if found is not None and pays(step_gain(found)):
                seen.add(kind)
                flags = "".join(f" --include {name}" for name in include or ())
                named = f" of {', '.join(include)} alone ({flags.strip()})" if include else ""
                made.append(f"ratio {ratio:g}{named}, {step_gain(found):.2f}x")
        if "ratio" in seen:
            break
    for tp in fewer:
        progress(f"tp {tp}")
        found = _tried(again, tp=tp, ratio=best.ratio)
        if found is not None and pays(step_gain(found)):
            made.append(f"tp {tp} with ratio {best.ratio:g}, {step_gain(found):.2f}x")
            break
    return tuple(made)


def _worth_trying(tried: ModelPrediction, layers: dict[str, float]) -> Iterator[list[str] | None]:
    """Yield the layers that pay alone, and None for all, as the closed form has them."""
    paying = [name for name, gain in layers.items() if pays(gain)]
    if 0 < len(paying) < len(layers):
        yield paying
    if pays(step_gain(tried)):
        yield None


def _tried(again: Again, **changes: Any) -> ModelPrediction | None:
    try:
        return again(**changes)
    except NmmError:
        return None  # a ratio or a number of cores that this model cannot have
