"""The inner backend: it compiles the rest of the graph.

It is chosen by name through torch's own registry. "auto" follows the device of the inputs: "neuron"
for TorchNeuron, "openxla" for torch-xla, inductor where it can compile, else eager with one
warning. For calls that PyTorch computes, inductor gets decompositions of our ops: it sees plain
products and fuses around them, so nothing is lost where there is no Neuron device.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend

from nmm_compiler.errors import OptionTypeError, UnknownNameError
from nmm_compiler.ops import registration
from nmm_compiler.ops.lower import op_name
from nmm_compiler.ops.references import as_matrix, layouts_of

# Raise the number when a decomposition changes: inductor's caches do not look inside of it.
_CACHE_TAG = "nmm-decompositions-2"
_INNER_OF_DEVICE = {"neuron": "neuron", "xla": "openxla"}


def inner_name(inner: str, example_inputs: Sequence[Any]) -> str:
    """Return the backend's name for option `inner` and these graph inputs.

    Raises torch's InvalidBackend for a name that no backend has.
    """
    if inner != "auto":
        lookup_backend(inner)
        return inner
    devices = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    for device, name in _INNER_OF_DEVICE.items():
        if device in devices:
            return name
    if devices <= {"cpu"} and not _inductor_compiles():
        _warn_of_eager()
        return "eager"
    return "inductor"


def check_mode(mode: str | None, inner: str) -> None:
    """Refuse a mode of torch.compile that would not be used: UnknownNameError, OptionTypeError."""
    if mode is None:
        return
    import torch._inductor

    known = list(torch._inductor.list_mode_options())
    if mode not in known:
        raise UnknownNameError("mode", mode, known)
    if inner != "inductor":
        raise OptionTypeError(
            "mode", mode, f"none: modes are inductor's, and {inner!r} compiles the rest of this "
            "graph; to have ours take longer for better kernels, pass options={'rules': "
            "['+simulated']} or run nmm build --search"
        )  # fmt: skip


@functools.cache
def _inductor_compiles() -> bool:
    """Return whether inductor finds a C++ compiler that runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


@functools.cache
def _warn_of_eager() -> None:
    warnings.warn(
        "nmm: inductor finds no C++ compiler, so the rest of the graph runs eagerly; install g++ "
        "or set CXX, or pass options={'inner': 'eager'} to silence this",
        stacklevel=3,
    )


def compile_inner(
    name: str, gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None = None
) -> Callable[..., Any]:
    """Compile `gm` with the backend `name`.

    Raises torch's InvalidBackend for an unknown name, and what the backend raises.
    """
    backend = lookup_backend(name)
    if name != "inductor":
        return backend(gm, example_inputs)  # type: ignore[arg-type]
    import torch._inductor

    _decompose_in_inductor()
    patches = None if mode is None else torch._inductor.list_mode_options(mode)
    tag = f"{torch.compiler.config.cache_key_tag}{_CACHE_TAG}" if calls_of(gm) else None
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=tag) if tag else contextlib.nullcontext():
        return backend(gm, example_inputs, config_patches=patches)  # type: ignore[call-arg, arg-type]


def graphs_in(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Return a graph and the graphs of its higher-order operators."""
    return [child for child in gm.modules() if isinstance(child, fx.GraphModule)]


def calls_of(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the op calls in the graph and in the graphs of its higher-order operators."""
    return [
        node
        for child in graphs_in(gm)
        for node in child.graph.nodes
        if node.op == "call_function" and op_name(node.target) is not None
    ]


def _as_col(y: Tensor) -> Tensor:
    """Return a row result [..., n] as [n, m]."""
    return as_matrix(y).t()


@functools.cache
def _decompose_in_inductor() -> None:
    """Register, once, what inductor puts in place of our ops.

    The table is global, because a table given to one compilation would turn inductor's caches off.
    A "col" result is a view here, which the view of its reader undoes.
    """
    from torch._inductor import decomposition, lowering

    def decompose(reference: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not registration.is_reference(kwargs.get("executor", "reference"), args[0]):
                return NotImplemented
            layout, layouts = kwargs.get("out_layout", "row"), kwargs.get("out_layouts")
            if layout == "row" and layouts is None:
                return reference(*args, **kwargs)
            rows = {**kwargs, "out_layout": "row"}
            rows.pop("out_layouts", None)
            out = reference(*args, **rows)
            if not isinstance(out, list):
                return _as_col(out)
            each = zip(out, layouts_of(layout, layouts, len(out)), strict=True)
            return [_as_col(y) if way == "col" else y for y, way in each]

        return run

    for name, op in registration.OPS.items():
        decomposition.register_decomposition([op])(  # type: ignore[list-item]
            decompose(registration.DEFINITIONS[name].reference)
        )
    # A call that a kernel computes is not decomposed: inductor calls the op, which it would refuse
    # to do on its own for an op that has a decomposition.
    for op in registration.OPS.values():
        lowering.make_fallback(op, warn=False, override_decomp=True)
    # Inductor keeps a merged copy of the table from its first compilation.
    decomposition.fast_random_decomps.cache_clear()
