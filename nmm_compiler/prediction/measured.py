"""A user's own figures beside the predicted steps: which step is slower than it should be.

A file is one number, the milliseconds of a token, or the JSON summary of Neuron Explorer or
neuron-profile (`--output-format summary-json`, or `json`). Of a summary these fields count, as
its reference describes them: total_time and cc_op_active_time in seconds, hbm_read_bytes and
hbm_write_bytes. The device's total leaves the host out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmm_compiler.errors import OptionTypeError
from nmm_compiler.prediction.phase import Phase
from nmm_compiler.records import Record


@dataclass(frozen=True, kw_only=True)
class Measured(Record):
    """What a file says of one pass, in microseconds; None where it does not.

    us: of the pass. collectives_us: in which at least one collective was active. hbm_bytes: read
    and written by one core. with_host: whether the pass has the host's part in it.
    """

    us: float
    with_host: bool
    collectives_us: float | None = None
    hbm_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """A step as predicted and as measured; measured_us is None where a file does not say."""

    step: str
    predicted_us: float
    measured_us: float | None
    note: str = ""

    @property
    def lost_us(self) -> float:
        """How much longer than predicted the step took."""
        return (self.measured_us or 0.0) - self.predicted_us

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table."""
        measured = "-" if self.measured_us is None else f"{self.measured_us / 1e3:.3f}"
        return (self.step, f"{self.predicted_us / 1e3:.3f}", measured, self.note)


_NEEDED = "a number of milliseconds, or the summary JSON of Neuron Explorer with total_time"


def read_measured(text: str, name: str) -> Measured:
    """Return what a file says; raises OptionTypeError where it is neither form."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        raise OptionTypeError("measured", name, _NEEDED) from None
    if isinstance(found, (int, float)) and not isinstance(found, bool) and found > 0:
        return Measured(us=1e3 * found, with_host=True)
    while isinstance(found, (dict, list)) and "total_time" not in found:
        inner = found.get("summary") if isinstance(found, dict) else (found or [None])[0]
        found = inner
    if not isinstance(found, dict):
        raise OptionTypeError("measured", name, _NEEDED)
    numbers = {
        key: value for key, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    }  # fmt: skip
    if not numbers.get("total_time"):
        raise OptionTypeError("measured", name, _NEEDED)
    moved = [numbers[key] for key in ("hbm_read_bytes", "hbm_write_bytes") if key in numbers]
    collectives = numbers.get("cc_op_active_time")
    return Measured(
        us=1e6 * numbers["total_time"],
        with_host=False,
        collectives_us=None if collectives is None else 1e6 * collectives,
        hbm_bytes=int(sum(moved)) if moved else None,
    )


def differences(phase: Phase, measured: Measured, bytes_per_second: float) -> list[Difference]:
    """Return the pass, its bytes, its collectives and the rest, predicted and measured.

    bytes_per_second: of one logical core, by which measured bytes become time.
    """
    steps = {step.name: step.us for step in phase.steps}
    host = steps.get("host and stack", 0.0)
    predicted = phase.us if measured.with_host else phase.us - host
    rows = {
        "bytes at the full rate": (
            None if measured.hbm_bytes is None else 1e6 * measured.hbm_bytes / bytes_per_second
        ),
        "collectives": measured.collectives_us,
    }
    made = [
        Difference(
            step="the pass" if measured.with_host else "the pass on the device",
            predicted_us=predicted, measured_us=measured.us,
        )
    ]  # fmt: skip
    made += [
        Difference(step=name, predicted_us=steps.get(name, 0.0), measured_us=us)
        for name, us in rows.items()
        if us is not None
    ]
    known = {one.step for one in made}
    left = [name for name in steps if name not in known]
    if not measured.with_host:
        left = [name for name in left if name != "host and stack"]
    if len(made) > 1:
        told = sum(one.measured_us or 0.0 for one in made[1:])
        made.append(
            Difference(
                step="the rest", predicted_us=sum(steps[name] for name in left),
                measured_us=max(0.0, measured.us - told), note=", ".join(left),
            )
        )  # fmt: skip
    return made


def verdict(made: Sequence[Difference], band: tuple[float, float]) -> str:
    """Return what the differences say; band: how much less and more published runs took."""
    whole, *steps = made
    assert whole.measured_us is not None
    ratio = whole.measured_us / whole.predicted_us
    inside = 1.0 + band[0] <= ratio <= 1.0 + band[1]
    said = (
        f"measured is {ratio:.2f}x of predicted, "
        f"{'within' if inside else 'beyond'} what published runs took"
    )
    worst = max(steps, key=lambda one: one.lost_us, default=None)
    if worst is None:
        return said + "; a profiler's summary would tell which step"
    if worst.lost_us <= 0.0:
        return said + "; no step is slower than predicted"
    return said + f"; slowest against its prediction: {worst.step}, {worst.lost_us / 1e3:+.3f} ms"
