"""`plan`: predictions of one model in many settings, and which form of its weights pays where.

Every model is traced first with the closed form of its kernels; each distinct kernel is then
simulated once, in several processes, before the settings are predicted by the simulated times. Of a
single setting a plan also says what would change it: the same model predicted again with one thing
changed.

A user's own figures go beside the predicted steps, so that it shows which step is slower than it
should be. A file is one number, the milliseconds of a token, or the JSON summary of Neuron Explorer
or neuron-profile (`--output-format summary-json`, or `json`). Of a summary these fields count, as
its reference describes them: total_time and cc_op_active_time in seconds, hbm_read_bytes and
hbm_write_bytes. The device's total leaves the host out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import ModelError, NmmError, OptionTypeError
from nmm_compiler.kernels.base import CORES
from nmm_compiler.lowrank_models.select import Patterns
from nmm_compiler.prediction.forms import (
    BF16,
    DEFAULT,
    Form,
    keeps_quality,
    notes_on,
    quality_of,
    read_form,
)
from nmm_compiler.prediction.model import REMEDY, ModelPrediction, Phase, PhaseLine
from nmm_compiler.prediction.predict import predict
from nmm_compiler.prediction.stacks import STACKS
from nmm_compiler.prices.kernel import noted_kernels, price_many
from nmm_compiler.prices.ways import ERRORS
from nmm_compiler.records import Record
from nmm_compiler.report.charts import gain_bars
from nmm_compiler.report.headline import told_apart
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.shown import Shown

_TEXT = ("target", "weights", "quality")  # columns that hold words
SETTING = ("target", "tp", "batch", "prompt", "context")
"""Arguments of `predict` that a plan crosses, and fields of what it returns."""


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


def settings(base: ModelPrediction) -> dict[str, dict[str, Any]]:
    """Return each change of one thing by its name: what `predict` is given instead."""
    forms = ("bf16", "fp8", "mxfp4+32fp8")
    other = 1 if base.lnc > 1 else 2
    size = "prompt" if base.phase("decode") is None else "context"
    half = max(1, getattr(base, size) // 2)
    return {
        **{f"weights {name}": {"weights": name} for name in forms if name != base.weights},
        f"{other} physical core{'s' * (other > 1)} a logical one": {"lnc": other},
        f"tp {2 * base.tp}": {"tp": 2 * base.tp},
        f"tp {base.tp // 2}": {"tp": base.tp // 2},
        f"batch {4 * base.batch}": {"batch": 4 * base.batch},
        f"a bucket of {half:,} tokens": {size: half},
        **{f"stack {name}": {"stack": name} for name in STACKS if name != base.stack},
    }


def changes(
    base: ModelPrediction,
    again: Callable[..., ModelPrediction],
    low_rank: Mapping[float, ModelPrediction],
) -> tuple[Change, ...]:
    """Return what each change would bring, the largest gain first.

    again: predicts the last phase of the same setting with some arguments of `predict` changed.
    low_rank: predictions at other ratios, which are at hand. What cannot be predicted, as a format
    that the target lacks, is left out.
    """
    others = {f"low rank, ratio {ratio:g}": one for ratio, one in low_rank.items()}
    for name, changed in settings(base).items():
        with contextlib.suppress(NmmError):
            others[name] = again(**changed)
    last = base.phases[-1]
    layers = max((line.calls for line in last.lines if "*" in line.module), default=0)
    fewer = tuple(
        dataclasses.replace(line, calls=layers)
        if (line.module, line.source) == ("(program)", "fitted") and line.calls > layers > 0
        else line
        for line in last.lines
    )
    if fewer != last.lines:
        phases = (*base.phases[:-1], dataclasses.replace(last, lines=fewer))
        others["one launch a layer"] = dataclasses.replace(base, phases=phases)
    made = []
    for name, other in others.items():
        us, tokens = other.phases[-1].us, other.batch / base.batch * (other.prompt / base.prompt)
        gain = base.phases[-1].us / us * tokens
        told = told_apart(gain, ERRORS[base.price])
        made.append(Change(name=name, us=us, gain=gain, told_apart=told, fits=other.memory.fits))
    return tuple(sorted(made, key=lambda change: -change.gain))


Measured = Mapping[str, float]
"""The numbers of a file by name: "ms", of one pass with the host's part, or a profiler's."""


@dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """A step as predicted and as measured."""

    step: str
    predicted_us: float
    measured_us: float


def read_measured(text: str, name: str) -> Measured:
    """Return what a file says; raises OptionTypeError where it is neither form."""
    found: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
    while isinstance(found, (dict, list)) and "total_time" not in found:
        found = found.get("summary") if isinstance(found, dict) else (found or [None])[0]
    given = found if isinstance(found, dict) else {"ms": found}
    numbers = {
        key: float(value) for key, value in given.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    }  # fmt: skip
    if not (numbers.get("ms") or numbers.get("total_time")):
        wanted = "a number of milliseconds, or the summary JSON of Neuron Explorer with total_time"
        raise OptionTypeError("measured", name, wanted)
    return numbers


def differences(phase: Phase, measured: Measured, bytes_per_second: float) -> list[Difference]:
    """Return the pass, its bytes, its collectives and the rest, predicted and measured.

    bytes_per_second: of one logical core, by which measured bytes become time.
    """
    if "total_time" not in measured:
        us = 1e3 * measured["ms"]
        return [Difference(step="the pass", predicted_us=phase.us, measured_us=us)]
    steps = {step.name: step.us for step in phase.steps}
    device = phase.us - steps.pop("host and stack", 0.0)
    moved = [measured[one] for one in ("hbm_read_bytes", "hbm_write_bytes") if one in measured]
    told = {"bytes at the full rate": sum(moved) / bytes_per_second} if moved else {}
    if "cc_op_active_time" in measured:
        told["collectives"] = measured["cc_op_active_time"]
    rest = {"the rest": max(0.0, measured["total_time"] - sum(told.values()))} if told else {}
    seconds = {"the pass on the device": measured["total_time"], **told, **rest}
    left = sum(us for name, us in steps.items() if name not in told)
    predicted = {"the pass on the device": device, "the rest": left, **steps}
    return [
        Difference(step=name, predicted_us=predicted.get(name, 0.0), measured_us=1e6 * each)
        for name, each in seconds.items()
    ]


def verdict(made: Sequence[Difference], band: tuple[float, float]) -> str:
    """Return what the differences say; band: how much less and more published runs took."""
    whole, *steps = made
    ratio = whole.measured_us / whole.predicted_us
    inside = 1.0 + band[0] <= ratio <= 1.0 + band[1]
    said = f"{'within' if inside else 'beyond'} what published runs took"
    lost = {one.step: (one.measured_us - one.predicted_us) / 1e3 for one in steps}
    if lost:
        worst = max(lost, key=lost.__getitem__)
        said += f"; slowest against its prediction: {worst}, {lost[worst]:+.3f} ms"
    return f"measured is {ratio:.2f}x of predicted, {said}"


@dataclass(frozen=True, kw_only=True)
class Refused(Record):
    """A setting that cannot be predicted, and why."""

    setting: str
    reason: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Shown, Record):
    """Predictions of one model in many settings."""

    name: str
    predictions: tuple[ModelPrediction, ...]
    refused: tuple[Refused, ...] = ()
    changes: tuple[Change, ...] = ()
    differences: tuple[Difference, ...] = ()

    def verdict(self) -> list[str]:
        """Return sentences: which form each target is to take; of forms that are all low rank,
        which setting pays most and in which layers, or that none pays."""
        if len({p.weights for p in self.predictions}) > 1:
            return [self._said_of(t) for t in dict.fromkeys(p.target for p in self.predictions)]
        low = [p for p in self.predictions if p.gain]
        if not low:
            return [f"no form to compare: {self.predictions[0].form} alone is predicted"]
        paying = [p for p in low if p.memory.fits and p.pays]
        best = max(paying or low, key=lambda p: p.step_gain)
        if not paying:
            return [
                f"no setting pays beyond the error of its prices: the nearest is "
                f"{_setting(best)} with {best.step_gain:.2f}x; {REMEDY}"
            ]
        said = [f"pays most: {_setting(best)}: {best.headline()}"]
        layers = [f"{name} {gain:.2f}x" for name, gain in layer_gains(best).items()]
        if layers:
            said.append(f"by layers, {best.phases[-1].name}: {', '.join(layers)}; what is "
                        "below 1 can stay dense (--exclude)")  # fmt: skip
        return said

    def best_form(self, target: str) -> str | None:
        """Return the fastest form of a target that fits and keeps the quality; of equally fast
        ones that with the least memory."""
        forms = self._forms_on(target)
        keep = [form for form, (_, fits, _) in forms.items() if fits and keeps_quality(form)]
        return max(keep, key=lambda form: (round(forms[form][0], 2), -forms[form][2]), default=None)

    def _forms_on(self, target: str) -> dict[str, tuple[float, bool, int]]:
        """Return of each form the mean gain over the first one, whether it always fits, and the
        bytes that its first prediction needs."""
        here = [p for p in self.predictions if p.target == target]
        by_form = {p.form: [one for one in here if one.form == p.form] for p in here}
        return {
            form: (
                math.prod(map(self.over_first, each)) ** (1 / len(each)),
                all(p.memory.fits for p in each),
                each[0].memory.needed_bytes,
            )
            for form, each in by_form.items()
        }

    def _said_of(self, target: str) -> str:
        """Return which form a target is to take, and what it gains over each other one."""
        forms, best = self._forms_on(target), self.best_form(target)
        if best is None:
            return (
                f"{target}: no form that fits a core's memory is known to keep the quality; more "
                "cores (--tp) hold more"
            )
        gain, _, needed = forms.pop(best)
        error, quality = ERRORS[self.predictions[0].price], quality_of(best)
        said = [f"{target}: take {best}"]
        if quality is not None and quality[1] != (1.0, 1.0):
            said[0] += " ({:.2f} and {:.2f} times the perplexity of bf16)".format(*quality[1])
        for form, (other, fits, held) in forms.items():
            over, note = gain / other, ""
            if not fits:
                note = ", which does not fit"
            elif not keeps_quality(form) and over < 1.0:
                note = ", which is not known to keep the quality"
            elif form.startswith("lowrank"):
                note = ": low rank alone loses"
            elif not told_apart(over, error):
                note = f", not told apart (error {100 * error:.0f} %)"
                note += f", with {needed / held:.2f} of its memory"
            said.append(f"{over:.2f}x over {form}{note}")
        return "; ".join(said)

    def over_first(self, p: ModelPrediction, phase: int = -1) -> float:
        """Return how many times faster a prediction is than the first form of its setting."""
        first = next(q for q in self.predictions if _sizes(q) == _sizes(p))
        return first.phases[phase].us / p.phases[phase].us

    def parts(self) -> Sequence[Part]:
        """Return the verdict, the table, what would change it, and the measured times."""
        first, *more = self.verdict()
        made: list[Part] = [Line(first, "headline"), *map(Line, more), *self._table()]
        if self.changes:
            base = self.predictions[0]
            times = (f"{base.phases[-1].name} ms", "tokens a second")
            made += [
                *base.waterfall(),
                Line(str(STACKS[base.stack]), "note"),
                Line(f"what would change it: {_setting(base)}", "headline"),
                Grid.of(("with", *times, ""), [
                    (c.name, f"{c.us / 1e3:.2f}", f"{c.gain:.2f}x",
                     "DOES NOT FIT" if not c.fits else "" if c.told_apart else "not told apart")
                    for c in self.changes
                ], right=times),
                gain_bars([(one.name, one.gain, one.told_apart) for one in self.changes],
                          "times as many tokens a second with one thing changed"),
            ]  # fmt: skip
        if self.differences:
            times = ("predicted ms", "measured ms")
            said = verdict(self.differences, self.predictions[0].error_band)
            rows = [
                (one.step, f"{one.predicted_us / 1e3:.3f}", f"{one.measured_us / 1e3:.3f}")
                for one in self.differences
            ]
            made += [Line(said, "headline"), Grid.of(("step", *times), rows, right=times)]
        low = [p for p in self.predictions if p.gain][:40]
        if low and not self.changes:
            gains = [
                (_setting(p), p.step_gain, told_apart(p.step_gain, ERRORS[p.price])) for p in low
            ]
            made.append(gain_bars(gains, "times as fast as dense, by setting"))
        return made

    def _table(self) -> list[Part]:
        """Return a row for each prediction, in columns of what differs, and the notes on them."""
        head = (*SETTING, "weights", "TTFT ms", "gain", "TPOT ms", "gain", "by bytes", "tok/s",
                "GiB", "quality")  # fmt: skip
        rows = [_cells(p, self.over_first(p, 0), self.over_first(p)) for p in self.predictions]
        same = [i for i in range(len(SETTING)) if len({row[i] for row in rows}) == 1]
        shown = [i for i in range(len(head)) if i not in same]
        grid = [tuple(row[i] for i in shown) for row in rows]
        return [
            Line("in all: " + ", ".join(f"{head[i]} {rows[0][i]}" for i in same)),
            Grid.of([head[i] for i in shown], grid, [h for h in head if h not in _TEXT]),
            Line("predicted, not measured; gains are over the first form of the setting, our dense "
                 "kernels; by bytes: ms that the kernels' bytes take at the full rate; GiB that a "
                 "core needs, NO where it has less", "note"),
            *(Line(text, "note") for text in notes_on([p.form for p in self.predictions])),
            *(Line(f"{one.setting}: {one.reason}", "warning") for one in self.refused),
        ]  # fmt: skip

    def __repr__(self) -> str:
        return f"<Plan: {self.name}, {len(self.predictions)} predictions; {self.verdict()[0]}>"


def plan(
    model: Any,
    *,
    targets: Sequence[str] = ("trn2",),
    forms: Sequence[str] = DEFAULT,
    prompts: Sequence[int] = (512,),
    contexts: Sequence[int] = (2048,),
    batches: Sequence[int] = (1,),
    tps: Sequence[int] = (1,),
    lnc: int = CORES,
    dtype: str | None = None,
    weights: str | None = None,
    stack: str = "own",
    include: Patterns = None,
    exclude: Patterns = None,
    price: str = "simulated",
    routing: Sequence[float] | None = None,
    measured: Measured | None = None,
    change: bool = True,
    jobs: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Return predictions of every combination, of weights in each of these forms.

    forms: as `forms.py` names them; "bf16" is the model in `weights`, by default its dtype.
    price, stack and routing: as in `predict`. measured: the user's own figures of the first
    setting. change: of a single setting also predict what would change it. jobs: processes that
    simulate kernels, by default one for each core. progress: called with (what is
    done now, how many are done, how many there are), of settings and then of kernels. A setting
    that cannot be predicted is in `refused`; raises ModelError when none can.
    """
    crossed = itertools.product(targets, tps, batches, prompts, contexts)
    settings = [dict(zip(SETTING, one, strict=True)) for one in crossed]
    wanted = list(itertools.product(settings, map(read_form, forms)))
    fixed = {"lnc": lnc, "dtype": dtype, "weights": weights, "stack": stack, "routing": routing}
    cut = {"include": include, "exclude": exclude}

    def predicted(setting: dict[str, Any], form: Form, **more: Any) -> ModelPrediction:
        low = {"weights": form.name} if form.base else form.keywords()
        given = {**setting, **fixed, **(cut if "ratio" in low else {}), **low, **more}
        return predict(model, **given)

    def priced(price: str, doing: str = "") -> Plan:
        made: list[tuple[Form, ModelPrediction]] = []
        refused: list[Refused] = []
        for i, (setting, form) in enumerate(wanted):
            sizes = (f"{name} {setting[name]}" for name in SETTING[1:])
            named = " ".join([str(setting["target"]), *sizes])
            if progress is not None:
                progress(doing + named, i, len(wanted))
            try:
                made.append((form, predicted(setting, form, price=price)))
            except NmmError as error:
                refused.append(Refused(setting=f"{named} {form.name}", reason=str(error)))
        if not made:
            raise ModelError(f"nothing could be predicted: {refused[0].reason}")
        told: tuple[Change, ...] = ()
        (form, base), *_ = made
        if change and len(settings) == 1 and form == BF16:
            again = functools.partial(predicted, settings[0], BF16, price=price, last=True)
            told = changes(base, again, {p.ratio: p for _, p in made if p.ratio is not None})
        rate = machine_target(base.target).memory_bytes_per_second * lnc
        steps = () if measured is None else differences(base.phases[-1], measured, rate)
        return Plan(
            name=base.name,
            predictions=tuple(p for _, p in made),
            refused=tuple(refused),
            changes=told,
            differences=tuple(steps),
        )

    if price == "simulated":
        with noted_kernels() as noted:
            priced("closed_form", "tracing ")
        names = {machine_target(name): name for name in targets}
        kernels = [(spec, names[chip]) for spec, chip in noted if chip in names]
        price_many(kernels, jobs=jobs, progress=progress)
    return priced(price)


def layer_gains(prediction: ModelPrediction) -> dict[str, float]:
    """Return how much faster each kind of layer's kernels are than dense, in the last phase."""

    def layer_of(line: PhaseLine) -> str:
        """Return the layer of a kernel or a collective: self_attn, mlp, ..., else ""."""
        inside = "*." in line.module and line.kind in ("kernel", "all_reduce", "all_gather")
        return line.module.rpartition("*.")[2].split(".")[0] if inside else ""

    before, after = (
        p.phases[-1].by(layer_of) for p in (prediction.dense or prediction, prediction)
    )
    return {name: before[name] / after[name] for name in before if name and after.get(name)}


def _sizes(p: ModelPrediction) -> tuple[str, ...]:
    """Return the setting of a prediction as text."""
    return tuple(str(getattr(p, name)) for name in SETTING)


def _setting(p: ModelPrediction) -> str:
    said = ", ".join(map(" ".join, zip(SETTING, _sizes(p), strict=True)))
    return f"{said.removeprefix('target ')}, {p.form}"


def _cells(p: ModelPrediction, first_gain: float, gain: float) -> tuple[str, ...]:
    tokens, memory, last = p.tokens_per_second, p.memory, p.phases[-1]
    quality = quality_of(p.form)
    at_rate = sum(line.calls * line.bytes_us for line in last.lines)
    return (
        *_sizes(p),
        p.form,
        f"{p.ttft_us / 1e3:.2f}", f"{first_gain:.2f}x",
        "-" if p.tpot_us is None else f"{p.tpot_us / 1e3:.2f}", f"{gain:.2f}x",
        f"{at_rate / 1e3:.2f}",
        "-" if tokens is None else f"{tokens:,.0f}",
        f"{memory.needed_bytes / 2**30:.2f}" + ("" if memory.fits else " NO"),
        "-" if quality is None else "{:.2f}/{:.2f}".format(*quality[1]),
    )  # fmt: skip
