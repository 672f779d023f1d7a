"""`compress`: a model's linears become low-rank, in place.

Reads top to bottom: select the matrices (`select.py`), calibrate (`calibrate.py`), decide all ranks
(`plan.py`), then factorize and replace one layer after the other (`factorize.py`). A layer is
replaced in one step after its factors are complete, so an interrupt between any two instructions
leaves a model that works.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from nmm_compiler.compress import experts, hf
from nmm_compiler.compress.arguments import Request, Selection, make_config
from nmm_compiler.compress.calibrate import OutputFn, Statistics, as_batches, collect
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.factorize import balance, check_finite, factorize
from nmm_compiler.compress.fingerprint import identify
from nmm_compiler.compress.journal import Journal
from nmm_compiler.compress.measure import measure, scaled_coefficients
from nmm_compiler.compress.modules import LowRankLinear, lowrank_layers, put
from nmm_compiler.compress.one_thread import one_thread
from nmm_compiler.compress.parts import Calibration
from nmm_compiler.compress.plan import (
    Decision,
    Measured,
    Plan,
    Ways,
    by_reader,
    check_dense,
    check_statistics,
    make_plan,
    moments_of,
    resolve,
)
from nmm_compiler.compress.plan import measure as measure_losses
from nmm_compiler.compress.progress import Steps
from nmm_compiler.compress.quantize import quantize_factors
from nmm_compiler.compress.ranks import Cost
from nmm_compiler.compress.report import CompressionReport, LayerReport, Skipped
from nmm_compiler.compress.select import (
    FilterFn,
    Patterns,
    Site,
    find_sites,
    only_read_reason,
)
from nmm_compiler.compress.sequential import Pairs, least_squares, paired_error
from nmm_compiler.errors import FactorsFileError, NoMatchingModulesError, OptionTypeError


def compress(
    model: nn.Module,
    ratio: float | CompressionConfig | None = None,
    *,
    rank: int | Mapping[str, int] | None = None,
    calibration: Any = None,
    include: Patterns = None,
    exclude: Patterns = None,
    filter_fn: FilterFn | None = None,
    method: str | None = None,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    allocation: str | None = None,
    budget: str | None = None,
    cost: Cost | None = None,
    target: str = "trn2",
    tokens: int = 512,
    workload: Mapping[str, tuple[int, float]] | None = None,
    allow_slower: bool = False,
    sensitivity: str | None = None,
    sequential: bool | None = None,
    output: OutputFn | None = None,
    resume: str | Path | None = None,
    memory: str | int | None = None,
    factors: str | None = None,
) -> CompressionReport:
    """Replace linears of `model` by `LowRankLinear`s, in place; return what was done.

    ratio: share of the parameters of the selected matrices to remove, in [0, 1); default 0.2. Or a
        whole CompressionConfig; the keywords of the same names must then be left out.
    rank: instead of a ratio, one rank for all, or {name pattern: rank}.
    calibration: batches to run through the model (dicts of arguments, tuples, or tensors), or what
        `calibrate` returned for this model.
    include, exclude: name patterns ("mlp", "layers.0.*", "re:..."); each must match something.
    filter_fn: (module, name) -> bool: whether a selected layer is factorized.
    method, align, allocation, budget, sensitivity, sequential: see CompressionConfig, which has
        their defaults.
    dtype: of the factors; default is the weight's. device: where to compute; default the weight's.
    target, tokens, workload: where and for which calls times are predicted: `tokens` a call, or a
        mix like {"prefill": (512, 0.2), "decode": (1, 0.8)}, tokens and weight of each. Layers
        that the backend computes in one call are priced as one.
    allow_slower: also make layers low-rank whose calls are then predicted to be slower than dense.
    cost: (k, n, rank or None) -> microseconds of one layer, instead of the kernels' prices.
    output: (result, batch) -> the tensor whose change matters, for sensitivity="gradient"; default
        the logits, else the last hidden state.
    resume: a directory that finished layers are kept in; the same call continues from it. Another
        model, other data or other arguments are refused.
    memory: bytes that the moments and the work on them may take beside the model, like "8GiB".
        Where they need more, calibration goes block by block, with the same result. None: all free
        memory.

    factors: "float8_e4m3" or "int8": round the factors to a byte an element with a scale for each
        output, once all are made (`quantize_factors`). fp8 factors are priced as the kernels that
        read them; int8 ones are dequantized at each call, and priced as floats.

    A layer is left dense where low rank would not save anything, or no time. Ctrl-C leaves a
    working model, part of it low-rank. Nothing is changed when an error is raised before the first
    factorization. A transformers model gets a config object of its own, since other models may
    share its old one.

    Raises OptionTypeError and UnknownNameError for bad arguments, NoMatchingModulesError when there
    is nothing to factorize, RankError when no legal ranks meet the ratio, or all of them are
    predicted to be slower than dense, CalibrationError for calibration that is empty, not finite or
    does not reach a layer, MemoryBudgetError for one that does not fit into memory, WeightError for
    a weight that is not finite, FactorsFileError when `resume` holds something else, or for a
    transformers model that is quantized (or was loaded from GGUF) and could not be saved
    afterwards.
    """
    config = make_config(
        ratio,
        rank=rank,
        method=method,
        allocation=allocation,
        budget=budget,
        align=align,
        sensitivity=sensitivity,
        sequential=sequential,
    )
    request = Request(
        model, include, exclude, filter_fn, output, progress, config, calibration, dtype, device,
        cost, target, tokens, workload, allow_slower, resume, memory, factors,
    )  # fmt: skip
    hf.check_savable(model)
    started = time.monotonic()
    before = count_parameters(model)
    journal = None if resume is None else Journal(resume, config)
    experts.split(model)
    try:
        report = _compress(model, request, journal)
        report = dataclasses.replace(report, factors=request.format or "")
        if request.format is not None and report.compressed:
            quantize_factors(model, request.format)
        return dataclasses.replace(
            report, model_parameters_before=before, seconds=time.monotonic() - started
        )
    finally:
        experts.join(model)
        hf.attach_if_transformers(model)


def _compress(model: nn.Module, request: Request, journal: Journal | None) -> CompressionReport:
    """Do what `compress` says, to a model whose stacked experts are split.

    The report lacks the model's parameters before, and the seconds, which the caller knows.
    """
    config, calibration = request.config, request.calibration
    output, memory = request.output, request.memory
    sites, skipped = _sites(model, request, journal)
    meta = any(site.weight.is_meta for site in sites)
    ways = resolve(config, calibration is not None, meta)
    if output is not None and (not ways.gradients or isinstance(calibration, Statistics)):
        raise OptionTypeError(
            "output", output, "it with batches and sensitivity='gradient': nothing else asks it"
        )
    site = None
    for site in sites:
        if not site.weight.is_meta:
            check_finite(site.weight, site.name)
    batches = statistics = None
    if memory is not None and (calibration is None or isinstance(calibration, Statistics)):
        raise OptionTypeError(
            "memory", request.memory, "it with batches, which calibration runs on"
        )
    if isinstance(calibration, Statistics):
        sites, skipped = _without_only_read(sites, skipped, calibration.only_read)
        statistics = check_statistics(calibration, sites, config, ways)
    elif calibration is not None:
        batches = as_batches(calibration)
    identity = None
    if journal is not None:
        data = batches if batches is not None else statistics
        done = lowrank_layers(model)
        identity = identify(model, sites, _every_name(model, done), data, request.settings())
        journal.check(identity, done)
        if journal.plan is not None:
            sites, skipped = _without_only_read(sites, skipped, journal.plan.only_read)
    left = sites if journal is None else journal.unfinished(sites)
    if config.sequential and left and journal is not None and journal.plan is not None:
        check_dense(journal.plan, sites)
    source: Calibration | None = None
    if batches is not None and left:
        source = Calibration(
            model, left, batches, gradients=ways.gradients, output=output,
            sequential=config.sequential, limit=memory, progress=request.progress,
        )  # fmt: skip
    if journal is not None and journal.plan is not None:
        plan = journal.plan
    else:
        known = _measured(source, left, statistics, request, ways)
        sites, skipped = _without_only_read(sites, skipped, known.only_read)
        prices = request.prices(model, sites, batches)
        plan = make_plan(sites, config, ways, known, prices, request.allow_slower)
        if journal is not None:
            assert identity is not None
            journal.start(plan, identity)

    work = _Work(model, request, ways, source, statistics, journal)
    by_name = {site.name: site for site in sites}
    del sites, left, site  # else they keep every dense weight in memory until the end
    layers = work.run(plan, by_name)
    return CompressionReport(
        method=plan.method,
        allocation=plan.allocation,
        budget=config.budget,
        align=plan.align,
        ratio=config.effective_ratio,
        layers=layers,
        skipped=skipped,
        model_parameters_after=count_parameters(model),
        calibration_tokens=plan.calibration_tokens,
        target=request.target if request.cost is None else "",
        workload=plan.workload,
        priced=plan.priced,
    )


def _measured(
    source: Calibration | None,
    sites: Sequence[Site],
    given: Statistics | None,
    request: Request,
    ways: Ways,
) -> Measured:
    """Return what the plan needs to know of the sites; only one part's statistics exist at a
    time."""
    known = Measured()
    if source is None:
        measure_losses(known, sites, request.config, ways, given, request.progress)
        return known
    by_name = {site.name: site for site in sites}
    for part in source.parts if source.limited else [source.whole]:
        here = [by_name[name] for name in part.sites]
        found = source.statistics(part, here)
        here = [site for site in here if site.name not in found.only_read]
        measure_losses(known, here, request.config, ways, found, request.progress)
    return known


def _every_name(model: nn.Module, layers: Mapping[str, LowRankLinear]) -> list[str]:
    """Return all names of these layers; a shared one has more than the first."""
    known = {id(layer) for layer in layers.values()}
    return [n for n, m in model.named_modules(remove_duplicate=False) if id(m) in known]


def _without_only_read(
    sites: Sequence[Site], skipped: Sequence[Skipped], only_read: Sequence[str]
) -> tuple[tuple[Site, ...], tuple[Skipped, ...]]:
    """Move the sites that calibration found to be only read to the skipped ones."""
    aside = [site for site in sites if site.name in only_read]
    left = tuple(site for site in sites if site.name not in only_read)
    reason = only_read_reason("the model, over the calibration data,")
    more = [Skipped(name=s.name, shape=tuple(s.weight.shape), reason=reason) for s in aside]
    if sites and not left:
        raise NoMatchingModulesError(
            f"none of the {len(sites)} selected layers can be factorized: {aside[0].name}: {reason}"
        )
    return left, (*skipped, *more)


def calibrate(
    model: nn.Module,
    calibration: Any,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    filter_fn: FilterFn | None = None,
    gradients: bool = True,
    output: OutputFn | None = None,
    progress: bool = True,
) -> Statistics:
    """Return the statistics for `compress(calibration=...)`, which can be used more than once.

    One pass over the data then serves any number of ratios and methods. Arguments are those of
    `compress`; gradients: also sample the gradients that global allocation compares matrices by.
    """
    Selection(model, include, exclude, filter_fn, output, progress)
    experts.split(model)
    try:
        sites, _ = find_sites(model, include, exclude, filter_fn)
        return collect(
            model, sites, as_batches(calibration), gradients=gradients, output=output,
            progress=progress,
        )  # fmt: skip
    finally:
        experts.join(model)


def count_parameters(model: nn.Module) -> int:
    """Return the elements of all parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def _sites(
    model: nn.Module, request: Request, journal: Journal | None
) -> tuple[tuple[Site, ...], tuple[Any, ...]]:
    """Return (sites, skipped); what a journal lists as finished is not among the skipped."""
    wanted = (request.include, request.exclude, request.filter_fn)
    if journal is None or journal.plan is None:
        return find_sites(model, *wanted)
    planned = {decision.name for decision in journal.plan.decisions}
    done = {
        name
        for name, module in model.named_modules()
        if name in planned and isinstance(module, LowRankLinear)
    }
    try:
        sites, skipped = find_sites(model, *wanted)
    except NoMatchingModulesError:
        if done != planned:
            raise
        sites, skipped = (), ()
    found = {site.name for site in sites} - set(journal.plan.only_read) | done
    if found != planned:
        differ = sorted(found ^ planned)
        raise FactorsFileError(
            f"{journal.directory} holds a compression of other layers ({', '.join(differ[:6])}); "
            "pass the same model and selection, or another directory"
        )
    return sites, tuple(skip for skip in skipped if skip.name not in planned)


class _Work:
    """The loop over the layers: factorize, replace, keep a record."""

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        ways: Ways,
        source: Calibration | None,
        statistics: Statistics | None,
        journal: Journal | None,
    ) -> None:
        self.model, self.request, self.ways = model, request, ways
        self.source, self.statistics, self.journal = source, statistics, journal
        self.pairs: dict[str, Pairs] = {}

    def run(self, plan: Plan, by_name: dict[str, Site]) -> tuple[LayerReport, ...]:
        """Carry out the plan, emptying by_name; on an interrupt, note how far it got."""
        reports: dict[str, LayerReport] = {}
        with Steps("factorizing", len(plan.decisions), self.request.progress) as steps:
            try:
                for stage in self._stages(plan.decisions, by_name):
                    for index, decision in stage:
                        steps.show(decision.name)
                        site = by_name.pop(decision.name, None)
                        reports[decision.name] = self._one(index, decision, site)
                        steps.advance()
            except KeyboardInterrupt as interrupt:
                way_on = (
                    f"the same call continues from {self.journal.directory}"
                    if self.journal
                    else "resume=DIRECTORY makes a run that can be continued"
                )
                interrupt.add_note(
                    f"compress: {len(reports)} of {len(plan.decisions)} layers are done; {way_on}"
                )
                raise
        return tuple(reports[decision.name] for decision in plan.decisions)

    def _stages(
        self, decisions: Sequence[Decision], by_name: Mapping[str, Site]
    ) -> Iterator[list[tuple[int, Decision]]]:
        """Yield (index, decision) in groups, with the statistics in place that each needs.

        The groups are the parts of the calibration; in sequential mode, layers that read the same
        tensor, in the order of execution. Layers that need no statistics (any more) come first in
        sequential mode, because later layers are fitted behind them; else they come last, when no
        block has to be the original.
        """
        parts = [] if self.source is None else self.source.parts
        calibrated = {name for part in parts for name in part.sites}
        others = [(i, d) for i, d in enumerate(decisions) if d.name not in calibrated]
        if self.request.config.sequential:
            yield others
        for part in parts:
            assert self.source is not None
            here = [(i, d) for i, d in enumerate(decisions) if d.name in part.sites]
            self.statistics = self.source.statistics(
                part, [by_name[n] for n in part.sites if n in by_name]
            )
            if not self.source.sequential:
                yield here
                continue
            original = self.statistics
            for group in by_reader(here, original.reads):
                sites = [by_name[d.name] for _, d in group]
                fresh, self.pairs = self.source.pairs(part, sites)
                self.statistics = dataclasses.replace(original, inputs=fresh.inputs)
                yield group
            self.source.finish(part)
        if not self.request.config.sequential:
            yield others

    def _one(self, index: int, decision: Decision, site: Site | None) -> LayerReport:
        report = LayerReport(
            name=decision.name,
            k=decision.k,
            n=decision.n,
            rank=decision.rank,
            note=decision.note,
            counted=decision.counted,
            dense_us=decision.dense_us,
            us=decision.us,
            slower=decision.slower,
        )
        finished = self.journal.load(index) if self.journal else None
        if finished is not None:
            up, down, report = finished
            if site is not None:
                self._put(site, up, down)
            return report
        if site is None or decision.rank is None:
            return report
        if site.weight.is_meta:
            stored = self.request.dtype or site.weight.dtype
            bias = cast("torch.Tensor | None", site.module.bias)
            layer = LowRankLinear(
                site.k, decision.rank, site.n, bias is not None, device="meta", dtype=stored
            )
            put(self.model, site.names, layer.train(site.module.training))
            return report
        with one_thread(site.k * site.n):
            return self._factorize(index, decision.rank, report, site)

    def _factorize(self, index: int, rank: int, known: LayerReport, site: Site) -> LayerReport:
        home = site.weight.device
        weight = site.weight.to(self.request.device or home)
        moments = moments_of(site, self.ways.method, self.statistics, self.request.config)
        moments = moments.to(weight.device)
        pairs = self.pairs.get(site.name)
        wanted = weight
        if pairs is not None and moments.inputs is not None:
            wanted = least_squares(weight, moments.inputs, pairs)
        factors = factorize(wanted, rank, moments, site.name)
        del wanted
        up, down = balance(factors, self.request.dtype or weight.dtype)
        solver, excess, theory = factors.solver, factors.excess, factors.relative_error
        raw = None if self.statistics is None else self.statistics.inputs.get(site.name)
        raw = raw if raw is not None and raw.tokens else None
        inside = scaled_coefficients(factors, down) if raw is not None and raw.carried else None
        del factors
        weight_error, output_error = measure(weight, up, down, raw, inside)
        if pairs is not None and raw is not None:
            output_error = paired_error(weight, up, down, raw, pairs, site.name)
        report = dataclasses.replace(
            known,
            weight_error=weight_error,
            output_error=output_error,
            theory_error=theory,
            solver=solver,
            excess=excess,
        )
        if self.journal is not None:
            self.journal.save(index, up, down, report)
        self._put(site, up.to(home), down.to(home))
        return report

    def _put(self, site: Site, up: torch.Tensor, down: torch.Tensor) -> None:
        weight = site.module.weight
        bias = cast("nn.Parameter | None", site.module.bias)
        assert isinstance(weight, torch.Tensor)
        layer = LowRankLinear.from_factors(down.to(weight.device), up.to(weight.device), bias)
        layer.down.weight.requires_grad_(weight.requires_grad)
        layer.up.weight.requires_grad_(weight.requires_grad)
        if self.source is not None and self.source.sequential:
            self.source.originals.keep(site)
        put(self.model, site.names, layer.train(site.module.training))
