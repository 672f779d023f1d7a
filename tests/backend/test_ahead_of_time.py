"""aot_compile in one process, load in another without the model: kernels, options, report."""

import importlib
import sys

import pytest
import torch
from processes import ran
from torch import nn

import nmm_compiler as nmm

MODEL = """
import torch
import torch.nn.functional as F

def weights():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g) for s in ((5, 64), (8, 64), (48, 8), (48,))]

def model(x, a, b, c):
    return torch.relu(F.linear(F.linear(x, a), b, c))
"""
LOAD = """
import sys, torch
g = torch.Generator().manual_seed(0)
x, a, b, c = (torch.randn(s, generator=g) for s in ((5, 64), (8, 64), (48, 8), (48,)))
with open(sys.argv[1], "rb") as file:
    loaded = torch.compiler.load_compiled_function(file)
import nmm_compiler
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen import build
build.choose = None  # a kernel that is not in the file could not be built
report = nmm_compiler.last_report()
assert report.chains == 1 and report.executor == "simulator", report
(line,) = report.kernels
with torch.no_grad():
    y = loaded(x, a, b, c)
exact = torch.relu(x.double() @ a.double().T @ b.double().T + c.double())
error = float((y.double() - exact).abs().max())
assert error <= 2.0**-23 * 72 * float(exact.abs().max()), error
from nmm_compiler.runtime.kernels import KERNELS
(kernel,) = KERNELS.found.values()
assert kernel.name == line.name
print("ran", kernel.name)
"""
LOAD_EXPORT = """
kind, path, values = sys.argv[2:]
x, want = torch.load(values)
if kind == "aoti":
    loaded = torch._inductor.aoti_load_package(path)
else:
    loaded = torch.export.load(path).module()
torch.testing.assert_close(loaded(x), want, rtol=1e-5, atol=1e-5)
print("loaded", kind)
"""


class OfTheUser(nn.Module):
    """What the other process has no code of."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 48)

    def forward(self, x):
        return torch.relu(self.up(self.down(x)))


def save_rewritten(kind, path, values):
    """Save a rewritten model as a program of this kind, with an input and its result."""
    model, x = OfTheUser().eval().requires_grad_(False), torch.randn(5, 64)
    result = nmm.rewrite(model, (x,), verify=True)
    assert [m.kind for m in result.matches] == ["lowrank"]
    program = torch.export.export(result.graph_module, (x,))
    if kind == "aoti":
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    else:
        torch.export.save(program, path)
    torch.save((x, model(x)), values)


@pytest.mark.parametrize(
    ("inner", "kind"),
    [("eager", "export"), pytest.param("inductor", "aoti", marks=pytest.mark.long)],
)
def test_two_processes(inner, kind, tmp_path, monkeypatch):
    """Compiled and rewritten models saved in this process; the other one cannot import them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model_of_the_user.py").write_text(MODEL)
    saved = str(tmp_path / "saved.bin")
    monkeypatch.syspath_prepend(tmp_path / "model")
    user = importlib.import_module("model_of_the_user")
    monkeypatch.delitem(sys.modules, "model_of_the_user")
    options = {"inner": inner, "executor": "simulator", "buckets": (5,), "kernels": "build"}
    with torch.no_grad():
        compiled = torch.compile(user.model, fullgraph=True, backend="nmm", options=options)
        made = compiled.aot_compile((tuple(user.weights()), {}))
    made.save_compiled_function(saved)
    rewritten = kind, str(tmp_path / "saved.pt2"), str(tmp_path / "values.pt")
    save_rewritten(*rewritten)

    # Its cache is empty: the kernel comes out of the file.
    (tmp_path / "second").mkdir(mode=0o700)
    place = str(tmp_path / "second")
    done = ran("-c", LOAD + LOAD_EXPORT, saved, *rewritten, cwd=tmp_path, NMM_CACHE_DIR=place)
    assert "ran lowrank" in done.stdout
    assert f"loaded {kind}" in done.stdout
    assert len([*(tmp_path / "second").rglob("kernel.py")]) == 1


def test_inductor_calls_the_kernels_of_an_executor():
    model, x = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 48)), torch.randn(5, 64)
    options = {"executor": "simulator", "inner": "inductor", "kernels": "lazy", "strict": True}
    with torch.no_grad():
        y = torch.compile(model, backend="nmm", options=options)(x)
        exact = model.double()(x.double())
    assert nmm.last_report().fallback is None
    assert float((y.double() - exact).abs().max()) <= 2.0**-23 * 72 * float(exact.abs().max())
