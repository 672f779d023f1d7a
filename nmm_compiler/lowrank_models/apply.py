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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from nmm_compiler.errors import ModelError, OptionTypeError, closest
from nmm_compiler.kernels.packed_formats import check_blocks
from nmm_compiler.lowrank_models import experts, hf, ranks as allocation
from nmm_compiler.lowrank_models.calibrate import Statistics, as_batches, collect
from nmm_compiler.lowrank_models.config import CompressionConfig
from nmm_compiler.lowrank_models.factorize import (
    Factors,
    balance,
    factorize,
    gram,
    measure,
    spectrum,
)
from nmm_compiler.lowrank_models.modules import (
    LowRankLinear,
    QuantizedLinear,
    put,
    residual,
    round_factors,
    rounded_beside,
)
from nmm_compiler.lowrank_models.moments import Moments, is_finite, regularize
from nmm_compiler.lowrank_models.predicted_time import JUDGE, Prices, kernel_prices
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.lowrank_models.report import CompressionReport, LayerReport
from nmm_compiler.lowrank_models.select import Patterns, Site, find_sites, named
from nmm_compiler.options import check_names

_BRANCH_ALIGN = 32
"""The tile of ranks beside a base: a block of MX factors, and few enough for a choice."""
Losses = dict[str, list[float]]
"""Per layer, the loss of keeping rank 0, 1, 2, ... in a unit common to all."""
Ranks = dict[str, int | None]
Allocate = Callable[[Mapping[str, str]], Ranks]
"""The ranks of all layers but some, which stay dense for the reasons given."""
Notes = dict[str, tuple[str, bool]]
"""Per layer, why it has no rank, and whether the ratio is over this layer, too."""


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
    gradients = config.method == "two-sided"
    given, first = config.calibration, None
    statistics = given if isinstance(given, Statistics) else Statistics({}, {})
    try:
        with experts.apart(model):
            sites, skipped = find_sites(model, config.include, config.exclude)
            _check_sites(sites, config)
            if given is not None and given is not statistics:
                first, *_ = batches = as_batches(given)
                statistics = collect(
                    model, sites, batches, gradients=gradients, whole=config.base is not None
                )
            if given is not None:
                statistics.check(sites, gradients=gradients, base=config.base)
            # a model on the meta device whose ranks no price decides needs none
            unpriced = sites[0].weight.is_meta and config.allow_slower
            shapes = [allocation.Shape(s.name, s.k, s.n) for s in (() if unpriced else sites)]
            dtype = str(sites[0].weight.dtype).removeprefix("torch.")
            prices = kernel_prices(model, shapes, dtype, config, first)
            plan, align = make_plan(sites, config, statistics, prices)
            ranks = {layer.name: layer.rank for layer in plan}
            by_name = {site.name: site for site in sites}
            del sites  # else it keeps every dense weight in memory until the end
            layers: list[LayerReport] = []
            with steps("factorizing") as step:
                for layer in plan:
                    step(f"factorizing {layer.name}", len(layers), len(plan))
                    site = by_name.pop(layer.name)
                    if layer.rank is not None:
                        layer = _replace(model, site, layer, layer.rank, config, statistics)
                    layers.append(layer)
            return CompressionReport(
                method=config.method,
                allocation=config.allocation,
                align=align,
                ratio=config.ratio,
                workload=prices.timed(ranks),
                layers=tuple(layers),
                skipped=skipped,
                model_parameters_before=before,
                model_parameters_after=count_parameters(model),
                model_bytes_before=held,
                model_bytes_after=count_bytes(model),
                calibration_tokens=statistics.tokens,
                target=config.target,
                priced=prices.note,
                source=JUDGE if prices.groups else "",
                factors=config.factors or "",
                base=config.base or "",
                seconds=time.monotonic() - started,
            )
    finally:
        hf.attach(model)


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
    with experts.apart(model):
        sites, _ = find_sites(model, include, exclude)
        _check_sites(sites, config)
        batches = as_batches(calibration)
        return collect(model, sites, batches, gradients=gradients, whole=base is not None)


def count_parameters(model: nn.Module) -> int:
    """Return the elements of all parameters, tied ones once, and of rounded weights, not scales."""
    rounded = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    plain = sum(p.numel() for p in model.parameters())
    return plain + sum(module.in_features * module.out_features for module in rounded)


def count_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, tied ones once."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise OptionTypeError("model", type(model).__name__, "a torch.nn.Module")


def _check_sites(sites: Sequence[Site], config: CompressionConfig) -> None:
    """Raise an error, naming the layer, for a weight that cannot become what config asks for.

    OptionTypeError where a model without weights is to be judged by its weights; ModelError for a
    weight that is not finite; ShapeError where blocks of the base do not divide its inputs.
    """
    for site in sites:
        for form in (config.base, config.factors):
            if form is not None:
                check_blocks(site.k, form, site.name)
        if not site.weight.is_meta and not is_finite(site.weight):
            raise ModelError(
                f"the weight of {site.name} {list(site.weight.shape)} has NaN or infinite elements "
                "and cannot be factorized; repair it, or name it in exclude="
            )
        if site.weight.is_meta and config.allocation == "global":
            raise OptionTypeError(
                "base" if config.calibration is None else "calibration",
                "given",
                "neither calibration nor a ratio with base= for a model on the meta "
                "device, which has shapes and no weights",
            )


def _replace(
    model: nn.Module,
    site: Site,
    layer: LayerReport,
    rank: int,
    config: CompressionConfig,
    statistics: Statistics,
) -> LayerReport:
    """Put factors, a base or both in the place of a linear; return its report with the errors."""
    weight = site.weight
    moments = moments_of(site, config.method, statistics)
    base, target = None, weight
    if config.base is not None:
        base = rounded_beside(weight, config.base, rank, moments, site.name)
        target = residual(weight, base)
    factors = Factors(weight.new_zeros(site.n, rank), weight.new_zeros(rank, site.k))
    if rank and not weight.is_meta:
        factors = balance(factorize(target, rank, moments, site.name), weight.dtype)
    bias: nn.Parameter | None = site.module.bias
    replacement: LowRankLinear | QuantizedLinear
    if base is not None and not rank:
        replacement, base.bias = base, bias
    else:
        wants = site.module.weight.requires_grad
        up, down = (factor.requires_grad_(wants) for factor in factors[:2])
        replacement = LowRankLinear.from_factors(down, up, bias, base)
        if config.factors is not None:
            round_factors(replacement, config.factors)
        stored = replacement.up.weight.detach(), replacement.down.weight.detach()
        factors = Factors(*stored, factors.coefficients)
    put(model, site.names, replacement.train(site.module.training))
    held = count_bytes(replacement) - (0 if bias is None else bias.nbytes)
    layer = dataclasses.replace(layer, bytes=held, base=config.base or "")
    if weight.is_meta:
        return layer
    errors = measure(weight, target, factors, statistics.inputs.get(site.name))
    return dataclasses.replace(layer, weight_error=errors[0], output_error=errors[1])


# -- which rank every matrix gets -----------------------------------------------------------------


def moments_of(site: Site, method: str, statistics: Statistics) -> Moments:
    """Return the regularized moments a method weighs a site's error with."""
    inputs = statistics.inputs.get(site.name)
    if inputs is None:
        return Moments()
    gradient = statistics.gradients.get(site.name) if method == "two-sided" else None
    return Moments(regularize(inputs), None if gradient is None else regularize(gradient))


def losses_of(
    sites: Sequence[Site], method: str, statistics: Statistics, base: str | None = None
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
            inputs = statistics.inputs.get(site.name)
            moments = moments_of(site, method, statistics)
            tail = torch.zeros(min(site.n, site.k) + 1, dtype=torch.float64)
            if inputs is not None or not statistics.inputs:  # else no token reached this expert
                lost = site.weight
                if base is not None:
                    lost = residual(lost, QuantizedLinear.of(lost, base))
                squares = spectrum(lost, moments)
                tail = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
                if moments.gradients is not None and inputs is not None:
                    tail *= 0.5 * inputs.tokens
                elif tail[0] > 0:
                    tail /= gram(site.weight, moments)[0].trace()
            before = losses.get(site.group, [0.0] * len(tail))
            losses[site.group] = [a + b for a, b in zip(before, tail.tolist(), strict=True)]
    return losses


def _shape_of(site: Site, config: CompressionConfig) -> allocation.Shape:
    """Return a site as a matrix to allocate a rank for; with a base in units of 16 bits."""
    shape = allocation.Shape(site.name, site.k, site.n)
    if config.base is None:
        return shape
    kinds, dtype = (False, config.factors, config.base), site.weight.dtype
    some, twice = (
        count_bytes(LowRankLinear(site.k, rank, site.n, *kinds, device="meta", dtype=dtype))
        for rank in (32, 64)
    )
    # what 32 more ranks take; the scales of v are there at any rank
    unit = (twice - some) / 32 / (site.k + site.n)
    return dataclasses.replace(shape, base=(some - (twice - some)) / 2, unit=unit / 2)


def make_plan(
    sites: Sequence[Site],
    config: CompressionConfig,
    statistics: Statistics,
    prices: Prices,
) -> tuple[list[LayerReport], int]:
    """Return (each layer with its rank, None for dense; the tile of all ranks).

    Layers without gradients stay dense: the output does not depend on them, so the effect of an
    error in them is unknown. So do layers whose calls would be slower low-rank, by `prices`: what
    they give up is spent again on the others.

    Raises ModelError when no legal ranks meet the ratio, or all of them are slower than dense.
    """
    every = config.method != "two-sided"
    used = {site.group for site in sites if every or site.name in statistics.gradients}
    unused = [site for site in sites if site.group not in used]
    sites = [site for site in sites if site.group in used]
    judge = dataclasses.replace(prices, groups=()) if config.allow_slower else prices
    slow: dict[str, str] = {}
    if config.ratio is None:
        allocate, notes, align = *_explicit(sites, config), config.align or 1
    else:
        allocate, notes, align = _budgeted(sites, config, statistics, judge, slow)
    legal = {name for name, (note, _) in notes.items() if not note}
    while True:
        if legal and legal <= slow.keys():
            passes = ", ".join(f"{tokens} tokens a call" for _, tokens, _ in config.passes)
            raise ModelError(
                f"low rank is predicted to be slower than dense in all {len(legal)} layers that "
                f"have a rank, for {passes}; pass allow_slower=True for a smaller model all the "
                "same, a larger ratio, or the workload= that the model serves"
            )
        ranks = allocate(slow)
        slower = judge.slower(ranks)
        if not slower:
            break
        slow |= slower
    slow |= {site.name: "the model's output does not depend on it: kept dense" for site in unused}
    notes |= {name: (why, False) for name, why in slow.items()}
    shares = prices.shares(ranks)
    layers = []
    for site in (*sites, *unused):
        rank, (note, counted) = ranks.get(site.name), notes[site.name]
        if rank and config.factors is not None:
            check_blocks(rank, config.factors, f"{site.name}.up")
        dense_us, us = shares.get(site.name, (None, None))
        layers.append(
            LayerReport(
                name=site.name, k=site.k, n=site.n, rank=rank, note=note, counted=counted,
                bytes=site.weight.nbytes, dense_us=dense_us, us=us,
            )
        )  # fmt: skip
    return layers, align


def _budgeted(
    sites: Sequence[Site],
    config: CompressionConfig,
    statistics: Statistics,
    prices: Prices,
    slow: dict[str, str],
) -> tuple[Allocate, Notes, int]:
    """Return (ranks that meet a ratio, a note on each layer, the tile of the ranks).

    Layers that share a rank, as the experts of one weight do, are one shape of the allocation. Adds
    to slow those that no rank makes faster, as far as the closed form tells.
    """
    ratio = cast(float, config.ratio)
    alike: dict[str, list[Site]] = defaultdict(list)
    for site in sites:
        alike[site.group].append(site)
    members = {group: [site.name for site in some] for group, some in alike.items()}
    shapes = {
        group: dataclasses.replace(_shape_of(some[0], config), name=group, count=len(some))
        for group, some in alike.items()
    }
    align = config.align or _BRANCH_ALIGN
    if config.base is None:
        align = config.align or allocation.choose_align([*shapes.values()], ratio)
    ranks_of = {group: list(allocation.legal_ranks(one, align)) for group, one in shapes.items()}
    notes: Notes = {}
    for group, names in members.items():  # a base alone is in the budget, a dense matrix is not
        note = "" if ranks_of[group] else f"no multiple of {align} is below break-even"
        notes |= dict.fromkeys(names, (note, not note or config.base is not None))
    losses: Losses = {}
    if ratio and config.allocation == "global":
        losses = losses_of(sites, config.method, statistics, config.base)
        nominal = {
            name: shapes[group].nearest(ranks_of[group], ratio)
            for group, names in members.items()
            for name in names
        }
        for group, (name, *_) in members.items():
            paying = [rank for rank in ranks_of[group] if prices.may_pay(name, rank, nominal)]
            if ranks_of[group] and not paying:
                slower = "its call would be slower at any rank: kept dense"
                why = prices.slower(nominal).get(name, slower)
                slow |= dict.fromkeys(members[group], why)
            ranks_of[group] = paying or ranks_of[group]

    def allocate(dense: Mapping[str, str]) -> Ranks:
        left = [shape for group, shape in shapes.items() if members[group][0] not in dense]
        if config.allocation == "uniform":
            allotted = allocation.allocate_uniform(left, ratio, align)
        else:
            allotted = allocation.allocate_global(
                left,
                losses,
                ratio,
                align,
                permitted=lambda name, rank: not rank or rank in ranks_of[name],
            )
        return {name: allotted.get(group) for group, names in members.items() for name in names}

    return allocate, notes, align


def _explicit(sites: Sequence[Site], config: CompressionConfig) -> tuple[Allocate, Notes]:
    """Return the ranks that the user gave, with notes; each pattern must match something."""
    given = config.rank if isinstance(config.rank, dict) else {"*": cast(int, config.rank)}
    names = [name for site in sites for name in site.names]
    for pattern in given:
        if not named(names, [pattern]):
            raise ModelError(
                f"rank pattern {pattern!r} matches none of the {len(sites)} selected layers"
                f"{closest(pattern, names)}"
            )
    ranks: Ranks = {}
    notes: Notes = {}
    for site in sites:
        fitting = (r for pattern, r in given.items() if named(site.names, [pattern]))
        rank, note = next(fitting, None), "no rank given: kept dense"
        if config.base is not None and not rank:
            rank, note = 0, ""
        elif rank is not None:
            if config.align is not None and rank % config.align:
                below = rank - rank % config.align
                raise ModelError(
                    f"rank {rank} for {site.name} is no multiple of align={config.align}: pass "
                    f"{max(config.align, below)} or {below + config.align}, or align=1"
                )
            shape, note = _shape_of(site, config), ""
            if rank > shape.largest_rank:
                kept = "kept dense" if shape.base is None else "the base alone"
                note = f"rank {rank} saves nothing (break-even above {shape.largest_rank}): {kept}"
                rank = shape.without
        ranks[site.name], notes[site.name] = rank, (note, True)
    return lambda dense: {n: None if n in dense else rank for n, rank in ranks.items()}, notes
