"""Several adapters in one batch become one call: PEFT's mixed batches, and gathered weights."""

import pytest
import torch
from models import Model, compiled, explained
from torch import nn
from torch.nn import functional as F

from nmm_compiler.prices.kernel import PRICES

peft = pytest.importorskip("peft")
NAMES = ["a", "__base__", "b", "c", "a"]


def assert_same(function, given):
    torch.testing.assert_close(compiled(function)(*given), function(*given))


@pytest.mark.parametrize(
    ("shape", "dropout"), [pytest.param((5, 32), 0.1, marks=pytest.mark.long), ((5, 3, 32), 0.0)]
)
def test_a_batch_of_three_adapters_is_one_call_a_layer_with_gradients(shape, dropout):
    """Adapters a, b and c, of which c has another rank."""
    said = {"target_modules": ["up", "down"], "init_lora_weights": False, "lora_dropout": dropout}
    layers = {"up": nn.Linear(32, 48, bias=False), "down": nn.Linear(48, 32)}
    model = Model(lambda m, x: x + m.down(F.gelu(m.up(x))), **layers)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, **said), adapter_name="a")
    made.add_adapter("b", peft.LoraConfig(r=4, lora_alpha=16, **said))
    made.add_adapter("c", peft.LoraConfig(r=8, **said))
    parameters = [p.requires_grad_() for n, p in made.eval().named_parameters() if "lora" in n]
    x = torch.randn(*shape)
    assert explained(made, {"x": x, "adapter_names": NAMES})[0] == ["adapters", "adapters"]
    got, wanted = (call(x, adapter_names=NAMES) for call in (compiled(made), made))
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(y.square().sum(), parameters) for y in (got, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def served(x, w, bias, a, b, gains, index):
    """A layer of a server: factors gathered by the adapter of each token."""
    branch = torch.bmm(b[index], torch.bmm(a[index], x.unsqueeze(-1))).squeeze(-1)
    return F.linear(x, w, bias) + branch * gains[index].unsqueeze(-1)


def operands():
    index = torch.tensor([0, 3, 1, 1, 2, 0])
    factors = torch.randn(4, 8, 32) / 6, torch.randn(4, 48, 8)
    return (
        torch.randn(6, 32),
        torch.randn(48, 32) / 6,
        torch.randn(48),
        *factors,
        torch.rand(4),
        index,
    )


def twice(x, w, a, b):
    y = F.linear(x, w)
    for rows in ([0, 1], [1, 2]):
        y[rows] += F.linear(F.linear(x[rows], a), b) * 2.0
    return y


def early(x, w, a, b):
    y = F.linear(x, w)
    y[[0]] += F.linear(F.linear(x[[0]], a), b)
    z = y * 2
    y[[1]] += F.linear(F.linear(x[[1]], a), b)
    return y + z


def scaled(x, w, a, b):
    y = F.linear(x, w)
    y[[0, 1]] = torch.add(y[[0, 1]], F.linear(F.linear(x[[0, 1]], a), b), alpha=2)
    return y


@pytest.mark.parametrize(
    ("function", "words"),
    [(twice, "not written once each"), (early, "reads it before all branches"), (scaled, "")],
)
def test_rows_that_are_written_or_read_otherwise_are_refused(function, words):
    inputs = torch.randn(4, 32), torch.randn(48, 32), torch.randn(8, 32), torch.randn(48, 8)
    matches, declined = explained(function, inputs)
    assert "adapters" not in matches
    assert not words or any(words in text for text in declined)
    assert_same(function, inputs)


@pytest.mark.parametrize("written", ["base", "hidden", "branch", "rows", "twice"])
def test_what_is_done_to_a_branch_is_done(written):
    def layer(x, w, bias, a, b, gains, index):
        values = {"base": F.linear(x, w, bias)}
        values["hidden"] = torch.bmm(a[index], x.unsqueeze(-1))
        values["branch"] = torch.bmm(b[index], values["hidden"]).squeeze(-1)
        if written in values:
            values[written].mul_(2)
        y, d = values["base"], values["branch"]
        if written == "rows":
            y[[0, 2]] += torch.mul(d[[0, 2]], 3)
            return y
        return torch.add(y, d, alpha=2 if written == "twice" else 1)

    assert_same(layer, operands())


def einsum(x, w, bias, a, b, gains, index):
    h = torch.einsum("bi,boi->bo", x, a[index])
    return F.linear(x, w, bias) + torch.einsum("br, bor -> bo", h * 0.5, b[index])


def rows(x, w, bias, a, b, gains, index):
    """Factors that lie [in, out], a row of each token, gains between the products."""
    h = torch.bmm(x.unsqueeze(1), a.mT[index]).squeeze(1) * gains[index].unsqueeze(-1)
    return torch.matmul(h.unsqueeze(1), b[index].transpose(1, 2)).squeeze(1) + F.linear(x, w, bias)


def in_place(x, w, bias, a, b, gains, index):
    y = F.linear(x, w, bias)
    chosen = torch.index_select(b, 0, index) @ torch.bmm(a[index], x.reshape(6, 32, 1))
    y += chosen.reshape(6, 48)
    return y * 2


def two_names(x, w, bias, a, b, gains, index):
    y = F.linear(x, w, bias)
    z = y.add_(torch.einsum("br,bor->bo", torch.einsum("bi,boi->bo", x, a[index]), b[index]))
    return y + z


def buffered(x, w, bias, a, b, gains, index):
    """vLLM's PyTorch form: slots [slots, 1, n, r], a buffer for h, slices that are all of y."""
    y = F.linear(x, w, bias)
    h = torch.zeros(6, 8, dtype=x.dtype)
    shrunk = torch.einsum("bi, boi -> bo", x, a[index].to(dtype=h.dtype).squeeze(dim=1))
    h[:, :8] = 2.0 * shrunk[:]
    expanded = torch.einsum("bi, boi -> bo", h, b[index].to(dtype=y.dtype).squeeze(dim=1))
    y[:, :48] += expanded[:6, :48]
    return y


def sequences(x, w, bias, a, b, gains, index):
    """One adapter for each sequence of a batch, as NxD Inference has it."""
    x = x.reshape(6, 1, 32).expand(6, 3, 32) * torch.arange(1.0, 4.0)[:, None]
    h = torch.einsum("bij,bkj->bik", x, a[index])
    return F.linear(x, w, bias) + torch.einsum("bij,bjk->bik", h, b.mT[index])


def sequences_of_rank_one(x, w, bias, a, b, gains, index):
    x = x.reshape(6, 1, 32).expand(6, 3, 32) * torch.arange(1.0, 4.0)[:, None]
    h = torch.matmul(x, a[:, :1][index].mT) / 4
    return torch.matmul(h, b[:, :, :1][index].mT) + F.linear(x, w, bias)


GATHERED = [
    served,
    einsum,
    rows,
    in_place,
    two_names,
    buffered,
    sequences,
    sequences_of_rank_one,
]


@pytest.mark.parametrize("form", GATHERED, ids=lambda form: form.__name__)
def test_forms_of_gathered_factors_are_one_call_with_gradients(form):
    args = operands()
    last = 3 if form is in_place else -1  # an index from the end, which index_select does not take
    args = (*args[:-1], torch.tensor([0, 3, last, 1, 2, 0]))
    if form is buffered:
        args = (*args[:3], args[3].unsqueeze(1), args[4].unsqueeze(1), *args[5:])
    assert explained(form, args)[0] == ["adapters"]
    leaves = [one.clone().requires_grad_() for one in args[:-1]]
    got, wanted = (call(*leaves, args[-1]) for call in (compiled(form), form))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    grads = [torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
             for y in (got, wanted)]  # fmt: skip
    assert sum(grad is not None for grad in grads[0]) >= 5
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def wider(x, w, bias, a, b, gains, index):
    h = torch.einsum("bi,boi->bo", x.double(), a[index].double()).float()
    return F.linear(x, w, bias) + torch.einsum("br,bor->bo", h, b[index])


def other_index(x, w, bias, a, b, gains, index):
    h = torch.einsum("bi,boi->bo", x, a[index.flip(0)])
    return F.linear(x, w, bias) + torch.einsum("br,bor->bo", h, b[index])


def other_input(x, w, bias, a, b, gains, index):
    h = torch.einsum("bi,boi->bo", x + 1, a[index])
    return F.linear(x, w, bias) + torch.einsum("br,bor->bo", h, b[index])


def some_columns(x, w, bias, a, b, gains, index):
    y = F.linear(x, w, bias)
    h = torch.einsum("bi,boi->bo", x, a[index])
    y[:, :24] += torch.einsum("br,bor->bo", h, b[index, :24])
    return y


def read_early(x, w, bias, a, b, gains, index):
    y = F.linear(x, w, bias)
    z = y * 3
    y += torch.einsum("br,bor->bo", torch.einsum("bi,boi->bo", x, a[index]), b[index])
    return y + z


def crossed_letters(x, w, bias, a, b, gains, index):
    h = torch.einsum("bi,boi->bo", x, a[index])
    return F.linear(x, w, bias) + torch.einsum("br,cor->co", h, b[index])


@pytest.mark.parametrize(
    "form",
    [wider, other_index, other_input, some_columns, read_early, crossed_letters],
    ids=lambda form: form.__name__,
)
def test_forms_that_compute_something_else_stay(form):
    args = operands()
    assert "adapters" not in explained(form, args)[0]
    assert_same(form, args)


def test_base_and_branches_that_are_faster_apart_stay(monkeypatch):
    cost = {"adapters": 90.0}
    monkeypatch.setitem(PRICES, "closed_form", lambda spec, target: cost.get(spec.family, 2.0))
    matches, declined = explained(served, operands())
    assert matches == []
    assert any("one call for 6 tokens: 90.0 us on trn2, smaller calls 10.0" in d for d in declined)


def test_trn1_takes_no_adapters_that_an_index_chooses():
    matches, declined = explained(served, operands(), target="trn1")
    assert matches == []
    assert any("trn1" in one for one in declined)
