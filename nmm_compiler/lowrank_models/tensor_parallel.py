"""Tensor parallelism for low-rank models: a plan for PyTorch's `parallelize_module`.

    plan = tensor_parallel_plan(model, mesh)          {module name: how it is cut}
    parallelize_module(model, mesh, plan)

Which linears are cut by columns (q, k, v, gate, up) and which by rows (o, down) is in transformers'
own plan. Linears get PyTorch's styles, and so do the factors of a low-rank one. There are two ways
to cut y = (x u) v:

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

from torch import nn

from nmm_compiler.errors import OptionTypeError, ShapeError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.lowrank_models.modules import (
    LowRankLinear,
    QuantizedLinear,
    lowrank_layers,
)
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
        Styles by the names of linears, and of the factors that are cut.

    Raises:
        OptionTypeError: transformers has no plan for the model, or its weights are packed.
        UnknownNameError: for a split.
        ShapeError: heads, features or ranks do not divide by the devices.
    """
    check_name("split", split, FACTOR_SPLITS)
    packed = next((n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)), None)
    if packed is not None:
        raise OptionTypeError(
            "model", packed, "a model of plain weights: no style cuts packed numbers and their "
            "scales; compress without base="
        )  # fmt: skip
    roles = linear_roles(model)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    class Whole(ColwiseParallel):
        """A factor that each device has whole."""

        def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
            pass  # what is not cut is given to every device

    whole, features = Replicate(), Shard(-1)
    devices, config = mesh.size(), getattr(model, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % devices:
            raise ShapeError(
                f"the model has {heads} {field}, which do not divide by {devices} devices; use a "
                "smaller mesh"
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
        of_x = features if rows else whole
        of_y = features if role == "colwise" else whole
        by_rows = RowwiseParallel(use_local_output=not low_rank)
        by_columns = ColwiseParallel(output_layouts=of_y)
        if not low_rank:
            plan[name] = by_rows if rows else by_columns
        elif split == "rank":
            plan[f"{name}.down"] = ColwiseParallel(input_layouts=of_x, use_local_output=False)
            plan[f"{name}.up"] = RowwiseParallel(output_layouts=of_y)
        elif rows:
            plan |= {f"{name}.down": by_rows, f"{name}.up": Whole(output_layouts=whole)}
        else:
            plan[f"{name}.down"] = Whole(output_layouts=whole, use_local_output=False)
            plan[f"{name}.up"] = by_columns
    return plan


def linear_roles(model: nn.Module, usual: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the linears of a model that are cut, by name: "colwise", "rowwise" or "head".

    A head is cut by columns, and its result is gathered. usual: the roles of linears inside of
    layers by the last part of their names, for those that the plan leaves out. Raises
    OptionTypeError for a model without a plan of transformers that cuts a linear.
    """
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    patterns = [
        (re.compile(r"(^|\.)" + re.escape(one).replace(r"\*", r"\d+") + "$"), role)
        for one, role in plan.items()
        if role in ("colwise", "rowwise", *_HEADS)
    ]
    if plan and usual:
        patterns += [(re.compile(rf"\.\d+\.(.*\.)?{one}$"), usual[one]) for one in usual]
    roles = {}
    layers = lowrank_layers(model)
    for name, module in model.named_modules():
        inside = name.rpartition(".")[0] in layers  # a factor
        if inside or not isinstance(module, (nn.Linear, LowRankLinear)):
            continue
        role = next((role for pattern, role in patterns if pattern.search(name)), "")
        if role in _HEADS and not re.search(r"\.\d+\.", name):
            role = "head"
        if role in ("colwise", "rowwise", "head"):
            roles[name] = role
    if not roles:
        wanted = "a transformers model with a tensor-parallel plan of its linears, or use one core"
        raise OptionTypeError("model", type(model).__name__, wanted)
    return roles
