"""`predict`: a model or a config in, its latency on a target out, dense and low-rank.

The order: the model without weights -> the ranks that `compress` would give -> one of each kind of
layer -> one core's share of it -> traced once a phase -> every piece priced -> summed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import OptionTypeError
from nmm_compiler.kernels.base import CORES, check_name, check_sizes, item_bytes
from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.lowrank_models.hf_layers import saved_layers as layers_of
from nmm_compiler.lowrank_models.meta_copies import MetaModel
from nmm_compiler.lowrank_models.select import Patterns
from nmm_compiler.options import DTYPES
from nmm_compiler.prediction.forms import BF16, read_form
from nmm_compiler.prediction.meta_models import as_given, dense_of, prepare
from nmm_compiler.prediction.model import Memory, ModelPrediction, Phase, PhaseLine
from nmm_compiler.prediction.prices import Cores, check_routing, fastest
from nmm_compiler.prediction.stacks import stack_named
from nmm_compiler.prediction.walk import Piece, cache_bytes, passes_of, walk_pass
from nmm_compiler.prices.kernel import LAUNCH_GAP_US, PRICES


def predict(
    model_or_config: Any,
    target: str = "trn2",
    *,
    prompt: int = 512,
    context: int = 2048,
    batch: int = 1,
    tp: int = 1,
    lnc: int = CORES,
    dtype: str | None = None,
    weights: str | None = None,
    ratio: float | None = None,
    rank: int | Mapping[str, int] | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    dense: Any = None,
    price: str = "simulated",
    stack: str = "own",
    routing: Sequence[float] | None = None,
    norms: bool = True,
    last: bool = False,
) -> ModelPrediction:
    """Return the predicted latency of a model on `target`, and that of the dense model.

    Args:
        model_or_config: an nn.Module (low-rank or not), a transformers config or a dict of its
            fields, a directory that `save_pretrained` wrote, low-rank or not, or the name of a
            public model (`public_models.json`). Weights are not needed.
        target: hardware, by name.
        prompt: tokens of the prompt, or of the input of a model that does not generate.
        context: tokens in the cache when a token is generated.
        batch: sequences at once.
        tp: logical cores that share the model.
        lnc: physical cores of a logical one: 1, as our kernels run, or 2, as AWS's software on
            trn2 and trn3 does by default.
        dtype: default bfloat16, and a module's own.
        weights: what the stored matrices are, default `dtype`: also a form of few bits as `nmm plan
            --forms` names it: "fp8", "mxfp4", "mxfp4+64" with a branch. The head, which `compress`
            leaves, is then fp8.
        ratio: the share of parameters that `compress` would remove, from layers that get slower
            too.
        rank: the ranks that `compress` would take; neither a ratio nor a rank: the model as it
            is.
        include: the linears that `compress` would make low-rank.
        exclude: those that it would leave.
        inputs: for a module that is no transformers model: its example inputs, for one phase.
        dense: what a low-rank module is compared with: the model before `compress`, or its
            config.
        price: of a kernel: "simulated", seconds for each new shape; "tuned", the same with the
            schedules that `tune` found where the cache has them; "closed_form", no time at all.
        stack: what runs the programs, one of `prediction.stacks.STACKS`: their gaps and host
            time.
        routing: how often each expert of a layer was chosen, for models with experts; default:
            equally often.
        norms: whether kernels have norms, sums and the RoPE of queries inside where that is
            faster, as the backend with `rules=["+norms", "+attention"]`.
        last: predict the last phase alone: the token, of a model that generates.

    Returns:
        Every piece with its time and source, and the sums.

    Raises:
        ModelError: the model cannot be traced or cut.
        UnknownNameError, OptionTypeError, ShapeError: for bad arguments.
        ModelError: as `compress` raises it.
    """
    check_sizes("predict", {"prompt": prompt, "context": context, "batch": batch, "tp": tp})
    chip = machine_target(target)
    most = chip.physical_cores_per_logical_core
    if lnc not in range(1, most + 1):
        wanted = f"at most {most} physical core{'s' * (most > 1)} for a logical one of {chip.name}"
        raise OptionTypeError("lnc", lnc, wanted)
    if dtype is None:  # a module's own, bfloat16 for what has none yet
        made = isinstance(model_or_config, MetaModel)
        own = model_or_config.module if made else model_or_config
        parameters = own.parameters() if isinstance(own, nn.Module) else ()
        first = next((p.dtype for p in parameters if p.is_floating_point()), torch.bfloat16)
        dtype = str(first).removeprefix("torch.")
    check_name("dtype", dtype, DTYPES)
    check_name("price", price, tuple(PRICES))
    low_rank = ratio is not None or rank is not None
    form = BF16 if weights is None else read_form(weights)
    form.check(chip)
    if form.rank and low_rank:
        raise OptionTypeError("weights", weights, "it without a ratio or a rank of factors")
    if not low_rank and (include is not None or exclude is not None):
        raise OptionTypeError("include", include or exclude, "it with a ratio or a rank")
    given = as_given(model_or_config)
    original = dense_of(given) if dense is None else as_given(dense)
    counts = check_routing(routing or (), routing)
    machine = Cores(chip, lnc, tp, form, price, stack_named(stack), counts)
    setting = {"prompt": prompt, "context": context, "batch": batch}
    predicted = functools.partial(_prediction, machine, target, dtype, setting, inputs, norms, last)
    before = predicted(original)
    if not low_rank and dense is None and original is given:
        return before
    each = dict(rank) if isinstance(rank, Mapping) else rank
    low = {"ratio": ratio, "rank": each, "include": include, "exclude": exclude}
    return predicted(given, low if low_rank else None, before)


@functools.lru_cache(maxsize=64)  # models of a plan, by their ratios and the cores that share them
def _kept(wanted: str) -> MetaModel:
    """Return what `prepare` makes of arguments in JSON: a plan asks for each many times."""
    return prepare(*json.loads(wanted))


def _prediction(
    machine: Cores, named: str, dtype: str, setting: dict[str, int], inputs: Any,
    norms: bool, last: bool, given: Any,
    low: dict[str, Any] | None = None, dense: ModelPrediction | None = None,
) -> ModelPrediction:  # fmt: skip
    """Return the prediction of a model as it is, or as `compress` would make it.

    named: the target, as given.
    """
    wanted = given, low, dtype, machine.tp
    if isinstance(given, MetaModel):
        model = given
    elif isinstance(given, nn.Module) or inputs is not None:
        model = prepare(*wanted)
    else:
        model = _kept(json.dumps(wanted, default=list))
    machine = replace(machine, experts_on=model.experts_on)
    output = getattr(model.module, "get_output_embeddings", lambda: None)()
    head = next((name for name, one in model.module.named_modules() if one is output), "")
    asked = passes_of(model, setting, inputs)
    layers = sum(map(len, model.layers.values()))
    inside = norms and machine.stack.kernels == "ours"
    # three tensors of the widest linear; a head that generates computes one token of each sequence
    once = head if asked[0].name == "prefill" else None
    widths = [
        (1 if name == once else setting["prompt"]) * linear.out_features
        for name, linear in model.module.named_modules()
        if isinstance(linear, nn.Linear)
    ]
    phases = []
    for one in asked[-1:] if last else asked:
        pieces = walk_pass(one, machine.target, named, machine.lnc, inside)
        phases.append(_phase(one.name, pieces, machine, layers, head))
    return ModelPrediction(
        name=model.name,
        target=machine.target.name,
        dtype=dtype,
        weights=machine.form.name,
        **setting,
        tp=machine.tp,
        lnc=machine.lnc,
        ratio=None if low is None else low["ratio"],
        ranks=tuple(sorted({*layers_of(model.module)["ranks"].values()} - {0})),
        parameters=model.parameters,
        phases=tuple(phases),
        memory=Memory(
            weight_bytes=_weight_bytes(model, machine, head),
            cache_bytes=max(map(cache_bytes, asked)),
            activation_bytes=3 * setting["batch"] * max(widths, default=0) * item_bytes(dtype),
            capacity_bytes=machine.target.hbm_bytes * machine.lnc,
        ),
        price=machine.price,
        stack=machine.stack.name,
        dense=dense,
    )


def _weight_bytes(model: MetaModel, machine: Cores, head: str) -> int:
    """Return the bytes of the weights that one logical core holds; tied ones count once."""
    total, module = 0, model.module
    few_bits = [
        (name, held)
        for name, held in module.named_buffers()
        if held.dim() == 2 and (held.itemsize == 1 or name.endswith(".scale"))
    ]
    for name, held in (*module.named_parameters(), *few_bits):
        size = held.nbytes
        here = machine.of_head if name == f"{head}.weight" else machine
        if here.form.base and name.endswith((".gate_up_proj", ".down_proj")):
            owner: Any = module.get_submodule(name.rpartition(".")[0])
            groups, *sizes = held.shape
            k, n = sizes if owner.dense_transposed else reversed(sizes)
            size = groups * here.form.stored_bytes(32 * tiles(k, 32), n)
        elif (
            here.form.base
            and isinstance(held, nn.Parameter)
            and held.dim() == 2
            and "embed" not in name
        ):
            size = here.form.stored_bytes(*reversed(held.shape))
        total += len(model.originals(name)) * size
    return total


def _phase(name: str, pieces: Sequence[Piece], machine: Cores, layers: int, head: str) -> Phase:
    """Return the lines of a pass: its pieces, the gaps between them, and the host."""
    lines: list[PhaseLine] = []
    for piece in pieces:
        lines += fastest(piece, machine.of_head if head and piece.module == head else machine)
    launches = sum(line.calls for line in lines)
    stack = machine.stack
    lines += [
        PhaseLine(
            module="(program)", kind="gaps", calls=launches, each_us=LAUNCH_GAP_US,
            source="fitted", what="from one kernel or region to the next",
        ),
        PhaseLine(
            module="(host)", kind="call", each_us=stack.host_us, source=stack.host_from,
            what="one call with its result read back",
        ),
    ]  # fmt: skip
    if stack.program_gap_us:
        lines.append(
            PhaseLine(
                module="(program)", kind="gaps", calls=layers + 1, each_us=stack.program_gap_us,
                source="published law", what="from one program to the next",
            )
        )  # fmt: skip
    return Phase(name=name, lines=tuple(lines))
