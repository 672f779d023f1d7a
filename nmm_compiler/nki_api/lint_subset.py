"""The rules about Python: the subset that the NKI compiler accepts inside kernel code.

Up to NKI 0.6 the compiler reads the kernel's source itself and knows a subset of Python; 0.7
traces real Python, so that most of these rules end there (each says so by `until`). Sources: the
NKI language guide, the NKI 0.3.0 update guide ("Language restrictions"), the 0.6.0 migration
guide (rules for loops on the device) and the announcement of the 0.7.0 change.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from nmm_compiler.nki_api.api import Api, before
from nmm_compiler.nki_api.lint_names import Finding, FunctionNode, Names, at

# Evaluated at compile time on plain numbers and types, and so usable inside a kernel.
_HARMLESS = {"typing", "typing_extensions", "dataclasses", "enum", "math", "collections", "abc"}
_FOREIGN = (sys.stdlib_module_names - _HARMLESS) | {
    *("numpy", "torch", "jax", "jaxlib", "scipy", "ml_dtypes", "pandas", "tensorflow"),
}
_BASES = ("nki.language.NKIObject", "enum.Enum", "enum.IntEnum")
_UNUSUAL = {
    ast.ListComp: "a list comprehension",
    ast.SetComp: "a set comprehension",
    ast.DictComp: "a dict comprehension",
    ast.Lambda: "a lambda",
    ast.Match: "match",
    ast.NamedExpr: "an assignment expression",
}


_COLLECTIONS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_CHANGES = frozenset(
    ("append", "extend", "insert", "pop", "popitem", "remove", "reverse", "clear", "update", "add",
     "discard", "setdefault", "sort")
)  # fmt: skip


def check_subset(names: Names, api: Api) -> Iterator[Finding]:
    """E201-E210, W206, E214: Python that the compilers before 0.7 do not read."""
    if not before(api.version, "0.7"):
        return
    for node in names.kernel_nodes():
        yield from _check_syntax(node, names)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _check_signature(node)
        elif isinstance(node, ast.ClassDef):
            yield from _check_class(node, names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield from _check_foreign(node, names)
            yield from _check_nested_jit(node, names)
    for kernel in names.kernels:
        yield from _check_list_defaults(kernel)
    for node in ast.walk(names.tree):
        if isinstance(node, ast.Call):
            yield from _check_list_arguments(node, names)


def _check_syntax(node: ast.AST, names: Names) -> Iterator[Finding]:
    if isinstance(node, ast.Compare):
        for op, value in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, (ast.Is, ast.IsNot)):
                wrong, right = ("is", "==") if isinstance(op, ast.Is) else ("is not", "!=")
                yield at(value, "NKI-E201", f"{wrong!r} is not in the NKI language; use {right!r}")
    elif isinstance(node, (ast.Try, ast.TryStar)):
        yield at(node, "NKI-E203", "try is not in the NKI language; test the condition before")
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            held = item.context_expr
            called = held.func if isinstance(held, ast.Call) else held
            if names.resolve(called) != "nki.language.no_reorder":
                text = "only nl.no_reorder() can be held by 'with' inside a kernel"
                yield at(held, "NKI-E204", text)
    elif isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.GeneratorExp)):
        text = "generators and coroutines are not in the NKI language; write a loop over a list"
        yield at(node, "NKI-E205", text)
    elif type(node) in _UNUSUAL:
        text = (
            f"{_UNUSUAL[type(node)]} is not described by the NKI language guide before 0.7; "
            "a loop or a named function is"
        )
        yield at(node, "NKI-W206", text)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            if isinstance(key, ast.Constant) and not isinstance(key.value, str):
                text = f"dict keys are strings inside a kernel, not {key.value!r}"
                yield at(key, "NKI-E214", text)


def _check_signature(function: FunctionNode) -> Iterator[Finding]:
    if isinstance(function, ast.AsyncFunctionDef):
        text = "generators and coroutines are not in the NKI language; write a plain function"
        yield at(function, "NKI-E205", text)
    if function.args.kwonlyargs:
        first = function.args.kwonlyargs[0]
        text = f"keyword-only parameters ('*' before {first.arg!r}) are refused; drop the '*'"
        yield at(first, "NKI-E202", text)


def _check_class(node: ast.ClassDef, names: Names) -> Iterator[Finding]:
    bases = [names.resolve(base) for base in node.bases]
    if len(bases) != 1 or bases[0] not in _BASES:
        shown = ", ".join(ast.unparse(base) for base in node.bases) or "nothing"
        text = f"class {node.name} inherits {shown}; it must inherit NKIObject alone, or Enum"
        yield at(node, "NKI-E207", text)


def _check_foreign(node: ast.Name, names: Names) -> Iterator[Finding]:
    path = names.resolve(node)
    root = (path or "").partition(".")[0]
    if root in _FOREIGN:
        text = f"{path} cannot be used inside a kernel; use nki.language, or pass the value in"
        yield at(node, "NKI-E210", text)


def _check_nested_jit(node: ast.Name, names: Names) -> Iterator[Finding]:
    called = names.definition(node)
    if called in names.kernels and called not in names.above(node):
        decorated = isinstance(called, ast.FunctionDef) and called.decorator_list
        if decorated:
            text = f"{node.id} carries @nki.jit and is used inside a kernel; drop its decorator"
            yield at(node, "NKI-E208", text)


def _check_list_defaults(kernel: FunctionNode) -> Iterator[Finding]:
    for default in kernel.args.defaults:
        if isinstance(default, ast.List):
            text = f"kernel arguments cannot be lists; write the tuple for {ast.unparse(default)}"
            yield at(default, "NKI-E209", text)


def _check_list_arguments(node: ast.Call, names: Names) -> Iterator[Finding]:
    called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    if names.definition(called) in names.kernels:
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if isinstance(value, ast.List):
                text = f"kernel arguments cannot be lists; pass the tuple for {ast.unparse(value)}"
                yield at(value, "NKI-E209", text)


def check_purity(names: Names, api: Api) -> Iterator[Finding]:
    """E211, W211: neuronxcc; E212: global. In force in every version."""
    for node in ast.walk(names.tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        if any(module.partition(".")[0] == "neuronxcc" for module in modules):
            code = "NKI-W211" if before(api.version, "0.4") else "NKI-E211"
            text = "neuronxcc.nki is the API of NKI 0.1, refused in kernels since 0.4; import nki"
            yield at(node, code, text)
    for node in names.kernel_nodes():
        if isinstance(node, ast.Global):
            text = (
                f"global {', '.join(node.names)}: compiled kernels are cached by their arguments, "
                "so a kernel must not depend on or change outer state"
            )
            yield at(node, "NKI-E212", text)


def check_device_loops(names: Names, api: Api) -> Iterator[Finding]:
    """E215-E221, W215: loops that run on the device."""
    for node in names.kernel_nodes():
        if isinstance(node, ast.For) and _calls(node.iter, "nki.language.dynamic_range", names):
            yield from _check_carried(node, names, None)
        if isinstance(node, ast.While) and _is_register(node.test, names):
            if before(api.version, "0.6"):
                continue
            code = "NKI-W215" if before(api.version, "0.7") else "NKI-E215"
            word = "deprecated since NKI 0.6" if code == "NKI-W215" else "removed in NKI 0.7"
            yield at(node, code, f"'while' on a register is {word}; use nl.while_loop(init, body)")
        elif isinstance(node, ast.Call):
            path = names.resolve(node.func)
            if path in ("nki.language.fori_loop", "nki.language.while_loop"):
                yield from _check_device_loop(node, path.rpartition(".")[2], names)
            if path == "nki.language.fori_loop" and not before(api.version, "0.7"):
                yield from _check_bounds(node, names)


def _check_bounds(node: ast.Call, names: Names) -> Iterator[Finding]:
    """From 0.7 the variable is a register if a bound is one, else an NkiScalar."""
    given = dict(zip(("lower", "upper", "body_fun"), node.args, strict=False))
    given.update({k.arg: k.value for k in node.keywords if k.arg})
    if any(_is_register(given[n], names) for n in ("lower", "upper") if n in given):
        return
    todo = [names.definition(given["body_fun"])] if "body_fun" in given else []
    seen: list[object] = []
    while todo:  # the body and the functions of the file that it calls
        function = todo.pop()
        if not isinstance(function, ast.FunctionDef) or function in seen:
            continue
        seen.append(function)
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            if names.resolve(call.func) == "nki.isa.register_store":
                text = (
                    "the variable of nl.fori_loop is no register in NKI 0.7 unless a bound is one, "
                    "and nisa.register_store takes registers; pass a bound as "
                    "nisa.register_alloc(n)"
                )
                yield at(node, "NKI-E220", text)
                return
            todo.append(names.definition(call.func))


def _calls(node: ast.AST | None, path: str, names: Names) -> bool:
    return isinstance(node, ast.Call) and names.resolve(node.func) == path


def _is_register(node: ast.expr, names: Names) -> bool:
    if _calls(node, "nki.isa.register_alloc", names):
        return True
    if not isinstance(node, ast.Name):
        return False
    for binding in names.lookup(node.id, names.scope_of[node]):
        made = binding.node.value if isinstance(binding.node, ast.Assign) else None
        if _calls(made, "nki.isa.register_alloc", names):
            return True
    return False


def _check_device_loop(node: ast.Call, loop: str, names: Names) -> Iterator[Finding]:
    for around in names.above(node):
        if isinstance(around, ast.With) and any(
            _calls(i.context_expr, "nki.language.no_reorder", names) for i in around.items
        ):
            yield at(node, "NKI-E216", f"nl.{loop} cannot stand inside nl.no_reorder()")
    given = dict(zip(("lower", "upper", "body_fun", "step"), node.args, strict=False))
    if loop == "while_loop":
        given = dict(zip(("init", "body_fun"), node.args, strict=False))
    given.update({k.arg: k.value for k in node.keywords if k.arg})
    step = given.get("step")
    if step is not None and _literal(step) is not None and _literal(step) < 1:  # type: ignore[operator]
        yield at(step, "NKI-E218", f"the step of nl.{loop} must be a positive whole number")
    body = names.definition(given["body_fun"]) if "body_fun" in given else None
    if not isinstance(body, ast.FunctionDef):
        return
    yield from _check_carried(body, names, body)
    returned = [r for r in _own_returns(body) if r.value is not None]
    if loop == "fori_loop":
        for statement in returned:
            text = f"{body.name} returns a value, and the body of nl.fori_loop must not"
            yield at(statement, "NKI-E217", text)
        yield from _check_loop_variable(body)
    elif not returned:
        text = f"{body.name} must return the register that continues nl.while_loop"
        yield at(body, "NKI-E217", text)


def _check_carried(
    loop: ast.For | ast.FunctionDef, names: Names, body: ast.FunctionDef | None
) -> Iterator[Finding]:
    """E221: a Python value that one turn of a loop on the device leaves to the next.

    body: the function that is the loop's body, whose own names end with each turn.
    """
    first: dict[str, ast.AST] = {}
    written: dict[str, ast.AST] = {}
    changed: dict[ast.AST, str] = {}
    for node in (n for statement in loop.body for n in _in_order(statement)):
        if isinstance(node, ast.Name):
            first.setdefault(node.id, node)
            if isinstance(node.ctx, ast.Store):
                written.setdefault(node.id, node)
        kept = _changed_collection(node)
        if kept is not None and _collection_outside(kept, loop, names):
            changed[kept] = kept.id
    for name, node in written.items():
        inner = None if body is None else names.scope_of[node]
        own = inner is not None and name not in inner.outward
        if not own and first[name] is not node:
            changed[node] = name
    for node, name in changed.items():
        text = (
            f"{name} changes from turn to turn in Python, and the body of a loop on the device is "
            "traced once; keep it in a register or a tile, or unroll with a Python for loop"
        )
        yield at(node, "NKI-E221", text)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement's nodes as they are evaluated: values before what is assigned."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
        children.remove(node.value)
        children.insert(0, node.value)
    for child in children:
        yield from _in_order(child)
    yield node


def _changed_collection(node: ast.AST) -> ast.Name | None:
    """Return the name whose items or attributes a node may change in Python."""
    changed: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _CHANGES:
            changed = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        changed = node.value
    return changed if isinstance(changed, ast.Name) else None


def _collection_outside(name: ast.Name, loop: ast.For | ast.FunctionDef, names: Names) -> bool:
    """Return whether a name is a list, dict or set that is made before the loop."""
    for binding in names.lookup(name.id, names.scope_of[name]):
        made = binding.node.value if isinstance(binding.node, ast.Assign) else None
        if isinstance(made, _COLLECTIONS) and loop not in names.above(made):
            return True
    return False


def _check_loop_variable(body: ast.FunctionDef) -> Iterator[Finding]:
    if not body.args.args:
        return
    variable = body.args.args[0].arg
    for node in ast.walk(body):
        operands = [node.left, node.right] if isinstance(node, ast.BinOp) else []
        if any(isinstance(o, ast.Name) and o.id == variable for o in operands):
            text = (
                f"{variable} is a register in the body of nl.fori_loop: no Python arithmetic; "
                f"pass it as .ap(..., scalar_offset={variable})"
            )
            yield at(node, "NKI-E219", text)


def _literal(node: ast.expr) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _literal(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    return None


def _own_returns(function: ast.FunctionDef) -> Iterator[ast.Return]:
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))
