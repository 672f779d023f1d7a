"""The rules about tensors: properties of named tiles that are known without running the kernel.

A name that is only ever assigned from an allocation (`nl.ndarray`, `nl.zeros`, ...) has a memory
and perhaps a dtype and a partition count; a view of it (`t[...]`, `t.reshape(...)`) has the same
memory. Everything that depends on shapes or values is the simulator's work.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from nmm_compiler.nki_api.api import Api
from nmm_compiler.nki_api.lint_names import Finding, Names, at

_ALLOCATORS = {f"nki.language.{n}": n for n in ("ndarray", "zeros", "ones", "full", "rand")}
_VIEWS = {
    *("reshape", "permute", "broadcast", "expand_dim", "squeeze_dim", "reshape_dim"),
    *("flatten_dims", "rearrange", "slice", "select", "vector_select", "ap", "view", "indirect"),
}
_INTEGERS = {f"nki.language.{n}" for n in ("int8", "int16", "int32", "uint8", "uint16", "uint32")}
_ON_CHIP = ("sbuf", "psum")
_PARTITIONS = 128  # SBUF and PSUM of every generation have 128 partitions


@dataclasses.dataclass(frozen=True)
class Tile:
    """An allocation that a name stands for: memory ("sbuf", ...) and dtype, when written out."""

    memory: str | None
    dtype: str | None


def check_values(names: Names, api: Api) -> Iterator[Finding]:
    """E301-E307: undefined names, output memory, operand memories, memset values, partitions."""
    for node in names.kernel_nodes():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if names.undefined(node):
                yield at(node, "NKI-E301", f"{node.id} is not defined in this file")
        elif isinstance(node, ast.Call):
            yield from _check_call(node, names)
    for kernel in names.entry_kernels():
        for node in ast.walk(kernel):
            if isinstance(node, ast.Return) and names.function_around(node) is kernel:
                yield from _check_output(node, names)


def tile_of(node: ast.AST | None, names: Names) -> Tile | None:
    """Return the known properties of the allocation behind an expression, or None."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _VIEWS
            and names.resolve(node.func) is None
        ):
            node = node.func.value
        else:
            break
    if not isinstance(node, ast.Name):
        return None
    tiles = set()
    for binding in names.lookup(node.id, names.scope_of[node]):
        made = binding.node.value if isinstance(binding.node, ast.Assign) else None
        tiles.add(_allocation(made, names) if binding.kind == "alias" else None)
    return tiles.pop() if len(tiles) == 1 else None


def _allocation(node: ast.expr | None, names: Names) -> Tile | None:
    if not isinstance(node, ast.Call):
        return None
    kind = _ALLOCATORS.get(names.resolve(node.func) or "")
    if kind is None or any(k.arg is None for k in node.keywords):
        return None
    order = ("shape", "fill_value", "dtype", "buffer") if kind == "full" else ()
    given = dict(zip(order or ("shape", "dtype", "buffer"), node.args, strict=False))
    given.update({str(k.arg): k.value for k in node.keywords})
    memory: str | None = "sbuf"  # the documented default
    if "buffer" in given:
        path = names.resolve(given["buffer"]) or ""
        memory = path.rpartition(".")[2] if path.startswith("nki.language.") else None
    dtype = names.resolve(given["dtype"]) if "dtype" in given else None
    return Tile(memory, dtype)


def _check_output(node: ast.Return, names: Names) -> Iterator[Finding]:
    value = node.value
    returned: list[ast.expr] = []
    if value is not None:
        returned = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value]
    for output in returned:
        tile = tile_of(output, names)
        if tile is not None and tile.memory not in (None, "shared_hbm"):
            text = (
                f"{ast.unparse(output)} is returned and lives in {tile.memory}; "
                "allocate outputs with buffer=nl.shared_hbm"
            )
            yield at(output, "NKI-E302", text)


def _check_call(node: ast.Call, names: Names) -> Iterator[Finding]:
    path = names.resolve(node.func)
    if path in _ALLOCATORS:
        yield from _check_partitions(node, names)
    if path == "nki.isa.dma_copy":
        for which, operand in _operands(node, ("dst", "src")):
            tile = tile_of(operand, names)
            if tile is not None and tile.memory == "psum":
                text = f"dma_copy cannot reach PSUM ({which}); go through SBUF with tensor_copy"
                yield at(operand, "NKI-E303", text)
    elif path == "nki.isa.memset":
        given = dict(_operands(node, ("dst", "value")))
        tile, value = tile_of(given.get("dst"), names), given.get("value")
        real = isinstance(value, ast.Constant) and isinstance(value.value, float)
        if tile is not None and tile.dtype in _INTEGERS and real and value is not None:
            text = f"memset of an integer tile takes an integer, not {ast.unparse(value)}"
            yield at(value, "NKI-E304", text)
    elif path == "nki.language.store":
        given = dict(_operands(node, ("dst", "value")))
        tile = tile_of(given.get("value"), names)
        if tile is not None and tile.memory == "psum":
            text = "nl.store cannot read PSUM; copy the tile to SBUF with nisa.tensor_copy first"
            yield at(given["value"], "NKI-E305", text)
    elif path == "nki.isa.nc_matmul":
        for which, operand in _operands(node, ("dst", "stationary", "moving")):
            tile = tile_of(operand, names)
            wanted = "psum" if which == "dst" else "sbuf"
            if tile is not None and tile.memory not in (None, wanted):
                text = f"{which} of nc_matmul must be in {wanted.upper()}, not {tile.memory}"
                yield at(operand, "NKI-E306", text)


def _check_partitions(node: ast.Call, names: Names) -> Iterator[Finding]:
    tile = _allocation(node, names)
    shape = next((k.value for k in node.keywords if k.arg == "shape"), None)
    shape = node.args[0] if node.args else shape
    if tile is None or tile.memory not in _ON_CHIP or not isinstance(shape, ast.Tuple):
        return
    first = shape.elts[0] if shape.elts else None
    if (
        isinstance(first, ast.Constant)
        and isinstance(first.value, int)
        and first.value > _PARTITIONS
    ):
        text = f"{first.value} partitions in {tile.memory}, which has {_PARTITIONS}"
        yield at(first, "NKI-E307", text)


def _operands(node: ast.Call, order: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(order, node.args, strict=False)
    for keyword in node.keywords:
        if keyword.arg in order:
            yield str(keyword.arg), keyword.value
