"""The kernels that the backward pass of a graph's calls will launch.

A graph reaches the backend before autograd, so its calls are those of the forward pass. Those of
the backward pass follow from them: `ops.backward_calls`. They are built with the others, so that no
kernel is built in the middle of the first training step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nmm_compiler.ops.backward_calls import backward_calls
from nmm_compiler.ops.lower import fitting, lower, tokens
from nmm_compiler.ops.registration import is_reference
from nmm_compiler.options import Options
from nmm_compiler.report.text import counted
from nmm_compiler.runtime import buckets
from nmm_compiler.runtime.kernels import KERNELS


def trains(args: Sequence[Any], executor: str) -> bool:
    """Return whether a call's backward pass will run, and kernels compute its products."""
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return wanted and not is_reference(executor, tensors[0])


def backward_specs(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], options: Options,
    size: Callable[[Any], int],
) -> list[Any]:  # fmt: skip
    """Return the specs that the backward pass of a call launches, for its token count.

    size: the number that a size stands for; where one is symbolic, those that count tokens become
    buckets.
    """
    sizes = [n for t in tree_leaves(args) if isinstance(t, Tensor) for n in t.shape]
    static = all(type(n) is int for n in sizes)
    specs = []
    for op, operands, keywords in backward_calls(name, args, kwargs, size):
        m = int(tokens(operands[0], keywords))
        lowered = lower(op, operands, keywords, m, Tensor.t, lnc=options.lnc)
        for launch in fitting(lowered.launches, options.target, options):
            spec, axis = launch.spec, launch.token_axis
            if static and options.buckets is None:
                KERNELS.keep_static(spec, options.target)
            elif spec.splits_tokens:
                whole = buckets.bucket(getattr(spec, axis), options.buckets)
                spec = dataclasses.replace(spec, **{axis: whole})
            specs.append(spec)
    return specs


def backward_note(counts: Counter[Any], target: str, options: Options) -> str:
    """Return how many launches a backward pass has, and their predicted time."""
    total = sum(counts.values())
    us = 0.0
    for spec, calls in counts.items():
        kernel = KERNELS.get_or_warn(spec, target, options)
        us += calls * float(kernel.profile().latency_us) if kernel is not None else 0.0
    return (
        f"the backward pass has {counted(total, 'launch', 'launches')} of "
        f"{counted(len(counts), 'kernel')} for its products, {us:,.1f} us predicted"
    )
