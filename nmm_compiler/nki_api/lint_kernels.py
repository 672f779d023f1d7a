"""The rules about kernel code: Python, loops on the device, and tiles that are known by name.

Up to NKI 0.6 the compiler reads the kernel's source itself and knows a subset of Python; 0.7
traces real Python, so that the rules of `of_the_subset` end there. Sources: the NKI language guide,
the NKI 0.3.0 update guide ("Language restrictions"), the 0.6.0 migration guide (rules for loops on
the device) and the announcement of the 0.7.0 change. A name that is only ever assigned from an
allocation (`nl.ndarray`, ...) has a memory and perhaps a dtype and a partition count; a view of it
has the same memory, and the row of an instruction says where its operands may lie. Everything that
depends on shapes or values is the simulator's work.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from nmm_compiler.nki_api import table
from nmm_compiler.nki_api.api import Api, api as documented, before
from nmm_compiler.nki_api.lint_api import Finding, arguments, at
from nmm_compiler.nki_api.lint_names import FunctionNode, Names, called_in, in_order, is_read
from nmm_compiler.simulator.isa.names import INSTRUCTIONS
from nmm_compiler.simulator.isa.operands import DMA_MEMORIES

# Evaluated at compile time on plain numbers and types, and so usable inside a kernel.
_HARMLESS = {"typing", "typing_extensions", "dataclasses", "enum", "math", "collections", "abc"}
_FOREIGN = (sys.stdlib_module_names - _HARMLESS) | {
    *("numpy", "torch", "jax", "jaxlib", "scipy", "ml_dtypes", "pandas", "tensorflow"),
}
_BASES = (["nki.language.NKIObject"], ["enum.Enum"], ["enum.IntEnum"])
_SYNTAX: dict[type[ast.AST], tuple[str, ...]] = {
    **dict.fromkeys((ast.Try, ast.TryStar), ("E203",)),
    **dict.fromkeys(
        (ast.Yield, ast.YieldFrom, ast.Await, ast.GeneratorExp, ast.AsyncFunctionDef), ("E205",)
    ),
    ast.ListComp: ("W206", "a list comprehension"),
    ast.SetComp: ("W206", "a set comprehension"),
    ast.DictComp: ("W206", "a dict comprehension"),
    ast.Lambda: ("W206", "a lambda"),
    ast.Match: ("W206", "match"),
    ast.NamedExpr: ("W206", "an assignment expression"),
}
"""Syntax that the compilers before 0.7 do not read: the code of its finding, and its name."""
_COLLECTIONS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_CHANGES = frozenset(
    ("append", "extend", "insert", "pop", "popitem", "remove", "reverse", "clear", "update", "add",
     "discard", "setdefault", "sort")
)  # fmt: skip
_ALLOCATORS = {f"nki.language.{n}" for n in ("ndarray", "zeros", "ones", "full", "rand")}
_VIEWS = {*table.TENSOR_METHODS_ADDED, "reshape", "ap", "view"}
_INTEGERS = {f"nki.language.{n}" for n in ("int8", "int16", "int32", "uint8", "uint16", "uint32")}
_PARTITIONS = 128  # SBUF and PSUM of every generation have 128 partitions
_MEMORIES: dict[str, dict[str, tuple[str, ...]]] = {
    **{f"nki.isa.{op}": row.roles for op, row in INSTRUCTIONS.items() if not row.waits},
    "nki.language.store": {"value": DMA_MEMORIES},
}  # fmt: skip
"""Where the operands of a function may lie."""


def _given(node: ast.Call, path: str) -> dict[str, ast.expr]:
    """Return the arguments of a function that the newest documented version has."""
    return arguments(node, documented().functions[path])


# Python that the compilers before 0.7 do not read


def of_the_subset(node: ast.AST, names: Names) -> Iterator[Finding]:
    """E201 to E208, E210, E214, W206: what the compilers before 0.7 do not read."""
    if type(node) in _SYNTAX:
        yield at(node, *_SYNTAX[type(node)])
    match node:
        case ast.Compare():
            for op, value in zip(node.ops, node.comparators, strict=True):
                if isinstance(op, ast.Is):
                    yield at(value, "E201", "is", "==")
                elif isinstance(op, ast.IsNot):
                    yield at(value, "E201", "is not", "!=")
        case ast.FunctionDef(args=ast.arguments(kwonlyargs=[first, *_])):
            yield at(first, "E202", first.arg)
        case ast.withitem(held):
            if names.resolve(called_in(held)) != "nki.language.no_reorder":
                yield at(held, "E204")
        case ast.ClassDef():
            if [names.resolve(base) for base in node.bases] not in _BASES:
                bases = ", ".join(map(ast.unparse, node.bases))
                yield at(node, "E207", node.name, bases or "nothing")
        case ast.Dict():
            for key in node.keys:
                if isinstance(key, ast.Constant) and not isinstance(key.value, str):
                    yield at(key, "E214", key.value)
        case ast.Name(ctx=ast.Load()):
            yield from _foreign_name(node, names)


def _foreign_name(node: ast.Name, names: Names) -> Iterator[Finding]:
    """E210: a module that no kernel has; E208: another kernel."""
    path = names.resolve(node) or ""
    if path.partition(".")[0] in _FOREIGN:
        yield at(node, "E210", path)
    called = names.definition(node)
    decorated = isinstance(called, ast.FunctionDef) and called.decorator_list
    if decorated and called in names.kernels and called not in names.above(node):
        yield at(node, "E208", node.id)


def _lists(names: Names) -> Iterator[Finding]:
    """E209: lists as arguments of kernels."""
    given = [("write", value) for kernel in names.kernels for value in kernel.args.defaults]
    for node in names.nodes:
        if isinstance(node, ast.Call):
            called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            if names.definition(called) in names.kernels:
                passed = [*node.args, *(keyword.value for keyword in node.keywords)]
                given += [("pass", value) for value in passed]
    for verb, value in given:
        if isinstance(value, ast.List):
            yield at(value, "E209", verb, ast.unparse(value))


# Rules of every version


def of_kernel_code(node: ast.AST, names: Names, api: Api) -> Iterator[Finding]:
    """E212, E301, and the rules for loops on the device, methods and tiles."""
    match node:
        case ast.Global():
            yield at(node, "E212", ", ".join(node.names))
        case ast.Name(ctx=ast.Load()):
            if names.undefined(node):
                yield at(node, "E301", node.id)
        case ast.For():
            if names.calls(node.iter, "nki.language.dynamic_range"):
                yield from _carried(node, names)
        case ast.While():
            if _is_register(node.test, names) and not before(api.version, "0.6"):
                yield at(node, "W215" if before(api.version, "0.7") else "E215")
        case ast.Call():
            path = names.resolve(node.func)
            if path is None:
                yield from _method(node, names, api)
            elif path in ("nki.language.fori_loop", "nki.language.while_loop"):
                yield from _device_loop(node, path, names, api)
            elif path in _ALLOCATORS:
                yield from _partitions(node, path, names)
            elif path in _MEMORIES:
                yield from _operands(node, path, names)


def _method(node: ast.Call, names: Names, api: Api) -> Iterator[Finding]:
    """E102: methods of tensors that are younger than the version.

    Types are not known here, so a method of that name in a class of the file gives no finding.
    """
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    since = table.TENSOR_METHODS_ADDED.get(name, "0.3")
    if before(api.version, since):
        classes = (kind for kind in names.nodes if isinstance(kind, ast.ClassDef))
        own = {m.name for kind in classes for m in kind.body if isinstance(m, ast.FunctionDef)}
        if name not in own:
            yield at(node, "E102 method", name, since, api.version)


# Loops on the device


def _is_register(node: ast.expr | None, names: Names) -> bool:
    made = [node, *(binding.value for binding in names.bindings(node))]
    return any(names.calls(value, "nki.isa.register_alloc") for value in made)


def _device_loop(node: ast.Call, path: str, names: Names, api: Api) -> Iterator[Finding]:
    """E216-E221: fori_loop and while_loop."""
    loop = path.removeprefix("nki.language.")
    held = (item for around in names.above(node) for item in getattr(around, "items", ()))
    if any(names.calls(item.context_expr, "nki.language.no_reorder") for item in held):
        yield at(node, "E216", loop)
    given = _given(node, path)
    step = given.get("step")
    if step is not None and re.fullmatch(r"0|-\d+", ast.unparse(step)):
        yield at(step, "E218", loop)
    body = names.definition(given.get("body_fun"))
    registers = any(_is_register(given.get(bound), names) for bound in ("lower", "upper"))
    if loop == "fori_loop" and not before(api.version, "0.7") and not registers:
        code = (inner for function in names.reached([body]) for inner in ast.walk(function))
        if any(names.calls(inner, "nki.isa.register_store") for inner in code):
            yield at(node, "E220")
    if not isinstance(body, ast.FunctionDef):
        return
    yield from _carried(body, names)
    returned = [r for r in _own_returns(body) if r.value is not None]
    if loop == "fori_loop":
        for statement in returned:
            yield at(statement, "E217 value", body.name)
        variable = body.args.args[0].arg if body.args.args else None
        sums = (inner for inner in ast.walk(body) if isinstance(inner, ast.BinOp))
        for inner in sums:
            if any(isinstance(o, ast.Name) and o.id == variable for o in (inner.left, inner.right)):
                yield at(inner, "E219", variable)
    elif not returned:
        yield at(body, "E217", body.name)


def _carried(loop: ast.For | ast.FunctionDef, names: Names) -> Iterator[Finding]:
    """E221: a Python value that one turn of a loop on the device leaves to the next.

    loop: it, or the function that is its body, whose own names end with each turn.
    """
    first: dict[str, ast.AST] = {}
    written: dict[str, ast.AST] = {}
    changed: dict[ast.AST, str] = {}
    for node in (n for statement in loop.body for n in in_order(statement)):
        match node:
            case ast.Name(name):
                first.setdefault(name, node)
                if isinstance(node.ctx, ast.Store):
                    written.setdefault(name, node)
            case ast.AugAssign(ast.Name(name) as target) if first[name] is target:
                first[name] = node  # it is read before it is written
        kept = _changed_collection(node)
        made = [binding.value for binding in names.bindings(kept)]
        if isinstance(kept, ast.Name) and any(
            isinstance(value, _COLLECTIONS) and loop not in names.above(value) for value in made
        ):
            changed[kept] = kept.id
    for name, node in written.items():
        own = isinstance(loop, ast.FunctionDef) and name not in names.scope_of[node].outward
        if not own and first[name] is not node:
            changed[node] = name
    for node, name in changed.items():
        yield at(node, "E221", name)


def _changed_collection(node: ast.AST) -> ast.expr | None:
    """Return what a node may change the items of in Python."""
    match node:
        case ast.Call(func=ast.Attribute(value=held, attr=name)) if name in _CHANGES:
            return held
        case ast.Subscript(value=held, ctx=ast.Store() | ast.Del()):
            return held
    return None


def _own_returns(function: FunctionNode) -> list[ast.Return]:
    inside = (node for statement in function.body for node in in_order(statement))
    return [node for node in inside if isinstance(node, ast.Return)]


# Tiles


class Tile(NamedTuple):
    """An allocation that a name stands for: memory ("sbuf", ...) and dtype, when written out."""

    memory: str | None = None
    dtype: str | None = None


def _tile_of(node: ast.AST | None, names: Names) -> Tile:
    """Return what is known of the allocation behind an expression."""
    while True:
        match node:
            case ast.Subscript(value=of):
                node = of
            case ast.Call(func=ast.Attribute(value=of, attr=name) as view) if (
                name in _VIEWS and names.resolve(view) is None
            ):
                node = of
            case _:
                break
    tiles = {_allocation(binding.value, names) for binding in names.bindings(node)}
    return tiles.pop() if len(tiles) == 1 else Tile()


def _allocation(node: ast.expr | None, names: Names) -> Tile:
    if not isinstance(node, ast.Call) or any(keyword.arg is None for keyword in node.keywords):
        return Tile()
    path = names.resolve(node.func)
    if path is None or path not in _ALLOCATORS:
        return Tile()
    given = _given(node, path)
    memory: str | None = "sbuf"  # the documented default
    if "buffer" in given:
        buffer = names.resolve(given["buffer"]) or ""
        memory = buffer.rpartition(".")[2] if buffer.startswith("nki.language.") else None
    return Tile(memory, names.resolve(given["dtype"]) if "dtype" in given else None)


def _operands(node: ast.Call, path: str, names: Names) -> Iterator[Finding]:
    """E303, E304, E306: memories of operands, numbers for memset."""
    op, given = path.rpartition(".")[2], _given(node, path)
    for role, memories in _MEMORIES[path].items():
        memory = _tile_of(given.get(role), names).memory
        if memory is not None and memory.rpartition("_")[2] not in memories:
            by_dma = op.startswith(("dma_", "store"))
            if by_dma and memory == "psum":
                yield at(given[role], "E303 psum", role, op)
            else:
                wanted = " or ".join(known.upper() for known in memories)
                yield at(given[role], "E303" if by_dma else "E306", role, op, wanted, memory)
    match given.get("value"):
        case ast.Constant(float()) as value if op == "memset":
            if _tile_of(given.get("dst"), names).dtype in _INTEGERS:
                yield at(value, "E304", ast.unparse(value))


def _partitions(node: ast.Call, path: str, names: Names) -> Iterator[Finding]:
    """E307: more partitions than there are."""
    memory, shape = _allocation(node, names).memory, _given(node, path).get("shape")
    match shape:
        case ast.Tuple([ast.Constant(int(size)) as first, *_]):
            if memory in ("sbuf", "psum") and size > _PARTITIONS:
                yield at(first, "E307", size, memory, _PARTITIONS)


def _outputs(names: Names) -> Iterator[Finding]:
    """E302: returned tensors that are not in shared HBM."""
    used = {names.definition(node) for node in names.kernel_nodes if is_read(node)}
    for kernel in [kernel for kernel in names.kernels if kernel not in used]:
        for node in _own_returns(kernel):
            for output in getattr(node.value, "elts", [node.value]):  # of a tuple or a list
                memory = _tile_of(output, names).memory
                if memory not in (None, "shared_hbm"):
                    yield at(output, "E302", ast.unparse(output), memory)


def of_the_kernels(names: Names, api: Api) -> Iterator[Finding]:
    """Yield the findings in the kernel code of a file."""
    subset = before(api.version, "0.7")
    for node in names.kernel_nodes:
        yield from of_kernel_code(node, names, api)
        if subset:
            yield from of_the_subset(node, names)
    if subset:
        yield from _lists(names)
    yield from _outputs(names)
