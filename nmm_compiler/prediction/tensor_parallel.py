"""One core of a tensor-parallel group: a model's linears cut, with the collectives between them.

`shard` cuts by the plan that transformers gives for the model: "colwise" linears (q, k, gate, up)
by output features, "rowwise" ones (o, down) by input features, after which the cores sum. What a
plan of experts leaves out (their attention, their shared experts) is cut by its usual name. Heads
stay whole. A low-rank linear y = (x u) v is cut as the backend cuts it (`tensor_parallel_plan`):

    colwise: u on every core, v cut by columns             nothing to exchange
    rowwise: u cut by rows, v on every core                all-reduce of x u, r wide,
                                                           inside of one kernel

Collectives are ops of their own in the traced graph, but for the one inside of a kernel: they move
nothing here and are priced by `prices/kernel.py`. `fastest` compares that kernel with two
products and a collective.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor, nn

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.meta_copies import MetaModel
from nmm_compiler.lowrank_models.modules import LowRankLinear
from nmm_compiler.lowrank_models.tensor_parallel import linear_roles
from nmm_compiler.ops import registration as _registered  # noqa: F401  (defines torch.ops.nmm)

COLLECTIVES = ("all_reduce", "all_gather")
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
    ModelError for a model without a tensor-parallel plan.
    """
    if tp == 1:
        return
    found = linear_roles(model.module)
    if getattr(model.module, "_tp_plan", None):
        found = {**_usual_roles(model.module), **found}
    parents = {name: model.module.get_submodule(name.rpartition(".")[0]) for name in found}
    heads = {parent: _heads(parent, tp) for parent in parents.values()}  # before any is cut
    for name, role in found.items():
        _cut(parents[name], name.rpartition(".")[2], role, tp, heads[parents[name]])
    if not found:
        raise ModelError(
            f"{model.name} has no tensor-parallel plan that says how its linears are cut; use tp=1"
        )


def _usual_roles(model: nn.Module) -> dict[str, str]:
    """Return how the linears inside of layers are cut that are called as everybody calls them."""
    layers = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    roles = {name: _USUAL.get(name.rpartition(".")[2], "") for name in layers}
    return {name: role for name, role in roles.items() if role and re.search(r"\.\d+\.", name)}


def _heads(parent: nn.Module, tp: int) -> tuple[int, int, int, int] | None:
    """Return of an attention module the features of a head, the query heads, and those and the key
    heads of one core; None where it has no heads."""
    size, query = getattr(parent, "head_dim", None), getattr(parent, "q_proj", None)
    if not isinstance(size, int) or query is None:
        return None
    queries = query.out_features // size
    keys = max(1, -(-(queries // getattr(parent, "num_key_value_groups", 1)) // tp))
    return size, queries, keys * max(1, -(-queries // (tp * keys))), keys


def _cut(
    parent: nn.Module, name: str, role: str, tp: int, heads: tuple[int, int, int, int] | None
) -> None:
    """Replace one linear of `parent` by what one core holds of it."""
    old = getattr(parent, name)
    bias, dtype = old.bias is not None, next(old.parameters()).dtype
    k, n = old.in_features, old.out_features
    if heads is None:
        part_k, part_n = -(-k // tp), -(-n // tp)
    else:
        size, whole, queries, keys = heads
        part_n = size * (queries if n == size * whole else keys)
        part_k = size * queries
        if hasattr(parent, "num_key_value_groups"):
            setattr(parent, "num_key_value_groups", queries // keys)  # noqa: B010
        for own, numbers in list(parent.named_parameters(recurse=False)):
            if numbers.shape == (whole,):  # one a head, as an attention sink
                setattr(parent, own, nn.Parameter(numbers[:queries], False))
    sizes = (part_k, n) if role == "rowwise" else (k, part_n)
    new: nn.Module
    if isinstance(old, LowRankLinear):
        kind = _RowsLowRank if role == "rowwise" else LowRankLinear
        new = kind(sizes[0], old.rank, sizes[1], bias, device="meta", dtype=dtype)
        new.tp = tp  # type: ignore[assignment]
    else:
        new = nn.Linear(*sizes, bias, device="meta", dtype=dtype)
        if role != "colwise":
            after = summed if role == "rowwise" else functools.partial(_gather, n)
            setattr(new, HOOK, new.register_forward_hook(after))
    setattr(parent, name, new.requires_grad_(False))
