"""Reads modules that `symbolic_trace` leaves as calls (`call_module`) as canonical forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Result
from nmm_compiler.passes.graph.canonical_forms import Activation, Norm
from nmm_compiler.passes.graph.contractions import linear_form, pointwise_convolution

_ACTIVATIONS = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def read_module(c: Canonical, node: fx.Node, module: Any) -> Result:
    """Return the form of a called module; None for hooks, subclasses and all other modules."""
    source = node.args[0] if len(node.args) == 1 else node.kwargs.get("input")
    if not isinstance(module, nn.Module) or not isinstance(source, fx.Node):
        return None
    if any(getattr(module, hooks) for hooks in _HOOKS) or c.shape(source) is None:
        return None
    kind = type(module)
    shape, out = c.shape(source) or (), c.shape(node) or ()
    if kind is nn.Linear:
        weight, bias = _own(c, node, module, "weight"), _own(c, node, module, "bias")
        return None if weight is None else linear_form(c, node, source, weight, bias)
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return _convolution(c, node, module, source)
    if kind is nn.Identity or (kind in _DROPOUTS and (not module.training or module.p == 0)):
        return (source, views.identity(shape)) if shape == out else None
    if kind in (nn.Flatten, nn.Unflatten):
        dims = views.reshape(views.identity(shape), out)
        return None if dims is None else (source, dims)
    if kind in _ACTIVATIONS and not getattr(module, "inplace", False):
        return Activation(source, _ACTIVATIONS[kind])
    if kind is nn.GELU:
        return Activation(source, "gelu_tanh" if module.approximate == "tanh" else "gelu")
    if isinstance(module, (nn.RMSNorm, nn.LayerNorm)) and len(module.normalized_shape) == 1:
        weight, bias = (_own(c, node, module, name) for name in ("weight", "bias"))
        dtype = c.dtype(source)
        eps = torch.finfo(dtype).eps if module.eps is None and dtype is not None else module.eps
        return Norm(source, "rms" if kind is nn.RMSNorm else "layer", weight, bias, eps)
    return None


def _own(c: Canonical, node: fx.Node, module: nn.Module, name: str) -> Any:
    # A parametrized weight (weight_norm) is computed on access, so it is no parameter.
    value = module._parameters.get(name)
    return None if value is None else c.attribute(node, name, value)


def _convolution(c: Canonical, node: fx.Node, module: Any, source: fx.Node) -> Result:
    plain = all(s == 1 for s in module.stride) and module.groups == 1
    padding = module.padding
    none = padding in ("same", "valid") or all(p == 0 for p in padding)
    weight = _own(c, node, module, "weight")
    if not plain or not none or weight is None:
        return None
    return pointwise_convolution(c, node, source, weight, _own(c, node, module, "bias"))
