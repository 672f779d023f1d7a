"""Factors of fp8 stay fp8 in fused calls: at every level of capture, in every family's rule.

Where a kernel cannot read them the report says why: the target, the dtype of x, numbers beyond 240,
steps around the products, other weights in the call, int8.
"""

import copy

import pytest
import torch
from models import VERIFIED, Backend, Model, calls_of, compiled
from torch import nn

from nmm_compiler.lowrank_models.modules import LowRankLinear
from nmm_compiler.lowrank_models.quantize import QuantizedLinear, quantize_factors
from nmm_compiler.passes.pipeline import rewrite

BF16 = torch.bfloat16
K, R, N = 256, 16, 512


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def low_rank(inputs, outputs, bias=False):
    return LowRankLinear(inputs, R, outputs, bias=bias)


def mlp():
    parts = {"gate": low_rank(K, N), "up": low_rank(K, N), "down": low_rank(N, K)}
    return Model(lambda p, x: p.down(nn.functional.silu(p.gate(x)) * p.up(x)), **parts)


def heads():
    parts = {name: low_rank(K, n, bias=n == K) for name, n in (("q", N), ("k", K), ("v", K))}
    return Model(lambda p, x: (p.q(x), p.k(x), p.v(x)), **parts)


def made(kind, format="fp8", dtype=BF16):
    model = {"mlp": mlp, "heads": heads, "one": lambda: nn.Sequential(low_rank(K, N))}[kind]()
    model = model.eval().to(dtype)
    quantize_factors(model, format)
    return model, torch.randn(4, K, dtype=dtype)


def at_level(level, model, x, options):
    """The result of rewriting the model as a module, an exported program, or Dynamo's graph."""
    if level == "module":
        return rewrite(model, (x,), options=options)
    if level == "export":
        return rewrite(torch.export.export(model, (x,)), options=options)
    results = Backend(options)
    with torch.no_grad():
        torch.compile(model, backend=results)(x)
    return results[0]


def called(result):
    """Return the op of every kernel call of the graph."""
    return [str(node.target).split(".")[1] for node in calls_of(result)]


CALLS = {
    "one": ["lowrank_matmul_scaled"],
    "mlp": ["gated_mlp_scaled"],
    "heads": ["lowrank_matmul_shared_x_scaled"],
}


@pytest.mark.parametrize("level", ["module", "export", "dynamo"])
@pytest.mark.parametrize("kind", list(CALLS))
def test_fused_calls_read_the_bytes(kind, level):
    model, x = made(kind)
    with torch.no_grad():
        result = at_level(level, model, x, VERIFIED if level == "dynamo" else {})
        assert called(result) == CALLS[kind]
        names = [str(n.target) for n in result.graph_module.graph.nodes]
        assert not any("clamp" in name or "_to_copy" in name for name in names)
        assert not any(n.op == "call_method" and n.target in ("to", "clamp")
                       for n in result.graph_module.graph.nodes)  # fmt: skip
        (match,) = [m for m in result.matches if m.kind in ("lowrank", "gated_mlp", "shared_x")]
        assert any("read as stored" in note for note in match.notes)


@pytest.mark.parametrize("kind", list(CALLS))
def test_a_compiled_model_computes_what_it_did(kind):
    """Reference and kernel in the simulator: roundings of p, h and y to bf16, 2^-9 each."""
    model, x = made(kind)
    want = model(x)
    for executor, most in (("reference", 0.0), ("simulator", 2.0**-7)):
        with torch.no_grad():
            got = compiled(model, executor=executor, strict=True)(x)
        for one, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, want)),
                              strict=True):  # fmt: skip
            assert float((one - other).detach().norm()) <= most * float(other.detach().norm())


def note_of(model, x, **options):
    result = rewrite(
        model, (x,), options={"rules": ["lowrank", "gated_mlp", "shared_x"], **options}
    )
    assert not any("_scaled" in name for name in called(result))
    return " ".join(note for match in result.matches for note in match.notes)


def test_what_is_dequantized_is_said_by_name():
    model, x = made("one")
    assert "trn1 has no fp8 kernels; trn2 and trn3 have" in note_of(model, x, target="trn1")
    model, x = made("one", dtype=torch.float32)
    assert "x is float32; cast the model to bfloat16" in note_of(model, x)
    model, x = made("one", "int8")
    assert "int8 factors are dequantized at each call" in note_of(model, x)


def test_fp8_numbers_without_a_bound_are_dequantized():
    class Wide(QuantizedLinear):
        def dequantized(self, dtype):
            return self.values.view(torch.float8_e4m3fn).to(self.scale.dtype) * self.scale

    model, x = made("one")
    for name in ("down", "up"):
        getattr(model[0], name).__class__ = Wide
    assert "may lie beyond 240" in note_of(model, x)


def test_a_scale_behind_the_products_is_said():
    model, x = made("one")

    scaled = Model(lambda p, x: 0.5 * p.inner(x), inner=model)
    assert "a scale stands behind the products" in note_of(scaled, x)


def test_a_gate_of_other_numbers_is_said():
    model, x = made("mlp")
    model.gate = low_rank(K, N).to(BF16)
    result = rewrite(model, (x,))
    notes = " ".join(note for match in result.matches for note in match.notes)
    assert "the call has other weights, too" in notes


def test_compressed_models_are_predicted_with_the_bytes_they_have():
    """A decode step reads half of the bytes: the predicted call is faster."""
    times = {}
    for format in (None, "fp8"):
        model = nn.Sequential(LowRankLinear(2048, 512, 4096)).eval().to(BF16)
        if format:
            quantize_factors(model, format)
        result = rewrite(model, (torch.randn(1, 2048, dtype=BF16),))
        times[format] = result.matches[0].info["predicted"]["fused"]
    assert times["fp8"] < 0.75 * times[None]


def doubled(value):
    value.mul_(2)
    return value


WRITES = {
    "the cast": lambda w, scale: doubled(w.to(BF16)).clamp(-240, 240) * scale,
    "the clamped": lambda w, scale: doubled(w.to(BF16).clamp(-240, 240)) * scale,
    "the weight": lambda w, scale: doubled(w.to(BF16).clamp(-240, 240) * scale),
    "its scale": lambda w, scale: w.to(BF16).clamp(-240, 240) * doubled(scale),
}


@pytest.mark.parametrize("name", WRITES)
def test_factors_that_are_written_in_place_are_not_read_as_stored(name):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            for at, shape in (("u", (R, K)), ("v", (N, R))):
                stored = (40 * torch.randn(*shape)).to(torch.float8_e4m3fn)
                self.register_buffer(at, stored)
                self.register_buffer(f"{at}_scale", torch.rand(shape[0], 1, dtype=BF16))

        def forward(self, x):
            u = WRITES[name](self.u, self.u_scale)
            v = self.v.to(BF16).clamp(-240, 240) * self.v_scale
            return nn.functional.linear(nn.functional.linear(x, u), v)

    results = Backend({"strict": True})  # to verify would write twice
    model, x = Written(), torch.randn(8, K, dtype=BF16)
    with torch.no_grad():
        want = copy.deepcopy(model)(x)
        torch.testing.assert_close(torch.compile(model, backend=results)(x), want)
    notes = [note for match in results[0].matches for note in match.notes]
    assert not any("are read as stored" in note for note in notes), notes
