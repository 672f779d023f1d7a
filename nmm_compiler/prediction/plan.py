"""`plan`: predictions of one model in many settings, and which ratio, layers and target pay.

Every model is traced first, and each distinct kernel is then simulated once, in several processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import ModelError, NmmError
from nmm_compiler.kernels.base import CORES, KernelSpec
from nmm_compiler.lowrank_models.select import Patterns
from nmm_compiler.prediction.changes import Change, changes
from nmm_compiler.prediction.changes import settings as changed_settings
from nmm_compiler.prediction.forms import (
    DEFAULT,
    Form,
    keeps_quality,
    notes_on,
    quality_of,
    read_form,
)
from nmm_compiler.prediction.measured import Difference, Measured, differences, verdict
from nmm_compiler.prediction.model import ModelPrediction
from nmm_compiler.prediction.phase import Phase
from nmm_compiler.prediction.predict import predict
from nmm_compiler.prediction.stacks import STACKS
from nmm_compiler.prediction.way_out import WayOut, pays, ways_out
from nmm_compiler.prediction.way_out import step_gain as _gain
from nmm_compiler.prices.kernel import noted_kernels
from nmm_compiler.prices.many import price_many
from nmm_compiler.prices.ways import ERRORS
from nmm_compiler.records import Record
from nmm_compiler.report.charts import gain_bars
from nmm_compiler.report.headline import told_apart
from nmm_compiler.report.parts import Drawing, Grid, Line, Part, Section
from nmm_compiler.report.shown import Shown

DENSE = read_form("bf16")


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
    ways_out: tuple[WayOut, ...] = ()
    changes: tuple[Change, ...] = ()
    differences: tuple[Difference, ...] = ()

    @property
    def best(self) -> ModelPrediction | None:
        """The low-rank prediction with the largest gain that fits; None where none pays."""
        fitting = [p for p in self.predictions if p.memory.fits and p.gain]
        best = max(fitting, key=_gain, default=None)
        return best if best is not None and pays(_gain(best)) else None

    def verdict(self) -> list[str]:
        """Return sentences: which form each target is to take; or of forms that are all low rank,
        which setting pays most, in which layers, on which targets, or that none pays."""
        said = self._by_form()
        if said:
            return [*said, *map(str, self.ways_out)]
        best = self.best
        low = [p for p in self.predictions if p.gain]
        if not low:
            return ["no ratio was asked for: these are the dense times"]
        if best is None:
            nearest = max(low, key=_gain)
            told = {(one.target, one.tp) for one in self.ways_out}
            remedy = "" if (nearest.target, nearest.tp) in told else f"; {nearest.remedy()}"
            verb = "is told apart from dense" if _gain(nearest) > 1.0 else "pays"
            return [
                f"no setting {verb}: the nearest is {_setting(nearest)} with {_gain(nearest):.2f}x"
                f"{remedy}",
                *map(str, self.ways_out),
            ]
        said = [f"pays most: {_setting(best)}: {best.headline()}"]
        layers = layer_gains(best)
        if layers:
            text = ", ".join(f"{name} {gain:.2f}x" for name, gain in layers.items())
            poor = [name for name, gain in layers.items() if gain < 1.0]
            said.append(
                f"by layers, {best.phases[-1].name}: {text}"
                + (f"; leave {', '.join(poor)} dense (--exclude)" if poor else "")
            )
        for target in dict.fromkeys(p.target for p in low):
            most = max((p for p in low if p.target == target), key=_gain)
            gain = _gain(most)
            said.append(f"{target}: {_verb(gain)}, {gain:.2f}x at best ({_setting(most)})")
        if any(_gain(p) < 1.0 for p in low):
            worst = min(low, key=_gain)
            said.append(f"slower than dense: {_setting(worst)}, {_gain(worst):.2f}x")
        return [*said, *map(str, self.ways_out)]

    def _by_form(self) -> list[str]:
        """Return which form each target is to take, and what the others do; empty where only dense
        and low-rank models of one dtype were asked for."""
        if len({p.weights for p in self.predictions}) < 2:
            return []
        return [self._said_of(t) for t in dict.fromkeys(p.target for p in self.predictions)]

    def best_form(self, target: str) -> str | None:
        """Return the fastest form of a target that fits and keeps the quality."""
        gains, fitting = self._gains_on(target)
        keep = [form for form in fitting if keeps_quality(form)]
        return max(keep, key=gains.__getitem__, default=None)

    def _gains_on(self, target: str) -> tuple[dict[str, float], list[str]]:
        """Return the mean gain of each form over the first one, and the forms that always fit."""
        here = [p for p in self.predictions if p.target == target]
        gains, fitting = {}, []
        for form in dict.fromkeys(p.form for p in here):
            each = [p for p in here if p.form == form]
            gains[form] = math.prod(map(self.over_first, each)) ** (1 / len(each))
            fitting += [form] if all(p.memory.fits for p in each) else []
        return gains, fitting

    def _said_of(self, target: str) -> str:
        """Return which form a target is to take, and what it gains over each other one."""
        best = self.best_form(target)
        gains, fitting = self._gains_on(target)
        if not fitting:
            return f"{target}: no form fits a core's memory; share the model over more (--tp)"
        if best is None:
            return f"{target}: no form that fits is known to keep the quality"
        said = [f"{target}: take {best}"]
        for form, gain in gains.items():
            times = f"{gains[best] / gain:.2f}x over {form}"
            if form not in fitting:
                said.append(f"{times}, which does not fit")
            elif gain > gains[best]:
                why = "is not known to keep" if quality_of(form) is None else "does not keep"
                said.append(f"{form} is faster and {why} the quality")
            elif form.startswith("lowrank") and form != best:
                said.append(f"{times}: low rank alone loses")
            elif form != best:
                said.append(times)
        return "; ".join(said)

    def over_first(self, p: ModelPrediction, phase: int = -1) -> float:
        """Return how many times faster a prediction is than the first form of its setting."""
        first = next(q for q in self.predictions if _cells_of_setting(q) == _cells_of_setting(p))
        return first.phases[phase].us / p.phases[phase].us

    def parts(self) -> Sequence[Part]:
        """Return the verdict, the table, and the lines of the best setting."""
        made: list[Part] = [
            Line(text, "headline" if i == 0 else "plain") for i, text in enumerate(self.verdict())
        ]
        head = ("on", "tp", "batch", "prompt", "context", "weights", "TTFT ms", "gain", "TPOT ms",
                "gain", "by bytes", "tok/s", "weights GiB", "GiB", "fits", "quality")  # fmt: skip
        rows = [_cells(p, self.over_first(p, 0), self.over_first(p)) for p in self.predictions]
        same = [i for i in range(_SETTINGS) if len({row[i] for row in rows}) == 1]
        shown = [i for i in range(len(head)) if i not in same]
        made.append(Line("in all: " + ", ".join(f"{head[i]} {rows[0][i]}" for i in same)))
        grid = [tuple(row[i] for i in shown) for row in rows]
        made.append(Grid.of([head[i] for i in shown], grid, head[1:-1]))
        made.append(
            Line("predicted, not measured; gains are over the first form of the setting, our dense "
                 "kernels; by bytes: ms that the kernels' bytes take at the full rate; GiB of a "
                 "core", "note")
        )  # fmt: skip
        forms = [p.form for p in self.predictions]
        made += [Line(text, "note") for text in notes_on(forms)]
        made += [Line(f"{one.setting}: {one.reason}", "warning") for one in self.refused]
        if self.changes:
            base = self.predictions[0]
            made += base.waterfall()
            made += [
                Line(str(STACKS[base.stack]), "note"),
                Line(f"what would change it: {_setting(base)}", "headline"),
                Grid.of(("with", f"{base.phases[-1].name} ms", "tokens a second", ""),
                        [change.cells() for change in self.changes],
                        right=(f"{base.phases[-1].name} ms", "tokens a second")),
                gain_bars([(one.name, one.gain, one.told_apart) for one in self.changes],
                            "times as many tokens a second with one thing changed"),
            ]  # fmt: skip
        if self.differences:
            base = self.predictions[0]
            made.append(Line(verdict(self.differences, base.error_band), "headline"))
            made.append(
                Grid.of(
                    ("step", "predicted ms", "measured ms", ""),
                    [one.cells() for one in self.differences],
                    right=("predicted ms", "measured ms"),
                )
            )
        gains = [(p, _gain(p)) for p in self.predictions if p.gain]
        if gains and not self.changes:
            made.append(
                gain_bars(
                    [(_setting(p), g, told_apart(g, ERRORS[p.price])) for p, g in gains[:40]],
                    "times as fast as dense, by setting",
                )
            )
        if self.best is not None:
            made.append(
                Section("the best setting in detail", tuple(self.best.parts()), folded=True)
            )
        return made

    def table(self, width: int | None = None) -> str:
        """Return verdict and table as text; only the page has the chart and the best setting."""
        from nmm_compiler.report.text import as_text

        short = [p for p in self.parts() if not isinstance(p, (Drawing, Section))]
        return as_text(short, width)

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
    measured: Measured | None = None,
    jobs: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Return predictions of every combination, of weights in each of these forms.

    forms: as `forms.py` names them; "bf16" is the model in `weights`, by default its dtype.
    Of a single setting also what would change it. price: of a kernel, and stack: what runs the
    programs, as in `predict`. measured: the user's own figures of the first setting. jobs:
    processes that simulate kernels, by default one for each core. progress: called with (what is
    done now, how many are done, how many there are), of settings and then of kernels. A setting
    that cannot be predicted is in `refused`; raises ModelError when none can.
    """
    settings = list(itertools.product(targets, tps, batches, prompts, contexts))
    wanted = list(itertools.product(settings, [read_form(name) for name in forms]))

    def step(said: str, done: int, of: int) -> None:
        if progress is not None:
            progress(said, done, of)

    def predicted(setting: tuple[Any, ...], form: Form, **more: Any) -> ModelPrediction:
        target, tp, batch, prompt, context = setting
        low = form.predicted()
        cut = {**low, "include": include, "exclude": exclude} if "ratio" in low | more else low
        fixed = {"tp": tp, "batch": batch, "prompt": prompt, "context": context, "lnc": lnc,
                 "dtype": dtype, "weights": weights, "price": price, "stack": stack}  # fmt: skip
        given = {key: value for key, value in more.items() if key != "include" or value}
        return predict(model, target, **{**fixed, **cut, **given})

    def changed(base: ModelPrediction) -> list[Mapping[str, Any]]:
        return [more for _, more in changed_settings(base)] if len(settings) == 1 else []

    if price == "simulated":
        kernels: dict[tuple[KernelSpec, str], None] = {}
        for i, (setting, form) in enumerate(wanted):
            step(f"tracing {_named(*setting)}", i, len(wanted))
            with contextlib.suppress(NmmError), noted_kernels() as noted:
                rough = predicted(setting, form, price="closed_form")
                for more in changed(rough) if form == DENSE else ():
                    with contextlib.suppress(NmmError):
                        predicted(setting, DENSE, **more, price="closed_form")
            kernels |= {(spec, setting[0]): None for spec in noted}
        price_many(kernels, jobs=jobs, progress=progress)
    made: dict[tuple[Any, ...], ModelPrediction] = {}
    refused: list[Refused] = []
    for i, (setting, form) in enumerate(wanted):
        step(_named(*setting), i, len(wanted))
        try:
            made[*setting, form] = predicted(setting, form)
        except NmmError as error:
            reason = str(error)
            refused.append(Refused(setting=f"{_named(*setting)} {form.name}", reason=reason))
    if not made:
        raise ModelError(f"nothing could be predicted: {refused[0].reason}")

    def out(target: str, tp: int) -> WayOut | None:
        """Return what pays instead, where no setting on so many cores does."""
        low = {key: p for key, p in made.items() if key[:2] == (target, tp) and p.gain}
        if tp == 1 or not low:
            return None
        key, best = max(low.items(), key=lambda one: _gain(one[1]))
        if pays(_gain(best)):
            return None

        def again(**changes: Any) -> ModelPrediction:
            return predicted(key[:-1], DENSE, **changes)

        fewer = [n for n in (1 << i for i in range(tp.bit_length())) if n < tp][::-1]
        others = ways_out(
            best, again, layer_gains if include is None else lambda p: {}, fewer,
            lambda said: step(f"what pays in place of tp {tp}: {said}", 0, 0),
        )  # fmt: skip
        setting = f"batch {best.batch}, prompt {best.prompt}, context {best.context}"
        return WayOut(
            target=target, tp=tp, setting=f"{setting}, ratio {best.ratio:g}", gain=_gain(best),
            pays=others,
        )  # fmt: skip

    told: tuple[Change, ...] = ()
    (*only, cut), base = next(iter(made.items()))
    if len(settings) == 1 and cut == DENSE:
        step("what would change it", 0, 0)
        low_rank = {one.ratio: one for one in made.values() if one.ratio is not None}
        told = changes(base, functools.partial(predicted, tuple(only), DENSE), low_rank)
    found = (out(target, tp) for target, tp in dict.fromkeys((one[0], one[1]) for one in settings))
    return Plan(
        name=next(iter(made.values())).name,
        predictions=tuple(made.values()),
        refused=tuple(refused),
        ways_out=tuple(one for one in found if one is not None),
        changes=told,
        differences=()
        if measured is None
        else tuple(
            differences(
                base.phases[-1], measured, machine_target(base.target).memory_bytes_per_second * lnc
            )
        ),
    )


def _named(target: str, tp: int, batch: int, prompt: int, context: int) -> str:
    return f"{target} tp {tp} batch {batch} prompt {prompt} context {context}"


def layer_gains(prediction: ModelPrediction, phase: str | None = None) -> dict[str, float]:
    """Return how much faster each kind of layer's kernels are than dense.

    phase: its name, by default the last one.
    """
    if prediction.dense is None:
        return {}
    name = phase or prediction.phases[-1].name
    found = [p.phase(name) for p in (prediction.dense, prediction)]
    before, after = (_by_layer(one) for one in found if one is not None)
    return {name: before[name] / after[name] for name in before if after.get(name)}


def _by_layer(phase: Phase) -> dict[str, float]:
    """Return microseconds of kernels by the layer that they belong to: self_attn, mlp, ..."""
    made: dict[str, float] = {}
    for line in phase.lines:
        inner = line.module.rpartition("*.")[2].split(".")[0] if "*." in line.module else ""
        if line.kind in ("kernel", "all_reduce", "all_gather") and inner:
            made[inner] = made.get(inner, 0.0) + line.us
    return made


def _verb(gain: float) -> str:
    if pays(gain):
        return "pays"
    return "is not told apart from dense" if gain > 1.0 else "does not pay"


def _setting(p: ModelPrediction) -> str:
    target, *sizes = _cells_of_setting(p)
    said = (f"{name} {size}" for name, size in zip(_SIZES, sizes, strict=True))
    return ", ".join([target, *said, p.form])


def _cells_of_setting(p: ModelPrediction) -> tuple[str, ...]:
    return p.target, str(p.tp), str(p.batch), str(p.prompt), str(p.context)


_SIZES = ("tp", "batch", "prompt", "context")
_SETTINGS = 1 + len(_SIZES)  # columns of `_cells` that say which setting a row is of


def _cells(p: ModelPrediction, first_gain: float, gain: float) -> tuple[str, ...]:
    tokens, memory, last = p.tokens_per_second, p.memory, p.phases[-1]
    quality = quality_of(p.form)
    at_rate = sum(line.calls * line.bytes_us for line in last.lines)
    return (
        *_cells_of_setting(p),
        p.form,
        f"{p.ttft_us / 1e3:.2f}", f"{first_gain:.2f}x",
        "-" if p.tpot_us is None else f"{p.tpot_us / 1e3:.2f}", f"{gain:.2f}x",
        f"{at_rate / 1e3:.2f}",
        "-" if tokens is None else f"{tokens:,.0f}",
        f"{memory.weight_bytes / 2**30:.2f}", f"{memory.needed_bytes / 2**30:.2f}",
        "yes" if memory.fits else "NO",
        "-" if quality is None else "{:.2f} / {:.2f}".format(*quality[1]),
    )  # fmt: skip
