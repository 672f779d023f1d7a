"""verify=True and result.check: wrong rewrites are named, and nothing is left changed."""

import pytest
import torch
import torch.nn.functional as F
from models import Backend, Model, OwnRule, Pair
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nmm_compiler import backend
from nmm_compiler.errors import ModelError, VerificationError
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.pipeline import explain, rewrite, run

X = torch.randn(6, 64)


class Layers(nn.Module):
    def __init__(self, between=torch.relu):
        super().__init__()
        for name in ("p", "q"):
            setattr(self, name + "a", nn.Linear(64, 8, bias=False))
            setattr(self, name + "b", nn.Linear(8, 64))
        self.between = between
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        h = self.between(self.pb(self.pa(x)))
        return h, self.qb(self.qa(h))


def wrong_rule(change):
    """Return a rule that takes each relu and emits `change` of it."""
    return OwnRule(
        "mine",
        lambda node: target_name(node) == "relu",
        lambda match, editor: change(editor, match.node.args[0]),
    )


def relu(editor, x):
    return editor.call(torch.ops.aten.clamp_min.default, x, 0.0)


def off_by(factor):
    return lambda editor, x: editor.call(torch.ops.aten.mul.Tensor, relu(editor, x), factor)


slightly_wrong = off_by(1.001)


def turned(editor, x, said=None):
    y = editor.call(torch.ops.aten.t.default, relu(editor, x))
    y = editor.call(torch.ops.aten.clone.default, y, memory_format=torch.contiguous_format)
    return editor.call(torch.ops.aten.t.default, y, meta_value=said)


def raises(editor, x):
    y = relu(editor, x)
    index = editor.call(torch.ops.aten.select.int, y, 0, 7, meta_value=editor.c.values[y][0])
    return editor.call(torch.ops.aten.add.Tensor, y, index)


def verified(model, change, *, inputs=(X,), call=rewrite):
    """Rewrite with the rule that emits a change, and with all checks on."""
    return call(model, inputs, options={"verify": True}, rules=[wrong_rule(change), "..."])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_verify_passes_a_right_rewrite(dtype):
    model, x = Layers().to(dtype), X.to(dtype)
    result = rewrite(model, (x,), rules=[wrong_rule(relu), "..."], verify=True)
    assert len(result.matches) == 3
    assert 0.0 <= result.check(x) < 1.0
    assert result.check(x=x) == result.check(x)
    assert rewrite(torch.export.export(model, (x,)), verify=True).matches


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (slightly_wrong, r"output 0 is off by .*, where rounding explains"),
        # 1e-4 of a relu behind one product: rounding explains about 1e-5 here
        (off_by(1.0001), r"output 0 is off by .*, where rounding explains"),
        # other strides than are said: those that are said are restored
        (lambda e, x: turned(e, x, e.c.values[x]), r"output 0 has strides \(1, 6\), had \(64, 1\)"),
        (raises, r"the rewritten graph raised IndexError"),
    ],
)
def test_verify_names_an_own_rule_that_is_wrong(change, said):
    with pytest.raises(VerificationError, match=said) as caught:
        verified(Layers(), change)
    if change is not raises:
        assert "first match with a wrong result is <Match: mine at relu" in str(caught.value)


def test_strides_that_an_own_rule_says_it_changed_are_restored():
    result = verified(Layers(), turned)
    assert "mine" in [m.rule for m in result.matches]
    assert [y.stride() for y in result.graph_module(X)] == [(64, 1)] * 2


def test_verify_names_the_first_of_the_matches_that_an_output_depends_on():
    only = Model(lambda p, x: (p.pair(x), torch.relu(x).sigmoid()), pair=Pair(64, 8, 64))
    with pytest.raises(VerificationError, match=r"output 1 .*wrong result is <Match: mine at relu"):
        verified(only, slightly_wrong)


def test_verify_finds_a_built_in_rule_that_is_wrong(monkeypatch):
    from nmm_compiler.passes.emit import calls

    right = calls.fold_chain

    def wrong(editor, chain, *stored):
        folded = right(editor, chain, *stored)
        return folded | {"scale": 1.01 * folded["scale"]}

    monkeypatch.setattr(calls, "fold_chain", wrong)
    with pytest.raises(VerificationError, match=r"result is <Match: lowrank at linear_1 .*in pb"):
        rewrite(Layers(between=torch.tanh), (X,), verify=True)


def test_verify_leaves_inputs_buffers_and_random_numbers_as_they_were():
    class Changing(Layers):
        def forward(self, x):
            self.count.add_(1.0)
            y = F.dropout(self.pb(self.pa(x)), 0.5, True) + torch.rand_like(x)
            x.mul_(2.0)
            return self.norm(y), self.qb(self.qa(x)) * self.count

    model, x = Changing(), X.clone()
    module = fx.symbolic_trace(model)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    result = run(module, (x,), {"verify": True})
    assert len(result.matches) == 2
    assert torch.equal(x, X)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def writes(x, y):
    y.copy_(torch.relu(x))
    return x + 1.0


SHARED = torch.randn(8, 6)


@pytest.mark.parametrize(
    ("function", "inputs", "wrong", "said"),
    [
        (writes, (X, X.clone()), slightly_wrong, "input 1, after the call, is off .*mine at relu"),
        (lambda x, y: (x.add_(1.0), torch.relu(y))[1], (SHARED[:4], SHARED.t()), slightly_wrong,
         " is off by "),
        # numbers that rounding may flip, and others
        (lambda x, u, v: (torch.relu(x @ u @ v).argmax(-1), x.argmax(-1)),
         (X, torch.randn(64, 8), torch.randn(8, 48)), off_by(-1.0), "output 0 is off"),
    ],
)  # fmt: skip
def test_verify_compares_what_a_graph_writes_shares_and_counts(function, inputs, wrong, said):
    module = fx.symbolic_trace(function)
    assert verified(module, relu, inputs=inputs).matches
    with pytest.raises(VerificationError, match=said):
        verified(module, wrong, inputs=inputs)


def test_verify_without_data_says_what_to_do():
    program = torch.export.export(Layers(), (X,))
    with pytest.raises(ModelError, match=r"result\.check"):
        rewrite(program.module(), verify=True)
    with pytest.raises(ModelError, match="meta"):
        rewrite(Layers().to("meta"), (X.to("meta"),), verify=True)


def test_verify_in_explain():
    assert verified(Layers(), relu, call=explain).matches
    with pytest.raises(VerificationError):
        verified(Layers(), slightly_wrong, call=explain)


def test_verify_in_graphs_of_higher_order_operators():
    from torch.utils.checkpoint import checkpoint

    class Held(Layers):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)[1]

    def backend(change):
        return Backend({"verify": True}, [wrong_rule(change), "..."])

    x, right = X.clone().requires_grad_(), backend(relu)
    torch.compile(Held(), backend=right)(x)
    assert len(right[0].matches) == 3
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"depends on .*<Match: mine"):
        torch.compile(Held(), backend=backend(slightly_wrong))(x)


# -- the backend ------------------------------------------------------------------------------

OPTIONS = {"inner": "eager", "kernels": "lazy", "verify": True}


def test_verify_by_the_backend_raises(monkeypatch):
    from nmm_compiler.passes import pipeline

    real = pipeline.run

    def wrong(module, inputs, options):
        return real(module, inputs, options, [wrong_rule(slightly_wrong), "..."])

    monkeypatch.setattr(pipeline, "run", wrong)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="<Match: mine"):
        torch.compile(Layers(), backend="nmm", options=OPTIONS)(X)
    # Inputs without data: the first call with data verifies, and only that one.
    module, fake = fx.symbolic_trace(Layers()), FakeTensorMode(allow_non_fake_inputs=True)
    compiled = backend.nmm(module, [fake.from_tensor(X)], options=OPTIONS)
    assert "the first call verifies" in str(backend.last_report())
    with pytest.raises(VerificationError, match="<Match: mine"):
        compiled(X)
    monkeypatch.setattr(pipeline, "run", real)
    compiled = backend.nmm(module, [fake.from_tensor(X)], options=OPTIONS)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), module(X), rtol=1e-5, atol=1e-5)
