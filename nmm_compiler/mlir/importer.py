"""From an exported graph to the torch dialect, with every fused op as a call of a function.

    %r = torch.operator "torch.nmm.lowrank_matmul"(%x, %u, %v, %none, ..., %str, ...)
      ->
    %r = func.call @lowrank_...(%x, %u, %v)

torch-mlir imports our ops under their own names; its pipelines refuse names that they do not know,
and lower a call of a private function like any other code. The function gets a body traced from
the op's PyTorch reference, or stays a declaration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ModelError
from nmm_compiler.mlir.bindings import load, text_attribute, walk
from nmm_compiler.mlir.calls import KernelCall, TensorType
from nmm_compiler.mlir.module import ExportedKernel
from nmm_compiler.mlir.program import Program, decompositions, quiet
from nmm_compiler.ops.registration import DEFINITIONS

MAIN = "main"
_OPERATOR = "torch.nmm."


def import_graph(program: Program, context: Any) -> Any:
    """Return an MLIR module (torch dialect) with the program as the public function @main."""
    graph = program.graph
    for node in list(graph.nodes):
        literal = program.literals.get(node.name) if node.op == "placeholder" else None
        if literal is not None:
            # torch-mlir writes a tensor that stands in for a node as a resource.
            node.replace_all_uses_with(literal)
            graph.erase_node(node)
    module = _import(graph, context, MAIN, None)
    function = _function(module, MAIN)
    ir = load().ir
    with context:
        entries = [
            ir.DictAttr.get({f"nmm.{argument.kind}": ir.StringAttr.get(argument.name)})
            for argument in program.arguments
        ]
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(entries)
    return module


def insert_calls(
    module: Any, calls: list[KernelCall], name_of: Callable[[KernelCall], str]
) -> None:
    """Replace each imported nmm operator by a call of the private function that serves it.

    calls: the graph's kernel calls in order, as many as the module has operators. One declaration
    is made per name; the module verifies afterwards.
    """
    ir = load().ir
    operators = [
        operation
        for operation in walk(module.operation)
        if operation.name == "torch.operator"
        and text_attribute(operation, "name").startswith(_OPERATOR)
    ]
    if len(operators) != len(calls):
        raise ModelError(f"torch-mlir imported {len(operators)} of {len(calls)} kernel calls")
    declared: set[str] = set()
    with module.context:
        for operator, call in zip(operators, calls, strict=True):
            name = name_of(call)
            operands, (results, unpack) = _operands(operator), _results(operator)
            types = ir.FunctionType.get([o.type for o in operands], [r.type for r in results])
            if name not in declared:
                declared.add(name)
                _declare(module, name, types)
            with ir.InsertionPoint(unpack or operator), operator.location:
                made = ir.Operation.create(
                    "func.call",
                    results=list(types.results),
                    operands=operands,
                    attributes={"callee": ir.FlatSymbolRefAttr.get(name)},
                )
            for old, new in zip(results, made.results, strict=True):
                old.replace_all_uses_with(new)
            if unpack is not None:
                unpack.erase()
            operator.erase()


def give_body(module: Any, name: str, call: KernelCall) -> None:
    """Replace the declaration of a kernel by a function with the op's PyTorch reference as body."""
    sizes = itertools.count(7, 4)  # sizes that differ, so that none equals another
    with quiet():
        exported = torch.export.export(
            _Reference(call),
            tuple(_example(operand, sizes) for operand in call.operands),
            dynamic_shapes=_dynamic_shapes(call) if call.dynamic else None,
            strict=False,
        )
        graph = exported.run_decompositions(decompositions()).graph
    old = _function(module, name)
    wanted = str(old.attributes["function_type"])
    old.erase()
    _import(graph, module.context, name, module)
    function = _function(module, name)
    function.attributes["no_inline"] = load().ir.UnitAttr.get(module.context)
    got = str(function.attributes["function_type"])
    if got != wanted:
        raise ModelError(f"the reference of {call.op} has type {got}, its call {wanted}")


def describe_kernels(module: Any, kernels: Sequence[ExportedKernel]) -> None:
    """Put the description of each kernel on its function, as attributes that start with "nmm."."""
    with module.context:
        for kernel in kernels:
            function = _function(module, kernel.name)
            for name, value in kernel.attributes().items():
                function.attributes[f"nmm.{name}"] = _attribute(value)


def _attribute(value: Any) -> Any:
    ir = load().ir
    if isinstance(value, (list, tuple)):
        return ir.ArrayAttr.get([_attribute(item) for item in value])
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    return ir.StringAttr.get(value)


class _Reference(torch.nn.Module):
    """The reference of one call as a module of its tensors."""

    def __init__(self, call: KernelCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        args, kwargs = self.call.rebuild(tensors)
        return DEFINITIONS[self.call.op].reference(*args, **kwargs)


def _example(operand: TensorType, sizes: Iterator[int]) -> Tensor:
    shape = [next(sizes) if size is None else size for size in operand.shape]
    return torch.zeros(shape, dtype=getattr(torch, operand.dtype))


def _dynamic_shapes(call: KernelCall) -> Any:
    automatic = torch.export.Dim.AUTO
    return (
        tuple(
            {d: automatic for d, size in enumerate(operand.shape) if size is None}
            for operand in call.operands
        ),
    )


def _import(graph: torch.fx.Graph, context: Any, name: str, module: Any) -> Any:
    """Import a graph as function `name` into `module` (or a new one) and return the module."""
    bindings = load()

    class NodeLocations(bindings.ContextCache):  # type: ignore[name-defined]
        """Puts the FX node's name in front of the source line of every operation."""

        def get_node_location(self, node: torch.fx.Node) -> Any:
            line = super().get_node_location(node)
            return bindings.ir.Location.name(node.name, childLoc=line, context=context)

    where = {"context": context} if module is None else {"module": module}
    importer = bindings.FxImporter(**where)
    importer._cc = NodeLocations(context)
    try:
        importer.import_stateless_graph(
            graph, func_name=name, func_visibility=None if module is None else "private"
        )
    except Exception as error:  # the importer raises many types; the error has the reason
        raise ModelError(f"torch-mlir cannot import {name}: {error}") from error
    function = _function(importer.module, name)
    function.attributes["torch.assume_strict_symbolic_shapes"] = bindings.ir.UnitAttr.get(context)
    return importer.module


def _function(module: Any, name: str) -> Any:
    return load().ir.SymbolTable(module.operation)[name].operation


def _declare(module: Any, name: str, types: Any) -> None:
    bindings = load()
    ir = bindings.ir
    with ir.InsertionPoint(module.body), ir.Location.name(name):
        function = bindings.func.FuncOp(name, types, visibility="private")
    function.attributes["no_inline"] = ir.UnitAttr.get()


def _operands(operator: Any) -> list[Any]:
    """Return the tensor operands of an imported operator, lists of tensors opened."""
    found = []
    for operand in operator.operands:
        kind = str(operand.type)
        if kind.startswith("!torch.vtensor"):
            found.append(operand)
        elif kind.startswith("!torch.list"):
            made_by = operand.owner
            found += [o for o in made_by.operands if str(o.type).startswith("!torch.vtensor")]
    return found


def _results(operator: Any) -> tuple[list[Any], Any]:
    """Return the tensors that an imported operator makes, and the operation that unpacks its
    list."""
    only = operator.results[0]
    if not str(only.type).startswith("!torch.list"):
        return [only], None
    users = [use.owner.operation for use in only.uses]
    if len(users) != 1 or users[0].name != "torch.prim.ListUnpack":
        used_by = ", ".join(user.name for user in users) or "nothing"
        raise ModelError(f"the list that {operator.name} makes is used by {used_by}")
    return list(users[0].results), users[0]
