"""Few-bit weights with low-rank branches, as `compress(base=)` and adapters spell them."""

import copy
import itertools

import pytest
import torch
from models import Model, compiled
from torch import nn
from toy_models import llama

import nmm_compiler as nmm
from nmm_compiler.kernels.tiling import rows_in_runs
from nmm_compiler.lowrank_models.modules import LowRankLinear, QuantizedLinear, round_factors
from nmm_compiler.ops.linear import CORRECTED, CORRECTED_MLP
from nmm_compiler.ops.lower import lower
from nmm_compiler.runtime.weights import Packs

OPTIONS = {"rules": ["lora"]}


class Corrected(nn.Module):
    """x dequantized^T + s (x a^T) b^T, the base frozen."""

    def __init__(self, k=128, n=256, r=16, bias=True, scale=1.0, format="fp8"):
        super().__init__()
        weight = torch.randn(n, k, dtype=torch.bfloat16) / k**0.5
        own = nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) if bias else None
        self.base = QuantizedLinear.of(weight, format, own)
        self.down = nn.Linear(k, r, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(r, n, bias=False, dtype=torch.bfloat16)
        self.scale = scale

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


def x(m=8, k=128):
    torch.manual_seed(1)
    return torch.randn(m, k, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("target", "dtype", "k", "format", "reason"),
    [("trn1", torch.bfloat16, 128, "fp8", "trn1 has no fp8 kernels"),
     ("trn2", torch.float16, 128, "fp8", "cast the model to bfloat16"),
     ("trn2", torch.bfloat16, 512, "mxfp4", "trn2 has no such product; take fp8"),
     ("trn3", torch.float32, 512, "mxfp4", "x is float32; cast the model to bfloat16"),
     ("trn3", torch.bfloat16, 96, "mxfp4", "whole 128s of inputs")],
)  # fmt: skip
def test_where_no_kernel_reads_the_bytes_the_report_says_so(target, dtype, k, format, reason):
    model = Corrected(k=k, format=format).to(dtype)
    made = nmm.rewrite(model, x(8, k).to(dtype), options={**OPTIONS, "target": target})
    (match,) = made.matches
    assert any("dequantized at each call" in n and reason in n for n in match.notes)
    assert "base_weight" not in match.info


MX = {"k": 1024, "n": 256, "r": 32}
ON_TRN3 = {"target": "trn3", "strict": True}
TRN3 = {**OPTIONS, **ON_TRN3}


def assert_one_call(made, op="corrected_matmul"):
    """Assert that kernels read the bytes, in one call, which gives what the graph did."""
    targets = [str(n.target) for n in made.graph_module.graph.nodes]
    assert not any("dequantize" in name for name in targets)
    assert [name.split(".")[1] for name in targets if "corrected" in name] == [op]


@pytest.mark.parametrize(
    ("format", "bias", "scale", "m"),
    [
        *itertools.product(["fp8"], [True, False], [1.0, 0.5], [1, 8, 130]),
        ("mxfp4", True, 1.0, 1), ("mxfp4", False, 0.5, 130),
        ("mxfp8", True, 1.0, 1), ("mxfp8", False, 0.5, 130),
    ],
)  # fmt: skip
def test_base_and_branch_are_one_call_that_reads_them_as_stored(format, bias, scale, m):
    sizes, options = ({}, OPTIONS) if format == "fp8" else (MX, TRN3)
    model = Corrected(**sizes, format=format, bias=bias, scale=scale)
    data = x(m, model.down.in_features)
    made = nmm.rewrite(model, data, options=options)
    (match,) = made.matches
    assert match.info["base_weight"] == format
    assert any("read as stored" in note for note in match.notes)
    assert any("rounds x to mxfp8" in note for note in match.notes) == (format != "fp8")
    assert_one_call(made)
    made.check(data)


def test_the_branch_in_other_words_and_adapters_on_it_are_found_too():
    def spelled(p, x):
        low, weight = p.low, p.low.base.dequantized(x.dtype)
        whole = nn.functional.linear(x, weight, low.base.bias)
        return (x @ low.down.weight.T) @ low.up.weight.T + whole + low.up(low.down(x) * 2.0) / 2

    model = Model(spelled, low=Corrected(**MX, format="mxfp4"))
    made = nmm.rewrite(model, x(4, 1024), options=TRN3, verify=True)
    assert_one_call(made)
    assert made.matches[0].info["chains"] == 2


@pytest.mark.parametrize(
    ("made", "options", "bound", "of_gradients"),
    [
        # 128 and 16 products in fp32, p, v / s and y rounded to bfloat16: a few halves of 2^-8
        ({}, OPTIONS, 4 * 2**-8, 2**-6),
        # x rounded to three bits of mantissa: 2^-4 of each term, 2^-4 / 1.7 on average, of 1024
        ({**MX, "format": "mxfp4", "scale": 0.5}, TRN3, 2**-4, 2**-5),
    ],
)
def test_kernels_agree_with_eager_and_the_branch_has_gradients(made, options, bound, of_gradients):
    model = Corrected(**made)
    data = x(8, model.down.in_features).requires_grad_()
    expected = model(data)
    got = compiled(model, **options, executor="simulator")(data)
    assert (got - expected).norm() <= bound * expected.norm()
    leaves = [data, model.down.weight, model.up.weight]
    grads = (torch.autograd.grad(y.sum(), leaves) for y in (got, expected))
    for one, want in zip(*grads, strict=True):
        bound = of_gradients * want.abs().max().item()
        torch.testing.assert_close(one, want, rtol=of_gradients, atol=bound)


def launched(*lowered):
    """Return the operands of the launch of a lowered call, by name."""
    launch = lower(*lowered)
    names = [tensor.name for tensor in launch.spec.inputs()]
    return dict(zip(names, launch.operands, strict=True))


@pytest.mark.parametrize("k", [1024, 1152])  # whole 512s, and more
@pytest.mark.parametrize(("layout", "eight"), [("row", False), ("col", True)])
@torch.no_grad()
def test_u_is_put_in_the_order_of_its_kernel_once_for_each_of_its_values(k, layout, eight):
    dtype = torch.float8_e4m3fn if eight else torch.bfloat16
    base = QuantizedLinear.of(torch.randn(64, k), "mxfp4")
    u, v = torch.randn(k, 16).to(dtype), torch.randn(16, 64).to(dtype)
    stored = u if layout == "row" else u.view(torch.int8).mT.contiguous().view(dtype)
    none, scale = [None] * 4, torch.ones(16) if eight else None
    operands = (x(4, k), base.values, base.scale, stored, v, *none, scale)
    packs, keywords = Packs(), {**CORRECTED.keywords, "u_layout": layout}

    def taken():
        return launched("corrected_matmul", operands, keywords, 4, packs.transposed)["u"]

    rows = torch.from_numpy(rows_in_runs(k, "fours")) if k == 1024 else torch.arange(k)
    wanted, first = u.float()[rows], taken()
    assert torch.equal(first.float(), wanted)
    made = packs.made
    assert taken().data_ptr() == first.data_ptr()
    assert packs.made == made
    stored.copy_((2 * stored.float()).to(dtype))
    assert torch.equal(taken().float(), 2 * wanted)


@pytest.mark.parametrize("n", [256, 192])  # features of whole 128s, and more
def test_u_behind_h_is_put_in_the_order_of_the_tiles_of_h(n):
    sizes = (128, n), (128, n), (n, 128)
    bases = [QuantizedLinear.of(torch.randn(outputs, k), "fp8") for k, outputs in sizes]
    us = [torch.randn(k, 16).bfloat16() for k, _ in sizes]
    vs = [torch.randn(16, outputs).bfloat16() for _, outputs in sizes]
    values = [one.values.view(torch.float8_e4m3fn) for one in bases]
    operands = x(1), values, [one.scale[:, 0] for one in bases], us, vs
    keywords = {**CORRECTED_MLP.keywords, "format": "fp8", "v_layout": "row"}
    named = launched("corrected_mlp", (*operands, *[None] * 4), keywords, 1)
    rows = torch.from_numpy(rows_in_runs(n, "strided_rows")) if n == 256 else torch.arange(n)
    assert rows[1] == (128 if n == 256 else 1)
    assert torch.equal(named["down_u"], us[2][rows])
    assert torch.equal(named["up_u"], us[1])


def gated(p, x):
    return p.down(nn.functional.silu(p.gate(x)) * p.up(x)) + x


def mlp(rank=0, function=gated, k=512, inner=1024, outputs=512):
    """Return a gated MLP of MX weights, with a branch each where there is a rank."""
    sizes = {"gate": (k, inner), "up": (k, inner), "down": (inner, outputs)}
    made = {name: Corrected(k, n, rank or 1, False, format="mxfp4")
            for name, (k, n) in sizes.items()}  # fmt: skip
    return Model(function, **{name: one if rank else one.base for name, one in made.items()})


@pytest.mark.parametrize("rank", [0, 32])
@torch.no_grad()
def test_a_gated_mlp_of_blocks_is_one_call_and_agrees_with_eager(rank):
    model, data = mlp(rank), x(3, 512)
    made = nmm.rewrite(model, data, options=ON_TRN3)
    assert_one_call(made, "corrected_mlp")
    made.check(data)
    want, got = model(data), compiled(model, **ON_TRN3, executor="simulator")(data)
    # both left factors rounded to three bits of mantissa, gate and up in quadrature
    assert (got - want).norm() <= 3**0.5 * 2**-4 * want.norm()


def test_a_gated_mlp_that_returns_other_features_than_it_takes_stays_two_calls():
    model = mlp(0, lambda p, x: p.down(nn.functional.silu(p.gate(x)) * p.up(x)), outputs=256)
    made = nmm.rewrite(model, x(3, 512), options=ON_TRN3, verify=True)
    assert sorted(match.rule for match in made.matches) == ["quantized", "shared_x"]


@pytest.mark.parametrize("place", ["gate", "up", "h"])
@pytest.mark.parametrize("tokens", [(512,), (4, 4)])
def test_a_value_of_a_gated_mlp_that_is_turned_stays_turned(place, tokens):
    def turned(p, x):
        values = {"gate": nn.functional.silu(p.gate(x)), "up": p.up(x)}
        if place in values:
            values[place] = values[place].transpose(0, 1)
        h = values["gate"] * values["up"]
        return p.down(h.transpose(0, 1) if place == "h" else h)

    data = torch.randn(*tokens, 128, dtype=torch.bfloat16)
    made = nmm.rewrite(mlp(0, turned, 128, 512, 128), data, options=ON_TRN3, verify=True)
    if place != "h":  # tokens in another order may be put so behind the call
        assert "corrected_mlp" not in [match.rule for match in made.matches]


def heads(**how):
    """Return several linears of one x that are read apart, as q, k and v are."""
    sizes = {"q": (256, 32, True), "k": (128, 16, False), "v": (128, 16, True)}
    return Model(
        lambda p, x: torch.cat([p.q(x).sigmoid(), p.k(x) * p.v(x)], -1),
        **{name: Corrected(512, n, r, bias, **how) for name, (n, r, bias) in sizes.items()},
    )


@pytest.mark.parametrize(
    ("format", "target", "scale"), [("mxfp4", "trn3", 0.5), ("fp8", "trn2", 1.0)]
)
def test_linears_of_one_x_are_one_call(format, target, scale):
    model, data = heads(format=format, scale=scale), x(8, 512)
    where = {"target": target, "strict": True}
    made = nmm.rewrite(model, data, options=where)
    (match,) = made.matches
    assert (match.rule, match.info["r"], match.info["n"]) == ("shared_x", "32+16+16", "256+128+128")
    assert match.info["base_weight"] == format
    assert_one_call(made, "corrected_matmul_shared_x")
    made.check(data)
    expected, got = model(data), compiled(model, **where, executor="simulator")(data)
    # of MX blocks x is rounded to three bits of mantissa; p, v / s and y to bfloat16
    bound = 2**-4 if format == "mxfp4" else 2**-6
    assert (got - expected).norm() <= bound * expected.norm()


CALLS = 256, 5, [], {"shared_x": 1, "corrected_mlp": 1}  # q, k and v; the MLP
# before q, k and v, and before the MLP
NORMS = 512, 1, ["+norms"], {"norm": 2, "residual": 2}


@pytest.mark.parametrize(
    ("format", "target", "factors", "hidden", "tokens", "rules", "counts"),
    [
        ("mxfp4", "trn3", "fp8", *CALLS),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("fp8", "trn2", None, *NORMS),
                ("mxfp4", "trn3", None, *CALLS),
                ("fp8", "trn2", None, *CALLS),
                ("mxfp4", "trn3", None, *NORMS),
                ("mxfp4", "trn3", "fp8", *NORMS),
            )
        ),
    ],
)
@torch.no_grad()
def test_a_compressed_llama(format, target, factors, hidden, tokens, rules, counts):
    """One call for q, k and v, one for the MLP; norms and sums inside of calls."""
    model = llama(hidden, 512, dtype=torch.bfloat16)
    nmm.compress(model, base=format, rank=16, factors=factors)
    given = {"input_ids": torch.arange(tokens)[None], "use_cache": False}
    options = {"target": target, "rules": rules, "strict": True}
    want = model(**given).logits
    got = compiled(model, **options, executor="simulator")(**given).logits
    matches = nmm.explain(model, given, options=options).matches
    found = [kind for match in matches for kind in match.kind.split()]
    assert {kind: found.count(kind) for kind in counts} == counts
    said = [note for match in matches for note in match.notes if "fp8 branch is read" in note]
    assert len(said) == (0 if factors is None else 3)  # qkv, o, the MLP
    # one layer: each product's x is rounded to three bits of mantissa beside MX weights
    assert (got - want).norm() <= (2**-3 if format == "mxfp4" else 2**-6) * want.norm()


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("written", [False, True])
def test_an_fp8_branch_is_read_as_stored_unless_it_is_written(factor, written):
    def function(p, x):
        if written:
            p.low.up.scale.mul_(2)
        return p.low.base(x) + factor * (p.low.up(p.low.down(x)) + p.bias)

    weight, down, up = (torch.randn(s).bfloat16() / 16 for s in ((256, 512), (32, 512), (256, 32)))
    low = LowRankLinear.from_factors(down, up, None, QuantizedLinear.of(weight, "mxfp4"))
    round_factors(low, "fp8")
    bias = torch.randn(256, dtype=torch.bfloat16)
    model, data = Model(function, low=low, bias=bias).requires_grad_(False), x(8, 512)
    want = copy.deepcopy(model)(data)
    made = nmm.explain(copy.deepcopy(model), data, options={"target": "trn3"})
    notes = [note for match in made.matches for note in match.notes]
    assert any("fp8 branch is read as stored" in note for note in notes) != written
    with torch.no_grad():
        got = compiled(model, target="trn3", executor="simulator")(data)
    assert (got - want).norm() <= 2**-4 * want.norm()


@pytest.mark.parametrize("written", ["weight", "scale"])
def test_blocks_that_are_written_in_place_are_not_read_as_stored(written):
    class Written(Corrected):
        def forward(self, x):
            weight = self.base.dequantized(x.dtype)
            if written == "weight":
                weight.mul_(2)
            else:
                self.base.scale.add_(1)
            whole = nn.functional.linear(x, weight)
            return whole + self.up(self.down(x))

    model, data = Written(**MX, format="mxfp4", bias=False), x(8, 1024)
    made = nmm.explain(model, data, options={"target": "trn3"})
    notes = [note for match in made.matches for note in match.notes]
    assert not any("read as stored" in note for note in notes)
    want = copy.deepcopy(model)(data)
    got = compiled(model, target="trn3", kernels="lazy")(data)
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6 * want.abs().max().item())
