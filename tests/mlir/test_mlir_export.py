"""export_mlir: every form parses back and verifies, calls equal matches, no transposes left."""

import hashlib
import json
import os
import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from mlir_golden import GOLDENS, golden_text
from mlir_models import MODELS, exported, llama_mlp, lora_call, one
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from toy_models import Model

import nmm_compiler.ops.registration  # noqa: F401  (defines torch.ops.nmm)
from nmm_compiler.errors import (
    MissingPackageError,
    ModelError,
    OptionTypeError,
    OutputError,
    UnknownNameError,
)
from nmm_compiler.mlir.export import export_mlir
from nmm_compiler.mlir.module import MLIRModule
from nmm_compiler.passes.pipeline import rewrite

pytest.importorskip("torch_mlir")

DIALECTS = ("torch", "linalg", "stablehlo")
MODES = ("call", "inline")


def parses_back(text: str, dialect: str) -> None:
    """Parse MLIR text in a fresh context and verify it, as a consumer does first."""
    from nmm_compiler.mlir.lower import context, ir, verify

    with context():
        verify(ir.Module.parse(text), dialect)


@cache
def matches(name: str) -> int:
    model, inputs = MODELS[name]()
    return len(rewrite(model, inputs).matches)


def kernel_calls(module: MLIRModule) -> list[str]:
    """The kernel that each call in the text names, read without our own code."""
    calls = re.findall(r"(?:call|custom_call) @(nmm_\w+)\(", module.text)
    return [call for call in calls if f"func.func @{call}" not in module.text]


QUICK = {
    *(("llama_mlp", dialect, mode) for dialect in DIALECTS for mode in MODES),
    ("lora", "torch", "call"),
    ("lora", "linalg", "inline"),
    ("lora", "stablehlo", "call"),
    ("bert_layer", "stablehlo", "call"),
}


def forms() -> list[Any]:
    """Every model, dialect and mode; of the small model all run by default, of others some."""
    return [
        pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.long])
        for one in product(("llama_mlp", "bert_layer", "lora"), DIALECTS, MODES)
    ]


@pytest.mark.parametrize(("name", "dialect", "mode"), forms())
def test_every_form_parses_back_with_as_many_calls_as_matches(
    name: str, dialect: str, mode: str
) -> None:
    module = exported(name, dialect, mode)
    count = matches(name)
    assert count >= 1
    assert len(kernel_calls(module)) == count
    assert sum(len(kernel.calls) for kernel in module.kernels) == count
    parses_back(module.text, dialect)
    assert "torch.operator" not in module.text
    if dialect != "torch":
        assert "!torch" not in module.text
        assert "f64" not in module.text or dialect == "linalg"  # linalg keeps scalar constants


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_distinct_kernel_is_declared_once(dialect: str) -> None:
    module = exported("llama_mlp", dialect, "call")
    names = [kernel.name for kernel in module.kernels]
    assert len(set(names)) == len(names)
    for name in names:
        declared = len(re.findall(rf"func\.func private @{name}\(", module.text))
        assert declared == (0 if dialect == "stablehlo" else 1)
        bodies = exported("llama_mlp", dialect, "inline").text
        assert len(re.findall(rf"func\.func private @{name}\(%arg0", bodies)) == 1


def test_equal_calls_share_one_kernel() -> None:
    a, b = (one()[0].low for _ in range(2))
    twice = Model(lambda m, x: m.a(x) * m.b(x * 2), a=a, b=b).eval()
    module = export_mlir(twice, (torch.randn(4, 16),), sources=False)
    (kernel,) = module.kernels
    assert len(kernel.calls) == 2
    assert kernel_calls(module) == [kernel.name] * 2


def test_operands_are_told_apart_where_one_of_equal_calls_repeats_a_tensor() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        low = torch.ops.nmm.lowrank_matmul
        return low(x, m.u, m.u) + low(x, m.u, m.v)

    model = Model(call, u=(16, 16), v=(16, 16))
    (kernel,) = export_mlir(model, (torch.randn(4, 16),), sources=False).kernels
    assert (len(kernel.calls), kernel.operands) == (2, (0, 1, 2))


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    path = Path(__file__).parent / "golden" / f"{name}.mlir"
    text = golden_text(name)
    assert len(text.splitlines()) < 60
    assert text == path.read_text(), (
        "run `python tests/mlir/mlir_golden.py` and look at the difference"
    )


def test_attributes_say_what_the_kernel_is() -> None:
    torch_form = export_mlir(*lora_call(), dialect="torch", sources=False)
    (kernel,) = torch_form.kernels
    spec = kernel.spec
    said = {"m": 6, "k": 32, "r": 4, "n": 48, "base": True, "bias": True, "scale": 2.0}
    assert {key: spec[key] for key in said} == said
    # the op takes x, u, v, bias, w; the NKI function x, u, v, w, bias
    assert kernel.operands == (0, 1, 2, 4, 3)
    declaration = next(line for line in torch_form.text.splitlines() if "nmm.spec" in line)
    assert 'nmm.family = "lowrank"' in declaration
    assert 'nmm.target = "trn2"' in declaration
    assert "nmm.operands = [0, 1, 2, 4, 3]" in declaration
    written = re.search(r'nmm\.spec = "(.*?)", ', declaration)
    assert written is not None
    assert json.loads(written.group(1).replace("\\22", '"')) == spec


def one_call(op: Any, shapes: Any, keywords: dict[str, Any]) -> Model:
    """Return a model that is one call of an op; its arguments are weights of these shapes."""
    flat, tree = pytree.tree_flatten(shapes, is_leaf=lambda s: s is None or isinstance(s, tuple))
    weights = {f"w{i}": shape for i, shape in enumerate(flat) if shape is not None}

    def function(m: Any, x: Tensor) -> Any:
        args = pytree.tree_unflatten([getattr(m, f"w{i}", None) for i in range(len(flat))], tree)
        return op(x, *args, **keywords)

    return Model(function, **weights)


OPS = {
    "gated_mlp": ([[(16, 4), (4, 32)], [(16, 32)], [(32, 4), (4, 16)], None, None, (16,)], {}),
    "gated_mlp_up": ([[(16, 32)], [(16, 32)]], {"activation": "gelu", "out_layout": "col"}),
    "matmul": ([(32, 16), (32,)], {"w_layout": "col", "activation": "gelu_tanh"}),
    "lowrank_matmul_shared_x": ([[(16, 2), (16, 4)], [(2, 8), (4, 12)], [None, (12,)]], {}),
    "lowrank_matmul_shared_u": ([(16, 4), [(4, 8), (4, 12)], [None, (12,)]], {}),
    "lowrank_matmul": ([(16, 4), (4, 8), *[None] * 6, (4, 8)], {}),
    "attention": ([(1, 1, 6, 16), (1, 1, 6, 16), (2, 6, 8)], {"rotates": "q", "window": 3}),
}


@pytest.mark.parametrize(
    ("name", "dialect", "mode"),
    [*((name, "stablehlo", "inline") for name in OPS), ("gated_mlp", "torch", "call")],
)
def test_every_op_is_one_call(name: str, dialect: str, mode: str) -> None:
    shapes, keywords = OPS[name]
    model = one_call(getattr(torch.ops.nmm, name), shapes, keywords)
    x = torch.randn((1, 2, 4, 16) if name == "attention" else (4, 16))
    module = export_mlir(model, (x,), dialect=dialect, kernels=mode, sources=False)
    (kernel,) = module.kernels
    assert kernel.op == name
    used = {*kernel.operands}
    assert used == set(range(len(list(model.parameters())) + 1))
    assert kernel_calls(module) == [kernel.name]
    parses_back(module.text, dialect)


def test_targets_change_the_attribute_and_the_kernel() -> None:
    model, inputs = one()
    trn2 = exported("one", "stablehlo", "call")
    trn3 = export_mlir(model, inputs, options={"target": "trn3"}, sources=False)
    assert 'nmm.target = "trn3"' in trn3.text
    assert trn3.kernels[0].name != trn2.kernels[0].name


def columns() -> Model:
    """Two kernels with a transposed tensor between them, as the layout pass leaves them."""

    def function(m: Any, x: Tensor) -> Tensor:
        stored = {"u_layout": "col", "v_layout": "col"}
        h = torch.ops.nmm.lowrank_matmul(x, m.u, m.v, out_layout="col", **stored)
        return torch.ops.nmm.lowrank_matmul(h, m.p, m.q, x_layout="col", **stored)

    return Model(function, u=(2, 16), v=(8, 2), p=(2, 8), q=(16, 2)).eval()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_col_operand_is_passed_in_that_layout_without_a_transpose(dialect: str) -> None:
    module = export_mlir(columns(), (torch.randn(4, 16),), dialect=dialect, sources=False)
    assert len(re.findall(r"transpose|permute|aten\.t\b", module.text)) == 0
    assert [(k.x_layout, k.out_layout) for k in module.kernels] == [("row", "col"), ("col", "row")]
    between = r"\[8,4\],f32" if dialect == "torch" else "tensor<8x4xf32>"
    assert re.search(between, module.text)


def test_weights_as_arguments_carry_their_names() -> None:
    module = exported("llama_mlp", "stablehlo", "call")
    model, _ = llama_mlp()
    assert [a.name for a in module.arguments if a.kind == "weight"] == list(model.state_dict())
    for argument in module.arguments:
        assert f'nmm.{argument.kind} = "{argument.name}"' in module.text
    assert module.arguments[-1].shape == (2, 8, 64)
    assert "dense_resource" not in module.text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_weights_as_resources_leave_only_inputs_whose_token_count_stays_open(dialect: str) -> None:
    model, inputs = one()
    tokens = torch.export.Dim("tokens", max=4096)
    module = export_mlir(
        model, inputs, dialect=dialect, weights="resources", dynamic_shapes={"x": {0: tokens}},
        sources=False,
    )  # fmt: skip
    assert [(a.name, a.shape) for a in module.arguments] == [("x", (None, 16))]
    assert module.kernels[0].spec["m"] is None
    assert module.text.count("dense_resource<") == 2
    assert module.text.count("func.func @main(%arg0") == 1
    assert "%arg1" not in module.text.splitlines()[1]
    assert ("[?,16]" if dialect == "torch" else "tensor<?x16xf32>") in module.text
    parses_back(module.text, dialect)


def test_a_dynamic_call_needs_buckets_for_its_sources() -> None:
    model, inputs = one()
    shapes = {"x": {0: torch.export.Dim("tokens", max=4096)}}
    with pytest.raises(ModelError, match="buckets"):
        export_mlir(model, inputs, dynamic_shapes=shapes)
    module = export_mlir(model, inputs, dynamic_shapes=shapes, options={"buckets": (2, 4)})
    assert [source.tokens for source in module.kernels[0].sources] == [2, 4]
    assert "nmm.source_tokens = [2, 4]" in module.text


def test_an_exported_program_and_a_graph_module_can_be_given() -> None:
    model, inputs = one()
    expected = exported("one", "stablehlo", "call").text
    program = torch.export.export(model, (), inputs)
    assert export_mlir(program, inputs, sources=False).text == expected
    graph = torch.fx.symbolic_trace(model)
    assert export_mlir(graph, (inputs["x"],), sources=False).text == expected


class Branching(Model):
    """A model whose forward has a condition on its input."""


class Counting(Model):
    """A model that writes into a buffer."""


BRANCHING = Branching(lambda m, x: x if x.sum() > 0 else -x)
COUNTING = Counting(lambda m, x: x + m.count.add_(1))
COUNTING.register_buffer("count", torch.zeros(1))
X = torch.randn(4, 16)
ODD = Model(lambda m, x: torch.special.bessel_j1(m.low(x)), low=one()[0].low).eval()


@pytest.mark.parametrize(
    ("model", "inputs", "keywords", "error", "message"),
    [
        (*one(), {"dialect": "tosa"}, UnknownNameError, "unknown dialect 'tosa'"),
        (*one(), {"kernels": "calls"}, UnknownNameError, "did you mean 'call'"),
        (*one(), {"weights": "arg"}, UnknownNameError, "did you mean 'args'"),
        (*one(), {"options": {"targets": "x"}}, UnknownNameError, "unknown option 'targets'"),
        (*one(), {"options": 3}, OptionTypeError, "options"),
        (3, (), {}, ModelError, "cannot trace int"),
        (one()[0], 3, {}, ModelError, "pass a tensor, a tuple"),
        (ODD, X, {"dialect": "linalg"}, ModelError, r'bessel_j1.* at loc."special_bessel_j1"'),
        (BRANCHING, X, {}, ModelError, r"torch\.export cannot trace Branching"),
        (COUNTING, X, {}, ModelError, "changes count in place"),
        (nn.Linear(16, 4, device="meta"), X, {}, ModelError, r"to_empty\(device='cpu'\)"),
    ],
)
def test_what_cannot_be_exported_is_named(
    model: Any, inputs: Any, keywords: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        export_mlir(model, inputs, sources=False, **keywords)


def test_a_model_without_chains_has_no_calls_and_no_source_directory(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, device="meta").eval().to_empty(device="cpu")
    module = export_mlir(model, (torch.randn(2, 4),))
    assert module.kernels == ()
    parses_back(module.text, "stablehlo")
    module.save(tmp_path / "plain.mlir")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain.manifest.json", "plain.mlir"]


def test_a_missing_torch_mlir_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch_mlir", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'nmm-compiler\[mlir\]'"):
        export_mlir(*one())


# Saving: module, manifest and sources together; nothing half-written when it cannot be.


@pytest.fixture(scope="module")
def module() -> MLIRModule:
    model, inputs = one()
    return export_mlir(model, inputs, dialect="stablehlo")


def test_the_manifest_ties_names_to_files(module: MLIRModule, tmp_path: Path) -> None:
    written = module.save(tmp_path / "model.mlir")
    assert written[-1] == tmp_path / "model.mlir"
    assert (tmp_path / "model.mlir").read_text() == module.text
    manifest = json.loads((tmp_path / "model.manifest.json").read_text())
    assert manifest["dialect"] == "stablehlo"
    assert [a["kind"] for a in manifest["arguments"]] == ["weight", "weight", "input"]
    (kernel,) = manifest["kernels"]
    (launch,) = kernel["launches"]
    (source,) = launch["sources"]
    text = (tmp_path / source["file"]).read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == source["sha256"]
    assert f'nmm.source_sha256 = "{source["sha256"]}"' in module.text
    assert f"@{kernel['name']}(" in module.text
    assert "@nki.jit" in text
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == set(written)


def test_a_disk_that_fills_up_leaves_the_old_module(
    module: MLIRModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.mlir"
    path.write_text("old")
    synced = os.fsync

    def full(handle: int) -> None:
        if os.fstat(handle).st_size == len(module.text):
            raise OSError(28, "No space left on device")
        synced(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        module.save(path)
    assert path.read_text() == "old"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_stablehlo_can_be_read_by_older_versions(module: MLIRModule) -> None:
    stablehlo = pytest.importorskip("torch_mlir._mlir_libs._stablehlo")
    artifact = stablehlo.serialize_portable_artifact_str(module.text, "1.3.0")
    text = str(stablehlo.deserialize_portable_artifact_str(artifact))
    assert module.kernels[0].name in text
