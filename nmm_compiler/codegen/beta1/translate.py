"""Rewrites an emitted file of the current dialect as NKI Beta 1, `neuronxcc.nki`.

In: the source that `specialize` gives, one `@nki.jit` function and helpers. Out: the same kernel,
statement by statement, in the older dialect's forms:

- instructions return their result: `nisa.f(dst=t, ...)` -> `t[...] = nisa.f(...)`
- matmuls -> `t += nisa.nc_matmul(...)` into tiles of `nl.zeros`
- DMA between HBM and SBUF -> `nl.load` and `nl.store`; helpers that are one of them are
  written out
- strided views of HBM -> index expressions of `nl.arange`, `views.py`
- `range` -> `nl.static_range`
- `nl.fori_loop` with a function as its body -> a `for` over `nl.affine_range`
- patterns of affine selects -> comparisons of index expressions, `views.py`
- tensors in shared HBM are made outside of loops

Beta 1 makes results at the top level of a kernel only (err_shared_hbm_must_in_kernel_level), and
does not let it use a tile outside of the loop or the `if` that allocates it
(err_local_variable_used_out_of_scope). Its documentation indexes a tensor in HBM only in the
`nl.load` or `nl.store` that moves it, and interpreters of that dialect look for the indices there:

    store(out[0:128, 0:512], tile)          nl.store(out[0:128, 0:512], value=tile)
    load_vector(row, bias[0:1, 0:300])      row[...] = nl.load(bias[0:1, 0:300], dtype=row.dtype)

A construct without a form in Beta 1 raises CodegenError, which names it.
"""

# ast names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nmm_compiler.codegen.beta1.views import (
    METHODS,
    View,
    elements,
    indices_of,
    keyword,
    number,
    predicate,
    quoted,
    same,
    subscript,
)
from nmm_compiler.codegen.printed import printed
from nmm_compiler.codegen.templates import Template
from nmm_compiler.codegen.tidy import remove_unused, without_aliases
from nmm_compiler.codegen.trees import (
    Block,
    Inlined,
    TreeEditor,
    appended,
    assign,
    assigned,
    called,
    changed,
    name,
    new_list,
    nodes,
    only_statement,
    parameter_names,
    parsed,
    read,
    root,
    without_docstring,
)
from nmm_compiler.errors import no_beta1_form

_MODULES = ("nl", "nisa")

# Instruction -> attributes of the destination t that it takes as keywords: dtype=t.dtype.
_ADDED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "tensor_copy", "activation", "tensor_tensor", "tensor_scalar",
            "scalar_tensor_tensor", "reciprocal", "tensor_reduce", "affine_select",
        ),
        ("dtype",),
    ),
    "memset": ("shape", "dtype"),
    **dict.fromkeys(("nc_transpose", "dma_transpose", "nc_matmul"), ()),
}  # fmt: skip

# Keywords that Beta 1 has no form for. The queue of a DMA is the compiler's choice there.
_DROPPED: dict[str, tuple[str, ...]] = {
    "nc_matmul": ("accumulate",),
    "affine_select": ("pattern", "channel_multiplier", "cmp_op", "offset"),
    "dma_transpose": ("dge_mode", "engine"),
}

# Modules and enumerators. `perf_mode` is text, as in nki-samples' double_row_matmul for SDK 2.26.
_RENAMED: dict[str, str] = {
    "import nki\n": "import neuronxcc.nki as nki\n",
    "import nki.": "import neuronxcc.nki.",
    "nisa.engine.tensor": "nisa.tensor_engine",
    "nisa.engine.vector": "nisa.vector_engine",
    "nisa.engine.scalar": "nisa.scalar_engine",
    "nisa.engine.gpsimd": "nisa.gpsimd_engine",
    "nisa.matmul_perf_mode.double_row": '"double_row_gen3"',
}


def to_beta_1(source: str) -> str:
    """Return the source of an emitted kernel in NKI Beta 1; raises CodegenError."""
    for current, other in _RENAMED.items():
        source = source.replace(current, other)
    module = read(source)
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    kernel = list(functions)[-1]
    short = Inlined({
        name: (parameter_names(f), value)
        for name, f in functions.items() if (value := _all_of_it(f)) is not None
    })  # fmt: skip
    functions = {n: short.visit(f) for n, f in functions.items() if n not in short.helpers}
    places = {(kernel, one): HBM for one in parameter_names(functions[kernel])}
    made = {
        name: _Function(name, functions, places).translated()
        for name in Template(functions, {}).call_order
    }
    others = [s for s in module.body if not isinstance(s, ast.FunctionDef)]
    return printed(changed(module, body=[*others, *map(made.get, functions)]))


# Where tensors are
#
# Beta 1 has one function per direction of a DMA, nl.load and nl.store, and sums into zeroed tiles
# only. For the parameters of a helper, the memory follows from the arguments of its calls.

HBM, CHIP, BOTH = "hbm", "chip", "both"
_SUMS = "dtype=nl.float32, buffer=nl.psum)"
Functions = Mapping[str, ast.FunctionDef]


class _Function(TreeEditor):
    """Translates one function, its statements in order; those that call it are translated before.

    places: (function, name) -> the memory of its tensor, BOTH where callers differ. views: names
    that stand for views, and so for no tensor of Beta 1. values: what other names were assigned
    last. target: the name that the present statement gives a value to. turned: names of tiles that
    are transposed into, all others in PSUM being sums.
    """

    def __init__(self, name: str, functions: Functions, places: dict[tuple[str, str], str]) -> None:
        self.name, self.functions, self.places = name, functions, places
        self.views: dict[str, View] = {}
        self.values: dict[str, ast.expr] = {}
        self.bodies: dict[str, ast.FunctionDef] = {}
        self.target = ""
        calls = nodes(functions[name])
        self.turned = {
            root(keyword(call, "dst")) for call in calls if called(call) == "nisa.nc_transpose"
        }

    def translated(self) -> ast.FunctionDef:
        """Return the function in Beta 1."""
        function = self.functions[self.name]
        return changed(function, body=remove_unused(self.visit_all(function.body)))

    def memory(self, node: Any) -> str | None:
        """Return HBM or CHIP of an expression; BOTH where callers differ, None for no tensor."""
        match node:
            case ast.List([node, *_]) | ast.ListComp(node):
                return self.memory(node)
            case ast.Call() if called(node) == "nl.ndarray":
                return HBM if ast.unparse(node).endswith("hbm)") else CHIP
        return CHIP if root(node) in self.functions else self.places.get((self.name, root(node)))

    def _place(self, function: str, name: str, value: ast.expr) -> None:
        """Note that a name of a function may be the tensor of an expression of this one."""
        memory = self.memory(value)
        if memory is not None:
            known = self.places.setdefault((function, name), memory)
            self.places[function, name] = known if known == memory else BOTH

    def view(self, node: Any, parts: bool = True) -> View | None:
        """Return the view that an expression is, or None. parts: slices of tiles are views too."""
        match node:
            case ast.Name(name) if name in self.views:
                return self.views[name]
            case ast.Subscript():
                indices, view = indices_of(node), self.view(node.value, parts)
                if view is not None:
                    return view.at(indices)
                sliced = any(isinstance(index, ast.Slice) for index in indices)
                if sliced and (parts or self.memory(node) == HBM):
                    return View.of(node.value, indices)
            case ast.Call(ast.Attribute(ast.Name(), "reshape"), [ast.Tuple([_, _, _, *_])]) if (
                not parts
            ):
                return None  # a whole tensor in three dimensions or more is one in Beta 1, too
            case ast.Call(ast.Attribute(receiver, how), given) if how in METHODS:
                return self._viewed(node, receiver, how, given)
        return None

    def _viewed(self, node: ast.Call, receiver: Any, how: str, given: list[ast.expr]) -> View:
        """Return the view that a method of an expression is."""
        view = self.view(receiver)
        part = self.values.get(receiver.id) if isinstance(receiver, ast.Name) else None
        if view is None and isinstance(part, ast.Subscript):  # of a tile, and viewed here only
            view = self.view(part)
        if view is not None:
            return view.step(how, given)
        if how == "reshape":  # a tensor of one dimension, as a whole
            return View.of(node, [ast.Slice(ast.Constant(0), size) for size in elements(given[0])])
        if how == "select" and isinstance(receiver, ast.Name) and number(given[0]) == 0:
            return View(receiver, (given[1],), ())
        raise no_beta1_form(f"the view {ast.unparse(node)}")

    # Statements

    def visit_all(self, before: Any) -> Any:
        """Return a sequence of nodes translated; of a block, with lists made whole first."""
        block = before and isinstance(before[0], ast.stmt)
        return super().visit_all(_with_lists(before) if block else before)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Keep the body of a loop on the device for the loop."""
        self.bodies[node.name] = node

    def visit_For(self, node: ast.For) -> Any:
        """Return a loop unrolled where Beta 1 compiles it, as in the current dialect.

        Beta 1 takes Python's `range` as sequential_range, whose variable is no number.
        """
        unrolled = changed(node.iter, func=parsed("nl.static_range"))
        return self.generic_visit(changed(node, iter=unrolled))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        """Return an assignment; that of a view is written out where the view is used."""
        name, value = assigned(node)
        self._place(self.name, root(node.targets[0]), node.value)
        view = self.view(value, parts=False) if name else None
        if view is not None:
            self.views[name] = view
            return None
        self.views.pop(name, None)
        self.values[name] = value
        self.target = root(node.targets[0])
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        function = called(node.value)
        if function == "nl.fori_loop":
            return self._device_loop(node.value)
        if function.startswith("nisa."):
            return self._instruction(node.value, function.removeprefix("nisa."))
        self.target, added = appended(node)
        self._place(self.name, self.target, added)
        return self.generic_visit(node)

    def _device_loop(self, loop: Any) -> ast.stmt:
        """Return `for i in nl.affine_range(n)` for `nl.fori_loop(0, n, body)`.

        The blocks of tokens that such loops run over do not depend on each other.
        """
        start, stop, name = loop.args
        if isinstance(stop, ast.Call):  # register_alloc(n)
            stop = stop.args[0]
        function = self.bodies[name.id]
        (variable,) = parameter_names(function)
        bounds = [stop] if number(start) == 0 else [start, stop]
        iterator = ast.Call(parsed("nl.affine_range"), bounds, [])
        body = remove_unused(without_aliases(function.body))  # of the variable in SBUF, too
        return ast.For(ast.Name(variable, ast.Store()), iterator, self.visit_all(body), [])

    # Expressions

    def visit(self, node: Any) -> Any:
        """Return the edited node, a view as index expressions."""
        view = self.view(node, parts=False)
        return super().visit(node) if view is None else _spread(view.spelled(), view.spread)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Return a call; that of a tile for sums, which are in fp32, makes it of zeros."""
        helper = self.functions.get(called(node))
        for one, value in zip(parameter_names(helper), node.args, strict=True) if helper else ():
            self._place(called(node), one, value)
        sums = called(node) == "nl.ndarray" and ast.unparse(node).endswith(_SUMS)
        if sums and self.target not in self.turned:
            node = changed(node, func=parsed("nl.zeros"))
        return self.generic_visit(node)

    # Instructions

    def _instruction(self, made: Any, name: str) -> ast.stmt:
        if name != "dma_copy" and name not in _ADDED:
            raise no_beta1_form(f"nisa.{name}")
        dst = keyword(made, "dst")
        if name == "dma_copy":
            return self._copy(dst, keyword(made, "src"))
        dropped = ("dst", *_DROPPED.get(name, ()))
        given = [arg for arg in made.keywords if arg.arg not in dropped]
        for added in _ADDED[name]:
            dtype = quoted("tensor.dtype", tensor=_tensor(dst))
            value = self._shape(dst) if added == "shape" else dtype
            given.append(ast.keyword(added, value))
        if name == "affine_select":
            shape = self._shape(dst)
            known = isinstance(shape, ast.Tuple)
            rows = elements(shape)[0] if known else quoted("shape[0]", shape=shape)
            given = [ast.keyword("pred", predicate(made, rows)), *given]
        value, target = self.visit(changed(made, keywords=given)), self._written(dst)
        if name == "nc_matmul":
            return ast.AugAssign(target, ast.Add(), value)
        return ast.Assign([target], value)

    def _written(self, dst: ast.expr) -> Any:
        """Return the target of an assignment: t[...] for a whole tile."""
        target = self.visit(dst)
        whole = not isinstance(target, (ast.Subscript, ast.Call))
        return subscript(target, [ast.Constant(...)]) if whole else target

    def _shape(self, dst: ast.expr) -> ast.expr:
        """Return the shape of a destination: of a tile, or of a part of one."""
        view = self.view(dst)
        if view is None:
            return quoted("dst.shape", dst=dst)
        return ast.Tuple([axis.size for axis in view.axes], ast.Load())

    def _copy(self, dst: ast.expr, src: ast.expr) -> ast.stmt:
        """Return nl.load or nl.store."""
        directions = self.memory(dst), self.memory(src)
        view = self.view(src)
        spread = None if view is None else view.spread
        source = self.visit(src) if view is None or spread is None else view.spelled()
        if directions == (HBM, CHIP):
            return ast.Expr(quoted("nl.store(dst, value=src)", dst=self.visit(dst), src=source))
        if directions != (CHIP, HBM):
            raise no_beta1_form(f"a DMA from {directions[1]} to {directions[0]}")
        loaded = quoted("nl.load(source, dtype=dst.dtype)", source=source, dst=_tensor(dst))
        return ast.Assign([self._written(dst)], _spread(loaded, spread))


def _spread(value: ast.expr, shape: ast.expr | None) -> ast.expr:
    """Return value.broadcast_to(shape), or the value where no shape is given."""
    if shape is None:
        return value
    return quoted("value.broadcast_to(shape)", value=value, shape=shape)


def _tensor(dst: Any) -> ast.expr:
    """Return the tensor of a destination, without its methods and indices."""
    while called(dst):
        dst = dst.func.value
    return dst.value if isinstance(dst, ast.Subscript) else dst


# Statements


def _all_of_it(function: ast.FunctionDef) -> ast.expr | None:
    """Return what stands for a call of a helper, None where a helper stays.

    A helper that is one DMA, or the view of an argument, is written out. One that stores a loop's
    variable in SBUF stands for the variable: Beta 1 needs no such copy.
    """
    names = {called(node) for node in nodes(function)} - {""}
    if names == {"nl.ndarray", "nisa.register_store"}:
        return name(parameter_names(function)[0])
    copy, only = _copy_of(function.body), only_statement(function.body)
    if copy is not None:
        return copy
    value: Any = getattr(only, "value", None)
    view = isinstance(value, ast.Subscript) or called(value).rpartition(".")[2] in METHODS
    return value if isinstance(only, ast.Return) and view else None


def _copy_of(body: Block) -> ast.Call | None:
    """Return the DMA that a block is, without its queue, which is the compiler's choice, so that
    copies in several queues are one."""
    only = only_statement(body)
    if isinstance(only, ast.If):
        one, other = _copy_of(only.body), _copy_of(only.orelse)
        return one if one and other and same(one, other) else None
    value: Any = getattr(only, "value", None)
    ends = [end for end in getattr(value, "keywords", ()) if end.arg in ("dst", "src")]
    plain = all(isinstance(end.value, (ast.Name, ast.Subscript)) for end in ends)
    return ast.Call(value.func, [], ends) if plain and called(value) == "nisa.dma_copy" else None


def _with_lists(body: Block) -> list[ast.stmt]:
    """Return a block in which a list that one statement fills is made by that statement.

    `t = []` and a loop of `t.append(e)` become `t = [e for ...]`; one `t.append(e)`, `t = [e]`.
    """
    empty = {new_list(s): s for s in body if new_list(s)}
    calls = Counter(map(called, nodes(*body)))
    made: list[ast.stmt] = []
    for statement in body:
        loop = statement if isinstance(statement, ast.For) else None
        filled = [appended(s) for s in (without_docstring(loop.body) if loop else [statement])]
        names = [one for one, _ in filled if one in empty]
        whole = len(names) == len(set(names)) == len(filled)
        if not whole or any(calls[f"{one}.append"] > 1 for one in names):
            made.append(statement)
            continue
        made = [s for s in made if all(s is not empty[one] for one in names)]
        for one, element in filled:
            value: ast.expr = ast.List([element], ast.Load())
            if loop is not None:
                over = changed(loop.iter, func=parsed("nl.static_range"))
                value = ast.ListComp(element, [ast.comprehension(loop.target, over, [], 0)])
            made.append(assign(one, value))
    return made
