"""`compress`: a model's linears become low-rank, in place.

Reads top to bottom: select the matrices (`select.py`), calibrate (`calibrate.py`), decide all ranks
(`plan.py`), then factorize and replace one layer after the other (`factorize.py`). A layer is
replaced in one step after its factors are complete, so an interrupt between any two instructions
leaves a model that works.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import OptionTypeError
from nmm_compiler.kernels.linear.corrected import reads_as_stored
from nmm_compiler.lowrank_models import experts, hf
from nmm_compiler.lowrank_models.calibrate import Statistics, as_batches, collect
from nmm_compiler.lowrank_models.config import CompressionConfig
from nmm_compiler.lowrank_models.factorize import (
    balance,
    check_finite,
    factorize,
    measure,
    one_thread,
    scaled_coefficients,
)
from nmm_compiler.lowrank_models.modules import LowRankLinear, put
from nmm_compiler.lowrank_models.plan import (
    check_base,
    check_meta,
    make_plan,
    moments_of,
)
from nmm_compiler.lowrank_models.predicted_time import JUDGE, Prices, kernel_prices
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.lowrank_models.quantize import (
    QuantizedLinear,
    make_layer,
    residual,
    rounded_beside,
)
from nmm_compiler.lowrank_models.ranks import Shape
from nmm_compiler.lowrank_models.report import CompressionReport, LayerReport
from nmm_compiler.lowrank_models.select import Patterns, Site, find_sites
from nmm_compiler.options import check_names


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
    named, after = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    fields = dataclasses.fields(CompressionConfig)
    kinds = {"ratio": named} | {field.name: after for field in fields if field.name != "ratio"}
    every = [inspect.Parameter("model", named)]
    every += [
        inspect.Parameter(field.name, kinds[field.name], default=field.default) for field in fields
    ]
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
    layers = [Shape(site.name, site.k, site.n) for site in sites]
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
