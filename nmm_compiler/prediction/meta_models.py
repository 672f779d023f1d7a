"""Models without weights, and what one core of a group has of them.

A model comes from a config, a directory, a public name, or a module that exists. Everything happens
on PyTorch's meta device, where tensors have shapes and no data.

`shard` cuts by the plan that transformers gives for the model: "colwise" linears (q, k, gate, up)
by output features, "rowwise" ones (o, down) by input features, after which the cores sum. What a
plan of experts leaves out (their attention, their shared experts) is cut by its usual name. Heads
stay whole. A low-rank linear y = (x u) v is cut as the backend cuts it (`tensor_parallel_plan`):

    colwise: u on every core, v cut by columns             nothing to exchange
    rowwise: u cut by rows, v on every core                all-reduce of x u, r wide,
                                                           inside of one kernel

Layers of stacked experts compute by `nmm.experts`, as compressed ones do. Of `tp` cores each has a
part of every expert's features, or, where those do not divide, some whole experts; either way their
results are summed.

Collectives are ops of their own in the traced graph, but for the one inside of a kernel: they move
nothing here and are priced by `prices/kernel.py`. `fastest` compares that kernel with two
products and a collective.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from nmm_compiler.errors import ModelError, UnknownNameError, one_line
from nmm_compiler.lowrank_models import hf_layers
from nmm_compiler.lowrank_models.apply import compress, count_parameters
from nmm_compiler.lowrank_models.experts import (
    CompressedExperts,
    StackedBase,
    adopt,
    is_stacked,
)
from nmm_compiler.lowrank_models.hf import require_transformers
from nmm_compiler.lowrank_models.meta_copies import MetaModel, shorten, without_data
from nmm_compiler.lowrank_models.modules import LowRankLinear, QuantizedLinear
from nmm_compiler.lowrank_models.tensor_parallel import linear_roles
from nmm_compiler.ops import registration as _registered  # noqa: F401  (defines torch.ops.nmm)
from nmm_compiler.outputs import read_json

_MADE = (nn.Module, MetaModel)
PUBLIC_MODELS = read_json(Path(__file__).with_name("public_models.json"))
"""The configs of public models that ship with the package, by name."""


def meta_model(given: Any, dtype: torch.dtype) -> MetaModel:
    """Return a model on the meta device.

    given: a module (left as it is), or the fields of a config, all of them, as `as_given` returns
    them. Raises ModelError where transformers makes no model of them, FileError for damaged ranks
    of a saved low-rank model, MissingPackageError where transformers is missing.
    """
    if isinstance(given, nn.Module):
        return MetaModel(without_data(given), type(given).__name__)
    dense = dense_of(given)
    transformers = require_transformers("a model without its code")
    auto = transformers.models.auto.modeling_auto
    named = " ".join(given.get("architectures") or ())
    generates = "CausalLM" in named or "LMHead" in named
    with torch.device("meta"):
        try:
            config = transformers.AutoConfig.for_model(**dense)
            if not named:
                encoder = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING
                generates = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING and not encoder
            kind = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
            module = kind.from_config(config, dtype=dtype)
        except Exception as error:  # a model's code meets the sizes of any file here
            text = f"{type(error).__name__}: {one_line(error)}"
            raise ModelError(f"transformers makes no model of the config: {text}") from error
        if dense is not given:
            hf_layers.prepare(module, hf_layers.read_layers(given["quantization_config"]))
    return MetaModel(module.eval(), str(given["name_or_path"] or given["model_type"]))


def dense_of(given: Any) -> Any:
    """Return the fields of the dense model that a saved low-rank one was made from; anything else
    as it is.

    Raises ModelError for a config of another quantization.
    """
    saved = None if isinstance(given, _MADE) else given.get("quantization_config")
    if saved is None:
        return given
    if saved.get("quant_method") != hf_layers.METHOD:
        raise ModelError(
            f"the config is of a model quantized by {saved.get('quant_method')}; pass the config "
            "of the model that it was made from, and weights= for the format"
        )
    return {name: value for name, value in given.items() if name != "quantization_config"}


def as_given(given: Any) -> Any:
    """Return a module, or what is prepared, as it is, else all fields of a transformers config, of
    a dict of some of them, of a path or of a public name; they are JSON data.

    Raises ModelError for anything else, UnknownNameError for an unknown name.
    """
    if isinstance(given, _MADE):
        return given
    transformers = require_transformers("a model without its code")
    if isinstance(given, (str, Path)):
        path, name = Path(given), str(given).lower()
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            given = {**read_json(file), "name_or_path": path.name}
        elif name in PUBLIC_MODELS:
            given = {**PUBLIC_MODELS[name], "name_or_path": name}
        else:
            forms = ("DIRECTORY with config.json", "CONFIG.json")
            raise UnknownNameError("model", str(given), list(PUBLIC_MODELS), forms)
    config = given if isinstance(given, transformers.PreTrainedConfig) else None
    if config is None and (not isinstance(given, Mapping) or "model_type" not in given):
        raise ModelError(
            f"cannot predict {given!r:.80}: pass an nn.Module, a transformers config, a dict with "
            "its fields and model_type, a directory with a config.json, or a public name"
        )
    try:
        config = config or transformers.AutoConfig.for_model(**given)
    except Exception as error:  # each config class has checks, and errors, of its own
        raise ModelError(f"transformers refuses the config: {one_line(error)}") from error
    own = {"name_or_path": config.name_or_path, "attn_implementation": config._attn_implementation}
    return config.to_dict() | own


def prepare(given: Any, low: Mapping[str, Any] | None, dtype: str, tp: int) -> MetaModel:
    """Return one core's share of one of each kind of layer; low: what `compress` is given.

    Raises ModelError for weights that are not traced, and for those that are not cut.
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
    model.parameters = count_parameters(model.module)
    experts_as_calls(model, tp)
    shorten(model)
    if tp > 1:
        shard(model, tp)
        sum_shared_once(model)
    return model


# -- one core of a group ---------------------------------------------------------------------

# The attribute of a cut linear that takes its collective away again.
HOOK = "of_all_cores"

# How serving stacks cut the linears of a layer that they are usually called by.
_USUAL = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), "colwise"),
    **dict.fromkeys(("gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
}

_library = torch.library.Library("nmm_prediction", "DEF")
_library.define("all_reduce(Tensor x) -> Tensor")
_library.define("all_gather(Tensor x, int features) -> Tensor")
_library.impl("all_reduce", lambda x: torch.empty_like(x), "Meta")
_library.impl("all_gather", lambda x, features: x.new_empty(*x.shape[:-1], features), "Meta")


def summed(module: nn.Module, given: Any, made: Any) -> Any:
    """Add up what the cores have of a linear that was cut by input features, of experts, or of a
    block of experts, behind whose tokens each core has the router's numbers."""
    if isinstance(made, tuple):
        return (summed(module, given, made[0]), *made[1:])
    return torch.ops.nmm_prediction.all_reduce(made)


def _gather(features: int, linear: nn.Module, given: Any, y: Tensor) -> Tensor:
    """Put together the output features of the cores, which every core needs whole."""
    return torch.ops.nmm_prediction.all_gather(y, features)


class _RowsLowRank(LowRankLinear):
    """The first factor cut by rows; the second whole."""

    tp = 1

    def forward(self, x: Tensor) -> Tensor:
        """Sum x u over the cores inside of one call, and multiply by the whole v."""
        factors = self.down.weight, self.up.weight, self.up.bias
        return torch.ops.nmm.lowrank_matmul(
            x, *factors, u_layout="col", v_layout="col", tp=self.tp, tp_axis="rows", group="cores"
        )


def shard(model: MetaModel, tp: int) -> None:
    """Cut the model's linears for one of `tp` cores, in place.

    Each core has at least one key and value head, and as many query heads as belong to it. Raises
    OptionTypeError for a model without a tensor-parallel plan.
    """
    found = linear_roles(model.module, _USUAL)
    parents = {name: model.module.get_submodule(name.rpartition(".")[0]) for name in found}
    heads = {parent: _heads(parent, tp) for parent in {*parents.values()}}  # before any is cut
    for name, role in found.items():
        _cut_linear(parents[name], name.rpartition(".")[2], role, tp, heads[parents[name]])


def _heads(parent: nn.Module, tp: int) -> tuple[int, int, int] | None:
    """Leave an attention module the heads of one core; return the features of all query heads, and
    of one core's query heads and key heads. None where it has no heads."""
    size, query = getattr(parent, "head_dim", None), getattr(parent, "q_proj", None)
    if not isinstance(size, int) or query is None:
        return None
    whole = query.out_features // size
    keys = max(1, -(-(whole // getattr(parent, "num_key_value_groups", 1)) // tp))
    queries = keys * max(1, -(-whole // (tp * keys)))
    if hasattr(parent, "num_key_value_groups"):
        setattr(parent, "num_key_value_groups", queries // keys)  # noqa: B010
    for own, numbers in list(parent.named_parameters(recurse=False)):
        if numbers.shape == (whole,):  # one a head, as an attention sink
            setattr(parent, own, nn.Parameter(numbers[:queries], False))
    return size * whole, size * queries, size * keys


def _cut_linear(
    parent: nn.Module, name: str, role: str, tp: int, heads: tuple[int, int, int] | None
) -> None:
    """Replace one linear of `parent` by what one core holds of it."""
    old = getattr(parent, name)
    bias, dtype = old.bias is not None, next(old.parameters()).dtype
    k, n = old.in_features, old.out_features
    if heads is None:
        part_k, part_n = -(-k // tp), -(-n // tp)
    else:
        whole, part_k, keys = heads
        part_n = part_k if n == whole else keys
    sizes = (part_k, n) if role == "rowwise" else (k, part_n)
    if isinstance(old, LowRankLinear):
        kind = _RowsLowRank if role == "rowwise" else LowRankLinear
        new: Any = kind(sizes[0], old.rank, sizes[1], bias, device="meta", dtype=dtype)
        new.tp = tp
    else:
        new = nn.Linear(*sizes, bias, device="meta", dtype=dtype)
        if role != "colwise":
            after = summed if role == "rowwise" else functools.partial(_gather, n)
            setattr(new, HOOK, new.register_forward_hook(after))
    setattr(parent, name, new.requires_grad_(False))


# -- stacked experts -------------------------------------------------------------------------


class _Repeated(CompressedExperts):
    """Experts as Llama 4 calls them: x has every token once for each expert.

    Those that a token did not choose multiply zeros, and are not read.
    """

    has_gate, has_bias, is_transposed = True, False, True

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        activated: Tensor = cast(Any, self).act_fn(gate)
        return activated * up

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return what the experts that tokens chose make of them, in the place of the first."""
        given: Any = self
        tokens = x.shape[0] // given.num_experts
        index = x.new_zeros(tokens, given.top_k, dtype=torch.int64)
        y = super().forward(x[:tokens], index, x.new_zeros(tokens, given.top_k))
        return torch.cat([y, x[tokens:]])


def experts_as_calls(model: MetaModel, tp: int) -> None:
    """Make the experts of a model calls of `nmm.experts`, of what one of `tp` cores has of them.

    Raises ModelError for experts that no kernel computes, and for those that the cores cannot
    share.
    """
    config: Any = getattr(model.module, "config", None)
    for name, module in model.module.named_modules():
        given: Any = module
        if type(module).__name__ == "Llama4TextExperts":
            given.top_k = getattr(config, "text_config", config).num_experts_per_tok
            module.__class__ = _Repeated
        if isinstance(module, _Repeated) or is_stacked(module):
            adopt(module)
            if given.said is None:
                raise ModelError(f"{model.name} has experts ({name}) that are no gated MLPs")
        elif not isinstance(module, CompressedExperts):
            continue
        held = dict(module.named_parameters())
        if ("gate_up_proj" in held) != ("down_proj" in held):
            raise ModelError(
                f"{model.name} has experts ({name}) of which one weight is low-rank and another is "
                "not: no kernel computes them in one call; include both, or leave both out"
            )
        if tp > 1:
            model.experts_on = max(model.experts_on, _cut_experts(module, held, tp))
            setattr(module, HOOK, module.register_forward_hook(summed))


def _cut_experts(layer: nn.Module, held: dict[str, nn.Parameter], tp: int) -> int:
    """Leave one core's part of every expert's features, or some whole experts; return how many
    cores have other experts."""
    turned, low = cast(Any, layer).dense_transposed, "down_proj" not in held
    of_h = {
        "gate_up_proj": 2 if turned else 1, "gate_up_proj_bias": 1, "gate_up_factors.up": 1,
        "down_proj": 1 if turned else 2, "down_factors.down": 2,
    }  # fmt: skip
    last = "down_factors.down" if low else "down_proj"
    groups, n = held[last].shape[0], held[last].shape[of_h[last]]
    if n % tp and groups % tp:
        raise ModelError(
            f"{type(layer).__name__}: {tp} cores share neither {n} features nor {groups} "
            "experts evenly; use another tp"
        )
    # each share of the features would have the first factors whole
    by_groups = bool(n % tp) or (low and not groups % tp)
    for name, parameter in held.items():
        axis = 0 if by_groups else of_h.get(name)
        if axis is not None:
            owner, _, leaf = name.rpartition(".")
            part = parameter.narrow(axis, 0, parameter.shape[axis] // tp)
            setattr(layer.get_submodule(owner), leaf, nn.Parameter(part, False))
    return tp if by_groups else 1


def sum_shared_once(model: MetaModel) -> None:
    """Sum over the cores once where a layer adds its shared experts to those that tokens chose."""
    for block in list(model.module.modules()):
        calls = [one for one in block.children() if isinstance(one, CompressedExperts)]
        shared = [one for name, one in block.named_children() if name.startswith("shared_expert")]
        ends = [end for one in shared for end in one.modules() if hasattr(end, HOOK)]
        if calls and ends:
            for end in (*calls, *ends):
                getattr(end, HOOK).remove()
            block.register_forward_hook(summed)
