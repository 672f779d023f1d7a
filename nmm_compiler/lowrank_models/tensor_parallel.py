"""Tensor parallelism for low-rank models: a plan for PyTorch's `parallelize_module`.

    plan = tensor_parallel_plan(model, mesh)          {module name: how it is cut}
    parallelize_module(model, mesh, plan)

Which linears are cut by columns (q, k, v, gate, up) and which by rows (o, down) is in transformers'
own plan. Dense linears get PyTorch's styles. A low-rank linear y = (x u) v has two ways:

    split    columns (x whole)                     rows (x cut by features)
    "row"    u whole, v cut by outputs             u cut by inputs, sum of x u (r wide), v whole
    "rank"   u and v cut along the rank,           x gathered, u and v cut along the rank,
             sum of y scattered by features        sum of y (n wide)

"row" moves least: r numbers a token in two of seven linears. "rank" holds least: no factor is on
two devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nmm_compiler.errors import MissingPackageError, OptionTypeError, ShapeError, UnknownNameError
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers
from nmm_compiler.lowrank_models.quantize import QuantizedLinear
from nmm_compiler.options import FACTOR_SPLITS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_HEADS = ("colwise_rep", "colwise_gather_output")


def tensor_parallel_plan(
    model: nn.Module, mesh: DeviceMesh, *, split: str = "row"
) -> dict[str, ParallelStyle]:
    """Return how `parallelize_module` cuts a compressed Llama, Qwen3 or the like over a mesh.

    Args:
        model: a transformers model, low-rank or not.
        mesh: of one dimension.
        split: how low-rank linears are cut, "row" or "rank".

    Returns:
        A style for each linear, by name.

    Raises:
        OptionTypeError: transformers has no plan for the model, or its weights are packed.
        UnknownNameError: for a split.
        ShapeError: heads, features or ranks do not divide by the devices.
    """
    if not torch.distributed.is_available():
        raise MissingPackageError("torch.distributed", "tensor parallelism", "hf")
    if split not in FACTOR_SPLITS:
        raise UnknownNameError("split", split, FACTOR_SPLITS)
    if mesh.ndim != 1:
        raise OptionTypeError("mesh", mesh, 'a mesh of one dimension, such as mesh["tp"]')
    packed = next((n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)), None)
    if packed is not None:
        raise OptionTypeError(
            "model", packed, "a model of plain weights: no style cuts packed numbers and their "
            "scales; compress without base="
        )  # fmt: skip
    roles = linear_roles(model)
    if not roles:
        raise OptionTypeError(
            "model", type(model).__name__, "a transformers model with a tensor-parallel plan"
        )
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    devices, config = mesh.size(), getattr(model, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % devices:
            raise ShapeError(
                f"the model has {heads} {field}, which do not divide by {devices} devices; use a "
                f"mesh whose size divides {heads}"
            )
    plan: dict[str, ParallelStyle] = {}
    for name, role in roles.items():
        if role == "head" and getattr(config, "tie_word_embeddings", False):
            continue  # its weight is that of the embedding, which every device reads whole
        module: Any = model.get_submodule(name)
        low_rank, rows = isinstance(module, LowRankLinear), role == "rowwise"
        ways = {"in_features" if rows else "out_features": "use a smaller mesh"}
        if low_rank and split == "rank":
            ways["rank"] = "compress with align= a multiple of it, or take split='row'"
        for what, way in ways.items():
            if getattr(module, what) % devices:
                raise ShapeError(
                    f"{name} has {what} {getattr(module, what)}, which does not divide by "
                    f"{devices} devices; {way}"
                )
        if low_rank:
            plan[name] = low_rank_style(role, split)
        elif rows:
            plan[name] = RowwiseParallel()
        else:
            plan[name] = ColwiseParallel(output_layouts=Replicate() if role == "head" else None)
    return plan


def linear_roles(model: nn.Module) -> dict[str, str]:
    """Return the linears of a model that are cut, by name: "colwise", "rowwise" or "head".

    A head is cut by columns, and its result is gathered. Empty for a model without a plan of
    transformers.
    """
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    patterns = [
        (re.compile(r"(^|\.)" + re.escape(one).replace(r"\*", r"\d+") + "$"), role)
        for one, role in plan.items()
    ]
    found = {}
    layers = lowrank_layers(model)
    for name, module in model.named_modules():
        inside = name.rpartition(".")[0] in layers  # a factor
        if inside or not isinstance(module, (nn.Linear, LowRankLinear)):
            continue
        role = next((role for pattern, role in patterns if pattern.search(name)), "")
        if role in _HEADS and not re.search(r"\.\d+\.", name):
            role = "head"
        if role in ("colwise", "rowwise", "head"):
            found[name] = role
    return found


def low_rank_style(role: str, split: str) -> ParallelStyle:
    """Return how a LowRankLinear is cut: see the table of this module."""
    from torch.distributed.tensor import (
        DTensor,
        Replicate,
        Shard,
        distribute_module,
        distribute_tensor,
    )
    from torch.distributed.tensor.parallel import ParallelStyle

    whole, features = Replicate(), Shard(-1)
    of_x = features if role == "rowwise" else whole
    wanted_x = whole if split == "rank" else of_x
    of_y = features if role == "colwise" else whole
    cuts: dict[str, Any] = {"down.weight": Shard(0), "up.weight": Shard(1)}
    if split == "row":
        cuts = {"up.weight": Shard(0), "up.bias": Shard(0)}
        if role == "rowwise":
            cuts = {"down.weight": Shard(1)}

    class LowRankParallel(ParallelStyle):
        """One low-rank linear over a mesh; tensors outside of it are plain."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            for name, parameter in list(module.named_parameters()):
                owner, _, leaf = name.rpartition(".")
                made = distribute_tensor(parameter, device_mesh, [cuts.get(name, whole)])
                cut = nn.Parameter(made, parameter.requires_grad)
                module.get_submodule(owner).register_parameter(leaf, cut)
            if role == "rowwise" and split == "row":  # the sum is r wide here, and n wide later
                module.get_submodule("down").register_forward_hook(
                    lambda one, given, p: p.redistribute(placements=[whole])
                )
            return distribute_module(module, device_mesh, None, entered, left)

    def entered(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [of_x], run_check=False)
        return (x.redistribute(placements=[wanted_x]), *inputs[1:])

    def left(module: nn.Module, y: Any, mesh: Any) -> Any:
        return y.redistribute(placements=[of_y]).to_local()

    return LowRankParallel()
