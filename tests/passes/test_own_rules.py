"""Rules of users: two functions or a class, through every entrance, and what they report."""

import functools
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Model, OwnRule
from torch import nn

import nmm_compiler as nmm
from nmm_compiler.errors import BrokenRuleError


def chain(x, u, v):
    return torch.relu(x @ u @ v)


def dense(x, u, v):
    return torch.relu(x @ (u @ v))


TO_DENSE = nmm.rule(chain, dense, name="to_dense")
U, V = torch.randn(64, 8) / 8, torch.randn(8, 48) / 3
SPELLINGS = {
    "linear": lambda x, u, v: F.relu(F.linear(F.linear(x, u.t()), v.T)),
    "the other way round": lambda x, u, v: torch.relu(v.mT @ (u.T @ x.mT)).mT,
    "batches of one weight": lambda x, u, v: torch.relu(
        torch.bmm(torch.bmm(x, u.expand(2, 64, 8)), v.expand(2, 8, 48))
    ),
    "views and copies": lambda x, u, v: torch.relu(
        (x.reshape(-1, 64) @ u).contiguous().view(2, 3, 8) @ v
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_pattern_finds_every_spelling(name):
    inputs = (torch.randn(2, 3, 64), U, V)
    result = nmm.rewrite(SPELLINGS[name], inputs, rules=[TO_DENSE, "..."], options=VERIFIED)
    assert [m.rule for m in result.matches] == ["to_dense"]
    assert "nmm." not in result.graph_module.code


@pytest.mark.parametrize(
    "near",
    [
        lambda x, u, v: torch.tanh(x @ u @ v),
        lambda x, u, v: torch.relu(x @ u * 0.5 @ v),
        lambda x, u, v: torch.relu((x @ u).mT @ v[:3]),
        lambda x, u, v: torch.relu(torch.relu(x @ u) @ v),
        lambda x, u, v: torch.relu(torch.matmul(x, u.view(8, 64).t()).transpose(0, 1)[0] @ v),
    ],
)
def test_what_differs_is_no_match(near):
    inputs = (torch.randn(2, 3, 64), U, V)
    result = nmm.rewrite(near, inputs, rules=[TO_DENSE, "..."], options=VERIFIED)
    found = [m for m in result.matches if m.rule == "to_dense"]
    # The last one is the pattern, on a part of x @ u that stands for x u itself.
    assert not found or near(*inputs).dim() == 2


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_the_entrances_and_any_token_count(dynamic):
    model = Model(lambda p, x: chain(x, p.u, p.v), u=U, v=V)
    options = {"inner": "eager", "kernels": "lazy", **VERIFIED, "rules": [TO_DENSE, "..."]}
    compiled = torch.compile(model, backend="nmm", options=options, dynamic=dynamic)
    for tokens in (3, 5):
        x = torch.randn(2, tokens, 64)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=2.0**-24 * 64 * 64)
    assert len(nmm.reports()) == 2 - dynamic
    report = nmm.last_report()
    assert report.matches == ("to_dense  at relu",)
    assert report.chains == 0
    assert report.rules == ("rule to_dense: 1 matched, 0 refused",)
    explained = nmm.explain(model, x, rules=[TO_DENSE, "..."])
    assert [m.rule for m in explained.matches] == ["to_dense"]


def test_numbers_and_conditions():
    def scaled(x, y, c=1.0):
        return x + c * torch.sin(y)

    rule = nmm.rule(
        scaled,
        lambda x, y, c: torch.add(x, torch.sin(y), alpha=c),
        where=lambda x, y, c: c < 1 or f"c is {c}",
        name="scaled",
    )
    x = torch.randn(3, 4)
    result = nmm.rewrite(lambda x: x - torch.sin(x.T).T / 4, (x,), rules=[rule], options=VERIFIED)
    assert result.matches[0].info["c"] == -0.25
    refused = nmm.rewrite(lambda x: 2.0 * torch.sin(x) + x, (x,), rules=[rule])
    assert [(d.code, d.reason) for d in refused.declined] == [("pattern", "c is 2.0")]
    one = nmm.rule(lambda x: x * 0.5 + 1.0, lambda x: x, name="one")
    assert not nmm.rewrite(lambda x: x * 0.25 + 1.0, (x,), rules=[one]).matches


def test_features_may_be_any_axis():
    rule = nmm.rule(lambda x, g: torch.tanh(x * g), lambda x, g: torch.tanh(g * x), name="gain")
    inputs = torch.randn(2, 16, 3), torch.rand(16)
    turned = nmm.rewrite(
        lambda x, g: torch.tanh(x * g[:, None]), inputs, rules=[rule], options=VERIFIED
    )
    assert turned.matches[0].info["operands"] == {"x": [6, 16], "g": [16]}


def test_constants_are_stored_weights():
    rule = nmm.rule(chain, dense, constants=("u",), name="stored")
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 48, bias=False), nn.ReLU())
    x = torch.randn(5, 64)
    assert nmm.rewrite(model, (x,), rules=[rule, "..."]).matches[0].rule == "stored"
    result = nmm.rewrite(lambda x, v: chain(x, x.T @ x, v), (x, torch.randn(64, 9)), rules=[rule])
    assert [d.code for d in result.declined if d.rule == "stored"] == ["weight"]


def test_the_safety_checks_of_built_in_rules():
    def used_twice(x, u, v):
        h = x @ u
        return torch.relu(h @ v), h

    def written(x, u, v):
        h = x @ u
        y = h @ v
        x.mul_(2.0)
        return torch.relu(y)

    inputs = (torch.randn(5, 64), U, V)
    for function, code in ((used_twice, "other_user"), (written, "mutation")):
        result = nmm.rewrite(function, inputs, rules=[TO_DENSE, "..."], options=VERIFIED)
        assert [d.code for d in result.declined if d.rule == "to_dense"] == [code]
        assert not [m for m in result.matches if m.rule == "to_dense"]


@pytest.mark.parametrize(
    ("function", "rules", "said"),
    [
        (chain, [TO_DENSE], 'rules=[to_dense, "..."] asks it first'),
        (lambda x, u, v: torch.relu(F.silu(x @ u) @ v), [TO_DENSE, "..."],
         "the nearest: at silu product is wanted, not activation silu"),
        (lambda x, u, v: x + 1, [TO_DENSE],
         "rule to_dense: no node of the graph is what the pattern ends with"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fire_says_so(function, rules, said):
    result = nmm.rewrite(function, (torch.randn(5, 64), U, V), rules=rules)
    assert said in " ".join(str(result).split())
    (own,) = [one for one in result.to_dict()["rules"] if one["rule"] == "to_dense"]
    assert own["matched"] == result.rules["to_dense"].matched == 0


def test_a_replacement_may_read_what_it_replaces():
    """y -> 2 y, twice; nodes that nothing reads go."""

    def doubled(match, editor):
        editor.call(torch.ops.aten.neg.default, match.node.args[0])
        once = editor.call(torch.ops.aten.mul.Tensor, match.node, 2.0)
        return editor.call(torch.ops.aten.mul.Tensor, once, 2.0)

    x = torch.randn(3, 4)
    rule = OwnRule("doubled", lambda node: node.target is torch.ops.aten.tanh.default, doubled)
    result = nmm.rewrite(lambda x: torch.tanh(x.sin()) + 1, (x,), rules=[rule])
    assert torch.equal(result.graph_module(x), 4 * torch.tanh(x.sin()) + 1)
    assert "neg" not in result.graph_module.code


# -- norms ------------------------------------------------------------------------------------


def hugging_face(x, w, b):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def t5(x, w, b):
    wide = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(w.dtype)


def layer(x, w, b):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-6) * w + b


def layer_of_var(x, w, b):
    var = x.var(-1, keepdim=True, unbiased=False)
    return w * ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(var + 1e-6)) + b


NORMS = {
    "rms": (hugging_face, t5, lambda x, w, b: F.rms_norm(x, (16,), w, 1e-6)),
    "layer": (layer, layer_of_var, lambda x, w, b: F.layer_norm(x, (16,), w, b, 1e-6)),
}


def normed(function, dtype):
    parts = {name: torch.rand(16, dtype=dtype) for name in ("w", "b")}
    return Model(lambda p, x: function(x, p.w, p.b), **parts)


@functools.cache
def _norms():
    rms = nmm.rule(
        lambda x, w, eps=1e-6: F.rms_norm(x, x.shape[-1:], w, eps),
        lambda x, w, eps: F.rms_norm(x, x.shape[-1:], None, eps) * w,
        name="rms",
    )
    layer = nmm.rule(
        lambda x, w, b, eps=1e-6: F.layer_norm(x, x.shape[-1:], w, b, eps),
        lambda x, w, b, eps: F.layer_norm(x, x.shape[-1:], w, None, eps) + b,
        name="layer",
    )
    return [rms, layer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_found_spelled_out(kind, dtype):
    x = torch.randn(2, 3, 16, dtype=dtype)
    for function in NORMS[kind]:
        result = nmm.rewrite(normed(function, dtype), (x,), rules=_norms(), verify=True)
        assert [m.rule for m in result.matches] == [kind], function
        assert result.matches[0].info["eps"] == 1e-6


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
        lambda x, w, b: w * (x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda x, w, b: (x - x.mean(-1, keepdim=True))
        * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6) * w + b,
        lambda x, w, b: (x - 2 * x.mean(-1, keepdim=True))
        * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6) * w + b,
    ],
)  # fmt: skip
def test_what_is_no_norm(other):
    x = torch.randn(16, 16)
    model = normed(other, torch.float32)
    assert not nmm.rewrite(model, (x,), rules=_norms()).matches


def test_a_part_of_a_pattern_may_be_absent():
    mine = nmm.rule(
        lambda x, w, b=None: F.silu(F.linear(x, w, b)),
        lambda x, w, b: F.silu(F.linear(x, w) if b is None else F.linear(x, w) + b),
        constants=("w", "b"),
        where=lambda x, w, b: b is None or b.shape == w.shape[:1],
        name="mine",
    )
    for bias in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(16, 24, bias=bias), torch.nn.SiLU())
        (match,) = nmm.rewrite(model, (torch.randn(3, 16),), rules=[mine], verify=True).matches
        assert ("b" in match.info["operands"]) == bias


# -- proofs and mistakes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (lambda *x: x[0], "'x' has no single value"),
        (lambda x, way="up": x + 1, "the default of 'way' is no number"),
        (lambda c=1.0: torch.ones(3), "it takes no tensor"),
        (lambda x: x, "returns a parameter"),
        (lambda x, y: x + 1, "does not use y"),
        (lambda x, c=1.0: x * (2 * c), "does not use c as it is"),
        (lambda x: (x + 1, x), "other than one tensor"),
        (lambda x: (x + 1).flatten(), "its result is reshaped"),
        (lambda x: x.nonsense(), "nonsense"),
    ],
)
def test_patterns_that_cannot_be_read(pattern, said):
    with pytest.raises(BrokenRuleError, match=re.escape(said)):
        nmm.rule(pattern, lambda *x: x)


def test_the_command_line_takes_rules(tmp_path, nmm):
    (tmp_path / "m.py").write_text(
        "import torch, nmm_compiler as nmm\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.tanh(torch.sin(x))\n"
        "def load():\n    return M(), {'x': torch.ones(2, 3)}\n"
        "mine = nmm.rule(lambda x: torch.tanh(torch.sin(x)), lambda x: x.tanh(), name='mine')\n"
    )
    file = str(tmp_path / "m.py")
    line = ("explain", f"{file}:load", "--rules")
    assert "rule mine: 1 matched" in nmm(*line, f"{file}:mine", code=0).out
    assert "load must be a rule" in nmm(*line, f"{file}:load", code=2).err


def test_the_example_runs_with_both_forms_under_torch_compile(capsys):
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import own_rule

    own_rule.main()
    said = capsys.readouterr().out
    assert said.count("+    lowrank_residual_default = torch.ops.mine.lowrank_residual") == 2
    error = float(said.rpartition("largest error: ")[2].split()[0])
    assert error <= 1.0
