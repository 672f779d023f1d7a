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

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1 import table
from nmm_compiler.codegen.beta1.expressions import (
    Expression,
    elements,
    integer,
    method,
    number,
    parsed,
    root,
    subscript,
    text,
)
from nmm_compiler.codegen.beta1.facts import (
    CHIP,
    HBM,
    Facts,
    is_new_tile,
    is_reshaped,
    keyword,
)
from nmm_compiler.codegen.beta1.statements import all_of_it, read_first, unrolled, with_lists
from nmm_compiler.codegen.beta1.views import (
    METHODS,
    IndexNames,
    Scope,
    predicate,
)
from nmm_compiler.codegen.fold_constants import assigned_names
from nmm_compiler.codegen.tidy import Spread, names_used, remove_unused
from nmm_compiler.codegen.trees import (
    Editor,
    Inlined,
    Names,
    assigned,
    called,
    nodes,
    parameter_names,
    with_comments,
)
from nmm_compiler.errors import no_beta1_form

Statement = cst.BaseStatement
_MODULES = ("nl", "nisa")


def to_beta_1(source: str) -> str:
    """Return the source of an emitted kernel in NKI Beta 1; raises CodegenError."""
    for name, other in table.NAMES.items():
        source = source.replace(name, other)
    module = cst.parse_module(source)
    functions = {f.name.value: f for f in module.body if isinstance(f, cst.FunctionDef)}
    kernel = list(functions)[-1]
    short = Inlined({
        name: (parameter_names(f), value)
        for name, f in functions.items() if (value := all_of_it(f)) is not None
    })  # fmt: skip
    functions = {n: short.edit(f) for n, f in functions.items() if n not in short.helpers}
    facts = Facts(functions, kernel)
    made = [_Function(name, f, facts, Scope()).translated() for name, f in functions.items()]
    others = [s for s in module.body if not isinstance(s, cst.FunctionDef)]
    code: str = Spread().edit(module.with_changes(body=[*others, *made])).code
    unknown = re.search(r"\bnisa\.\w+\.\w+", code)
    if unknown:
        raise no_beta1_form(unknown[0])
    return code


def _body(function: cst.FunctionDef) -> list[Statement]:
    return list(function.body.body)  # type: ignore[arg-type]


def _with_body(function: cst.FunctionDef, body: Sequence[Statement]) -> cst.FunctionDef:
    return function.with_changes(body=function.body.with_changes(body=body))


@dataclasses.dataclass
class _Function:
    """Translates one function."""

    name: str
    function: cst.FunctionDef
    facts: Facts
    scope: Scope

    def translated(self) -> cst.FunctionDef:
        """Return the function in Beta 1."""
        body = _body(self.function)
        self.views = self._view_names(body)
        self.bodies: dict[str, cst.FunctionDef] = {}
        self.names = IndexNames()
        return _with_body(self.function, remove_unused(self._block(body)))

    def _view_names(self, body: Sequence[Statement]) -> set[str | None]:
        """Return the names that stand for views, and so for no tensor of Beta 1.

        These are strided views and parts of tensors in HBM. A tile of its own stays one where a
        part of it is viewed: `tile[0:128, 0:4].permute(...)`.
        """
        every = [node for node in nodes(*body) if isinstance(node, cst.Assign)]
        given = [(node.targets[0].target, node.value) for node in every]
        named = [(at.value, value) for at, value in given if isinstance(at, cst.Name)]
        named = [(name, value) for name, value in named if not is_reshaped(value)]
        tiles = {name for name, value in named if is_new_tile(value)}
        found: set[str | None] = set()
        node: Any
        for node in nodes(*body):
            viewed = method(node)
            if viewed is not None and viewed[1] in METHODS and not is_reshaped(node):
                part = isinstance(_receiver(node), cst.Subscript)
                found |= {root(node)} - (tiles if part else set())
        found &= {name for name, _ in named}
        more = {name for name, value in named if self._is_view(value, found)}
        while not more <= found:
            found |= more
            more = {name for name, value in named if self._is_view(value, found)}
        return found

    def _is_view(self, node: Expression, names: set[str | None]) -> bool:
        if isinstance(node, cst.Call):
            module, _, name = called(node).rpartition(".")
            return name in METHODS and module not in ("", *_MODULES)
        if not isinstance(node, cst.Subscript):
            return False
        sliced = any(isinstance(element.slice, cst.Slice) for element in node.slice)
        in_hbm = sliced and self.facts.memory(self.name, node) == HBM
        return root(node) in names or in_hbm

    # Statements

    def _block(self, body: Sequence[Statement]) -> list[Statement]:
        made: list[Statement | None] = []
        before: list[Statement] = []
        left = with_lists(body)
        while left:
            statement = left.pop(0)
            if isinstance(statement, cst.If):
                statement, left = self._sunk(statement, left)
            new: list[Any] = self._statement(statement) or [None]
            self.names.change(assigned_names([statement]))
            made += new
            before += [statement] * len(new)
        return with_comments(made, before)

    def _statement(self, statement: Any) -> list[Statement]:
        if isinstance(statement, cst.FunctionDef):
            self.bodies[statement.name.value] = statement
            return []
        if isinstance(statement, cst.If):
            return self._if(statement)
        if isinstance(statement, cst.For):
            if "nl.shared_hbm" in text(statement):
                raise no_beta1_form(f"results made in a loop of {text(statement.iter)}")
            return [unrolled(statement).with_changes(body=self._nested(statement.body))]
        small = statement.body[0]
        if isinstance(small, cst.Assign):
            return self._assign(statement, small)
        full = called(getattr(small, "value", None))
        if full == "nl.fori_loop":
            return [self._device_loop(statement, small.value)]
        if full.startswith("nisa."):
            return self._instruction(statement, small.value, full.removeprefix("nisa."))
        if full.endswith(".append"):
            tile = small.value.args[0].value
            small = small.deep_replace(tile, self._tile(small.value.func, tile))
        return self._with(statement, self._spelled(small))

    def _nested(self, block: Any) -> Any:
        """Return a nested block. Its index names are assigned again behind it."""
        self.names.held = {}
        body = self._block(block.body)
        self.names.held = {}
        return block.with_changes(body=body or [cst.parse_statement("pass")])

    def _if(self, statement: cst.If) -> list[Statement]:
        body = self._nested(statement.body)
        orelse: Any = statement.orelse
        if isinstance(orelse, cst.If):
            (orelse,) = self._if(orelse)
        elif orelse is not None:
            orelse = orelse.with_changes(body=self._nested(orelse.body))
        test = self._spelled(statement.test)
        assert not self.names.new
        return [statement.with_changes(test=test, body=body, orelse=orelse)]

    def _sunk(self, statement: cst.If, left: list[Statement]) -> tuple[cst.If, list[Statement]]:
        """Move statements that use a view into the branches of the `if` that defines it.

        Returns the `if` and the statements left behind it.
        """
        views = self.views & assigned_names([statement]) & read_first(left)
        uses = [place for place, s in enumerate(left) if names_used([s]) & views]
        if not uses:
            return statement, left
        moved, rest = left[: uses[-1] + 1], left[uses[-1] + 1 :]
        orelse = statement.orelse
        if not isinstance(orelse, cst.Else):
            raise no_beta1_form(f"views {sorted(map(str, views))} of an `if` without one `else`")
        body = statement.body.with_changes(body=[*statement.body.body, *moved])
        other = orelse.body.with_changes(body=[*orelse.body.body, *moved])
        orelse = orelse.with_changes(body=other)
        return statement.with_changes(body=body, orelse=orelse), rest

    def _assign(self, statement: Any, small: cst.Assign) -> list[Statement]:
        target, value = small.targets[0].target, small.value
        if isinstance(target, cst.Name):
            if target.value in self.views:
                view = self.scope.view(value)
                if view is None:
                    raise no_beta1_form(f"the view {text(value)}")
                self.scope.views[target.value] = view
                return []
            constant = number(value)
            if constant is not None:
                self.scope.constants[target.value] = constant
        made = self._spelled(small.with_changes(value=self._tile(target, value)))
        return self._with(statement, made)

    def _tile(self, target: Any, value: Any) -> Any:
        """Return the creation of a tile, zeroed if matmuls sum into it."""
        element = value
        if isinstance(value, cst.List) and value.elements:
            element = value.elements[0].value
        elif isinstance(value, cst.ListComp):
            element = value.elt
        buffer = keyword(element, "buffer")
        in_psum = buffer is not None and text(buffer) == "nl.psum"
        if not in_psum or (self.name, root(target)) not in self.facts.summed:
            return value
        return value.deep_replace(element, element.with_changes(func=parsed("nl.zeros")))

    def _device_loop(self, statement: Any, call: cst.Call) -> Statement:
        """Return `for i in nl.affine_range(n)` for `nl.fori_loop(0, n, body)`.

        The blocks of tokens that such loops run over do not depend on each other.
        """
        start, stop, name = (arg.value for arg in call.args)
        leading = statement.leading_lines
        if isinstance(stop, cst.Call):  # register_alloc(n): the comment is about it, drop both
            stop, leading = stop.args[0].value, ()
        body = self.bodies[cst.ensure_type(name, cst.Name).value]
        (variable,) = (p.name for p in body.params.params)
        bounds = [stop] if number(start) == 0 else [start, stop]
        iterator = cst.Call(parsed("nl.affine_range"), [cst.Arg(bound) for bound in bounds])
        copies = {name: variable for name, value in map(assigned, _body(body))
                  if isinstance(value, cst.Name) and value.value == variable.value}  # fmt: skip
        left = [one for one in _body(body) if assigned(one)[0] not in copies]
        block = cst.IndentedBlock(Names(copies).edit_all(left))
        return cst.For(variable, iterator, self._nested(block), leading_lines=leading)

    # Expressions

    def _spelled(self, node: Any) -> Any:
        """Return the node with its views as index expressions."""
        return _Views(self).edit(node)

    def _with(self, statement: Any, small: Any) -> list[Statement]:
        """Return the statement as `small`, its comment first, behind its new index names."""
        made = [*self.names.assignments(), statement.with_changes(body=[small], leading_lines=())]
        made[0] = made[0].with_changes(leading_lines=statement.leading_lines)
        return made

    # Instructions

    def _instruction(self, statement: Any, call: cst.Call, name: str) -> list[Statement]:
        if name != "dma_copy" and name not in table.ADDED:
            raise no_beta1_form(f"nisa.{name}")
        if any(argument.keyword is None for argument in call.args):
            raise no_beta1_form(f"nisa.{name} with arguments that have no keyword")
        dropped = [k for k in table.DROPPED.get(name, ()) if keyword(call, k) is not None]
        if "dge_mode" in dropped:  # the comment is about dge_mode: drop it too
            statement = statement.with_changes(leading_lines=())
        dst = keyword(call, "dst")
        assert dst is not None
        if name == "dma_copy":
            src = keyword(call, "src")
            assert src is not None
            return self._with(statement, self._copy(dst, src))
        given = [a for a in call.args if a.keyword and a.keyword.value not in ("dst", *dropped)]
        for added in table.ADDED[name]:
            value = self._shape(dst) if added == "shape" else (
                cst.Attribute(_tensor(dst), cst.Name(added))
            )  # fmt: skip
            given.append(_named(added, value))
        if name == "memset":
            given = [given[1], given[0], given[2]]  # the order of its signature
        if name == "affine_select":
            compared, indices = predicate(call, self._partitions(dst))
            self.names.taken(indices)
            given = [_named("pred", compared), *given]
        value = self._spelled(call.with_changes(args=given))
        viewed = isinstance(dst, cst.Name) and dst.value in self.views
        target = self._spelled(dst if viewed else _target(dst))
        if name == "nc_matmul" and (self.name, root(dst)) in self.facts.summed:
            return self._with(statement, cst.AugAssign(target, cst.AddAssign(), value))
        return self._with(statement, cst.Assign([cst.AssignTarget(target)], value))

    def _shape(self, dst: Expression) -> Expression:
        """Return the shape of a destination: of a tile, or of a part of one."""
        view = self.scope.view(dst)
        if view is None:
            return cst.Attribute(dst, cst.Name("shape"))
        return cst.Tuple([cst.Element(axis.size) for axis in view.axes])

    def _partitions(self, dst: Expression) -> Expression:
        shape = self._shape(dst)
        if isinstance(shape, cst.Tuple):
            return shape.elements[0].value
        return subscript(shape, [cst.Index(integer(0))])

    def _copy(self, dst: Expression, src: Expression) -> Any:
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
            call = cst.Call(parsed("nl.store"), [cst.Arg(target), _named("value", source)])
            return cst.Expr(call)
        if directions != (CHIP, HBM):
            raise no_beta1_form(f"a DMA from {directions[1]} to {directions[0]}")
        dtype = _named("dtype", cst.Attribute(_tensor(dst), cst.Name("dtype")))
        value = _spread(cst.Call(parsed("nl.load"), [cst.Arg(source), dtype]), spread)
        return cst.Assign([cst.AssignTarget(_target(target))], value)


def _spread(value: Expression, shape: Expression | None) -> Expression:
    """Return value.broadcast_to(shape), or the value where no shape is given."""
    if shape is None:
        return value
    return cst.Call(cst.Attribute(value, cst.Name("broadcast_to")), [cst.Arg(shape)])


def _receiver(node: Expression) -> Expression:
    """Return what a chain of methods is called on."""
    while (found := method(node)) is not None:
        node = found[0]
    return node


def _named(name: str, value: Expression) -> cst.Arg:
    plain = cst.SimpleWhitespace("")
    equal = cst.AssignEqual(whitespace_before=plain, whitespace_after=plain)
    return cst.Arg(value, keyword=cst.Name(name), equal=equal)


def _tensor(dst: Expression) -> Expression:
    """Return the tensor of a destination, without its indices."""
    base = _receiver(dst)
    return base.value if isinstance(base, cst.Subscript) else base


def _target(dst: Expression) -> Any:
    """Return the target of an assignment: t[...] for a whole tile."""
    if isinstance(dst, (cst.Subscript, cst.Call)):
        return dst
    return subscript(dst, [cst.Index(cst.Ellipsis())])


class _Views(Editor):
    """Writes the views of an expression as index expressions."""

    def __init__(self, function: _Function) -> None:
        self.function = function

    def edit(self, node: Any) -> Any:
        """Return the edited node."""
        if is_reshaped(node):
            return node
        named = isinstance(node, cst.Name) and node.value in self.function.views
        if not named and not self.function._is_view(node, self.function.views):
            return super().edit(node)
        view = self.function.scope.view(node)
        if view is not None:
            return _spread(self.function.names.spelled(view), view.spread)
        # of a whole tensor, `k.select(0, i)` is `k[i]`
        receiver, name, arguments = method(node) or (node, "", [])
        if not isinstance(receiver, cst.Name) or name != "select" or number(arguments[0]) != 0:
            raise no_beta1_form(f"the view {text(node)}")
        return subscript(receiver, [cst.Index(arguments[1])])
