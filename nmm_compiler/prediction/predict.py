"""`predict`: a model or a config in, its latency on a target out, dense and low-rank.

The order: the model without weights -> the ranks that `compress` would give -> one of each kind of
layer -> one core's share of it -> traced once a phase -> every piece priced -> summed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import ModelError, OptionTypeError
from nmm_compiler.kernels.base import CORES, check_name, check_sizes, item_bytes
from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.lowrank_models.apply import compress, count_parameters
from nmm_compiler.lowrank_models.experts import StackedBase
from nmm_compiler.lowrank_models.hf_layers import SavedLayers
from nmm_compiler.lowrank_models.meta_copies import MetaModel, example_inputs, shorten
from nmm_compiler.lowrank_models.quantize import QuantizedLinear
from nmm_compiler.lowrank_models.select import Patterns
from nmm_compiler.options import DTYPES
from nmm_compiler.prediction.experts import (
    check_routing,
    experts_as_calls,
    routed,
    sum_shared_once,
)
from nmm_compiler.prediction.forms import BF16, read_form
from nmm_compiler.prediction.meta_models import (
    as_given,
    dense_config,
    meta_model,
    saved_layers,
)
from nmm_compiler.prediction.model import Line, Memory, ModelPrediction, Phase
from nmm_compiler.prediction.prices import Machine, fastest, line_of
from nmm_compiler.prediction.stacks import STACKS, stack_named
from nmm_compiler.prediction.tensor_parallel import shard
from nmm_compiler.prediction.walk import Graphs, Piece, graphs_of, walk_graphs
from nmm_compiler.prices.kernel import PRICES


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
        parameters = model_or_config.parameters() if isinstance(model_or_config, nn.Module) else ()
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
    original = dense_config(given) if dense is None else as_given(dense)
    machine = Machine(chip, lnc, tp, form, price, stack_named(stack).name)
    setting = {"prompt": prompt, "context": context, "batch": batch}
    counts = check_routing(routing or (), routing)
    made = functools.partial(_prediction, machine, target, dtype, setting, inputs, counts, norms)
    before = made(original)
    if not low_rank and dense is None and saved_layers(given) is None:
        return before
    low = {"ratio": ratio, "rank": rank, "include": include, "exclude": exclude}
    return made(given, low if low_rank else None, before)


@dataclass
class Prepared:
    """One core's share of a model, ready to be traced; what was traced of it stays.

    shared: how many cores have other experts.
    """

    model: MetaModel
    ranks: tuple[int, ...]
    parameters: int
    shared: int
    graphs: dict[tuple[Any, ...], Graphs] = field(default_factory=dict)
    walked: dict[tuple[Any, ...], list[Piece]] = field(default_factory=dict)

    def pieces(
        self, phase: PhaseInputs, named: str, machine: Machine, takes_norms: bool
    ) -> list[Piece]:
        """Return the pieces of a phase on a machine; named: the target as it was given.

        Its graphs are the same for every target.
        """
        sizes = (phase.name, phase.batch, phase.tokens)
        if sizes not in self.graphs:
            self.graphs[sizes] = graphs_of(self.model, phase.inputs())
        key = (*sizes, machine.target, machine.lnc, takes_norms)
        if key not in self.walked:
            given = self.graphs[sizes], named, machine.lnc, takes_norms
            self.walked[key] = walk_graphs(self.model, *given)
        return self.walked[key]


_KEPT: dict[str, Prepared] = {}
_KEPT_MOST = 64  # models of a plan, by their ratios and the cores that share them


def _prediction(
    machine: Machine, named: str, dtype: str, setting: dict[str, int], inputs: Any,
    routing: tuple[float, ...], norms: bool, given: Any,
    low: dict[str, Any] | None = None, dense: ModelPrediction | None = None,
) -> ModelPrediction:  # fmt: skip
    """Return the prediction of a model as it is, or as `compress` would make it.

    named: the target, as given. A config's model is kept: a plan asks for it many times.
    """
    key = ""
    if not isinstance(given, nn.Module) and inputs is None:
        config = {**given.to_dict(), "name_or_path": given.name_or_path}
        key = json.dumps([config, low, dtype, machine.tp], default=str, sort_keys=True)
    prepared = _KEPT.get(key) or prepare(given, low, dtype, machine.tp)
    if key:
        _KEPT[key] = prepared
    if len(_KEPT) > _KEPT_MOST:
        del _KEPT[next(iter(_KEPT))]
    model = prepared.model
    output = getattr(model.module, "get_output_embeddings", lambda: None)()
    head = next((name for name, one in model.module.named_modules() if one is output), "")
    asked = model_phases(model, setting, inputs)
    layers = sum(map(len, model.layers.values()))
    inside = norms and STACKS[machine.stack].kernels == "ours"
    # three tensors of the widest linear; a head that generates computes one token of each sequence
    once = head if _generates(model.module) else None
    widths = [
        (1 if name == once else setting["prompt"]) * linear.out_features
        for name, linear in model.module.named_modules()
        if isinstance(linear, nn.Linear)
    ]
    phases = []
    for one in asked:
        pieces = routed(prepared.pieces(one, named, machine, inside), routing, prepared.shared)
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
        ranks=prepared.ranks,
        parameters=prepared.parameters,
        phases=tuple(phases),
        memory=Memory(
            weight_bytes=_weight_bytes(model, dtype, machine, head),
            cache_bytes=max(one.cache_bytes() for one in asked),
            activation_bytes=3 * setting["batch"] * max(widths, default=0) * item_bytes(dtype),
            capacity_bytes=machine.target.hbm_bytes * machine.lnc,
        ),
        price=machine.price,
        stack=machine.stack,
        dense=dense,
    )


def prepare(given: Any, low: Mapping[str, Any] | None, dtype: str, tp: int) -> Prepared:
    """Return one core's share of one of each kind of layer; low: what `compress` is given.

    Raises ModelError for weights that are not traced, and for those that `shard` does not cut.
    """
    model = meta_model(given, getattr(torch, dtype))
    for name, module in model.module.named_modules():
        packed = isinstance(module, QuantizedLinear) and (module.format != "fp8" or tp > 1)
        if packed or isinstance(module, StackedBase):
            raise ModelError(
                f"{model.name} has {module.format} weights ({name}), and modules of such weights "
                "are not predicted, those of fp8 with tp=1 alone; predict the dense model, with "
                "weights='mxfp4+32' or another form of nmm plan --forms"
            )
    if low is not None:
        compress(model.module, **low, allow_slower=True)
        model.module.requires_grad_(False)
    ranks = tuple(sorted(set(SavedLayers.of(model.module).ranks.values()) - {0}))
    parameters = count_parameters(model.module)
    shared = experts_as_calls(model, tp)
    shorten(model)
    shard(model, tp)
    sum_shared_once(model, tp)
    return Prepared(model, ranks, parameters, shared)


@dataclass(frozen=True)
class PhaseInputs:
    """One phase: a function that makes its inputs, and the key-value cache among them."""

    name: str
    batch: int
    tokens: int
    inputs: Callable[[], Any]
    cache_bytes: Callable[[], int] = int


def model_phases(model: MetaModel, setting: Mapping[str, int], inputs: Any) -> list[PhaseInputs]:
    """Return the phases of a model: prefill and decode, or one pass."""
    batch, prompt, context = (setting[name] for name in ("batch", "prompt", "context"))
    if inputs is not None:
        given = tree_map_only(torch.Tensor, lambda t: t.to("meta"), inputs)
        return [PhaseInputs("pass", batch, prompt, lambda: given)]
    module: Any = model.module
    once = example_inputs(module, prompt, batch)
    if once is None:
        raise ModelError(
            f"{model.name} is no transformers model of tokens or images: pass inputs=, its example "
            "inputs"
        )
    if not _generates(module):
        tokens = prompt if "input_ids" in once else 0
        return [PhaseInputs("pass", batch, tokens, lambda: once)]

    def ids(length: int) -> torch.Tensor:
        return torch.zeros(batch, length, dtype=torch.long, device="meta")

    def prefill() -> dict[str, Any]:
        return {**once, "use_cache": False, "logits_to_keep": 1}

    def cache() -> Any:
        before = {"input_ids": ids(max(1, context - 1)), "use_cache": True, "logits_to_keep": 1}
        with torch.no_grad():
            return module(**before).past_key_values

    def decode() -> dict[str, Any]:
        return {"input_ids": ids(1), "use_cache": True, "past_key_values": cache()}

    def cache_bytes() -> int:
        """Return the bytes of all layers that the traced ones stand for."""
        held = cache().layers
        times = [len(every) for every in model.layers.values()] or [1] * len(held)
        return sum(
            count * value.nbytes
            for layer, count in zip(held, times, strict=False)
            for value in vars(layer).values()
            if isinstance(value, torch.Tensor) and value.is_meta
        )

    return [
        PhaseInputs("prefill", batch, prompt, prefill),
        PhaseInputs("decode", batch, context, decode, cache_bytes),
    ]


def _generates(module: nn.Module) -> bool:
    return "CausalLM" in type(module).__name__ or "LMHead" in type(module).__name__


def _weight_bytes(model: MetaModel, dtype: str, machine: Machine, head: str) -> int:
    """Return the bytes of the weights that one logical core holds; tied ones count once."""
    total = 0
    for name, parameter in model.module.named_parameters():
        size = parameter.numel() * parameter.element_size()
        here = machine.of_head if name == f"{head}.weight" else machine
        if here.form.base and name.endswith((".gate_up_proj", ".down_proj")):
            owner: Any = model.module.get_submodule(name.rpartition(".")[0])
            groups, *sizes = parameter.shape
            k, n = sizes if owner.dense_transposed else reversed(sizes)
            size = groups * here.form.stored_bytes(32 * tiles(k, 32), n)
        elif here.form.base and parameter.dim() == 2 and "embed" not in name:
            size = here.form.stored_bytes(*reversed(parameter.shape))
        total += len(model.originals(name)) * size
    for name, buffer in model.module.named_buffers():  # factors of eight bits
        if buffer.dim() == 2 and buffer.element_size() == 1:
            total += len(model.originals(name)) * buffer.numel()
    return total


def _phase(name: str, pieces: Sequence[Piece], machine: Machine, layers: int, head: str) -> Phase:
    """Return the lines of a pass: its pieces, the gaps between them, and the host."""
    lines: list[Line] = []
    for piece in pieces:
        lines += fastest(piece, machine.of_head if head and piece.module == head else machine)
    launches = sum(line.calls * line.launches for line in lines)
    stack = STACKS[machine.stack]
    between: Any = {"module": "(program)", "kind": "gaps"}
    lines += [
        line_of(
            stack.launch_gap_us, "fitted", "from one kernel or region to the next",
            calls=launches, **between,
        ),
        line_of(
            stack.host_us, stack.host_from, "one call with its result read back",
            module="(host)", kind="call",
        ),
    ]  # fmt: skip
    if stack.program_gap_us:
        law = stack.program_gap_us, "published law", "from one program to the next"
        lines.append(line_of(*law, calls=layers + 1, **between))
    return Phase(name=name, lines=tuple(lines))
