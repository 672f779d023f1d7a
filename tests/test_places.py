"""How many places a change touches: a toy of each kind works in a copy of the package.

Each toy is a set of edits: new files, and lines added to files that are there. That the toy works
with these edits alone is the proof that no other place has to know of it. CONTRIBUTING.md repeats
the numbers.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from processes import ran

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nmm_compiler"


@dataclasses.dataclass(frozen=True)
class Toy:
    """New files, lines of text put before or after a line that is there, and what then works."""

    files: dict[str, str]
    lines: tuple[tuple[str, str, str], ...]  # (file, the text that is there, what it becomes)
    works: str  # a program that prints what is expected
    prints: str


def as_toy(family: str, file: str) -> str:
    """Return a file of a family as the same file of a family called toy."""
    text = (PACKAGE / "kernels" / family / file).read_text()
    for word in ("Spec", "Schedule"):
        text = text.replace(family.capitalize() + word, "Toy" + word)
    text = text.replace(family.upper(), "TOY").replace(f" {family}(**named)", " toy(**named)")
    for old in ('"{}"', 'f"{} ', "kernels.{}", "`{}`", "def {}(", "bare={},"):
        text = text.replace(old.format(family), old.format("toy"))
    return text


def family_toy(family: str, works: str, prints: str) -> Toy:
    """Return a family that computes what another one does, under another name."""
    there = f"from nmm_compiler.kernels.{family}.schedule import {family.upper()}\n"
    files = ("__init__.py", "spec.py", "schedule.py", "kernel.py", "op.py")
    return Toy(
        files={f"kernels/toy/{file}": as_toy(family, file) for file in files},
        lines=(
            (
                "kernels/__init__.py",
                there,
                there + "from nmm_compiler.kernels.toy.schedule import TOY\n",
            ),
            ("kernels/__init__.py", "(*LINEAR, ATTENTION", "(*LINEAR, ATTENTION, TOY"),
        ),
        works=(
            "import torch\n"
            "from nmm_compiler.codegen.build import build_kernel\n"
            "from nmm_compiler.codegen.check_against_float64 import prove\n"
            "from nmm_compiler.kernels.toy import ToySpec\n"
            "import nmm_compiler.ops.registration\n"
        )
        + works,
        prints=prints,
    )


TOYS = {
    "target": Toy(
        files={
            "targets/toy.py": (
                '"""A toy."""\n\n'
                "from nmm_compiler.targets.base import assumed\n"
                "from nmm_compiler.targets.trn3 import TARGET as TRN3\n\n"
                "TARGET = TRN3.variant(\n"
                '    "toy", generation="gen4", summary="a toy", instances=("toy",),\n'
                '    hbm_bytes_per_second=assumed(1.0e9, "a toy has a slow memory"),\n)\n'
            )
        },
        lines=(),
        works=(
            "from nmm_compiler.codegen.build import build_kernel\n"
            "from nmm_compiler.kernels.linear.specs import LowRankSpec\n"
            "from nmm_compiler.options import Options\n"
            "spec = LowRankSpec(m=16, k=128, r=64, n=128)\n"
            "times = [build_kernel(spec, name).profile().latency_us for name in ('toy', 'trn3')]\n"
            "print(Options(target='toy').target, times[0] > 5 * times[1])\n"
        ),
        prints="toy True",
    ),
    "kernel family": family_toy(
        "attention",
        "kernel = build_kernel(ToySpec(m=1, context=256, heads=2, d=64), 'trn2')\n"
        "q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))\n"
        "wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "print(kernel.name.split('_')[0], prove(kernel).passed,\n"
        "      torch.allclose(torch.ops.nmm.toy(q, k, v, causal=True), wanted, atol=1e-6))\n",
        "toy True True",
    ),
    "rewrite rule": Toy(
        files={
            "passes/rules/toy.py": (
                '"""Rule `toy`: neg(neg(x)) -> x."""\n\n'
                "from nmm_compiler.passes.rules.base import Match, Rule\n\n\n"
                "class Toy(Rule):\n"
                '    """Drops two signs."""\n\n'
                '    name = "toy"\n\n'
                "    def pattern(self, graph, node):\n"
                "        found = [n for n in node.all_input_nodes if 'neg' in str(node.target)]\n"
                "        if found and 'neg' in str(found[0].target):\n"
                "            yield node, found[0]\n\n"
                "    def check(self, graph, candidate):\n"
                "        return Match(self.name, candidate[0], frozenset(candidate),\n"
                "                     data=candidate[1].all_input_nodes[0])\n\n"
                "    def rewrite(self, graph, match, editor):\n"
                "        return match.data\n"
            )
        },
        lines=(
            (
                "passes/pipeline.py",
                "from nmm_compiler.passes.rules.lora import LoRA\n",
                "from nmm_compiler.passes.rules.lora import LoRA\n"
                "from nmm_compiler.passes.rules.toy import Toy\n",
            ),
            ("passes/pipeline.py", "    MLA(),\n", "    MLA(),\n    Toy(),\n"),
        ),
        works=(
            "import torch\n"
            "from nmm_compiler.passes.pipeline import rewrite\n"
            "class M(torch.nn.Module):\n"
            "    def forward(self, x):\n"
            "        return -(-x) + 1\n"
            "traced = torch.fx.symbolic_trace(M())\n"
            "result = rewrite(traced, (torch.randn(3),), verify=True)\n"
            "print([m.rule for m in result.matches], 'neg' in str(result.graph_module.code))\n"
        ),
        prints="['toy'] False",
    ),
    "option": Toy(
        files={},
        lines=(
            (
                "options.py",
                "    strict: bool = False\n",
                "    strict: bool = False\n    toy: int = 3\n",
            ),
        ),
        works=(
            "from nmm_compiler.options import Options\n"
            "print(Options.make({'toy': 4}).toy, Options().toy)\n"
        ),
        prints="4 3",
    ),
    "instruction": Toy(
        files={},
        lines=(
            (
                "simulator/isa/elementwise.py",
                "@instruction(\n",
                '@instruction(\n    engines="vector",\n'
                '    operands="src[P F] -> dst[P F]",\n    cycles=cycles.copy,\n)\n'
                "def toy_halve(call: Call, dst: Any, src: Any) -> None:\n"
                '    """dst = src / 2."""\n'
                "    put(dst, f32(src) / 2)\n\n\n@instruction(\n",
            ),
        ),
        works=(
            "import numpy as np, pathlib, tempfile\n"
            "from nmm_compiler.nki_api.lint import lint_file\n"
            "from nmm_compiler.simulator.run import simulate\n"
            "path = pathlib.Path(tempfile.mkdtemp()) / 'k.py'\n"
            "path.write_text('''import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n\n"
            "@nki.jit\ndef halve(x):\n"
            '    """Halve."""\n'
            "    out = nl.ndarray((128, 8), dtype=x.dtype, buffer=nl.shared_hbm)\n"
            "    a = nl.ndarray((128, 8), dtype=x.dtype, buffer=nl.sbuf)\n"
            "    b = nl.ndarray((128, 8), dtype=x.dtype, buffer=nl.sbuf)\n"
            "    nisa.dma_copy(a, x)\n    nisa.toy_halve(b, a)\n    nisa.dma_copy(out, b)\n"
            "    return out\n''')\n"
            "done = simulate(path, np.full((128, 8), 3.0, np.float32))\n"
            "print(float(done.output[0, 0]), done.profile.engine_busy_us['vector'] > 0,\n"
            "      [str(f) for f in lint_file(path)])\n"
        ),
        prints="1.5 True []",
    ),
}
PLACES = {
    "target": 1,
    "kernel family": 6,
    "rewrite rule": 2,
    "option": 1,
    "instruction": 1,
}
"""Files that each toy touches; a family's folder is its four files and what it exports."""


PROGRAM = """
import json, os, sys, torch
for folder, works in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.path.insert(0, folder)
        exec(works, {"__name__": "toy"})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, folder
"""


def test_each_toy_works_in_as_many_places_as_promised(tmp_path):
    """Each in a copy and in a process of its own, which a process forks that has loaded torch."""
    programs = []
    for kind, toy in TOYS.items():
        copy = tmp_path / kind / "nmm_compiler"
        # with its compiled files, which hold for what is not edited; not those being written
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
        for name, text in toy.files.items():
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).write_text(text)
        for name, there, becomes in toy.lines:
            text = (copy / name).read_text()
            assert there in text, f"{name} has no line {there!r}"
            (copy / name).write_text(text.replace(there, becomes, 1))
        touched = {*toy.files, *(name for name, _, _ in toy.lines)}
        assert len(touched) == PLACES[kind], kind
        programs.append((str(copy.parent), toy.works))
    settings = {"PYTHONPATH": "", "NMM_CACHE": "off", "PYTHONDONTWRITEBYTECODE": "1"}
    done = ran("-c", PROGRAM, json.dumps(programs), cwd=tmp_path, **settings)
    assert done.stdout.splitlines() == [toy.prints for toy in TOYS.values()]
