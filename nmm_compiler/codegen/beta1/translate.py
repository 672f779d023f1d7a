"""Rewrites an emitted file of the current dialect as NKI Beta 1, `neuronxcc.nki`.

In: the source that `specialize` gives, one `@nki.jit` function and helpers. Out: the same kernel,
statement by statement, in the older dialect's forms:

- instructions return their result: `nisa.f(dst=t, ...)` -> `t[...] = nisa.f(...)`, `table.py`
- matmuls that accumulate -> `t += nisa.nc_matmul(...)` into tiles of `nl.zeros`
- DMA between HBM and SBUF -> `nl.load` and `nl.store`; helpers that are one `nl.store` are written
  out, `statements.py`
- strided views of HBM -> index expressions of `nl.arange`, `views.py`
- `range` -> `nl.static_range`, `statements.py`
- `nl.fori_loop` with a function as its body -> a `for` over `nl.affine_range`
- patterns of affine selects -> comparisons of index expressions, `views.py`
- tensors in shared HBM are made outside of loops

A construct without a form in Beta 1 raises CodegenError, which names it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

from nmm_compiler.codegen.beta1 import table
from nmm_compiler.codegen.beta1.expressions import (
    attribute,
    call,
    elements,
    indices_of,
    integer,
    keyword,
    method,
    number,
    several,
    subscript,
)
from nmm_compiler.codegen.beta1.facts import CHIP, HBM, Facts, is_new_tile, is_reshaped
from nmm_compiler.codegen.beta1.statements import all_of_it, unrolled, with_lists
from nmm_compiler.codegen.beta1.views import METHODS, IndexNames, Scope, predicate
from nmm_compiler.codegen.fold_constants import assigned_names
from nmm_compiler.codegen.printed import printed, text
from nmm_compiler.codegen.tidy import remove_unused
from nmm_compiler.codegen.trees import (
    Block,
    Comment,
    Editor,
    Inlined,
    Names,
    assigned,
    called,
    changed,
    parameter_names,
    parsed,
    read,
    root,
)
from nmm_compiler.errors import no_beta1_form

_MODULES = ("nl", "nisa")


def to_beta_1(source: str) -> str:
    """Return the source of an emitted kernel in NKI Beta 1; raises CodegenError."""
    for current, other in table.NAMES.items():
        source = source.replace(current, other)
    module = read(source)
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    kernel = list(functions)[-1]
    short = Inlined({
        name: (parameter_names(f), value)
        for name, f in functions.items() if (value := all_of_it(f)) is not None
    })  # fmt: skip
    functions = {n: short.visit(f) for n, f in functions.items() if n not in short.helpers}
    facts = Facts(functions, kernel)
    made = [_Function(name, f, facts, Scope()).translated() for name, f in functions.items()]
    others = [s for s in module.body if not isinstance(s, ast.FunctionDef)]
    code = printed(changed(module, body=[*others, *made]))
    unknown = re.search(r"\bnisa\.\w+\.\w+", code)
    if unknown:
        raise no_beta1_form(unknown[0])
    return code


@dataclasses.dataclass
class _Function:
    """Translates one function."""

    name: str
    function: ast.FunctionDef
    facts: Facts
    scope: Scope

    def translated(self) -> ast.FunctionDef:
        """Return the function in Beta 1."""
        self.views: set[str] = set()  # names that stand for views, and so for no tensor of Beta 1
        self.bodies: dict[str, ast.FunctionDef] = {}
        self.names = IndexNames()
        body = remove_unused(self._block(self.function.body))
        return changed(self.function, body=body)

    def is_view(self, node: ast.AST) -> bool:
        """Return whether an expression is a strided view, or a part of a view or of HBM."""
        if isinstance(node, ast.Call):
            module, _, how = called(node).rpartition(".")
            return how in METHODS and module not in ("", *_MODULES)
        if not isinstance(node, ast.Subscript):
            return False
        sliced = any(isinstance(index, ast.Slice) for index in indices_of(node))
        in_hbm = sliced and self.facts.memory(self.name, node) == HBM
        return root(node) in self.views or in_hbm

    # Statements

    def _block(self, body: Block) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in with_lists(body):
            while _says_what_beta_1_lacks(statement) and made and isinstance(made[-1], Comment):
                made.pop()
            made += self._statement(statement)
            self.names.change(assigned_names([statement]))
        return made

    def _statement(self, statement: Any) -> list[ast.stmt]:
        match statement:
            case Comment():
                return [statement]
            case ast.FunctionDef():
                self.bodies[statement.name] = statement
                return []
            case ast.If():
                test = self._spelled(statement.test)
                assert not self.names.new
                body, orelse = self._nested(statement.body), self._nested(statement.orelse)
                return [changed(statement, test=test, body=body, orelse=orelse)]
            case ast.For():
                if "nl.shared_hbm" in ast.unparse(ast.Module([statement], [])):
                    raise no_beta1_form(f"results made in a loop of {text(statement.iter)}")
                body = self._nested(statement.body)
                return [changed(statement, iter=unrolled(statement.iter), body=body)]
            case ast.Assign():
                return self._assign(statement)
        value = getattr(statement, "value", None)
        full = called(value)
        if full == "nl.fori_loop":
            return [self._device_loop(statement.value)]
        if full.startswith("nisa."):
            return self._with(self._instruction(statement.value, full.removeprefix("nisa.")))
        if full.endswith(".append"):
            tile = self._tile(statement.value.func, statement.value.args[0])
            statement = changed(statement, value=changed(statement.value, args=[tile]))
        return self._with(self._spelled(statement))

    def _nested(self, body: Block) -> list[ast.stmt]:
        """Return a nested block. Behind it its index names are made again, its views unknown."""
        before, names = dict(self.scope.views), assigned_names(body)
        self.names.held = {}
        made = self._block(body)
        self.names.held = {}
        self.views |= names & set(before)
        self.scope.views = {name: view for name, view in before.items() if name not in names}
        return made

    def _assign(self, statement: ast.Assign) -> list[ast.stmt]:
        target, value = assigned(statement)
        viewed = target and self.is_view(value) and not is_reshaped(value)
        for one in (value, self.scope.values.get(target)):
            if is_new_tile(one) and (viewed or target in self.views):
                raise no_beta1_form(f"{target} as a tile and as a view")
        self.views.discard(target)
        if viewed:
            view = self.scope.view(value)
            if view is None:
                raise no_beta1_form(f"the view {text(value)}")
            self.scope.views[target] = view
            self.views.add(target)
            return []
        self.scope.values[target] = value
        tile = self._tile(statement.targets[0], statement.value)
        return self._with(self._spelled(changed(statement, value=tile)))

    def _tile(self, target: ast.expr, value: Any) -> Any:
        """Return the creation of a tile, zeroed if matmuls sum into it."""
        if isinstance(value, ast.List) and value.elts:
            return changed(value, elts=[self._tile(target, value.elts[0]), *value.elts[1:]])
        if isinstance(value, ast.ListComp):
            return changed(value, elt=self._tile(target, value.elt))
        buffer = keyword(value, "buffer")
        in_psum = buffer is not None and text(buffer) == "nl.psum"
        if not in_psum or (self.name, root(target)) not in self.facts.summed:
            return value
        return changed(value, func=parsed("nl.zeros"))

    def _device_loop(self, loop: ast.Call) -> ast.stmt:
        """Return `for i in nl.affine_range(n)` for `nl.fori_loop(0, n, body)`.

        The blocks of tokens that such loops run over do not depend on each other.
        """
        start, stop, body = loop.args
        if isinstance(stop, ast.Call):  # register_alloc(n)
            stop = stop.args[0]
        function = self.bodies[text(body)]
        (variable,) = parameter_names(function)
        bounds = [stop] if number(start) == 0 else [start, stop]
        iterator = call(parsed("nl.affine_range"), *bounds)
        copies = {copy: value for copy, value in map(assigned, function.body)
                  if isinstance(value, ast.Name) and value.id == variable}  # fmt: skip
        left = [one for one in function.body if assigned(one)[0] not in copies]
        block = self._nested(Names(copies).visit_all(left))
        return ast.For(ast.Name(variable, ast.Store()), iterator, block, [])

    # Expressions

    def _spelled(self, node: Any) -> Any:
        """Return the node with its views as index expressions."""
        return _Views(self).visit(node)

    def _with(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statement behind its new index names."""
        return [*self.names.assignments(), statement]

    # Instructions

    def _instruction(self, made: ast.Call, name: str) -> ast.stmt:
        if name != "dma_copy" and name not in table.ADDED:
            raise no_beta1_form(f"nisa.{name}")
        if made.args:
            raise no_beta1_form(f"nisa.{name} with arguments that have no keyword")
        dst, src = keyword(made, "dst"), keyword(made, "src")
        assert dst is not None
        if name == "dma_copy":
            assert src is not None
            return self._copy(dst, src)
        dropped = ("dst", *table.DROPPED.get(name, ()))
        given = [arg for arg in made.keywords if arg.arg not in dropped]
        for added in table.ADDED[name]:
            value = self._shape(dst) if added == "shape" else attribute(_tensor(dst), added)
            given.append(ast.keyword(added, value))
        if name == "memset":
            given = [given[1], given[0], given[2]]  # the order of its signature
        if name == "affine_select":
            compared, indices = predicate(made, self._partitions(dst))
            self.names.taken(indices)
            given = [ast.keyword("pred", compared), *given]
        value = self._spelled(changed(made, keywords=given))
        viewed = isinstance(dst, ast.Name) and dst.id in self.views
        target = self._spelled(dst if viewed else _target(dst))
        if name == "nc_matmul" and (self.name, root(dst)) in self.facts.summed:
            return ast.AugAssign(target, ast.Add(), value)
        return ast.Assign([target], value)

    def _shape(self, dst: ast.expr) -> ast.expr:
        """Return the shape of a destination: of a tile, or of a part of one."""
        view = self.scope.view(dst)
        return attribute(dst, "shape") if view is None else several(*(a.size for a in view.axes))

    def _partitions(self, dst: ast.expr) -> ast.expr:
        shape = self._shape(dst)
        return shape.elts[0] if isinstance(shape, ast.Tuple) else subscript(shape, [integer(0)])

    def _copy(self, dst: ast.expr, src: ast.expr) -> ast.stmt:
        """Return nl.load or nl.store."""
        directions = self.facts.memory(self.name, dst), self.facts.memory(self.name, src)
        view = self.scope.view(src)
        spread = None if view is None else view.spread
        if view is None or spread is None:
            source = self._spelled(src)
        elif elements(spread)[1:] != [axis.size for axis in view.axes[1:]]:
            raise no_beta1_form(f"a DMA that repeats {text(src)} along the free axes")
        else:
            source = self.names.spelled(view)
        target = self._spelled(dst)
        if directions == (HBM, CHIP):
            stored = ast.keyword("value", source)
            return ast.Expr(ast.Call(parsed("nl.store"), [target], [stored]))
        if directions != (CHIP, HBM):
            raise no_beta1_form(f"a DMA from {directions[1]} to {directions[0]}")
        dtype = ast.keyword("dtype", attribute(_tensor(dst), "dtype"))
        value = _spread(ast.Call(parsed("nl.load"), [source], [dtype]), spread)
        return ast.Assign([_target(target)], value)


def _says_what_beta_1_lacks(statement: ast.stmt) -> bool:
    """Return whether the comment of a statement is about a DMA's queue or a loop's register."""
    words = text(statement) if isinstance(statement, ast.Expr) else ""
    return "dge_mode=" in words or "register_alloc(" in words


def _spread(value: ast.expr, shape: ast.expr | None) -> ast.expr:
    """Return value.broadcast_to(shape), or the value where no shape is given."""
    return value if shape is None else call(attribute(value, "broadcast_to"), shape)


def _receiver(node: ast.expr) -> ast.expr:
    """Return what a chain of methods is called on."""
    while (viewed := method(node)) is not None:
        node = viewed[0]
    return node


def _tensor(dst: ast.expr) -> ast.expr:
    """Return the tensor of a destination, without its indices."""
    base = _receiver(dst)
    return base.value if isinstance(base, ast.Subscript) else base


def _target(dst: ast.expr) -> ast.expr:
    """Return the target of an assignment: t[...] for a whole tile."""
    if isinstance(dst, (ast.Subscript, ast.Call)):
        return dst
    return subscript(dst, [ast.Constant(...)])


class _Views(Editor):
    """Writes the views of an expression as index expressions."""

    def __init__(self, function: _Function) -> None:
        self.function = function

    def visit(self, node: Any) -> Any:
        """Return the edited node."""
        if is_reshaped(node):
            return node
        named = isinstance(node, ast.Name) and node.id in self.function.views
        if not named and not self.function.is_view(node):
            return self.generic_visit(node)
        view = self.function.scope.view(node)
        if view is not None:
            return _spread(self.function.names.spelled(view), view.spread)
        match node:  # of a whole tensor, `k.select(0, i)` is `k[i]`
            case ast.Call(ast.Attribute(ast.Name() as whole, "select"), [ast.Constant(0), place]):
                return subscript(whole, [place])
        raise no_beta1_form(f"the view {text(node)}")
