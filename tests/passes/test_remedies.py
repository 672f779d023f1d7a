"""Each remedy that names a change, applied: the place that was refused with it fuses then."""

import pytest
import torch
import torch.nn.functional as F
from remedy_texts import remedies
from torch import nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

import nmm_compiler as nmm
from nmm_compiler.passes.pipeline import explain, rewrite, run

L = F.linear
X = torch.randn(2, 6, 64)
PIXELS = torch.randn(2, 64, 6, 6)
VERIFIED = {"verify": True, "strict": True}


class Model(nn.Module):
    """Weights under short names; a function computes with them."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function

        def weight(*shape):
            return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5, requires_grad=False)

        self.a, self.b, self.c, self.d = weight(8, 64), weight(48, 8), weight(6, 64), weight(48, 6)
        self.w, self.e, self.narrow, self.t = (
            weight(48, 64),
            weight(48, 8),
            weight(48, 4),
            weight(6, 1),
        )
        self.s, self.bias, self.column = weight(8), weight(8), weight(48)
        self.both, self.odd = weight(16, 64), weight(4, 8, 8)
        self.large, self.small = weight(40, 64), weight(64, 40)
        self.experts, self.backs, self.gates = weight(4, 64, 8), weight(4, 8, 48), weight(4, 64)
        self.c1, self.c2, self.c3 = weight(8, 64, 1, 1), weight(48, 8, 1, 1), weight(48, 4, 1, 1)
        self.low = weight(48, 8).bfloat16()

    def forward(self, *inputs):
        return self.function(self, *inputs)


def chain(p, x):
    return L(L(x, p.a), p.b)


def chain2(p, x):
    return L(L(x, p.c), p.d)


def adapted(p, x):
    return L(x, p.w) + chain(p, x)


def seen_sum(p, x):
    y = L(x, p.w)
    seen = y.view(-1)
    y += chain(p, x)
    return y, seen


def out_of_place(p, x):
    y = L(x, p.w)
    return y + chain(p, x), y.view(-1)


def written(p, x):
    z = x * 1.5
    h = L(z, p.a)
    z.add_(1.0)
    return L(h, p.b), z


def written_behind(p, x):
    z = x * 1.5
    y = chain(p, z)
    z.add_(1.0)
    return y, z


def read_twice(p, x):
    h = L(x, p.a)
    return L(h, p.b), h.sum()


def masked_pixels(p, x, behind=False):
    h = F.conv2d(x, p.c1) * x[:, :1]
    return F.conv2d(h, p.c2) + p.column[:, None, None] if behind else F.conv2d(h, p.c2, p.column)


def by_experts(p, x, loop=False):
    gates = L(x, p.gates)
    if loop:
        return sum((x @ p.experts[i] @ p.backs[i]) * gates[..., i : i + 1] for i in range(4))
    return torch.einsum("bsk,ekr,ern,bse->bsn", x, p.experts, p.backs, gates)


# Remedy: (refused, mended), or several such pairs. Each function takes the model and x.
APPLIED = {
    "add a vector of the rank's width, a parameter or a buffer: it folds as a bias": (
        lambda p, x: L(L(x, p.a) + 1, p.b), lambda p, x: L(L(x, p.a) + p.bias, p.b)),
    "add out of place": (seen_sum, out_of_place),
    "add the bias behind the product": (
        masked_pixels, lambda p, x: masked_pixels(p, x, behind=True)),
    "add up the chains: h1 @ v1 + h2 @ v2 is one call": (
        lambda p, x: L(torch.cat([L(x, p.a), L(x, p.c)], -1), torch.cat([p.b, p.d], -1)),
        lambda p, x: chain(p, x) + chain2(p, x)),
    "add x @ w and (x @ u) @ v, in place of their weights": (
        lambda p, x: L(x, p.w + p.b @ p.a), adapted),
    "call the module instead of reading its weight, or exclude it from compress": (
        lambda p, x: L(x, F.pad(p.b @ p.a, (0, 0, 0, 2))), chain),
    "compute it once outside the graph and pass it as a parameter": (
        lambda p, x: L(x, torch.linalg.qr(p.a.t())[0].t()) @ p.b.t(), chain),
    "contract exactly the dimension that the first product made": (
        lambda p, x: L(x, p.a).view(2, 6, 2, 4) @ p.b.t()[:4], chain),
    "contract the whole inner dimension": (
        lambda p, x: L(x, p.a).flatten(1) @ p.w.view(-1, 64)[:48], chain),
    "cut the first factor instead, and write a product for each part: x @ u[:, :4] @ v": [
        (lambda p, x: [L(h, p.narrow) for h in L(x, p.a).chunk(2, -1)][1],
         lambda p, x: L(L(x, p.a[4:]), p.narrow)),
        (lambda p, x: L(L(x, p.a)[..., :4], p.narrow), lambda p, x: L(L(x, p.a[:4]), p.narrow))],
    "do it before the first product or behind the second one: both leave tokens alone": [
        (lambda p, x: L(L(x, p.a)[:, -1], p.b), lambda p, x: L(L(x[:, -1], p.a), p.b)),
        (lambda p, x: L(L(x, p.a)[:, 1:], p.b), lambda p, x: chain(p, x)[:, 1:]),
        (lambda p, x: L(L(x, p.a).mean(1), p.b), lambda p, x: chain(p, x.mean(1))),
        (lambda p, x: L(F.pad(L(x, p.a), (0, 0, 1, 0)), p.b),
         lambda p, x: F.pad(chain(p, x), (0, 0, 1, 0))),
        (lambda p, x: L(x.new_zeros(2, 3, 8).index_add(1, torch.arange(6) % 3, L(x, p.a)), p.b),
         lambda p, x: x.new_zeros(2, 3, 48).index_add(1, torch.arange(6) % 3, chain(p, x)))],
    "feed base and adapter the same tensor, in one dtype": (
        lambda p, x: L(x.flip(1), p.w) + chain(p, x), adapted),
    "feed both the same tensor": (
        lambda p, x: F.silu(chain(p, x.flip(1))) * chain2(p, x),
        lambda p, x: F.silu(chain(p, x)) * chain2(p, x)),
    "fold it into a factor once: it is linear": [
        (lambda p, x: L(F.pad(L(x, p.c), (0, 2)), p.b),
         lambda p, x: L(L(x, F.pad(p.c, (0, 0, 0, 2))), p.b)),
        (lambda p, x: L(L(x, p.a).cumsum(-1), p.b),
         lambda p, x: L(L(x, p.a), p.b.flip(1).cumsum(1).flip(1)))],
    "fold it into the first factor and its bias": (
        lambda p, x: L(torch.relu(2.0 * L(x, p.a, p.bias)), p.b),
        lambda p, x: L(torch.relu(L(x, 2.0 * p.a, 2.0 * p.bias)), p.b)),
    "fold the scale into the weight": (
        lambda p, x: F.silu(2.0 * L(x, p.w)) * chain(p, x),
        lambda p, x: F.silu(L(x, 2.0 * p.w)) * chain(p, x)),
    "join the inputs before the first product, or the results": [
        (lambda p, x: L(torch.cat([L(x, p.a), L(x, p.a)], 1), p.b),
         lambda p, x: chain(p, torch.cat([x, x], 1))),
        (lambda p, x: L(torch.cat([L(x, p.a), L(x * 2, p.a)], 1), p.b),
         lambda p, x: torch.cat([chain(p, x), chain(p, x * 2)], 1))],
    "keep one dtype through the chain": (
        lambda p, x: L(L(x, p.a).double(), p.b.double()), chain),
    "keep one dtype through the chain, or cast back before the second product": (
        lambda p, x: L(2 * L(x.bfloat16(), p.a.bfloat16()).float(), p.b),
        lambda p, x: L((2 * L(x.bfloat16(), p.a.bfloat16()).float()).bfloat16(), p.low)),
    "mix the tokens first, (a @ x) @ u @ v, if it mixes tokens alone": (
        lambda p, x: L(torch.softmax(x @ x.mT, -1) @ L(x, p.a), p.b),
        lambda p, x: chain(p, torch.softmax(x @ x.mT, -1) @ x)),
    "multiply behind the second product; a vector over the inner dimension folds": [
        (lambda p, x: L(L(x, p.a) * p.t, p.b), lambda p, x: chain(p, x) * p.t),
        (lambda p, x: L(L(x, p.a) * p.t, p.b), lambda p, x: L(L(x, p.a) * p.s, p.b))],
    "multiply by the mask, h * mask, if it is one for each token": [
        (lambda p, x: L(L(x, p.a).masked_fill(x[..., :1] > 0, 0.0), p.b),
         lambda p, x: L(L(x, p.a) * (x[..., :1] <= 0), p.b)),
        (lambda p, x: L(torch.where(x[..., :1] > 0, L(x, p.a), 0.0), p.b),
         lambda p, x: L(L(x, p.a) * (x[..., :1] > 0), p.b))],
    "multiply by the reciprocal: h * (1 / d)": [
        (lambda p, x: L(L(x, p.a) / x.norm(dim=-1, keepdim=True), p.b),
         lambda p, x: L(L(x, p.a) * (1 / x.norm(dim=-1, keepdim=True)), p.b)),
        (lambda p, x: L(L(x, p.a) / p.s, p.b), lambda p, x: L(L(x, p.a) * (1 / p.s), p.b))],
    "multiply the inner value or the result, if it is one number for each token": [
        (lambda p, x: L(L(x, p.a), p.b * x.mean()), lambda p, x: chain(p, x) * x.mean()),
        (lambda p, x: L(L(x, p.a), p.b * x.mean()), lambda p, x: L(L(x, p.a) * x.mean(), p.b))],
    "nothing: each is fused as its own call; merge the adapters for a gated MLP": (
        lambda p, x: F.silu(adapted(p, x)) * chain2(p, x),
        lambda p, x: F.silu(L(x, p.w)) * chain2(p, x)),
    "nothing: group what has one weight, and call each group with it": (
        lambda p, x: torch.bmm(torch.bmm(x, p.experts[x[:, 0, 0].argsort()]),
                               p.backs[x[:, 0, 0].argsort()]),
        lambda p, x: x[0] @ p.experts[0] @ p.backs[0]),
    "nothing: the projection is fused as one chain; two projections make a gated MLP": (
        lambda p, x: (lambda h: F.silu(h[..., :24]) * h[..., 24:])(chain(p, x)),
        lambda p, x: F.silu(L(L(x, p.a), p.b[:24])) * L(L(x, p.a), p.b[24:])),
    "pad x before the first factor, F.pad(x, ...), which may have no bias then": [
        (lambda p, x: F.conv2d(F.conv2d(x, p.c1, padding=1), p.c2),
         lambda p, x: F.conv2d(F.conv2d(F.pad(x, (1, 1, 1, 1)), p.c1), p.c2)),
        (lambda p, x: F.conv2d(F.conv2d(x, p.c1), p.c2, padding=1),
         lambda p, x: F.conv2d(F.conv2d(F.pad(x, (1, 1, 1, 1)), p.c1), p.c2))],
    "reorder the features of a factor once instead": (
        lambda p, x: L(L(x, p.a).flip(-1), p.b), lambda p, x: L(L(x, p.a), p.b.flip(1))),
    "store it as a buffer": (lambda p, x: L(L(x, p.a), x.new_ones(48, 8)), chain),
    "sum over the inner dimension, as (x @ a) @ b does": (
        lambda p, x: L(x, p.a)[..., None] * p.b.t(), lambda p, x: L(x, p.a) @ p.b.t()),
    "take every n-th pixel of x, x[:, :, ::n, ::n], in place of the stride": [
        (lambda p, x: F.conv2d(F.conv2d(x, p.c1, stride=2), p.c2),
         lambda p, x: F.conv2d(F.conv2d(x[:, :, ::2, ::2], p.c1), p.c2)),
        (lambda p, x: F.conv2d(F.conv2d(x, p.c1), p.c2, stride=2),
         lambda p, x: F.conv2d(F.conv2d(x[:, :, ::2, ::2], p.c1), p.c2))],
    "use bfloat16, float16 or float32": (
        lambda p, x: L(L(x.double(), p.a.double()), p.b.double()), chain),
    "use one 2-D matrix per product": (
        lambda p, x: L(L(x, p.a), p.odd.transpose(0, 1).reshape(32, 8)),
        lambda p, x: L(L(x, p.a), p.odd.view(32, 8))),
    "use one 2-D weight for all of the batch": (
        lambda p, x: torch.bmm(torch.bmm(x, p.experts[:2]), p.backs[:2]),
        lambda p, x: x @ p.experts[0] @ p.backs[0]),
    "use one of {}; the projections are fused by themselves": (
        lambda p, x: torch.tanh(chain(p, x)) * chain2(p, x),
        lambda p, x: F.silu(chain(p, x)) * chain2(p, x)),
    "use only the chain's result": (read_twice, lambda p, x: (chain(p, x), x.sum())),
    "use the functional form": (
        lambda p, x: L(L(x, p.a).mul_(2.0), p.b), lambda p, x: L(L(x, p.a).mul(2.0), p.b)),
    "write (x @ u) @ v": (
        lambda p, x: L(x, (p.b * p.s) @ p.a), lambda p, x: L(L(x, p.a), p.b * p.s)),
    "write before or after the chain": (written, written_behind),
    "write the products one by one": [
        (by_experts, lambda p, x: by_experts(p, x, loop=True)),
        (lambda p, x: torch.einsum("bsk,rk,rl,btl->bst", x, p.a, p.a, x),
         lambda p, x: L(L(x, p.a), p.a.t()) @ x.mT)],
}  # fmt: skip
PAIRS = [
    pytest.param(text, *pair, id=f"{text[:40]}-{number}")
    for text, pairs in APPLIED.items()
    for number, pair in enumerate(pairs if isinstance(pairs, list) else [pairs])
]


def normed(x):
    return F.layer_norm(x, (64,))


# Remedy: (the rule, refused, mended), of rules that have to be asked for.
ENDS = {
    "normalize the last dimension": (
        "norm", lambda p, x: chain(p, F.layer_norm(x.mT, (6,)).mT),
        lambda p, x: chain(p, normed(x))),
    "let only low-rank calls read it": (
        "norm", lambda p, x: (lambda h: (chain(p, h), h.sum()))(normed(x)),
        lambda p, x: (chain(p, normed(x)), x.sum())),
    "add the residual to the result as it is": (
        "residual", lambda p, x: chain(p, x).transpose(0, 1) + 2 * x[..., :48].transpose(0, 1),
        lambda p, x: (chain(p, x) + 2 * x[..., :48]).transpose(0, 1)),
    "add tensors of one shape and dtype": (
        "residual", lambda p, x: chain(p, x) + 2 * x[:, :1, :48],
        lambda p, x: chain(p, x) + (2 * x[:, :1, :48]).repeat(1, 6, 1)),
    "let only the sum read it": (
        "residual", lambda p, x: (lambda y: (y + 2 * x[..., :48], y.sum()))(chain(p, x)),
        lambda p, x: (chain(p, x) + 2 * x[..., :48], x.sum())),
}  # fmt: skip


@pytest.mark.parametrize("text", ENDS)
def test_a_norm_or_a_residual_goes_into_the_call(text):
    rule, refused, mended = ENDS[text]
    options = {**VERIFIED, "norms": True}
    before, after = (rewrite(Model(f), (X,), options=options) for f in (refused, mended))
    assert [d.remedy for d in before.declined if d.rule == rule] == [text]
    assert rule not in [m.kind for m in before.rewritten]
    assert rule in [m.kind for m in after.rewritten]
    assert not [d for d in after.declined if d.rule == rule]


def traced(function, x):
    return rewrite(Model(function), (x,), options=VERIFIED)


@pytest.mark.parametrize(("text", "refused", "mended"), PAIRS)
def test_the_remedy_helps(text, refused, mended):
    before, end = text.split("{}")[0], text.split("{}")[-1]
    x = PIXELS if "conv2d" in refused.__code__.co_names or refused is masked_pixels else X
    told = [d.remedy for d in traced(refused, x).declined]
    assert any(said.startswith(before) and end in said for said in told), told
    after = traced(mended, x)
    assert after.rewritten
    said = [d.remedy for d in after.declined]
    assert not any(one.startswith(before) and end in one for one in said), said


ELSEWHERE = {
    "use executor 'auto'": "test_tensor_parallel", "use executor 'reference', or torch.no_grad() "
    "and parameters without gradients": "test_tensor_parallel",
    "cut the factors along the rank, or the second one by its outputs": "test_distributed",
    "parallelize both factors, or none": "test_distributed",
    "keep both products inside of what the operator runs, or outside of it": "test_two_graphs",
    "remove the graph break: TORCH_LOGS=graph_breaks says where and why Dynamo broke":
        "test_two_graphs",
    "set Options(reassociate=True), or ": "test_multiplied_back",
    "store it": "test_own_rules", "change the model or the rule's `where`": "test_own_rules",
    "write what is there into a pattern": "test_own_rules",
}  # fmt: skip
"""Remedies of refusals that ask for several processes, graphs or a user's rule: their tests."""
BELOW = {
    "call model.eval()", "compile without dynamic=True, or call torch._dynamo.mark_static on the "
    "weights", "rewrite what the transform calls, "
    "nmm_compiler.rewrite(f, inputs).graph_module, or call f on the whole batch",
    "fold it into the layer before, in eval mode: fuse_linear_bn_eval or fuse_conv_bn_eval of "
    "torch.nn.utils.fusion", "keep both products inside of the region, or outside of it",
    "keep the chain on one device", "use a plain tensor", "use a rank of at most {}",
    "make the factor a parameter or a buffer (beside a stored base, adapters may be inputs)",
    "store one dense weight", "hand the sizes over, or reshape after the chain", "set enable_gqa",
    "pass [batch, heads, tokens, d] with static sizes", "pass as many queries as keys",
    "pass is_causal=True, or a mask made of static sizes alone, without padding",
    "call scaled_dot_product_attention: attn_implementation='sdpa' in transformers",
    "use eval mode", "set Options(reassociate=True): the factors in a row become two",
}  # fmt: skip
"""Remedies with a test of their own in this file."""


def test_every_remedy_that_names_a_change_is_applied():
    """A text that names no change begins with "nothing"."""
    changes = {text for text in remedies() if text and not text.startswith("nothing: ")}
    assert len(changes) > 50
    assert changes <= {*APPLIED, *ENDS, *ELSEWHERE, *BELOW}
    assert {text for text in APPLIED if not text.startswith("nothing")} <= changes


def test_a_model_in_eval_mode():
    model = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.1), nn.Linear(8, 48))
    (refused,) = run(torch.fx.symbolic_trace(model.train()), (X,)).declined
    assert refused.remedy == "call model.eval()"
    assert rewrite(model.eval(), (X,), options=VERIFIED).rewritten


def test_a_batch_norm_in_the_layer_before():
    first, norm, last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 48)
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    model = nn.Sequential(first, norm, last).eval().requires_grad_(False)
    (refused,) = rewrite(model, (X[0],)).declined
    assert "fuse_linear_bn_eval" in refused.remedy
    mended = nn.Sequential(fuse_linear_bn_eval(first, norm), last).eval().requires_grad_(False)
    result = rewrite(mended, (X[0],), options=VERIFIED)
    assert [m.kind for m in result.rewritten] == ["lowrank"]
    torch.testing.assert_close(result.graph_module(X[0]), model(X[0]), rtol=1e-5, atol=1e-5)


def collected(function, *inputs, dynamic=None):
    found = []

    def backend(module, given):
        found.append(run(module, given))
        return found[-1].graph_module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return found[0]


def test_weights_with_static_sizes():
    def function(x, w, u, v):
        return x @ w + x @ u @ v

    x, *weights = torch.randn(5, 64), torch.randn(64, 48), torch.randn(64, 8), torch.randn(8, 48)
    refused = collected(function, x, *weights, dynamic=True)
    assert {d.code for d in refused.declined} == {"symbolic_weight"}
    assert collected(function, x, *weights, dynamic=None).rewritten
    for weight in weights:
        torch._dynamo.mark_static(weight)
    assert collected(function, x, *weights, dynamic=True).rewritten


def test_a_transform_of_rewritten_code():
    model = Model(chain)
    torch._dynamo.reset()
    found = explain(lambda x: torch.func.vmap(lambda row: chain(model, row))(x), X)
    (refused,) = found.declined
    assert "rewrite what the transform calls" in refused.remedy
    row = nmm.rewrite(model, (X[0],))
    assert [m.kind for m in row.rewritten] == ["lowrank"]
    got = torch.func.vmap(row.graph_module)(X)
    torch.testing.assert_close(got, model(X), rtol=1e-5, atol=1e-5)
    assert traced(chain, X).rewritten  # the whole batch


def test_products_on_one_side_of_a_region():
    def crossing(p, x):
        with torch.no_grad():
            h = L(x, p.a)
        return L(h, p.b)

    def inside(p, x):
        with torch.no_grad():
            return chain(p, x)

    def collect(function):
        model, found = Model(function).requires_grad_(True), []

        def backend(module, given):
            found.append(run(module, given))
            return found[-1].graph_module.forward

        torch._dynamo.reset()
        torch.compile(model, backend=backend)(X)
        return found[0]

    assert "keep both products inside" in collect(crossing).declined[0].remedy
    assert collect(inside).rewritten
    assert collect(chain).rewritten


def test_one_device_and_plain_tensors():
    class Scaled(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.a, self.b = (nn.Linear(*k, bias=False, device="meta") for k in ((64, 8), (8, 48)))
            self.s = nn.Parameter(torch.ones((), device=device))

        def forward(self, x):
            return self.b(self.a(x) * self.s)

    x = torch.randn(6, 64, device="meta")
    told = [d.remedy for d in run(torch.fx.symbolic_trace(Scaled("cpu")), (x,)).declined]
    assert told == ["keep the chain on one device"]
    assert run(torch.fx.symbolic_trace(Scaled("meta")), (x,)).rewritten

    class Sub(torch.Tensor):
        pass

    given = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 48)).requires_grad_(False)
    sub = X.as_subclass(Sub)
    told = [d.remedy for d in run(torch.fx.symbolic_trace(given), (sub,)).declined]
    assert told == ["use a plain tensor"]
    assert run(torch.fx.symbolic_trace(given), (sub.as_subclass(torch.Tensor),)).rewritten


def test_factors_from_outside():
    def given(p, x):
        return x["x"] @ x["u"] @ p.b.t()

    inputs = {"x": X, "u": torch.randn(64, 8)}
    assert "make the factor a parameter" in traced(given, inputs).declined[0].remedy
    assert traced(chain, X).rewritten
    beside = traced(lambda p, x: L(x["x"], p.w) + x["x"] @ x["u"] @ x["v"],
                    inputs | {"v": torch.randn(8, 48)})  # fmt: skip
    assert [m.kind for m in beside.rewritten] == ["lora"]


def test_a_rank_that_pays():
    def cut(r):
        return lambda p, x: L(L(x, p.large[:r]), p.small[:, :r])

    (refused,) = traced(cut(40), X).declined
    text, _, rank = refused.remedy.rpartition(" ")
    assert text == "use a rank of at most"
    assert traced(cut(int(rank)), X).rewritten
    wide = traced(lambda p, x: L(L(x, p.a[:1])[..., :1], p.s[:1, None]), X)
    assert [d.remedy for d in wide.declined] in ([], ["store one dense weight"])


def test_a_free_order():
    for function in (lambda p, x: L(L(L(x, p.a), p.odd[0]), p.b), lambda p, x: L(x, p.b @ p.a)):
        (refused,) = traced(function, X).declined
        assert "reassociate=True" in refused.remedy
        options = {**VERIFIED, "reassociate": True}
        assert rewrite(Model(function), (X,), options=options).rewritten


def test_attention_as_the_remedies_say():
    def call(**more):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **more)

    on = {"attention": True}
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 9, 8)
    mask = torch.ones(5, 5).tril().bool()
    for remedy, (refused, inputs), (mended, others) in (
        ("pass is_causal=True, or a mask made of static sizes alone, without padding",
         (call(attn_mask=mask), (q, q, q)),
         (call(is_causal=True), (q, q, q))),
        ("use eval mode", (call(dropout_p=0.5), (q, q, q)), (call(), (q, q, q))),
        ("pass as many queries as keys", (call(is_causal=True), (q, k, k)),
         (call(is_causal=True), (k, k, k))),
        ("pass [batch, heads, tokens, d] with static sizes", (call(), (q[0], q[0], q[0])),
         (call(), (q, q, q))),
    ):  # fmt: skip
        assert remedy in [d.remedy for d in rewrite(refused, inputs, options=on).declined]
        assert rewrite(mended, others, options=on).rewritten


def test_spelled_out_attention_as_the_remedy_says():
    def spelled(q, k, v):
        return torch.softmax((q @ k.transpose(-1, -2)).relu(), -1) @ v

    q = torch.randn(1, 4, 5, 8)
    (refused,) = rewrite(spelled, (q, q, q), options={"attention": True}).declined
    assert refused.remedy.startswith("call scaled_dot_product_attention")
    assert rewrite(F.scaled_dot_product_attention, (q, q, q), options={"attention": True}).rewritten


def test_attention_of_groups_of_heads():
    def call(**more):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **more)

    q, grouped, on = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), {"attention": True}
    graph = torch.fx.symbolic_trace(call(enable_gqa=True))
    assert run(graph, (q, grouped, grouped), on).rewritten
