"""Whether a subclass of `nn.Linear` computes what `nn.Linear` computes, found out by running it.

Some models spell x W^T + b themselves (transformers' FalconLinear); others add a router, a scale or
an activation. The name cannot tell, so a few random rows are sent through a float64 copy of the
module, in eval and in training mode, and compared with the product of its weight.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

_ROWS = 3


def difference_from_linear(module: nn.Linear) -> str | None:
    """Return None when the module's forward is x W^T + b up to rounding, else why it is not."""
    if type(module).forward is nn.Linear.forward:
        return None
    weight = module.weight.detach()
    if weight.is_meta:
        return "has a forward of its own, which cannot be tried on the meta device"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _ROWS, weight.shape[1], generator=generator, dtype=torch.float64)
    x = x.to(weight.device)
    try:
        twin = copy.deepcopy(module).double()
        bound, expected = _bound_and_product(twin, x)
        for mode in (False, True):
            with torch.no_grad():
                y = twin.train(mode)(x)
            if not isinstance(y, torch.Tensor) or y.shape != expected.shape:
                return "gives something else than one tensor [..., n]"
            if not bool(((y - expected).abs() <= bound).all()):
                return "computes something else than x W^T + b"
    except Exception as error:  # whatever a foreign forward raises is a reason to leave it alone
        return f"cannot be called like an nn.Linear ({type(error).__name__}: {error})"
    return None


def _bound_and_product(linear: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far rounding can part two orders of summation, and x W^T + b.

    (k + 2) eps (|x| |W|^T + |b|): k products, the bias, and the result (Higham, 2002, section 3.1),
    for either of the two.
    """
    weight, bias = linear.weight.detach(), linear.bias
    expected, size = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        expected, size = expected + bias.detach(), size + bias.detach().abs()
    return 2 * (weight.shape[1] + 2) * torch.finfo(torch.float64).eps * size, expected
