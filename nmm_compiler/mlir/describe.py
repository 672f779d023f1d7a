"""Describes a kernel call: its launches with their specs, and the NKI source of each.

The specs come from the same function that serves a compiled model (`ops.lower.lower`), so
that an exported call and a compiled one mean the same kernels. A call is one launch; where the
target has no room for one, projections that share an input are one launch each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ModelError, NmmError
from nmm_compiler.mlir.calls import KernelCall
from nmm_compiler.mlir.module import ExportedKernel, KernelLaunch, KernelSource
from nmm_compiler.ops import lower as lowering
from nmm_compiler.options import Options


def describe(
    call: KernelCall, nodes: Sequence[str], options: Options, sources: bool
) -> ExportedKernel:
    """Return the kernel that serves a call and the FX nodes in `nodes`.

    sources: build the NKI source of every launch, for the call's token count or, when that is known
    at run time only, for each of options.buckets. Raises ModelError when no kernel family computes
    the call, or there are no buckets.
    """
    keywords = call.keywords
    counts = _token_counts(call, options, sources)
    found: list[list[KernelSource]] = []
    specs: list[Any] = []
    operands: list[tuple[int, ...]] = []
    for tokens in counts:
        for index, (spec, order) in enumerate(_launches(call, tokens, options, sources)):
            if index == len(specs):
                specs.append(spec)
                operands.append(order)
                found.append([])
            if sources:
                found[index].append(_source(spec, tokens, keywords["target"], options))
    launches = tuple(
        KernelLaunch(spec.family, _plain(spec, call.dynamic), order, tuple(built))
        for spec, order, built in zip(specs, operands, found, strict=True)
    )
    return ExportedKernel(
        name=f"nmm_{call.op}_{call.digest()}",
        op=call.op,
        x_layout=keywords["x_layout"],
        out_layout=",".join(keywords.get("out_layouts") or [keywords["out_layout"]]),
        target=keywords["target"],
        calls=tuple(nodes),
        launches=launches,
    )


def _token_counts(call: KernelCall, options: Options, sources: bool) -> tuple[int, ...]:
    tensors = _tensors(call)
    args, keywords = call.rebuild(tensors)
    if not call.dynamic:
        return (int(lowering.tokens(args[0], keywords)),)
    if not sources:
        return (1,)
    if not options.buckets:
        raise ModelError(
            f"{call.node} has a token count known at run time only, and an NKI kernel has a fixed "
            "one; pass options={'buckets': (1, 128, ...)} to write a source per count, or "
            "kernels='inline', or sources=False"
        )
    return options.buckets


def _tensors(call: KernelCall) -> list[Tensor]:
    """Return tensors without data for the operands; a size known at run time only is 1."""
    return [
        torch.empty(
            [1 if size is None else size for size in operand.shape],
            dtype=getattr(torch, operand.dtype),
            device="meta",
        )
        for operand in call.operands
    ]


def _launches(
    call: KernelCall, tokens: int, options: Options, sources: bool
) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the spec of each launch and, for its operands in order, their numbers in the call.

    sources: whether the target has to be able to build each launch, under these options.
    """
    tensors = _tensors(call)
    args, keywords = call.rebuild(tensors)
    try:
        launches = lowering.lower(call.op, args, keywords, tokens).launches
        if sources:
            launches = lowering.fitting(launches, keywords["target"], options)
    except NmmError as error:
        raise ModelError(f"no kernel computes {call.node}: {error}") from error
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    # The first operand of a launch is x seen as a matrix; the others are the call's own tensors.
    return [
        (launch.spec, (0, *(numbers[id(tensor)] for tensor in launch.operands[1:])))
        for launch in launches
    ]


def _source(spec: Any, tokens: int, target: str, options: Options) -> KernelSource:
    from nmm_compiler.codegen.build import build_kernel

    kernel = build_kernel(spec, target, options=options)
    digest = hashlib.sha256(kernel.source.encode()).hexdigest()
    return KernelSource(tokens, f"{kernel.name}.py", digest, kernel.source)


def _plain(spec: Any, dynamic: bool) -> dict[str, Any]:
    plain: dict[str, Any] = spec.to_dict()
    return {**plain, "m": None} if dynamic else plain
