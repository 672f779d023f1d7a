"""The kernels that the backward pass of a graph's calls will launch.

A graph reaches the backend before autograd, so its calls are those of the forward pass. Those of
the backward pass follow from them: `ops.backward_calls`. They are built with the others, so that no
kernel is built in the middle of the first training step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nmm_compiler.ops.backward_calls import backward_calls
from nmm_compiler.ops.launches import view_turned
from nmm_compiler.ops.lower import launches_of, tokens
from nmm_compiler.ops.registration import is_reference
from nmm_compiler.options import Options
from nmm_compiler.report.text import counted
from nmm_compiler.runtime.kernels import KERNELS

_SHOWN = 4


def backward_specs(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], options: Options,
    size: Callable[[Any], int],
) -> tuple[list[Any], list[str]]:  # fmt: skip
    """Return the specs that the backward pass of a call launches, for its token count.

    With them come the products that PyTorch computes, as text. Both are empty where nothing is
    trained. size: the number that a size stands for; where one is symbolic, those that count tokens
    become buckets.
    """
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return [], []
    if is_reference(str(kwargs["executor"]), tensors[0]):
        return [], [f"all of {name}"]
    static = all(type(n) is int for t in tensors for n in t.shape)
    specs = []
    calls, by_torch = backward_calls(name, args, kwargs, size)
    for op, operands, keywords in calls:
        call = op, operands, keywords, int(tokens(operands[0], keywords))
        for launch in launches_of(call, options.target, options, view_turned):
            specs.append(KERNELS.sized(launch, options.target, options, static))
    return specs, by_torch


def backward_notes(
    counts: Counter[Any], by_torch: Counter[str], target: str, options: Options
) -> Iterator[str]:
    """Yield how many launches a backward pass has and their predicted time, and what has none."""
    if by_torch:
        many = ", ".join(f"{count} x {what}" for what, count in by_torch.most_common(_SHOWN))
        more = f" and {len(by_torch) - _SHOWN} more" if len(by_torch) > _SHOWN else ""
        yield f"PyTorch, no kernel, computes backward products: {many}{more}"
    if not counts:
        return
    total = sum(counts.values())
    us = 0.0
    for spec, calls in counts.items():
        kernel = KERNELS.get_or_warn(spec, target, options)
        us += calls * float(kernel.profile().latency_us) if kernel is not None else 0.0
    yield (
        f"the backward pass has {counted(total, 'launch', 'launches')} of "
        f"{counted(len(counts), 'kernel')} for its products, {us:,.1f} us predicted"
    )
