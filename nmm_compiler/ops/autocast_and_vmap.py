"""How the `torch.ops.nmm.*` ops behave under autocast and vmap.

Autocast: floating operands are cast to the autocast dtype before the op, as for `linear`; without
this rule an eager call would return bf16 (its body autocasts) and a compiled one fp32.
Vmap: a batch of inputs with shared weights is one call with one more token dimension; a batch of
weights is one call for each weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xla": "AutocastXLA"}
_PRIVATE_KEY = "AutocastPrivateUse1"
_LEFT_ALONE = (torch.float64, torch.float8_e4m3fn)


def _autocast(op: Callable, device_type: str, key: str) -> Callable:
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(value: Any) -> Any:
            eligible = isinstance(value, Tensor) and value.is_floating_point()
            eligible = eligible and value.dtype not in _LEFT_ALONE
            return value.to(dtype) if eligible else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*tree_map(cast, args), **kwargs)

    return run


def _vmap(op: Callable) -> Callable:
    def run(info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        shared_weights = all(dim is None for dim in tree_leaves(in_dims[1:]))
        given = [kwargs.get("x_layout", "row"), kwargs.get("out_layout", "row")]
        rows = {*given, *(kwargs.get("out_layouts") or ())} == {"row"}
        if shared_weights and rows and isinstance(in_dims[0], int):
            out = op(args[0].movedim(in_dims[0], 0), *args[1:], **kwargs)
            return out, tree_map(lambda _: 0, out)
        outs = [op(*_one(args, in_dims, index), **kwargs) for index in range(info.batch_size)]
        stacked = tree_map(lambda *same: torch.stack(same), *outs)
        return stacked, tree_map(lambda _: 0, stacked)

    return run


def _one(args: Any, in_dims: Any, index: int) -> Any:
    """Return one call's operands of a batch; a dimension is None of what all calls share."""
    return tree_map(lambda t, dim: t if dim is None else t.select(dim, index), args, in_dims)


def register(library: torch.library.Library, name: str, op: Callable) -> None:
    """Register the autocast rules of every device type and the vmap rule of op `name`."""
    private = torch._C._get_privateuse1_backend_name()
    for device_type, key in {**_AUTOCAST_KEYS, private: _PRIVATE_KEY}.items():
        library.impl(name, _autocast(op, device_type, key), key)
    torch.library.register_vmap(f"nmm::{name}", _vmap(op), lib=library)
