"""vllm-neuron: rewrites the graphs that its Dynamo backends compile, before they are looked up.

    from nmm_compiler.device import vllm_neuron
    vllm_neuron.install(target="trn2")                # vLLM calls torch.compile itself
    torch.compile(model, backend=vllm_neuron.wrap("vllm_neuron"), options=compile_options)

vllm-neuron has a backend that compiles and one that captures graphs to compile them in parallel,
both `fn(gm, example_inputs, options={})`. Each hashes the graph's text for its cache of NEFFs, so
both get the rewritten graph, in which a call is `wrap_nki(kernel)[cores](x, u, v, ..., sha256)`.
Its hash knows a kernel by its name, grid and operands: the last argument is static and tells
kernels of other source apart, so that a newer version of this package never meets an older NEFF.

The signatures are those that vllm-neuron 0.3 and libtorch-neuronx-lite document; no device has run
this. Kernels are not tried before they are used, as they are by backend "nmm".
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from torch import fx
from torch._dynamo.backends import registry

from nmm_compiler.backend.compile_graph import Compilation, calls_of, meta_value, rewrite
from nmm_compiler.backend.report import publish
from nmm_compiler.codegen.build_many import fill_cache
from nmm_compiler.codegen.emitted_file import with_static_argument
from nmm_compiler.errors import NeuronSetupError
from nmm_compiler.ops.launches import Launch
from nmm_compiler.ops.lower import GraphCall, graph_call, lower, op_name, reshaped
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.options import Options
from nmm_compiler.passes.pipeline import copy_graph
from nmm_compiler.runtime import neuron
from nmm_compiler.runtime.kernels import KERNELS

BACKENDS = (
    "vllm_neuron",
    "vllm_neuron_graph_capture",
    "neuron_libtorch",
    "neuron_libtorch_graph_capture",
)
"""The names under which vllm-neuron and libtorch-neuronx-lite register their backends."""

HASH_ARGUMENT = "kernel_sha256"
_HOP_MODULES = ("libtorch_neuronx_lite.nki.nki_hop", "vllm_neuron.nki.nki_hop")

Backend = Callable[..., Any]


def wrap(backend: str | Backend = BACKENDS[0], **options: Any) -> Backend:
    """Return a Dynamo backend that rewrites a graph and hands it to one of vllm-neuron's.

    backend: a registered name or the function. options: as for backend "nmm"; what torch.compile is
    given as options goes to vllm-neuron. Raises UnknownNameError and OptionTypeError for options,
    NeuronSetupError where a graph is compiled and `wrap_nki` is not installed.
    """
    made = Options.make(options)

    def compile_rewritten(
        gm: fx.GraphModule, example_inputs: Sequence[Any], options: Any = None, **more: Any
    ) -> Any:
        inner: Any = registry.lookup_backend(backend) if isinstance(backend, str) else backend
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", "backend")
        work = Compilation(gm, example_inputs, made, name)
        with work.phase("passes"):
            rewritten = rewrite(work)
        with work.phase("kernels"):
            if rewritten is not gm:
                rewritten = _lowered(work, rewritten)
        with work.phase("inner"):
            compiled = inner(rewritten, example_inputs, options=options or {}, **more)
        publish(work.report(), made, gm, rewritten)
        return compiled

    return compile_rewritten


def install(*names: str, **options: Any) -> tuple[str, ...]:
    """Put `wrap` around vllm-neuron's backends in torch's registry; return which there were.

    names: default BACKENDS. vLLM's worker calls torch.compile by these names: call this in a plugin
    of vLLM, or before the engine starts. A backend that is wrapped already is left alone.
    """
    known = registry._COMPILER_FNS
    found = tuple(name for name in names or BACKENDS if name in registry.list_backends(()))
    for name in found:
        inner = registry.lookup_backend(name)
        if not getattr(inner, "rewrites", False):
            wrapped = wrap(inner, **options)
            wrapped.rewrites, wrapped._tags = True, ()  # type: ignore[attr-defined]
            known[name] = wrapped
    return found


def _lowered(work: Compilation, gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph with kernels in place of our ops, or the original where one has
    none; the report predicts the graph with our ops."""
    gm, options = copy_graph(gm)[0], work.options
    with work.tried("lowering to kernels failed", left=True):
        calls = {node: lower(*_call(node), lnc=options.lnc) for node in calls_of(gm)}
        specs = [launch.spec for launch in calls.values()]
        missing = fill_cache(specs, options.target, options=options)
        for node, launch in calls.items():
            _replace(work, gm, node, launch, "built" if launch.spec in missing else "cache")
        gm.graph.lint()
        gm.recompile()
        return gm
    return work.gm


def _call(node: fx.Node) -> GraphCall:
    """Return a call of an op, on the metadata of its operands."""
    called: Any = graph_call(node, meta_value)
    if not isinstance(called[3], int):
        raise NeuronSetupError(
            f"{node.name} has a symbolic token count, and Neuron compiles static shapes; compile "
            "with dynamic=False, one graph for each bucket"
        )
    return cast(GraphCall, called)


def _replace(
    work: Compilation, gm: fx.GraphModule, node: fx.Node, launch: Launch, origin: str
) -> None:
    """Put the call of a kernel in the place of a call of an op; kernels take whole tensors."""
    options, spec = work.options, launch.spec
    kernel = KERNELS.get(spec, options.target, options)
    function, digest = _with_hash(kernel)
    work.note_kernel(kernel, 1, origin, backward=0)
    nodes: dict[int, Any] = {id(meta_value(one)): one for one in node.all_input_nodes}
    name = str(op_name(node.target))
    given = DEFINITIONS[name].bound(node.args, node.kwargs)
    nodes |= {id(operand): given[one] for one, operand in reshaped(name, launch).items()}
    tracer = fx.proxy.GraphAppendingTracer(gm.graph)
    with gm.graph.inserting_before(node):
        operands = []
        for tensor in launch.operands:
            source: Any = fx.Proxy(nodes[id(tensor)], tracer)
            operands.append(source.reshape(tuple(tensor.shape)).contiguous())
        made: Any = _wrap_nki()(function)[spec.lnc](*operands, digest)
        if not isinstance(made, fx.Proxy):
            raise NeuronSetupError(
                f"wrap_nki of {kernel.name} returned {type(made).__name__} while a graph is "
                "written; report the versions of vllm-neuron and libtorch-neuronx-lite"
            )
        values = meta_value(node)
        replaced = {node: (made, values)}
        if isinstance(values, (list, tuple)):
            index = {user: int(cast(Any, user.args[1])) for user in node.users}
            replaced = {user: (made[i], values[i]) for user, i in index.items()}  # type: ignore[index]
        for old, (result, value) in replaced.items():
            new = result.reshape(tuple(value.shape)).contiguous().node
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
    for old in dict.fromkeys((*replaced, node)):
        gm.graph.erase_node(old)


def _with_hash(kernel: Any) -> tuple[Any, str]:
    """Return a kernel's function with one more argument, which is static, and what it is given."""
    digest = hashlib.sha256(kernel.source.encode()).hexdigest()
    source = with_static_argument(kernel.source, HASH_ARGUMENT)
    shown = Path(os.devnull) / f"{kernel.name}_{digest[:12]}.py"  # it runs from memory
    return neuron.load(dataclasses.replace(kernel, source=source, path=shown)), digest


def _wrap_nki() -> Callable[[Any], Any]:
    """Return `wrap_nki`; raises NeuronSetupError where no package has it."""
    for name in _HOP_MODULES:
        try:
            return importlib.import_module(name).wrap_nki
        except ModuleNotFoundError:
            continue
    raise NeuronSetupError(
        f"none of {', '.join(_HOP_MODULES)} is installed, and a kernel enters vllm-neuron's graphs "
        "through their wrap_nki; install vllm-neuron, or use backend 'nmm'"
    )
