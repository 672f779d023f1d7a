"""Factors of fp8 stay fp8 in fused calls: at every level of capture, in every family's rule.

Where a kernel cannot read them the report says why: the target, the dtype of x, numbers beyond 240,
steps around the products, other weights in the call, int8.
"""

import copy

import pytest
import torch
from models import VERIFIED, Backend, Model, calls_of, compiled
from torch import nn

from nmm_compiler.lowrank_models.modules import LowRankLinear, QuantizedLinear, quantize_factors
from nmm_compiler.passes.pipeline import rewrite

BF16 = torch.bfloat16
K, R, N = 256, 16, 512


def low_rank(inputs, outputs, bias=False):
    return LowRankLinear(inputs, R, outputs, bias=bias)


def gated(p, x):
    return p.down(nn.functional.silu(p.gate(x)) * p.up(x))


# Of each kind: its function, the sizes of its linears, and the call that it becomes.
KINDS = {
    "one": (lambda p, x: p.low(x), {"low": (K, N)}, "lowrank_matmul_scaled"),
    "mlp": (gated, {"gate": (K, N), "up": (K, N), "down": (N, K)}, "gated_mlp_scaled"),
    "heads": (lambda p, x: (p.q(x), p.k(x), p.v(x)),
              {"q": (K, N), "k": (K, K, True), "v": (K, K, True)},
              "lowrank_matmul_shared_x_scaled"),
}  # fmt: skip


def made(kind, format="fp8", dtype=BF16):
    function, sizes, _ = KINDS[kind]
    model = Model(function, **{name: low_rank(*size) for name, size in sizes.items()})
    model = model.eval().to(dtype)
    quantize_factors(model, format)
    return model, torch.randn(4, K, dtype=dtype)


@torch.no_grad()
def at_level(level, model, x, options):
    """The result of rewriting the model as a module, an exported program, or Dynamo's graph."""
    if level == "module":
        return rewrite(model, (x,), options=options)
    if level == "export":
        return rewrite(torch.export.export(model, (x,)), options=options)
    results = Backend(options)
    torch.compile(model, backend=results)(x)
    return results[0]


def called(result):
    """Return the op of every kernel call of the graph."""
    return [str(node.target).split(".")[1] for node in calls_of(result)]


@pytest.mark.parametrize("level", ["module", "export", "dynamo"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fused_calls_read_the_bytes(kind, level):
    model, x = made(kind)
    result = at_level(level, model, x, VERIFIED if level == "dynamo" else {})
    assert called(result) == [KINDS[kind][2]]
    targets = [str(n.target) for n in result.graph_module.graph.nodes]
    assert not any("clamp" in t or "_to_copy" in t or t == "to" for t in targets)
    (match,) = [m for m in result.matches if m.kind in ("lowrank", "gated_mlp", "shared_x")]
    assert any("read as stored" in note for note in match.notes)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_compiled_model_computes_what_it_did(kind):
    """Reference and kernel in the simulator: roundings of p, h and y to bf16, 2^-9 each."""
    model, x = made(kind)
    want = model(x)
    for executor, most in (("reference", 0.0), ("simulator", 2.0**-7)):
        got = compiled(model, executor=executor, strict=True)(x)
        for one, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, want)),
                              strict=True):  # fmt: skip
            assert float((one - other).detach().norm()) <= most * float(other.detach().norm())


class Wide(QuantizedLinear):
    """Numbers of which no bound is known."""

    def dequantized(self, dtype):
        return self.values.view(torch.float8_e4m3fn).to(self.scale.dtype) * self.scale


def unbounded(model):
    for linear in (model.low.down, model.low.up):
        linear.__class__ = Wide


@pytest.mark.parametrize(
    ("given", "change", "options", "words"),
    [
        (("one",), None, {"target": "trn1"}, "trn1 has no fp8 kernels; trn2 and trn3 have"),
        (("one", "fp8", torch.float32), None, {}, "x is float32; cast the model to bfloat16"),
        (("one", "int8"), None, {}, "int8 factors are dequantized at each call"),
        (("one",), unbounded, {}, "may lie beyond 240"),
        (
            ("one",),
            lambda m: setattr(m, "function", lambda p, x: 0.5 * p.low(x)),
            {},
            "more than a bias stands beside its products",
        ),
        (
            ("mlp",),
            lambda m: setattr(m, "gate", low_rank(K, N).to(BF16)),
            {},
            "the call has other weights, too",
        ),
    ],
)
def test_what_is_dequantized_is_said_by_name(given, change, options, words):
    model, x = made(*given)
    if change is not None:
        change(model)
    result = rewrite(model, (x,), options=options)
    assert "lowrank_matmul_scaled" not in called(result)
    assert words in " ".join(note for match in result.matches for note in match.notes)


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
@torch.no_grad()
def test_factors_that_are_written_in_place_are_not_read_as_stored(name):
    def function(p, x):
        u = WRITES[name](p.u, p.u_scale)
        v = p.v.to(BF16).clamp(-240, 240) * p.v_scale
        return nn.functional.linear(nn.functional.linear(x, u), v)

    weights = {"u_scale": torch.rand(R, 1, dtype=BF16), "v_scale": torch.rand(N, 1, dtype=BF16)}
    model, x = Model(function, **weights), torch.randn(8, K, dtype=BF16)
    for at, shape in (("u", (R, K)), ("v", (N, R))):
        model.register_buffer(at, (40 * torch.randn(*shape)).to(torch.float8_e4m3fn))
    results = Backend({"strict": True})  # to verify would write twice
    want = copy.deepcopy(model)(x)
    torch.testing.assert_close(torch.compile(model, backend=results)(x), want)
    notes = [note for match in results[0].matches for note in match.notes]
    assert not any("are read as stored" in note for note in notes), notes
