"""House rules that ruff has no rule for: what no file of the package may contain.

An exception to a rule is written here with its reason, where everybody sees the whole list.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parent.parent
PACKAGE = TREE / "nmm_compiler"
ROOMS = ("nmm_compiler", "tests", "benchmarks", "docs", "examples")

ENVIRONMENT_FILE = "options.py"
# Running text is what these are for; everything else parses it or leaves it alone.
MAY_RUN_TEXT = {
    "simulator/loading/source_text.py": "the simulator runs kernel text, under stand-in modules",
    "simulator/isa/instruction.py": "an instruction's checks stand in line, as in a dataclass",
}
MAX_PARAMETERS = 9
# Functions whose parameters are the user's options, the operands of a torch op, or (in
# simulator/isa, under @instruction) the parameters that NKI gives an instruction.
MANY_PARAMETERS = {
    "cli/build.py": {"build"},
    "cli/compress.py": {"compress"},
    "cli/plan.py": {"plan"},
    "kernels/attention/op.py": {"attention"},
    "ops/gated_mlp.py": {"gated_mlp_up", "gated_mlp"},
    "ops/lowrank.py": {"lowrank_matmul"},
    "ops/lowrank_shared.py": {"lowrank_matmul_shared_x", "lowrank_matmul_shared_u"},
    "prediction/model_kernels.py": {"model_kernels"},
    "prediction/plan.py": {"plan"},
    "prediction/predict.py": {"predict"},
    "simulator/run.py": {"simulate"},
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_NAMES = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}


def _attribute(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def faults_of(file: str, text: str) -> Iterator[str]:
    """Yield `file:line: what, and the way out` for each rule that a file breaks."""
    tree = ast.parse(text, file)
    lines = text.splitlines()
    if Path(file).name in FORBIDDEN_NAMES:
        yield f"{file}:1: a file named so collects strangers; name it after its one idea"
    if not ast.get_docstring(tree):
        yield f"{file}:1: no module docstring; say what goes in, what comes out, the hard idea"
    for node in ast.walk(tree):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler):
            yield from _handler_faults(node, where, lines)
        elif isinstance(node, ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                yield f"{where}: star import; name what you use"
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                yield f"{where}: {node.module} runs what it reads; use JSON or safetensors"
            if node.module == "os" and {a.name for a in node.names} & {"environ", "getenv"}:
                yield f"{where}: the environment is read in options.py only"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in FORBIDDEN_MODULES:
                    yield f"{where}: {alias.name} runs what it reads; use JSON or safetensors"
        elif isinstance(node, ast.Attribute):
            if _attribute(node) in ("os.environ", "os.getenv", "os.putenv", "os.environb") and (
                file != ENVIRONMENT_FILE and not _is_set_for_others(node, tree)
            ):
                yield f"{where}: the environment is read in options.py only; add a function there"
        elif isinstance(node, ast.Call):
            yield from _call_faults(node, where, file)
    yield from _comment_faults(file, text)


def _handler_faults(node: ast.ExceptHandler, where: str, lines: list[str]) -> Iterator[str]:
    if node.type is None:
        yield f"{where}: bare except; name the exceptions"
        return
    names = {_attribute(part) for part in ast.walk(node.type)}
    if names & {"Exception", "BaseException"}:
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        kept = any(  # to be raised later, in another thread
            isinstance(inner, ast.Assign) and _attribute(inner.value) == (node.name or "-")
            for inner in ast.walk(node)
        )
        around = lines[node.lineno - 2 : node.body[0].lineno]
        if not (raises or kept) and not any("#" in line for line in around):
            yield (
                f"{where}: except {ast.unparse(node.type)} without a reason; name the exceptions, "
                "or say in a comment on the line why all of them, and warn"
            )


def _is_set_for_others(node: ast.Attribute, tree: ast.Module) -> bool:
    """Return whether os.environ is written (for a library that reads it) and not read."""
    for outer in ast.walk(tree):
        if isinstance(outer, ast.Subscript) and outer.value is node:
            return isinstance(outer.ctx, (ast.Store, ast.Del))
    return False


def _call_faults(node: ast.Call, where: str, file: str) -> Iterator[str]:
    name = _attribute(node.func)
    if name in ("eval", "exec") and file not in MAY_RUN_TEXT:
        yield f"{where}: {name}(); text is parsed here, not run"
    if name == "torch.load":
        yield f"{where}: torch.load unpickles; read safetensors"
    if name in ("np.load", "numpy.load"):
        safe = [
            isinstance(k.value, ast.Constant) and k.value.value is False
            for k in node.keywords
            if k.arg == "allow_pickle"
        ]
        if safe not in ([True], []):
            yield f"{where}: np.load with pickle permitted"
    if name.startswith("subprocess.") and any(
        k.arg == "shell" and getattr(k.value, "value", True) for k in node.keywords
    ):
        yield f"{where}: shell=True; pass a list of arguments"
    if name in ("os.system", "os.popen"):
        yield f"{where}: {name} runs a shell; use subprocess with a list"


def _comment_faults(file: str, text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        where = f"{file}:{token.start[0]}"
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
            yield f"{where}: {token.string.strip()!r}; do it, or write an issue"
        if re.search(r"type:\s*ignore(?!\[)", token.string):
            yield f"{where}: name what is ignored: # type: ignore[code]"
        if re.search(r"noqa(?!:)", token.string):
            yield f"{where}: name what is ignored: # noqa: CODE"


# Files that comments name and that are not ours: of a user, of AWS's libraries.
NAMED_ELSEWHERE = {
    "a.py", "add.py", "b.py", "file.py", "my_kernel.py", "name.py", "mlp.py", "qkv_cte.py",
    "rope.py", "gate_up_projection_mx_shard_H.py", "output_projection_cte_parameters.py",
    "output_projection_tkg.py", "test_speedup.py",
}  # fmt: skip
NAMED_FILE = re.compile(r"(?<![\w/.<>*{-])((?:[\w-]+/)*[a-z_]\w*\.(?:py|md|toml))\b(?![/*<{])")


def ends_of_paths(files: list[str]) -> set[str]:
    """Return each file's path, and each end of it: a comment may leave out the folders above."""
    parts = [file.split("/") for file in files]
    return {"/".join(path[first:]) for path in parts for first in range(len(path))}


def lost_files(file: str, text: str, ends: set[str]) -> Iterator[str]:
    """Yield `file:line: name` of each file that a comment or a docstring names and nobody has."""
    known = ends | NAMED_ELSEWHERE
    if known.issuperset(NAMED_FILE.findall(text)):
        return  # which takes a hundredth of reading its tokens
    said = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(text, file)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            said.append((getattr(node, "lineno", 1), ast.get_docstring(node) or ""))
    for line, words in said:
        for name in NAMED_FILE.findall(words):
            if name not in known:
                yield f"{file}:{line}: {name}"


def test_files_that_comments_name_exist():
    paths = [path for room in ROOMS for path in (TREE / room).rglob("*.*")] + list(TREE.glob("*.*"))
    files = [path.relative_to(TREE).as_posix() for path in paths]
    ends = ends_of_paths(files)
    faults = [
        fault
        for file in files
        if file.endswith(".py")
        for fault in lost_files(file, (TREE / file).read_text("utf-8"), ends)
    ]
    assert not faults, "named and not there:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("# see room/a.py\n", []),
        ("# see a.py, other/a.py\n", ["f.py:1: other/a.py"]),
        ('def f():\n    """What b.md says of top/room/a.py."""\n', ["f.py:1: b.md"]),
        ("# FILE.py, <name>.py, room/*.py and x/{family}.py stand for any\n", []),
        ("x = 'gone.py'\n", []),
    ],
)
def test_a_lost_file_is_found(text, lost):
    assert list(lost_files("f.py", text, ends_of_paths(["top/room/a.py"]))) == lost


def test_the_package_keeps_the_house_rules():
    faults = [
        fault
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in faults_of(path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8"))
    ]
    assert not faults, f"{len(faults)} fault(s):\n" + "\n".join(faults)


def long_signatures(file: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, fault) of each function with more than MAX_PARAMETERS, self left out."""
    tree = ast.parse(text, file)
    methods = {
        id(node)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if "staticmethod" not in map(_attribute, getattr(node, "decorator_list", ()))
    }
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        given = node.args
        named = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        count = sum(argument is not None for argument in named) - (id(node) in methods)
        if count > MAX_PARAMETERS and not _is_of_nki(file, node):
            yield (
                node.name,
                f"{file}:{node.lineno}: {node.name} has {count} parameters, over "
                f"{MAX_PARAMETERS}; hand over a record",
            )


def _is_of_nki(file: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the parameters are those of an instruction of NKI."""
    decorators = [getattr(d, "func", d) for d in node.decorator_list]
    return file.startswith("simulator/isa/") and "instruction" in map(_attribute, decorators)


def test_only_public_functions_have_many_parameters():
    found: dict[str, set[str]] = {}
    faults = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for name, fault in long_signatures(file, path.read_text("utf-8")):
            found.setdefault(file, set()).add(name)
            if name not in MANY_PARAMETERS.get(file, set()):
                faults.append(fault)
    assert not faults, f"{len(faults)} fault(s):\n" + "\n".join(faults)
    assert found == MANY_PARAMETERS, "MANY_PARAMETERS names functions that are shorter, or gone"
    assert not [name for names in found.values() for name in names if name.startswith("_")]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(a, b, c, d, e, f, g, h, i): pass", 0),
        ("def f(a, /, b, c, d, e, f, g, h, *, i, j): pass", 1),
        ("async def f(a, b, c, d, e, f, g, h, *i, **j): pass", 1),
        ("def f():\n    def g(a, b, c, d, e, f, g, h, i, j): pass", 1),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h, i): pass", 0),
        ("class A:\n    @staticmethod\n    def f(a, b, c, d, e, f, g, h, i, j): pass", 1),
        ("@instruction()\ndef f(a, b, c, d, e, f, g, h, i, j): pass", 0),
        ("@other()\ndef f(a, b, c, d, e, f, g, h, i, j): pass", 1),
    ],
)
def test_parameters_are_counted(text, count):
    assert len(list(long_signatures("simulator/isa/a.py", text))) == count


def test_no_exception_is_kept_for_a_file_that_is_gone():
    files = (*MAY_RUN_TEXT, ENVIRONMENT_FILE)
    assert [file for file in files if not (PACKAGE / file).is_file()] == []


DOC = '"""What it is."""\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "no module docstring"),
        (DOC + "try:\n    x = 1\nexcept:\n    x = 2\n", "bare except"),
        (DOC + "try:\n    x = 1\nexcept Exception:\n    x = 2\n", "without a reason"),
        (
            DOC + "try:\n    x = 1\nexcept (OSError, Exception) as e:\n    x = 2\n",
            "without a reason",
        ),
        (DOC + "from os import *\n", "star import"),
        (DOC + "import os\nx = os.environ['A']\n", "environment"),
        (DOC + "import os\nx = os.environ.get('A')\n", "environment"),
        (DOC + "import os\nx = os.getenv('A')\n", "environment"),
        (DOC + "from os import environ\n", "environment"),
        (DOC + "import pickle\n", "runs what it reads"),
        (DOC + "from pickle import loads\n", "runs what it reads"),
        (DOC + "x = eval('1')\n", "eval()"),
        (DOC + "exec('1')\n", "exec()"),
        (DOC + "import torch\nx = torch.load('a')\n", "unpickles"),
        (DOC + "import numpy as np\nx = np.load('a', allow_pickle=True)\n", "pickle"),
        (DOC + "import subprocess\nsubprocess.run('x', shell=True)\n", "shell"),
        (DOC + "x = 1  # " + "TODO: more\n", "issue"),
        (DOC + "x = 1  # type: " + "ignore\n", "code"),
        (DOC + "x = 1  # no" + "qa\n", "CODE"),
    ],
)
def test_the_rules_find(text, said):
    faults = list(faults_of("room/file.py", text))
    assert len(faults) == 1, faults
    assert said in faults[0]
    assert faults[0].startswith("room/file.py:")


@pytest.mark.parametrize(
    "text",
    [
        DOC + "try:\n    x = 1\nexcept Exception:  # plug-ins raise what they like\n    x = 2\n",
        DOC + "try:\n    x = 1\nexcept Exception as e:\n    raise ValueError from e\n",
        DOC + "try:\n    x = 1\nexcept BaseException as e:\n    failure = e\n",
        DOC + "import os\nos.environ['NEURON_FLAG'] = '1'\n",
        DOC + "model.eval()\n",
        DOC + "x = 1  # type: ignore[arg-type]\n",
    ],
)
def test_the_rules_leave_alone(text):
    assert list(faults_of("room/file.py", text)) == []
