"""Digests of what decides a figure, for the rows that a benchmark keeps.

A row is true while these digests are what they were when it was computed. They are of what code
does: comments, docstrings and layout do not count, nor do files that only show a figure. Each
kernel has digests of its own, so that a change of one kernel leaves the figures of others.

    meaning(text)          what Python source does, as text
    simulator(beta_1)      the simulator: what it runs and what that costs
    machine(target)        the numbers of a target
    closed_form(family)    the closed form's figures of kernels of models
    chosen_by(family)      how a family's schedule is chosen
    templates(family)      the same and the kernel that codegen specializes
    emitted(spec, ...)     the kernel that codegen writes today for a schedule
    foreign(file, name)    somebody else's kernel, with the functions that it calls
    as_traced(model, tp)   which kernels the passes make of a model
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kernel_rows import MODELS, rank

import nmm_compiler
from nmm_compiler.codegen.emitted_file import kernel_source
from nmm_compiler.codegen.estimate import estimate_us
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.lowrank_shared import LowRankSharedSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.prediction.meta_models import read_config
from nmm_compiler.prediction.predict import model_phases, prepare
from nmm_compiler.prediction.prices import with_weights
from nmm_compiler.prediction.tensor_parallel import SPLITS
from nmm_compiler.prediction.walk import walk
from nmm_compiler.targets import get

PACKAGE = Path(nmm_compiler.__file__).resolve().parent
LENGTH = 8
MODEL_TOKENS = (1, 8, 32, 128, 512, 2048)

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "codegen/code_digests.py": "the key of the kernel cache",
        "codegen/machine_target.py": "a target as one machine is known to be",
        "kernels/__init__.py": "the list of families: each is digested alone",
        "kernels/error_bounds.py": "how wrong a result may be, not how fast it comes",
        "simulator/collectives.py": "kernels of several cores, which no row holds",
        "simulator/timing/advice.py": "what would be faster than a finished timeline",
        "simulator/timing/causes.py": "why engines of a finished timeline waited",
        "simulator/timing/chrome_trace.py": "writes a finished timeline",
        "simulator/timing/evidence.py": "how wrong figures have been",
        "simulator/timing/profile_parts.py": "shows a finished timeline",
        "simulator/timing/shares.py": "shares of a finished timeline by line",
        "simulator/variable_names.py": "names of tensors in messages",
    }
)
"""File of the package -> why it decides no figure."""


def digest(*texts: str) -> str:
    """Return a short digest of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:LENGTH]


@functools.cache
def meaning(text: str) -> str:
    """Return what Python source does: without comments, layout and docstrings.

    The text is the same for every version of Python that reads the source.
    """
    return _text(ast.parse(text))


def _text(node: Any) -> str:
    if isinstance(node, list):
        return f"[{' '.join(_text(one) for one in node if not _docstring(one))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({' '.join(f'{n}={_text(v)}' for n, v in fields)})"


def _docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def of_files(files: Iterable[Path], package: Path = PACKAGE) -> str:
    """Return the digest of files of the package, those left out excepted."""
    named = {file.relative_to(package).as_posix(): file for file in files}
    texts = []
    for name in sorted(named.keys() - LEFT_OUT.keys()):
        text = named[name].read_text(encoding="utf-8")
        texts += [name, meaning(text) if name.endswith(".py") else text]
    return digest(*texts)


@functools.cache
def simulator(beta_1: bool = False, package: Path = PACKAGE) -> str:
    """Return the digest of the simulator; beta_1: with what runs NKI Beta 1."""
    room = package / "simulator"
    files = (file for file in room.rglob("*.py") if beta_1 or room / "beta1" not in file.parents)
    return of_files(files, package)


@functools.cache
def machine(target: str, package: Path = PACKAGE) -> str:
    """Return the digest of a target's numbers."""
    chip = get(target)
    words = ("summary", "instances", "sources", "absent_instructions")
    fields = (f.name for f in dataclasses.fields(chip) if f.name not in words)
    numbers = (f"{name}={getattr(chip, name)!r}" for name in fields)
    return digest(*numbers, of_files([package / "targets" / "base.py"], package))


@functools.cache
def closed_form(family: str, target: str) -> str:
    """Return the digest of the closed form's figures of a family, for kernels of the six models.

    It is of figures and not of code, since all of them take milliseconds to compute.
    """
    chip = get(target)
    formats = ("bfloat16", "float8_e4m3") if chip.float8_kernels else ("bfloat16",)
    specs = {with_weights(spec, name): None for spec in _of_models(family) for name in formats}
    return digest(*(f"{estimate_us(spec, chip):.9g}" for spec in specs))


def _of_models(family: str) -> Iterable[KernelSpec]:
    """Yield kernels of a family as models launch them."""
    if family == "attention":
        for m, batch in ((1, 1), (1, 32), (128, 1), (2048, 1), (2048, 8)):
            for context, heads, kv_heads, d in ((4096, 32, 8, 64), (32768, 16, 8, 128)):
                reads = context if m == 1 else m
                yield AttentionSpec(m=m, batch=batch, context=reads, heads=heads,
                                    kv_heads=kv_heads, d=d)  # fmt: skip
        return
    for (hidden, wide), m, part in itertools.product(MODELS.values(), MODEL_TOKENS, (1, 4)):
        n, r = wide // part, rank(hidden, wide)
        for x in ("row", "col"):
            if family == "gated_mlp":
                yield GatedMLPSpec(m=m, k=hidden, n=n, r=r, x_layout=x)
                yield GatedMLPSpec(m=m, k=hidden, n=n, r=0, x_layout=x)
            elif family == "gated_mlp_up":
                yield GatedMLPUpSpec(m=m, k=hidden, n=n, r=r, x_layout=x, out_layout="col")
                yield GatedMLPUpSpec(m=m, k=hidden, n=n, r=0, x_layout=x, out_layout="col")
            elif family == "lowrank_shared":
                pairs = ((r, (n, n)), (r, (n,)))
                yield LowRankSharedSpec(m=m, k=hidden, pairs=pairs, x_layout=x)
            for k, out in ((hidden, n), (n, hidden)):
                if family == "lowrank":
                    yield LowRankSpec(m=m, k=k, r=r, n=out, x_layout=x)
                elif family == "matmul":
                    yield MatmulSpec(m=m, k=k, n=out, x_layout=x)


@functools.cache
def chosen_by(family: str, package: Path = PACKAGE) -> str:
    """Return the digest of the code that ranks and chooses a family's schedules."""
    return of_files(_imported(_starts(family, package), package), package)


@functools.cache
def templates(family: str, package: Path = PACKAGE) -> str:
    """Return the digest of `chosen_by` and of the kernel's template with its pieces."""
    start = [*_starts(family, package), package / "kernels" / _folder(family) / "kernel.py"]
    return of_files(_imported(start, package), package)


def _folder(family: str) -> str:
    return Path(FAMILIES[family].path).parent.name


def _starts(family: str, package: Path) -> list[Path]:
    folder = package / "kernels" / _folder(family)
    choice = (package / "codegen" / f"{name}.py" for name in ("choose", "latency"))
    return [folder / "spec.py", folder / "schedule.py", *choice]


def _imported(start: Iterable[Path], package: Path) -> set[Path]:
    """Return files with all that they import of rooms that say how kernels are made."""
    found: set[Path] = set()
    waiting = list(start)
    while waiting:
        file = waiting.pop()
        if file in found or file.relative_to(package).as_posix() in LEFT_OUT:
            continue
        found.add(file)
        for one in _imports(file.read_text(encoding="utf-8")):
            waiting += _files(*one, file, package)
    return found


@functools.cache
def _imports(text: str) -> list[tuple[int, str, tuple[str, ...]]]:
    """Return (dots, module, names) of each import that names what it takes."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return [(n.level, n.module or "", tuple(alias.name for alias in n.names)) for n in nodes]


def _files(
    level: int, name: str, imported: tuple[str, ...], file: Path, package: Path
) -> list[Path]:
    words = name.split(".")
    if level:
        base = file.parents[level - 1]
    elif words[0] == "nmm_compiler":
        base, words = package, words[1:]
    else:
        return []
    module = base.joinpath(*words)
    if module.relative_to(package).parts[:1] not in (("kernels",), ("codegen",)):
        return []
    some = [module.with_suffix(".py"), module / "__init__.py"]
    some += [module / f"{one}.py" for one in imported]
    return [one for one in some if one.is_file()]


def emitted(spec: KernelSpec, target: str, schedule: Mapping[str, Any]) -> str:
    """Return the digest of the kernel that codegen writes for a schedule; "" if it is none now."""
    kind = FAMILIES[spec.family].schedule_class
    try:
        name, text = kernel_source(spec, kind.from_dict(dict(schedule)), get(target))
    except TypeError:  # a field that schedules no longer have
        return ""
    return digest(meaning(text.replace(name, "kernel")))


def foreign(file: Path, name: str) -> str:
    """Return the digest of a function of a file, with those of the file that it names."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    known: dict[str, ast.stmt] = {one.name: one for one in tree.body if isinstance(one, kinds)}
    for one in tree.body:
        if isinstance(one, ast.Assign):
            known |= {t.id: one for t in one.targets if isinstance(t, ast.Name)}
    found: set[str] = set()
    waiting = {name} & known.keys()
    while waiting:
        found.add(here := waiting.pop())
        names = {node.id for node in ast.walk(known[here]) if isinstance(node, ast.Name)}
        waiting |= (names & known.keys()) - found
    return digest(*(_text(known[one]) for one in sorted(found)))


class Traced(NamedTuple):
    """What the passes make of a model: a digest, and the families of kernels in it.

    dense, low: of the dense model, and of that with low-rank factors.
    """

    digest: str
    dense: frozenset[str]
    low: frozenset[str]


@functools.cache
def as_traced(model: str, tp: int, target: str = "trn1") -> Traced:
    """Return which kernels and regions the passes make of a model's layer.

    Dense, and with factors of a tenth fewer parameters in its MLPs; a prompt and a token.
    """
    setting = {"prompt": 128, "context": 512, "batch": 1}
    factors = {"ratio": 0.1, "rank": None, "include": ["mlp"], "exclude": None}
    texts: list[str] = []
    families: dict[bool, set[str]] = {False: set(), True: set()}
    for low, split in ((None, SPLITS[0]), *((factors, split) for split in SPLITS)):
        made = prepare(read_config(model), low, "bfloat16", split, tp).model
        for phase in model_phases(made, setting, None):
            for piece in walk(made, phase.inputs(), target):
                ways = [[str(spec) for spec in way] for way in piece.ways]
                texts.append(f"{dataclasses.replace(piece, ways=())} {ways}")
                families[low is not None] |= {spec.family for way in piece.ways for spec in way}
    return Traced(digest(*texts), frozenset(families[False]), frozenset(families[True]))
