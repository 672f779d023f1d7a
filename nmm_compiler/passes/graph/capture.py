"""Makes GraphModules of users' modules, functions, exported programs and Dynamo graphs.

`to_graph` gives the one graph that `rewrite` works on; `all_graphs` runs a model under
`torch.compile` and collects every graph that Dynamo makes of it, graph breaks included;
`graphs_without_data` gives those of a model on the meta device, in a fifth of the time.
`collect_values` gives shapes and dtypes of every value: from the graph's metadata, else by
fake-tensor propagation.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from nmm_compiler.errors import ModelError
from nmm_compiler.passes.graph.effects import fetch_attribute, region_edge

Graphs = list[tuple[fx.GraphModule, list[Any]]]

_NO_LIMIT = 1 << 30
_TRACED: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that was first compiled to look at its graphs."""


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as (args, kwargs): a tensor, a sequence, or a mapping of keywords."""
    if example_inputs is None:
        return (), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise ModelError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tensor, a tuple of "
        "positional arguments or a dict of keyword arguments"
    )


def to_graph(model: Any, example_inputs: Any) -> tuple[fx.GraphModule, Sequence[Any] | None]:
    """Return the one graph of a model, and the inputs of a call of it where they are known.

    GraphModules are used unchanged. ExportedPrograms are unlifted (`program.module()`). Other
    modules and functions go through torch.export, which needs example_inputs.
    Raises ModelError for anything else, for inputs of another call, and when torch.export cannot
    make one graph.
    """
    given = None if example_inputs is None else arguments(example_inputs)
    if isinstance(model, fx.GraphModule):
        graph = model
    elif isinstance(model, ExportedProgram):
        graph, given = model.module(), given or model.example_inputs
    elif not callable(model):
        raise ModelError(
            f"cannot rewrite a {type(model).__name__}; pass an nn.Module, a function, a "
            "GraphModule or an ExportedProgram"
        )
    elif given is None:
        raise ModelError(
            "a model that is not a graph yet needs example_inputs to be traced; "
            "pass them as nmm_compiler.rewrite(model, (x,))"
        )
    else:
        module = model
        if not isinstance(model, nn.Module):
            module = nn.Module()
            module.forward = lambda *args, **kwargs: model(*args, **kwargs)
        try:
            graph = export(module, *given).module()
        except Exception as error:
            raise ModelError(
                f"torch.export could not make one graph of {type(model).__name__}: {error}. "
                'Use torch.compile(model, backend="nmm"), which handles graph breaks, or explain()'
            ) from error
    if given is None:
        return graph, None
    try:
        return graph, inspect.signature(graph.forward).bind(*given[0], **given[1]).args
    except TypeError as error:
        raise ModelError(f"example_inputs are no call of the graph: {error}") from error


def export(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> ExportedProgram:
    """Return torch.export's program of a module; raises what torch.export raises.

    Caches of transformers, such as the DynamicCache in a causal language model's output, become
    trees of tensors, which torch.export passes in and out.
    """
    _register_caches(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.export's own deprecated internals
        return torch.export.export(
            module, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )


def _register_caches(module: nn.Module) -> None:
    """Make caches of transformers trees of tensors."""
    for kind in _cache_classes(module):
        if kind not in pytree.SUPPORTED_NODES:
            unflatten = functools.partial(_unflatten_attributes, kind)
            pytree.register_pytree_node(kind, _flatten_attributes, unflatten)


def _cache_classes(module: nn.Module) -> Iterator[type]:
    """Yield transformers' classes of caches and of their layers, and those of the model's file."""
    files = map(sys.modules.get, ("transformers.cache_utils", type(module).__module__))
    shared, own = (vars(file) if file is not None else {} for file in files)
    classes = [*shared.values(), *(value for name, value in own.items() if name.endswith("Cache"))]
    for kind in classes:
        if isinstance(kind, type) and kind.__module__.startswith("transformers."):
            yield kind


def _flatten_attributes(thing: Any) -> tuple[list[Any], Any]:
    """Return the attributes that can hold tensors, and the names of these with all others."""
    held = vars(thing)
    trees = {
        name: value
        for name, value in held.items()
        if isinstance(value, torch.Tensor) or type(value) in pytree.SUPPORTED_NODES
    }
    return list(trees.values()), (tuple(trees), {n: v for n, v in held.items() if n not in trees})


def _unflatten_attributes(kind: Any, values: Any, context: Any) -> Any:
    names, others = context
    instance = kind.__new__(kind)
    vars(instance).update(others, **dict(zip(names, values, strict=True)))
    return instance


def all_graphs(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graphs:
    """Run the model once and return every graph Dynamo makes, with its inputs.

    Compiled code that Dynamo holds for other models stays.
    """
    graphs: Graphs = []

    def collect(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((module, inputs))
        return module.forward

    # Past its limits Dynamo runs the code uncompiled: a model class that was explained, or
    # compiled, eight times would seem to have no graph.
    limits = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
    others = set(_compiled()) - set(_TRACED)
    # Code that once passed the limits is marked: Dynamo only runs it from then on.
    for code in others:
        set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))
    try:
        with torch.no_grad(), torch._dynamo.config.patch(limits):
            torch.compile(model, backend=collect, dynamic=False)(*args, **kwargs)
    finally:
        # What stays counts against the limit of a model that is compiled later and shares code,
        # as all models of transformers share a wrapper of their forward functions.
        for code in set(_compiled()) - others:
            _TRACED.add(code)
            eval_frame.reset_code(code)
    return graphs


def _compiled() -> list[CodeType]:
    """Return the code that Dynamo holds compiled forms of."""
    seen = (one() for one in convert_frame.input_codes.seen)
    return [code for code in seen if code is not None]


def graphs_without_data(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graphs:
    """Return the graphs of a call of a model on the meta device, each with its inputs.

    The model's code runs once, where Dynamo interprets its bytecode. Code that asks a tensor for
    its data, or loops inside of an operator, has the graphs that Dynamo makes of it.
    """
    _register_caches(model)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves, tree = pytree.tree_flatten((held, args, kwargs))

    def call(*leaves: Any) -> list[Any]:
        held, args, kwargs = pytree.tree_unflatten(leaves, tree)
        with traced_as_compiled(model):
            return pytree.tree_leaves(torch.func.functional_call(model, held, args, kwargs))

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.no_grad(), mode:
            fakes = pytree.tree_map_only(
                torch.Tensor, lambda one: mode.from_tensor(one, static_shapes=True), leaves
            )
            graph = make_fx(call, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    except Exception:  # Dynamo breaks the graph there, or raises what is wrong with the model
        logging.getLogger(__name__).debug("the trace ends here; Dynamo's is taken", exc_info=True)
        return all_graphs(model, args, kwargs)
    if any(isinstance(node.target, HigherOrderOperator) for node in graph.graph.nodes):
        return all_graphs(model, args, kwargs)
    for i, (node, name) in enumerate(zip(graph.graph.nodes, held, strict=False)):
        node.target = f"p_{i}_{name}".replace(".", "_")
    for node in graph.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return [(graph, leaves)]


@contextlib.contextmanager
def traced_as_compiled(model: nn.Module) -> Iterator[None]:
    """Tell the model's code that it is compiled; note in each node that make_fx traces meanwhile
    the path of the module that it comes from."""
    mode, before = get_proxy_mode(), torch.compiler._is_compiling_flag
    nodes: Any = mode.tracer.graph.nodes if mode else ()
    hooks, inside = [], [""]

    def note() -> None:
        """Note the innermost module in the nodes since the last note."""
        for node in itertools.takewhile(lambda n: "nn_module_stack" not in n.meta, reversed(nodes)):
            node.meta["nn_module_stack"] = {inside[-1]: (inside[-1], None)}

    def enter(path: str, *_: Any) -> None:
        note()
        inside.append(path)

    def leave(*_: Any) -> None:
        note()
        inside.pop()

    for path, module in model.named_modules():
        enters = functools.partial(enter, path)
        hooks += [module.register_forward_pre_hook(enters), module.register_forward_hook(leave)]
    try:
        torch.compiler._is_compiling_flag = True
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        for hook in hooks:
            hook.remove()


# -- values -----------------------------------------------------------------------------------


def value_key(graph: fx.Graph) -> str:
    """Return the graph's metadata key: "example_value" in Dynamo graphs, else "val"."""
    keys = (k for node in graph.nodes for k in ("example_value", "val") if k in node.meta)
    return next(keys, "val")


def collect_values(
    module: fx.GraphModule, example_inputs: Sequence[Any] | None
) -> dict[fx.Node, Any]:
    """Return the metadata value of each node; only missing values are computed.

    Nodes without users in a traced graph only log or assert, so they need no value. Raises
    ModelError when values are missing and there are no inputs to propagate.
    """
    key = value_key(module.graph)
    known = {node: node.meta[key] for node in module.graph.nodes if key in node.meta}
    traced = any(node.op.startswith("call") for node in known)
    rest = [node for node in module.graph.nodes if node not in known and node.op != "output"]
    stored = [node for node in rest if node.op == "get_attr"]
    called = [node for node in rest if node.op != "get_attr" and not region_edge(node)]
    missing = [node for node in called if node.users or not traced]
    if not missing:
        return known | {node: fetch_attribute(module, str(node.target)) for node in stored}
    holders = module.graph.find_nodes(op="placeholder")
    if example_inputs is None and not {*holders}.isdisjoint(missing):
        raise ModelError(
            f"the graph carries no shapes (first missing: node {missing[0].name!r}); pass "
            "example_inputs, for instance nmm_compiler.rewrite(graph, (torch.empty(4, 512),))"
        )
    pairs = zip(holders, example_inputs or (), strict=False)
    inputs = [value for holder, value in pairs if holder not in known]
    fake = (v for v in pytree.tree_leaves([*known.values(), *inputs]) if isinstance(v, FakeTensor))
    # Sizes that depend on data (x[mask]) become symbols of the environment.
    mode = next((v.fake_mode for v in fake), None) or FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=ShapeEnv()
    )
    run = _Propagation(module, mode, {*called} - {*missing})
    with mode, torch.no_grad():
        run.run(*map(run.fake, inputs), initial_env=dict(known))
    return {node: value for node, value in run.env.items() if node.op != "output"}


class _Propagation(fx.Interpreter):
    """Computes the missing values on fake tensors, in the fake mode of the known ones.

    The mode has the shape environment of symbolic sizes, so that nothing is specialized. Edges of
    autocast and grad-mode regions are run too: dtypes depend on them.
    """

    def __init__(
        self, module: fx.GraphModule, mode: FakeTensorMode, silent: Collection[fx.Node]
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.mode, self.silent = mode, silent

    def fake(self, value: Any) -> Any:
        """Return a tensor as one of the mode, any other value as it is."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self.mode.from_tensor(value, static_shapes=True)
        if isinstance(value, nn.Parameter) and not isinstance(fake, nn.Parameter):
            fake.requires_grad_(value.requires_grad)
        return fake

    def run_node(self, node: fx.Node) -> Any:
        """Compute the value of a node that is not known."""
        return None if node in self.silent else super().run_node(node)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module on fake buffers: batch norm counts its calls in one."""
        module = super().fetch_attr(target)
        buffers = {name: self.fake(value) for name, value in module.named_buffers()}
        return torch.func.functional_call(module, buffers, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        """Return parameters as fake tensors, other attributes as they are."""
        return self.fake(super().fetch_attr(target))
