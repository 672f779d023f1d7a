"""The torch.compile backend, from top to bottom:

    options -> passes -> kernels -> report -> inner backend

`torch.compile(model, backend="nmm", options={...})` calls `nmm` once per graph, before autograd. It
works without importing this package, through the entry point group `torch_dynamo_backends`. The
graph's low-rank chains become calls of `torch.ops.nmm.*`; the inner backend compiles the result.
The inner backend gets the original graph where there are no chains and, with a warning, where our
passes fail (`strict` raises instead).

The inner backend is chosen by name through torch's own registry. "auto" follows the device of the
inputs: "neuron" for TorchNeuron, "openxla" for torch-xla, inductor where it can compile, else eager
with one warning. For calls that PyTorch computes, inductor gets decompositions of our ops: it sees
plain products and fuses around them, so nothing is lost where there is no Neuron device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._pytree import tree_leaves

import nmm_compiler.runtime.executor  # noqa: F401  (registers the executors)
from nmm_compiler.backend.report import (
    CompileReport,
    KernelLine,
    forget_reports,
    last_report,
    publish,
    reports,
)
from nmm_compiler.codegen.build_many import fill_cache
from nmm_compiler.errors import TO_MEND, OptionTypeError, UnknownNameError, no_kernel
from nmm_compiler.ops import registration, sharding
from nmm_compiler.ops.backward_calls import backward_calls
from nmm_compiler.ops.launches import view_turned
from nmm_compiler.ops.lower import (
    GraphCall,
    graph_call,
    lower,
    op_name,
    tokens,
)
from nmm_compiler.ops.references import as_matrix
from nmm_compiler.options import Options
from nmm_compiler.passes.graph.read_graph import local_part
from nmm_compiler.passes.result import could_bring, graph_parts, slower_than_dense
from nmm_compiler.runtime import neuron
from nmm_compiler.runtime.kernels import KERNELS, WITHOUT_KERNEL
from nmm_compiler.runtime.weights import PACKS

_GRAPHS = itertools.count(1)
Compiled = Callable[..., Any]
__all__ = ["last_report", "nmm", "reports", "reset"]
# Raise the number when a decomposition changes: inductor's caches do not look inside of it.
_CACHE_TAG = "nmm-decompositions-2"
_INNER_OF_DEVICE = {"neuron": "neuron", "xla": "openxla"}


def nmm(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Options | dict[str, Any] | None = None,
    **more: Any,
) -> Compiled:
    """Compile one Dynamo graph; the function that torch.compile's backend "nmm" names.

    Args:
        gm: the graph.
        example_inputs: its inputs.
        mode: for an inner inductor.
        options: an Options, or a dict of its fields.
        more: fields of Options, without `options`.

    Returns:
        The compiled graph.

    Raises:
        UnknownNameError, OptionTypeError: for bad options.
    """
    chosen = Options.make(options, **more)
    sharding.register_when_used(registration.RULES)
    work = Compilation(gm, example_inputs, chosen)
    patches = patches_of(mode, work.inner)
    with work.phase("passes"):
        rewritten = rewrite(work)
    with work.phase("kernels"):
        if rewritten is not gm:
            with work.tried("kernels were not built", "calls build them when they run"):
                _build_kernels(work, rewritten)
    with work.phase("inner"):
        compiled = _compile_inner(work, rewritten, patches)
    report = work.report()
    if _compiles_ahead_of_time():
        from nmm_compiler.backend.ahead_of_time import AheadOfTime  # torch 2.9 cannot do this

        graph = rewritten if report.fallback is None else gm
        compiled = AheadOfTime.of(compiled, graph, chosen, report)
    elif work.unverified is not None:
        compiled = _verified_at_first_call(work.unverified, compiled)
    publish(report, chosen, work.gm, rewritten)
    return compiled


def _compiles_ahead_of_time() -> bool:
    """Return whether the result must be writable, for torch's `aot_compile`."""
    wanted = ("bundled_autograd_cache", "force_non_lazy_backward_lowering")
    return all(getattr(torch._functorch.config, name, False) for name in wanted)


def reset() -> None:
    """Forget kernels, copies of weights and reports; torch._dynamo.reset() calls this."""
    KERNELS.clear()
    PACKS.clear()
    neuron.forget()
    forget_reports()


nmm.reset = reset  # type: ignore[attr-defined]


class Compilation:
    """What is known so far about one graph's compilation; said: fields of its report.

    inner: what compiles the rest of the graph, by default as the options say.
    """

    def __init__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, inner: str = ""
    ) -> None:
        self.gm, self.example_inputs, self.options = gm, example_inputs, options
        self.inner = inner or inner_name(options.inner, example_inputs)
        self.said: dict[str, Any] = {"graph": next(_GRAPHS), "nodes": len(gm.graph.nodes)}
        self.lines: list[KernelLine] = []
        self.built: list[Any] = []
        self.notes: list[str] = []
        self.phases_ms: dict[str, float] = {}
        self.unverified: Any = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase."""
        start = time.perf_counter()
        yield
        self.phases_ms[name] = round(1e3 * (time.perf_counter() - start), 3)

    @contextlib.contextmanager
    def tried(self, what: str, follows: str = "", *, left: bool = False) -> Iterator[None]:
        """Note a fault of the block, which must not fail the compilation; raise under strict.

        follows: what happens then, for a warning; "" gives none. left: the graph then goes to the
        inner backend as it was.
        """
        try:
            yield
        except (*TO_MEND, UnknownNameError):
            raise
        except Exception as error:  # a fault of ours, which the report names
            if self.options.strict:
                raise
            fault = f"{what}: {type(error).__name__}: {error}"
            if left:
                self.said |= {"fallback": fault, "chains": 0, "matches": ()}
                follows = (
                    f"the graph goes to {self.inner!r} as it was, and options={{'strict': True}} "
                    "gives the traceback"
                )
            else:
                self.notes.append(fault)
            if follows:
                warnings.warn(f"nmm: {fault}; {follows}", stacklevel=2)

    def note_kernel(self, kernel: Any, calls: int, origin: str, backward: int) -> None:
        """Note a kernel that the graph calls, for the report."""
        profile = kernel.predicted
        self.built.append(kernel)
        self.lines.append(
            KernelLine(
                name=kernel.name,
                spec=kernel.spec.short(),
                schedule=kernel.schedule.short(),
                path=str(kernel.path),
                calls=calls,
                backward=backward,
                origin=origin,
                hbm_bytes=profile.hbm_read_bytes + profile.hbm_write_bytes,
                predicted_us=float(profile.latency_us),
            )
        )

    def report(self) -> CompileReport:
        """Return the report of the compilation."""
        return CompileReport(
            target=self.options.target,
            executor=self.options.executor,
            inner=self.inner,
            kernels=tuple(self.lines),
            built=tuple(self.built),
            phases_ms=self.phases_ms,
            notes=tuple(dict.fromkeys(self.notes)),
            **self.said,
        )


def rewrite(work: Compilation) -> fx.GraphModule:
    """Return the rewritten graph, or the graph itself when nothing was found or passes failed."""
    from nmm_compiler.passes import pipeline
    from nmm_compiler.passes.verify import is_real

    result = None
    with work.tried("the passes failed", left=True):
        options = dataclasses.replace(work.options, verify=False)
        result = pipeline.run(work.gm, work.example_inputs, options)
    if result is None:
        return work.gm
    matches = result.matches
    for match in matches:
        work.notes += [note for note in (*match.notes, slower_than_dense(match)) if note]
    work.said |= {
        "chains": sum(int(match.info.get("chains", 0)) for match in matches),
        "matches": tuple(map(_match_line, matches)),
        "rules": tuple(map(str, result.rules.values())),
        "declined": tuple(result.declined),
    }
    if not matches:
        headline = functools.partial(could_bring, result.opportunities, work.options.target)
        work.said["predicted"] = functools.cache(headline)
        return work.gm
    rewritten: fx.GraphModule = result.graph_module
    prices = [match.info["predicted"] for match in matches if "predicted" in match.info]
    headline = functools.partial(_graph_headline, rewritten, prices, work.options)
    work.said["predicted"] = functools.cache(headline)
    with work.tried("no pictures of the graph"):
        work.said["pictures"] = tuple(graph_parts(work.gm, rewritten, matches))
    if work.options.verify and all(map(is_real, work.example_inputs)):
        result.check(*work.example_inputs)
    elif work.options.verify:
        work.unverified = result
        work.notes.append("the inputs hold no data: the first call verifies the rewrite")
    return rewritten


def _graph_headline(graph: fx.GraphModule, prices: list[dict[str, Any]], options: Options) -> str:
    """Return what low rank brings to a graph; predictions are loaded when somebody reads it."""
    from nmm_compiler.prediction.headlines import graph_headline

    return graph_headline(graph, prices, options)


def _verified_at_first_call(result: Any, compiled: Compiled) -> Compiled:
    """Return the compiled graph, with a check of the rewrite on the inputs of its first call."""
    left = [result]

    def call(*inputs: Any) -> Any:
        if left:
            left[0].check(*inputs)
            left.clear()
        return compiled(*inputs)

    return call


def _match_line(match: Any) -> str:
    sizes = ", ".join(f"{k}={match.info[k]}" for k in ("m", "k", "r", "n") if k in match.info)
    return f"{str(match).partition(' at ')[0]} {sizes} at {match.module or match.name}"


def _build_kernels(work: Compilation, rewritten: fx.GraphModule) -> None:
    """Build the kernels that the graph's calls will launch, one per distinct spec.

    Those of the backward pass, too, so that no kernel is built in the middle of the first training
    step: a graph reaches the backend before autograd, and `backward_calls` says what follows.
    """
    if work.options.kernels == "lazy":
        work.notes.append("kernels are built when a call first needs them (kernels='lazy')")
        return
    forward: list[Any] = []
    backward: list[Any] = []
    by_torch: Counter[str] = Counter()
    # the passes name the target of a call; PyTorch computes one of the model's own that no rule
    # takes, as of compressed experts
    matched = [node for node in calls_of(rewritten) if "target" in node.kwargs]
    for node in matched:
        with work.tried(f"no kernel for {node.name}"):  # it runs in PyTorch
            called: Any = graph_call(node, meta_value)
            forward += _specs(work, called)
            after, products = _backward(called)
            backward += [_launched(work, call, isinstance(called[-1], int)) for call in after]
            by_torch.update(products)
    counts = Counter([*forward, *backward])
    target, device = work.options.target, _kernel_device(work)
    missing = fill_cache(list(counts), target, options=work.options)
    for spec, calls in counts.items():
        kernel = KERNELS.get_or_warn(spec, target, work.options)
        if kernel is None:
            work.notes.append(f"no kernel for {spec.short()}; {WITHOUT_KERNEL}")
            continue
        if device is not None and not neuron.check(kernel, device):
            if work.options.strict:
                why = neuron.FAILED_FIRST_RUN.format(kernel.name)
                raise no_kernel("neuron", str(spec), why)
            work.notes.append(f"{kernel.name} failed its first run; PyTorch computes its calls")
        work.note_kernel(
            kernel, calls, "built" if spec in missing else "cache", backward.count(spec)
        )
    if by_torch:
        many = ", ".join(f"{count} x {what}" for what, count in by_torch.most_common())
        work.notes.append(f"PyTorch, no kernel, computes backward products: {many}")


def _backward(called: GraphCall) -> tuple[list[GraphCall], list[str]]:
    """Return the calls in the backward pass of a call, and the products that PyTorch computes.

    Both are empty where nothing is trained. A size that is symbolic is what it is in this call.
    """
    name, args, kwargs, _ = called
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return [], []
    if registration.is_reference(str(kwargs["executor"]), tensors[0]):
        return [], [f"all of {name}"]
    calls, products = backward_calls(name, args, kwargs, lambda size: _size(size) or 1)
    return [(op, given, more, int(tokens(given[0], more))) for op, given, more in calls], products


def _kernel_device(work: Compilation) -> torch.device | None:
    """Return the Neuron device that the graph's kernels will run on, if any.

    The kernels are checked on that device now, because nothing runs while the inner backend traces.
    """
    if work.options.executor not in ("auto", "neuron"):
        return None
    tensors = (x for x in work.example_inputs if isinstance(x, Tensor))
    return next((x.device for x in tensors if x.device.type in registration.NEURON_DEVICES), None)


def _specs(work: Compilation, called: GraphCall) -> list[Any]:
    """Return the specs a call launches: for its token count, or the bucket of a symbolic one."""
    *call, m = called
    count = _size(m)
    if count is None:
        work.notes.append("a token count depends on data: its kernels are built when a call runs")
        return []
    if not isinstance(m, int):
        work.notes.append("the token count is symbolic: kernels are built per bucket")
    return [_launched(work, (*call, count), isinstance(m, int))] if count else []


def _launched(work: Compilation, call: GraphCall, static: bool) -> Any:
    """Return the spec that a call with a token count launches on the target."""
    launch = lower(*call, view_turned, lnc=work.options.lnc)
    return KERNELS.sized(launch, work.options, static)


def meta_value(node: fx.Node) -> Any:
    """Return the metadata of a node: of a tensor cut over devices, the part on this one."""
    meta = node.meta
    value = meta["example_value"] if "example_value" in meta else meta["val"]
    return local_part(value)


def _size(size: Any) -> int | None:
    """Return a size, or what a symbolic one is in this call, without guarding on it; None for
    none."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def _compile_inner(work: Compilation, rewritten: fx.GraphModule, patches: Any) -> Compiled:
    if rewritten is not work.gm:  # our ops may be the cause of a fault
        with work.tried(f"inner backend {work.inner!r} on the rewritten graph failed", left=True):
            return compile_inner(work.inner, rewritten, work.example_inputs, patches)
    return compile_inner(work.inner, work.gm, work.example_inputs, patches)


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
    return _inner_of_cpu() if devices <= {"cpu"} else "inductor"


def patches_of(mode: str | None, inner: str) -> Any:
    """Return what a mode of torch.compile changes in inductor's settings.

    Raises UnknownNameError, OptionTypeError for a mode that would not be used.
    """
    if mode is None:
        return None
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
    return torch._inductor.list_mode_options(mode)


@functools.cache
def _inner_of_cpu() -> str:
    """Return "inductor", or with one warning "eager" where it finds no C++ compiler that runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        warnings.warn(
            "nmm: inductor finds no C++ compiler, so the rest of the graph runs eagerly; install "
            "g++ or set CXX, or pass options={'inner': 'eager'} to silence this",
            stacklevel=3,
        )
        return "eager"
    return "inductor"


def compile_inner(
    name: str, gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Any
) -> Compiled:
    """Compile `gm` with the backend `name`; patches: of inductor's settings.

    Raises torch's InvalidBackend for an unknown name, and what the backend raises.
    """
    backend = lookup_backend(name)
    if name != "inductor":
        return backend(gm, example_inputs)  # type: ignore[arg-type]
    _decompose_in_inductor()
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=f"{config.cache_key_tag}{_CACHE_TAG}"):
        return backend(gm, example_inputs, config_patches=patches)  # type: ignore[call-arg, arg-type]


def calls_of(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the op calls in the graph and in the graphs of its higher-order operators."""
    graphs = [child.graph for child in gm.modules() if isinstance(child, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if op_name(node.target) is not None]


@functools.cache
def _decompose_in_inductor() -> None:
    """Register, once, what inductor puts in place of our ops.

    The table is global, because a table given to one compilation would turn inductor's caches off.
    A "col" result is a view here, which the view of its reader undoes.
    """
    from torch._inductor import decomposition, lowering

    def decompose(reference: Compiled) -> Compiled:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not registration.is_reference(kwargs.get("executor", "reference"), args[0]):
                return NotImplemented
            layout, layouts = kwargs.pop("out_layout", "row"), kwargs.pop("out_layouts", None)
            rows = reference(*args, **kwargs)
            each = zip(tree_leaves(rows), itertools.cycle(layouts or [layout]), strict=False)
            matrices = [as_matrix(y).t() if way == "col" else y for y, way in each]
            return matrices if isinstance(rows, list) else matrices[0]

        return run

    for name, op in registration.OPS.items():
        decomposition.register_decomposition([op])(
            decompose(registration.DEFINITIONS[name].reference)
        )
    # A call that a kernel computes is not decomposed: inductor calls the op, which it would refuse
    # to do on its own for an op that has a decomposition.
    for op in registration.OPS.values():
        lowering.make_fallback(op, warn=False, override_decomp=True)
    # Inductor keeps a merged copy of the table from its first compilation.
    decomposition.fast_random_decomps.cache_clear()
