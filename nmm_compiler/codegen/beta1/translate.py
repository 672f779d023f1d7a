"""Rewrites an emitted file of the current dialect as NKI Beta 1, `neuronxcc.nki`.

In: the source that `specialize` gives, one `@nki.jit` function and helpers. Out: the same kernel,
statement by statement, in the older dialect's forms:

- instructions return their result: `nisa.f(dst=t, ...)` -> `t[...] = nisa.f(...)`
- matmuls that accumulate -> `t += nisa.nc_matmul(...)` into tiles of `nl.zeros`
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
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from nmm_compiler.codegen.beta1.views import (
    METHODS,
    View,
    elements,
    indices_of,
    keyword,
    method,
    number,
    predicate,
    quoted,
    subscript,
)
from nmm_compiler.codegen.printed import printed
from nmm_compiler.codegen.tidy import remove_unused
from nmm_compiler.codegen.trees import (
    Block,
    Editor,
    Inlined,
    Names,
    appended,
    assign,
    assigned,
    bound,
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
    facts = Facts(functions, kernel)
    made = [_Function(name, facts).translated(f) for name, f in functions.items()]
    others = [s for s in module.body if not isinstance(s, ast.FunctionDef)]
    return printed(changed(module, body=[*others, *made]))


# Where tensors are
#
# Beta 1 has one function per direction of a DMA, nl.load and nl.store, and sums into zeroed tiles
# only. For the parameters of a helper, both follow from the arguments of its calls.

HBM, CHIP, BOTH = "hbm", "chip", "both"
Functions = Mapping[str, ast.FunctionDef]
Place = tuple[str, str]
"""(function, a name in it), or (function, RESULT)."""
RESULT = "return"


def reached(places: set[Any], sources: Mapping[Any, set[Any]]) -> set[Any]:
    """Return the places, their sources, and so on."""
    found, left = set(places), list(places)
    while left:
        new = sources.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


class Facts:
    """Where the tensor of each name of each function is, and which are summed into.

    sources: of each place, those whose tensors it may hold, and memories in which it has new ones.
    summed: the places whose tensors matmuls add to.
    """

    def __init__(self, functions: Functions, kernel: str) -> None:
        self.functions = functions
        self.sources: dict[Place | str, set[Place | str]] = defaultdict(set)
        sums: set[Place | str] = set()
        for parameter in parameter_names(functions[kernel]):
            self.sources[kernel, parameter].add(HBM)
        for owner, function in functions.items():
            for node in nodes(*function.body):
                self._read(owner, node)
                adds = keyword(node, "accumulate")
                if adds is not None and ast.unparse(adds) != "False":
                    sums |= self._held(owner, keyword(node, "dst"))
        self.summed = reached(sums, self.sources)

    def _read(self, function: str, node: Any) -> None:
        """Note the places that a node gives tensors to."""
        if isinstance(node, ast.Assign):
            self.sources[function, root(node.targets[0])] |= self._held(function, node.value)
        elif isinstance(node, ast.Return):
            self.sources[function, RESULT] |= self._held(function, node.value)
        elif called(node).endswith(".append"):
            self.sources[function, root(node)] |= self._held(function, node.args[0])
        elif called(node) in self.functions:
            names = parameter_names(self.functions[called(node)])
            for name, value in bound(node, names).items():
                self.sources[called(node), name] |= self._held(function, value)

    def _held(self, function: str, node: Any) -> set[Place | str]:
        """Return the places, or the memory, of the tensors that an expression may be."""
        match node:
            case ast.Name():
                return {(function, node.id)}
            case ast.Tuple() | ast.List():
                return set().union(*(self._held(function, one) for one in node.elts))
            case ast.IfExp():
                return self._held(function, node.body) | self._held(function, node.orelse)
            case ast.Call() if called(node) == "nl.ndarray":
                buffer = keyword(node, "buffer")
                return {HBM if buffer is not None and ast.unparse(buffer).endswith("hbm") else CHIP}
            case ast.Call() if called(node) in self.functions:
                return {(called(node), RESULT)}
            case ast.Call():
                return self._held(function, node.func)
            case ast.Subscript() | ast.Attribute():
                return self._held(function, node.value)
        return set()

    def memory(self, function: str, node: ast.expr) -> str | None:
        """Return HBM or CHIP of an expression; BOTH where callers differ, None for no tensor."""
        found = reached(self._held(function, node), self.sources) & {HBM, CHIP}
        return BOTH if len(found) > 1 else next(iter(found), None)


class _Function(Editor):
    """Translates one function, its statements in order.

    views: names that stand for views, and so for no tensor of Beta 1. values: what other names were
    assigned last. target: the name that the present statement gives a value to.
    """

    def __init__(self, name: str, facts: Facts) -> None:
        self.name, self.facts = name, facts
        self.views: dict[str, View] = {}
        self.values: dict[str, ast.expr] = {}
        self.bodies: dict[str, ast.FunctionDef] = {}
        self.target = ""

    def translated(self, function: ast.FunctionDef) -> ast.FunctionDef:
        """Return the function in Beta 1."""
        return changed(function, body=remove_unused(self._block(function.body)))

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
                if sliced and (parts or self.facts.memory(self.name, node) == HBM):
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

    def _block(self, body: Block) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in _with_lists(body):
            written = self.visit(statement)
            made += [] if written is None else [written]
        return made

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Keep the body of a loop on the device for the loop."""
        self.bodies[node.name] = node

    def visit_If(self, node: ast.If) -> ast.stmt:
        test, body = self.visit(node.test), self._block(node.body)
        return changed(node, test=test, body=body, orelse=self._block(node.orelse))

    def visit_For(self, node: ast.For) -> ast.stmt:
        return changed(node, iter=_unrolled(node.iter), body=self._block(node.body))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        """Return an assignment; that of a view is written out where the view is used."""
        name, value = assigned(node)
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
        self.target = root(node.value)  # of t.append(tile)
        return self.generic_visit(node)

    def _device_loop(self, loop: Any) -> ast.stmt:
        """Return `for i in nl.affine_range(n)` for `nl.fori_loop(0, n, body)`.

        The blocks of tokens that such loops run over do not depend on each other.
        """
        start, stop, body = loop.args
        if isinstance(stop, ast.Call):  # register_alloc(n)
            stop = stop.args[0]
        function = self.bodies[ast.unparse(body)]
        (variable,) = parameter_names(function)
        bounds = [stop] if number(start) == 0 else [start, stop]
        iterator = ast.Call(parsed("nl.affine_range"), bounds, [])
        copies = {copy: value for copy, value in map(assigned, function.body)
                  if isinstance(value, ast.Name) and value.id == variable}  # fmt: skip
        left = [one for one in function.body if assigned(one)[0] not in copies]
        block = self._block(Names(copies).visit_all(left))
        return ast.For(ast.Name(variable, ast.Store()), iterator, block, [])

    # Expressions

    def visit(self, node: Any) -> Any:
        """Return the edited node, a view as index expressions."""
        view = self.view(node, parts=False)
        return super().visit(node) if view is None else _spread(view.spelled(), view.spread)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Return a call; that of a tile which matmuls sum into makes it of zeros."""
        buffer = keyword(node, "buffer")
        in_psum = buffer is not None and ast.unparse(buffer) == "nl.psum"
        if in_psum and (self.name, self.target) in self.facts.summed:
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
        if name == "nc_matmul" and (self.name, root(dst)) in self.facts.summed:
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
        directions = self.facts.memory(self.name, dst), self.facts.memory(self.name, src)
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


def _tensor(dst: ast.expr) -> ast.expr:
    """Return the tensor of a destination, without its methods and indices."""
    while (viewed := method(dst)) is not None:
        dst = viewed[0]
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
    only = only_statement(function.body)
    value: Any = getattr(only, "value", None)
    if called(value) == "nisa.dma_copy":  # without its queue, which is the compiler's choice
        ends = [end for end in value.keywords if end.arg in ("dst", "src")]
        plain = all(isinstance(end.value, (ast.Name, ast.Subscript)) for end in ends)
        return ast.Call(value.func, [], ends) if plain else None
    found = method(value) if isinstance(only, ast.Return) else None
    return value if found is not None and found[1] in METHODS else None


def _unrolled(iterator: Any) -> Any:
    """Return what a loop is over, unrolled where Beta 1 compiles it, as in the current dialect.

    Beta 1 takes Python's `range` as sequential_range, whose variable is no number.
    """
    if called(iterator) != "range":
        return iterator
    args = iterator.args
    if len(args) == 2 and number(args[0]) == 0:
        args = args[1:]
    return changed(iterator, func=parsed("nl.static_range"), args=args)


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
