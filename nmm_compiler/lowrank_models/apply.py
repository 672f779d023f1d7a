"""`compress`: a model's linears become low-rank, in place.

Reads top to bottom: select the matrices (`select.py`), calibrate (`calibrate.py`), decide all ranks
(`make_plan`, by the allocators of `ranks.py`), then factorize and replace one layer after the other
(`factorize.py`). A layer is replaced in one step after its factors are complete, so an interrupt
between any two instructions leaves a model that works.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import ModelError, OptionTypeError, closest
from nmm_compiler.kernels.linear.corrected import reads_as_stored
from nmm_compiler.kernels.packed_formats import MX, check_blocks
from nmm_compiler.lowrank_models import experts, hf
from nmm_compiler.lowrank_models import ranks as allocation
from nmm_compiler.lowrank_models.calibrate import Statistics, as_batches, collect
from nmm_compiler.lowrank_models.config import CompressionConfig
from nmm_compiler.lowrank_models.factorize import (
    balance,
    check_finite,
    factorize,
    measure,
    one_thread,
    scaled_coefficients,
    spectrum,
)
from nmm_compiler.lowrank_models.modules import LowRankLinear, put
from nmm_compiler.lowrank_models.moments import Moments, regularize
from nmm_compiler.lowrank_models.predicted_time import JUDGE, Prices, kernel_prices
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.lowrank_models.quantize import (
    QuantizedLinear,
    make_layer,
    residual,
    rounded_beside,
    stored_bytes,
)
from nmm_compiler.lowrank_models.report import CompressionReport, LayerReport
from nmm_compiler.lowrank_models.select import Patterns, Site, find_sites, matches
from nmm_compiler.options import check_names

_BRANCH_ALIGN = 32
"""The tile of ranks beside a base: a block of MX factors, and few enough for a choice."""
_SLOWER = "its call would be slower at any rank: kept dense"
Losses = dict[str, list[float]]
"""Per layer, the loss of keeping rank 0, 1, 2, ... in a unit common to all."""
Ranks = dict[str, int | None]
Notes = dict[str, tuple[str, bool]]
"""Per layer, what to say of its rank, and whether the ratio is over this layer, too."""


def compress(model: nn.Module, ratio: float | None = None, **keywords: Any) -> CompressionReport:
    """Replace linears of `model` by `LowRankLinear`s, in place; return what was done.

    Args:
        model: any module; a transformers model gets a config object of its own, since other models
            may share its old one.
        ratio: share of the parameters of the selected matrices to remove.
        keywords: the other fields of CompressionConfig, which says what each means.

    A layer is left dense where low rank would not save anything, or no time. Ctrl-C leaves a
    working model, part of it low-rank. Nothing is changed when an error is raised before the first
    factorization.

    Raises:
        OptionTypeError, UnknownNameError: for bad arguments.
        ModelError: there is nothing to factorize.
        ModelError: no legal ranks meet the ratio, or all of them are predicted to be slower than
            dense.
        ModelError: calibration is empty, not finite or does not reach a layer.
        CapacityError: calibration does not fit into memory.
        ModelError: a weight is not finite.
        FileError: a transformers model is quantized (or was loaded from GGUF) and could not
            be saved afterwards.
    """
    check_names(CompressionConfig, keywords)
    config = CompressionConfig(ratio=ratio, **keywords)
    _check_model(model)
    hf.check_savable(model)
    started = time.monotonic()
    before, held = count_parameters(model), count_bytes(model)
    experts.split(model)
    try:
        return dataclasses.replace(
            _compress(model, config),
            model_parameters_before=before,
            model_bytes_before=held,
            seconds=time.monotonic() - started,
        )
    finally:
        experts.join(model)
        hf.attach_if_transformers(model)


def signature() -> inspect.Signature:
    """Return what `compress` takes, from the record that says it."""
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    fields = inspect.signature(CompressionConfig).parameters.values()
    ratio, *others = (field.replace(annotation=field.empty) for field in fields)
    every = [model, ratio.replace(kind=model.kind), *others]
    return inspect.Signature(every, return_annotation="CompressionReport")


setattr(compress, "__signature__", signature())  # noqa: B010


def calibrate(
    model: nn.Module,
    calibration: Any,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    gradients: bool = True,
    base: str | None = None,
) -> Statistics:
    """Return the statistics for `compress(calibration=...)`, which can be used more than once.

    One pass over the data then serves any number of ratios and methods. Arguments are those of
    `compress`; gradients: also sample the gradients that method "two-sided" needs.
    """
    config = CompressionConfig(base=base)
    _check_model(model)
    experts.split(model)
    try:
        sites, _ = find_sites(model, include, exclude)
        check_base(config, sites)
        batches = as_batches(calibration)
        return collect(model, sites, batches, gradients=gradients, whole=base is not None)
    finally:
        experts.join(model)


def count_parameters(model: nn.Module) -> int:
    """Return the elements of all parameters, tied ones once, and of rounded weights, not scales."""
    rounded = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    scales = {id(module.scale) for module in rounded}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in scales)
    return plain + sum(module.in_features * module.out_features for module in rounded)


def count_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, tied ones once."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise OptionTypeError("model", type(model).__name__, "a torch.nn.Module")


def _compress(model: nn.Module, config: CompressionConfig) -> CompressionReport:
    """Do what `compress` says, to a model whose stacked experts are split.

    The report lacks the model's parameters before, and the seconds, which the caller knows.
    """
    sites, skipped = find_sites(model, config.include, config.exclude)
    check_meta(config, sites)
    check_base(config, sites)
    for site in sites:
        if not site.weight.is_meta:
            check_finite(site.weight, site.name)
    gradients = config.resolved_method == "two-sided"
    batches = statistics = None
    if isinstance(config.calibration, Statistics):
        statistics = config.calibration
    elif config.calibration is not None:
        batches = as_batches(config.calibration)
        whole = config.base is not None
        statistics = collect(model, sites, batches, gradients=gradients, whole=whole)
    if statistics is not None:
        statistics.check(sites, gradients=gradients, base=config.base)
    prices = _prices(model, sites, config, batches)
    plan, align = make_plan(sites, config, statistics, prices)
    chosen = {layer.name: layer.rank for layer in plan}
    timed = () if prices is None else prices.timed(chosen)
    by_name = {site.name: site for site in sites}
    del sites, site  # else they keep every dense weight in memory until the end
    return CompressionReport(
        method=config.resolved_method,
        allocation=config.allocation,
        align=align,
        ratio=config.effective_ratio,
        layers=_carry_out(model, plan, by_name, config, statistics),
        skipped=skipped,
        model_parameters_after=count_parameters(model),
        model_bytes_after=count_bytes(model),
        calibration_tokens=0 if statistics is None else statistics.tokens,
        target=config.target,
        workload=timed,
        priced=_multiplied_out(config) if prices is None else prices.note,
        source="" if prices is None else JUDGE,
        factors=config.factors or "",
        base=config.base or "",
    )


def _prices(
    model: nn.Module, sites: Sequence[Site], config: CompressionConfig, batches: list[Any] | None
) -> Prices | None:
    """Return the prices of the sites; None for a dtype or a base without kernels.

    A model on the meta device whose ranks no price decides needs none either.
    """
    if config.base is not None:
        return None
    if sites[0].weight.is_meta and config.allow_slower:
        return None
    layers = [allocation.Shape(site.name, site.k, site.n) for site in sites]
    dtype = str(config.dtype or sites[0].weight.dtype).removeprefix("torch.")
    first = None if batches is None else batches[0]
    return kernel_prices(model, layers, dtype, config.passes, config.target, first, config.factors)


def _multiplied_out(config: CompressionConfig) -> str:
    """Return what to say of a base that no kernel of the target reads as stored."""
    base, chip = config.base, machine_target(config.target)
    if base is None or reads_as_stored(chip, base):
        return ""
    return f"no kernel for {chip.name} reads {base}: calls multiply it out, which saves memory only"


def _carry_out(
    model: nn.Module,
    plan: Sequence[LayerReport],
    by_name: dict[str, Site],
    config: CompressionConfig,
    statistics: Statistics | None,
) -> tuple[LayerReport, ...]:
    """Factorize and replace each layer, emptying by_name; an interrupt says how far it got."""
    done: list[LayerReport] = []
    with steps("factorizing") as step:
        try:
            for layer in plan:
                step(f"factorizing {layer.name}", len(done), len(plan))
                site = by_name.pop(layer.name)
                made = layer
                if layer.rank is not None:
                    with one_thread(site.k * site.n):
                        made = _replace(model, site, layer, layer.rank, config, statistics)
                done.append(made)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"compress: {len(done)} of {len(plan)} layers are done")
            raise
    return tuple(done)


def _replace(
    model: nn.Module,
    site: Site,
    layer: LayerReport,
    rank: int,
    config: CompressionConfig,
    statistics: Statistics | None,
) -> LayerReport:
    """Put factors, a base or both in the place of a linear; return its report with the errors."""
    weight, dtype = site.weight, config.dtype or site.weight.dtype
    moments = moments_of(site, config.resolved_method, statistics).to(weight.device)
    base, target = None, weight
    if config.base is not None:
        base = rounded_beside(weight, config.base, rank, moments, site.name)
        layer = dataclasses.replace(layer, base=base.format)
        target = weight if weight.is_meta else residual(weight, base)
    up, down = (weight.new_zeros(shape, dtype=dtype) for shape in ((site.n, rank), (rank, site.k)))
    if rank and not weight.is_meta:
        factors = factorize(target, rank, moments, site.name)
        up, down = balance(factors, dtype)
    wants = cast(torch.Tensor, site.module.weight).requires_grad
    bias = cast("nn.Parameter | None", site.module.bias)
    made = make_layer(down.requires_grad_(wants), up.requires_grad_(wants), bias, base,
                      config.factors)  # fmt: skip
    put(model, site.names, made.train(site.module.training))
    if weight.is_meta:
        return layer
    if isinstance(made, LowRankLinear):
        up, down = made.up.weight, made.down.weight
    inputs = None if statistics is None else statistics.inputs.get(site.name)
    inputs = inputs if inputs is not None and inputs.tokens else None
    inside = None
    if rank and inputs is not None and inputs.carried:
        inside = scaled_coefficients(factors, down)
    weight_error, output_error = measure(
        weight, up.detach(), down.detach(), inputs, inside, None if base is None else target
    )
    return dataclasses.replace(layer, weight_error=weight_error, output_error=output_error)


# -- which rank every matrix gets -----------------------------------------------------------------


def check_meta(config: CompressionConfig, sites: Sequence[Site]) -> None:
    """Raise OptionTypeError where a model without weights is to be judged by its weights."""
    if any(site.weight.is_meta for site in sites) and config.allocation == "global":
        name = "base" if config.calibration is None else "calibration"
        raise OptionTypeError(
            name,
            "given",
            "neither calibration nor a ratio with base= for a model on the meta "
            "device, which has shapes and no weights",
        )


def check_base(config: CompressionConfig, sites: Sequence[Site]) -> None:
    """Raise OptionTypeError or ShapeError, naming the layer, for what has no such base."""
    form = config.base
    for site in sites if form is not None else ():
        check_blocks(site.k, str(form), site.name)


def moments_of(site: Site, method: str, statistics: Statistics | None) -> Moments:
    """Return the regularized moments a method weighs a site's error with."""
    inputs = None if statistics is None else statistics.inputs.get(site.name)
    if statistics is None or inputs is None or not inputs.tokens:
        return Moments()  # no data, or an expert that no token reached
    gradient = statistics.gradients.get(site.name) if method == "two-sided" else None
    return Moments(regularize(inputs), None if gradient is None else regularize(gradient))


def losses_of(
    sites: Sequence[Site], method: str, statistics: Statistics | None, base: str | None = None
) -> Losses:
    """Return the losses of these sites by group.

    A loss is, with gradients, half the expected g^T (dW x) squared, summed over the tokens; else
    the squared relative error of the matrix, weighted by its inputs when there is calibration.
    With a base the ranks are those of the branch.
    """
    losses: Losses = {}
    with steps("measuring spectra") as step:
        for i, site in enumerate(sites):
            step(f"measuring {site.name}", i, len(sites))
            moments = moments_of(site, method, statistics).to(site.weight.device)
            tail = torch.zeros(min(site.n, site.k) + 1, dtype=torch.float64)
            if statistics is None or moments.inputs is not None:
                lost = site.weight
                if base is not None:
                    lost = residual(lost, QuantizedLinear.of(lost, base))
                squares = spectrum(lost, moments, site.name)
                tail = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
                if moments.gradients is not None and statistics is not None:
                    tail *= 0.5 * statistics.inputs[site.name].tokens
                elif tail[0] > 0:
                    tail /= tail[0].clone() if base is None else _squared_norm(site, statistics)
            before = losses.get(site.group, [0.0] * len(tail))
            losses[site.group] = [a + b for a, b in zip(before, tail.tolist(), strict=True)]
    return losses


def _squared_norm(site: Site, statistics: Statistics | None) -> float:
    """Return |W A^1/2|_F^2 of a weight, or |W|_F^2 without calibration."""
    moment = None if statistics is None else statistics.inputs[site.name]
    wide = site.weight.double()
    weighted = wide if moment is None else wide @ moment.mean.to(wide.device)
    return float((weighted * wide).sum())


def shape_of(site: Site, config: CompressionConfig) -> allocation.Shape:
    """Return a site as a matrix to allocate a rank for; with a base in units of 16 bits."""
    if config.base is None:
        return allocation.Shape(site.name, site.k, site.n)
    none, some = (layer_bytes(site, rank, config) for rank in (0, 32))
    scales = _factor_bytes(site, 0, config)
    unit = (some - none - scales) / 32 / (site.k + site.n)
    return allocation.Shape(site.name, site.k, site.n, base=(none + scales) / 2, unit=unit / 2)


def layer_bytes(site: Site, rank: int | None, config: CompressionConfig) -> int:
    """Return the bytes of a layer's matrices with their scales; rank None for a dense one."""
    dtype = site.weight.dtype
    if rank is None:
        return stored_bytes(site.n, site.k, None, dtype)
    base = 0
    if config.base is not None:
        base = stored_bytes(site.n, site.k, config.base, dtype)
    return base + (_factor_bytes(site, rank, config) if rank else 0)


def _factor_bytes(site: Site, rank: int, config: CompressionConfig) -> int:
    dtype = config.dtype or site.weight.dtype
    down = stored_bytes(rank, site.k, config.factors, dtype)
    if config.factors == "fp8" and config.base in MX:  # its scales are those of the rank
        return down + stored_bytes(rank, site.n, config.factors, dtype)
    return down + stored_bytes(site.n, rank, config.factors, dtype)


def make_plan(
    sites: Sequence[Site],
    config: CompressionConfig,
    statistics: Statistics | None,
    prices: Prices | None,
) -> tuple[list[LayerReport], int]:
    """Return (each layer with its rank, None for dense; the tile of all ranks).

    Layers without gradients stay dense: the output does not depend on them, so the effect of an
    error in them is unknown. So do layers that would be slower low-rank, by `prices`. Raises
    ModelError when no legal ranks meet the ratio.
    """
    unused: list[Site] = []
    if statistics is not None and config.resolved_method == "two-sided":
        used = {s.group for s in sites if s.name in statistics.gradients}
        unused = [site for site in sites if site.group not in used]
        sites = [site for site in sites if site.group in used]
    judge = None if config.allow_slower else prices
    if config.effective_ratio is None:
        ranks, notes, align = *_explicit(sites, config, judge), config.align or 1
    else:
        ranks, notes, align = _budgeted(sites, config, statistics, judge, config.effective_ratio)
    shares, slower = ({}, {}) if prices is None else (prices.shares(ranks), prices.slower(ranks))
    unused_note = "the model's output does not depend on it: kept dense"
    notes |= {site.name: (unused_note, False) for site in unused}
    layers = []
    for site in (*sites, *unused):
        rank, (note, counted) = ranks.get(site.name), notes[site.name]
        if rank and config.factors is not None:
            check_blocks(site.k, config.factors, f"{site.name}.down")
            check_blocks(rank, config.factors, f"{site.name}.up")
        dense_us, us = shares.get(site.name, (None, None))
        layers.append(
            LayerReport(
                name=site.name, k=site.k, n=site.n, rank=rank, note=note, counted=counted,
                bytes=layer_bytes(site, rank, config), dense_us=dense_us, us=us,
                slower=site.name in slower,
            )
        )  # fmt: skip
    return layers, align


def _budgeted(
    sites: Sequence[Site],
    config: CompressionConfig,
    statistics: Statistics | None,
    prices: Prices | None,
    ratio: float,
) -> tuple[Ranks, Notes, int]:
    """Return (ranks that meet a ratio, a note on each layer, the tile of the ranks).

    Layers that share a rank, as the experts of one weight do, are one shape of the allocation.
    """
    shapes = [shape_of(site, config) for site in sites]
    align = config.align or _BRANCH_ALIGN
    if config.base is None:
        align = config.align or allocation.choose_align(shapes, ratio)
    uniform = config.allocation == "uniform"
    members: dict[str, list[str]] = {}
    for site in sites:
        members.setdefault(site.group, []).append(site.name)
    first = {shape.name: shape for shape in shapes}
    shared = [
        dataclasses.replace(first[names[0]], name=name, count=len(names))
        for name, names in members.items()
    ]
    ranks_of = {one.name: list(allocation.legal_ranks(one, align)) for one in shared}
    losses: Losses = {}
    slow: dict[str, str] = {}
    if ratio and not uniform:
        losses = losses_of(sites, config.resolved_method, statistics, config.base)
        if prices is not None:
            nominal = {name: _nominal(first[name], ranks_of[key], ratio)
                       for key, names in members.items() for name in names}  # fmt: skip
            for key, (name, *_) in members.items():
                paying = [r for r in ranks_of[key] if prices.may_pay(name, r, nominal)]
                if ranks_of[key] and not paying:
                    slow |= dict.fromkeys(members[key], prices.slower(nominal).get(name, _SLOWER))
                ranks_of[key] = paying or ranks_of[key]

    def allocate(slow: Mapping[str, str]) -> Ranks:
        left = [one for one in shared if members[one.name][0] not in slow]
        if uniform:
            found = allocation.allocate_uniform(left, ratio, align)
        else:
            found = allocation.allocate_global(
                left,
                losses,
                ratio,
                align,
                permitted=lambda name, rank: not rank or rank in ranks_of[name],
            )
        return {name: found.get(key) for key, names in members.items() for name in names}

    legal = {names[0] for key, names in members.items() if ranks_of[key]}
    none = f"no multiple of {align} is below break-even"
    notes = {  # a base alone is in the budget, and a matrix that stays dense is not
        shape.name: ("", True)
        if allocation.legal_ranks(shape, align)
        else (none, shape.base is not None)
        for shape in shapes
    }
    return *_none_slower(allocate, legal, slow, notes, prices), align


def _nominal(shape: allocation.Shape, ranks: Sequence[int], ratio: float) -> int | None:
    """Return the rank that a shape would have at the ratio, None where none is legal."""
    ideal = (1 - ratio) * shape.k * shape.n / (shape.k + shape.n)
    return min(ranks, key=lambda rank: abs(rank - ideal), default=None)


def _none_slower(
    allocate: Callable[[Mapping[str, str]], Ranks],
    legal: set[str],
    slow: dict[str, str],
    notes: Notes,
    prices: Prices | None,
) -> tuple[Ranks, Notes]:
    """Return (ranks, notes with why some layers stay dense): none makes its call slower than dense.

    allocate: the ranks beside these slow layers. legal: layers that have a legal rank. What a slow
    layer gives up is spent again on the others. Raises ModelError where all of them are slow.
    """
    while True:
        if prices is not None and legal and legal <= slow.keys():
            workload = ", ".join(
                f"{tokens} token{'s' * (tokens != 1)} a call"
                + (f" ({weight:.0%})" if weight < 1 else "")
                for _, tokens, weight in prices.workload
            )
            raise ModelError(
                f"low rank is predicted to be slower than dense in all {len(legal)} layers that "
                f"have a rank, for {workload}; pass allow_slower=True for a smaller model all the "
                "same, a larger ratio, or the workload= that the model serves"
            )
        ranks = allocate(slow)
        found = {} if prices is None else prices.slower(ranks)
        if not found:
            return ranks, notes | {name: (why, False) for name, why in slow.items()}
        slow = slow | found


def _explicit(
    sites: Sequence[Site], config: CompressionConfig, prices: Prices | None
) -> tuple[Ranks, Notes]:
    """Return the ranks that the user gave, with notes; each pattern must match something."""
    ranks_given = config.given_ranks
    given: Mapping[str, int] = (
        {"*": ranks_given} if isinstance(ranks_given, int) else ranks_given or {}
    )
    names = [name for site in sites for name in site.names]
    for pattern in given:
        if not any(matches(name, pattern) for name in names):
            raise ModelError(
                f"rank pattern {pattern!r} matches none of the {len(sites)} selected layers"
                f"{closest(pattern, names)} (e.g. {', '.join(names[:4])})"
            )
    ranks: Ranks = {}
    notes: Notes = {}
    for site in sites:
        rank = next(
            (r for p, r in given.items() if any(matches(name, p) for name in site.names)), None
        )
        note = "no rank given: kept dense"
        if config.base is not None and not rank:
            rank, note = 0, ""
        elif rank is not None:
            shape = shape_of(site, config)
            rank, note = allocation.check_explicit(shape, rank, config.align)
        ranks[site.name], notes[site.name] = rank, (note, True)
    return _none_slower(
        lambda slow: {name: None if name in slow else rank for name, rank in ranks.items()},
        {name for name, rank in ranks.items() if rank}, {}, notes, prices,
    )  # fmt: skip
