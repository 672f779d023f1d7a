"""Finds out, by running or reading code, what a layer computes and how a model uses it.

Does a subclass of `nn.Linear` compute what `nn.Linear` computes? Some models spell x W^T + b
themselves (transformers' FalconLinear); others add a router, a scale or an activation. The class
name does not say, so a few random rows go through a float64 copy of the module, in eval and in
training mode, and the result is compared with the product of its weight.

Is a linear called, or is its weight only read? Callers of `F.multi_head_attention_forward` (WavLM)
pass `self.q_proj.weight`, and factors would be multiplied back on every call. `only_reads` finds it
in the code of the module that holds the linear.
"""

from __future__ import annotations

import copy
import dis
import inspect
import itertools

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
    except Exception as error:  # a forward that raises is a reason to leave the layer alone
        return f"cannot be called like an nn.Linear ({type(error).__name__}: {error})"
    return None


def _bound_and_product(linear: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bound on the rounding difference of two orders of summation, and x W^T + b.

    (k + 2) eps (|x| |W|^T + |b|): k products, the bias, and the result (Higham, 2002, section 3.1),
    for either of the two.
    """
    weight, bias = linear.weight.detach(), linear.bias
    expected, size = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        expected, size = expected + bias.detach(), size + bias.detach().abs()
    return 2 * (weight.shape[1] + 2) * torch.finfo(torch.float64).eps * size, expected


def only_reads(owner: nn.Module, name: str) -> bool:
    """Return whether the code that an owner's forward reaches reads `self.name.weight`, and uses
    `self.name` for nothing but such parameters.

    That code is `forward` and the methods of the class that it names. A use that cannot be told
    from a call, as of the module itself, counts as one.
    """
    kind = type(owner)
    reached, waiting, uses = {""}, ["forward"], set[str]()
    while waiting:
        method = inspect.unwrap(getattr(kind, waiting.pop(), None) or object)
        codes = [method.__code__] if inspect.isfunction(method) else []
        for code in codes:  # grows by the functions inside
            codes += [one for one in code.co_consts if inspect.iscode(one)]
            waiting += [one for one in code.co_names if one not in reached and hasattr(kind, one)]
            reached.update(code.co_names)
            for one, after in itertools.pairwise(dis.get_instructions(code)):
                if one.argval == name and one.opname.startswith("LOAD"):
                    uses.add(after.argval if after.opname == "LOAD_ATTR" else "")
    return "weight" in uses and uses <= {"weight", "bias"}
