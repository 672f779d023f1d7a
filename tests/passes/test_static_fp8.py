"""fp8 weights and fp8 activations of static scales: ModelOpt's checkpoints, loaded and fused."""

import pytest
import torch
from models import Model, compiled
from torch import nn

import nmm_compiler as nmm
from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.static_fp8 import StaticFP8Linear, load_static_fp8

OPTIONS = {"target": "trn2", "strict": True}
K, N = 256, 384


def checkpoint(model, x):
    """Return what ModelOpt exports for a model: one scale for each weight and each x."""
    state = {}
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            scale = linear.weight.float().abs().max() / 448
            state[f"{name}.weight"] = (linear.weight.float() / scale).to(torch.float8_e4m3fn)
            state[f"{name}.weight_scale"] = scale
            state[f"{name}.input_scale"] = x.float().abs().max() / 448
            if linear.bias is not None:
                state[f"{name}.bias"] = linear.bias.detach()
    return state


def loaded(m, bias=True):
    model = nn.Sequential(nn.Linear(K, N, bias=bias)).bfloat16()
    x = torch.randn(m, K, dtype=torch.bfloat16)
    state = checkpoint(model, x)
    assert load_static_fp8(model, state) == ("0",)
    return model.eval(), x, state


def exact(x, state):
    """Return the product in float64 of x rounded as the checkpoint says, and of its weight."""
    scale = state["0.input_scale"].double()
    rounded = (x.float() / state["0.input_scale"]).to(torch.float8_e4m3fn).double() * scale
    y = rounded @ (state["0.weight"].double() * state["0.weight_scale"].double()).T
    return y + state["0.bias"].double() if "0.bias" in state else y


@pytest.mark.parametrize(("m", "bias"), [(1, True), (160, False)])
@torch.no_grad()
def test_a_checkpoint_is_one_call_of_fp8_numbers_and_right_against_float64(m, bias):
    model, x, state = loaded(m, bias)
    made = nmm.rewrite(model, x, options=OPTIONS)
    (match,) = made.matches
    assert (match.rule, match.info["x"], match.info["weights"]) == ("static_fp8", "fp8", "fp8")
    names = [str(node.target) for node in made.graph_module.graph.nodes]
    assert sum("matmul_scaled" in name for name in names) == 1
    assert not any("linear" in name for name in names)
    got = compiled(model, **OPTIONS, executor="simulator")(x).double()
    want = exact(x, state)
    # exact products of fp8 numbers; halving loses a bit of a subnormal, 2^-10 of 448 in w and in x
    # where K add up; the bias and the result are rounded to bfloat16
    terms = x.double().abs().max() * state["0.weight_scale"].double() * 448
    bound = 2**-8 * want.abs() + 2 * K**0.5 * 2**-10 / 224 * terms
    assert ((got - want).abs() <= bound).all()
    made.check(x)


def test_q_k_and_v_share_the_rounding_of_x():
    layers = {"q": nn.Linear(K, N, bias=False), "k": nn.Linear(K, 128, bias=False)}
    model = Model(lambda p, x: (p.q(x), p.k(x)), **layers).bfloat16()
    x = torch.randn(2, 4, K, dtype=torch.bfloat16)
    assert load_static_fp8(model, checkpoint(model, x)) == ("q", "k")
    made = nmm.rewrite(model, x, options=OPTIONS)
    assert [one.rule for one in made.matches] == ["static_fp8"] * 2
    made.check(x)


def test_numbers_beyond_240_are_refused_by_name():
    def plain(p, x):
        w, q = p.w.to(x.dtype), (x / 0.5).to(torch.float8_e4m3fn).to(x.dtype)
        w = w.clamp(-240, 240) if p.clamp else w
        return nn.functional.linear(q * p.scale, w * p.scale)

    x = torch.randn(4, K, dtype=torch.bfloat16)
    model = Model(plain, scale=torch.full((1,), 0.5, dtype=torch.bfloat16))
    model.register_buffer("w", torch.randn(N, K).to(torch.float8_e4m3fn))
    for clamp, words in ((True, "x may lie beyond 240"), (False, "numbers of float8_e4m3fn may")):
        model.clamp = clamp
        made = nmm.rewrite(model, x, options=OPTIONS)
        (refused,) = [one for one in made.declined if one.rule == "static_fp8"]
        assert refused.code == "few_bits"
        assert words in refused.reason


def test_what_is_no_such_checkpoint_is_refused_with_the_values():
    _, _, state = loaded(1)
    for name, tensor, words in (
        ("0.weight", state["0.weight"].float(), "torch.float32"),
        ("0.weight", state["0.weight"][:8], rf"has torch.float8_e4m3fn \(8, {K}\)"),
        ("0.input_scale", torch.ones(3), r"scales of \(1, 3\) numbers"),
    ):
        with pytest.raises(ModelError, match=words):
            load_static_fp8(nn.Sequential(nn.Linear(K, N)), {**state, name: tensor})
    assert load_static_fp8(nn.Sequential(nn.SiLU()), state) == ()


@pytest.mark.parametrize("place", ["steps", "rounded", "weight"])
@torch.no_grad()
def test_numbers_that_are_written_in_place_are_not_read_as_stored(place):
    class Written(StaticFP8Linear):
        def forward(self, x):
            made = {"steps": (x.float() / self.input_scale).clamp(-240.0, 240.0)}
            if place == "steps":
                made["steps"].mul_(2)
            made["rounded"] = made["steps"].to(torch.float8_e4m3fn).float()
            made["weight"] = self.weight.float().clamp(-240.0, 240.0)
            if place != "steps":
                made[place].mul_(3)
            left = (made["rounded"] * self.input_scale).to(x.dtype)
            return nn.functional.linear(left, (made["weight"] * self.weight_scale).to(x.dtype))

    _, x, state = loaded(16, False)
    written = Written(state["0.weight"], state["0.weight_scale"], state["0.input_scale"])
    got = compiled(written, **OPTIONS)(x)
    torch.testing.assert_close(got, written(x), rtol=2**-6, atol=2**-6)
