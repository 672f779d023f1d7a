"""Layouts: which results are turned, which transposes go, in graph and kernels."""

import functools
import re

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Pair, calls_of, kernel_calls, kinds_of, trace_and_run
from torch import nn

import nmm_compiler as nmm
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.passes.result import graph_parts
from nmm_compiler.passes.rules.shared import NEAR

K, R, N = 64, 8, 48


# Factors a [k, r] b [r, n] c [n, r] d [r, k], a vector over n, columns over tokens.
Model = functools.partial(
    models.Model, a=(K, R), b=(R, N), c=(N, R), d=(R, K), bias=(N,), five=(5, 1),
    full=(3, 5, N), turned=(N, 5),
)  # fmt: skip


def up(p, x):
    return x @ p.a @ p.b


def down(p, y):
    return y @ p.c @ p.d


def check(function, x):
    """Rewrite, with outputs and strides compared."""
    return trace_and_run(Model(function).requires_grad_(False).to(x.dtype), x, **VERIFIED)


X3, X2 = torch.randn(3, 5, K), torch.randn(5, K)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda p, x: down(p, F.relu(up(p, x))), ["row>col", "col>row"]),
        (lambda p, x: down(p, F.relu(up(p, x).view(15, N)).view(3, 5, N)), ["row>col", "col>row"]),
        # every other reader needs the order of the graph
        (lambda p, x: down(p, torch.tanh(up(p, x))), ["row>row", "row>row"]),
        (lambda p, x: (lambda y: (down(p, y), y.sum(0)))(up(p, x)), ["row>row", "row>row"]),
        # written in place
        (lambda p, x: (lambda y: (y.add_(1.0), down(p, y)))(up(p, x)), ["row>row", "row>row"]),
    ],
)
def test_a_result_is_turned_where_only_calls_read_it(function, expected):
    result = check(function, X3)
    met = [f"{m.info['x_layout']}>{m.info['out_layout']}" for m in result.matches]
    assert met == expected
    assert result.transposes_after == 0


@pytest.mark.parametrize(
    ("function", "before"),
    [
        # (a transposed view that is returned moves nothing, and is not counted)
        (lambda p, x: down(p, F.relu(up(p, x.T).T).T).T, 3),
        (lambda p, x: down(p, F.relu(up(p, x.T).T.contiguous()).T.contiguous()).T, 3),
        (lambda p, x: F.relu(up(p, x.mT).permute(1, 0)).contiguous(), 2),
    ],
)
def test_explicit_transposes_go(function, before):
    result = check(function, X2.T.contiguous())
    assert (result.transposes_before, result.transposes_after) == (before, 0)


# -- a SwiGLU MLP on x^T that makes y^T -------------------------------------------------------


# The six factors, each as nn.Linear stores it, [outputs, inputs].
FACTORS = {
    "gate_a": (R, K), "gate_b": (N, R), "up_a": (R, K), "up_b": (N, R), "down_a": (R, N),
    "down_b": (K, R),
}  # fmt: skip
SwiGLU = functools.partial(models.Model, **FACTORS)


def mlp(p, x):
    """[tokens, k] -> [tokens, k]."""
    h = F.silu(F.linear(F.linear(x, p.gate_a), p.gate_b)) * F.linear(F.linear(x, p.up_a), p.up_b)
    return F.linear(F.linear(h, p.down_a), p.down_b)


def feature_major(p, x):
    h = F.silu(p.gate_b @ (p.gate_a @ x)) * (p.up_b @ (p.up_a @ x))
    return p.down_b @ (p.down_a @ h)


def transposed_h(p, x):
    x = x.T
    gate, up = F.linear(F.linear(x, p.gate_a), p.gate_b), F.linear(F.linear(x, p.up_a), p.up_b)
    h = (F.silu(gate.T.contiguous()) * up.transpose(0, 1)).mT
    return F.linear(F.linear(h, p.down_a), p.down_b).permute(1, 0).contiguous()


def einsums(p, x):
    gate = torch.einsum("mr,nr->mn", torch.einsum("km,rk->mr", x, p.gate_a), p.gate_b)
    up = torch.einsum("mr,nr->mn", torch.einsum("km,rk->mr", x, p.up_a), p.up_b)
    low = torch.einsum("mn,rn->mr", F.silu(gate) * up, p.down_a)
    return torch.einsum("mr,kr->km", low, p.down_b)


SPELLED = {
    "T": lambda p, x: mlp(p, x.T).T,
    "contiguous": lambda p, x: mlp(p, x.t().contiguous()).t().contiguous(),
    "feature major": feature_major,
    "transposed h": transposed_h,
    "einsum": einsums,
}


@pytest.mark.parametrize(
    ("name", "whole"), [*((name, True) for name in SPELLED), ("T", False), ("transposed h", False)]
)
def test_a_swiglu_mlp_ends_with_no_transpose_in_graph_or_kernels(name, whole):
    model = SwiGLU(SPELLED[name]).requires_grad_(False)
    options = {"verify": True, "rules": () if whole else ("-gated_mlp",)}
    result = nmm.rewrite(model, (torch.randn(K, 64),), options=options)
    kinds = kinds_of(result)
    assert kinds == (["gated_mlp"] if whole else ["gated_mlp_up", "lowrank"])
    assert result.transposes_after == 0
    made = kernel_calls(result.graph_module, torch.Tensor.t)
    assert len(made) >= len(kinds)
    for _, spec in made:
        kernel = build_kernel(spec, "trn2")
        assert kernel.profile().transposes == {"dma": 0, "tensor": 0, "vector": 0}, spec.short()
        assert not re.search("dma_transpose|nc_transpose", kernel.source)


def test_a_row_input_is_transposed_by_the_kernel_that_loads_it():
    x = torch.randn(64, K)
    result = nmm.rewrite(SwiGLU(mlp).requires_grad_(False), (x,))
    ((_, spec),) = kernel_calls(result.graph_module, torch.Tensor.t)
    assert sum(build_kernel(spec, "trn2").profile().transposes.values()) > 0


def test_pictures_show_the_call_whose_result_is_only_read_transposed():
    """Nothing reads what takes the place of such a result: the call is found by what was added."""
    shapes = ((64, 8), (8, 96), (96, 8), (8, 64))
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
    result = trace_and_run(model, torch.randn(4, 64))
    unread = [match for match in result.matches if match.info["out_layout"] == "col"]
    assert unread, "the layout assignment turns the tensor between the two calls"
    pictures = graph_parts(result.original, result.graph_module, unread)
    texts = [part.text for section in pictures for part in section.parts]
    assert texts[1].startswith("after: ")
    assert "0 nodes" not in " ".join(texts)


def swapped(p, x):
    """The tokens of one operand are in another order than those of the other."""
    return down(p, torch.tanh(up(p, x)).transpose(0, 1) + up(p, x.transpose(0, 1)))


CASES = {
    "some tokens": lambda p, x: down(p, torch.tanh(up(p, x)) * p.five),
    "tokens swapped and added": swapped,
    "features in the middle": lambda p, x: down(p, torch.tanh(up(p, x).mT).mT),
    "a full operand": lambda p, x: down(p, torch.tanh(up(p, x)) + p.full),
    "a turned operand": lambda p, x: down(p, torch.tanh(up(p, x[0])) + p.turned.mT),
    "a slice of the features": lambda p, x: torch.tanh(up(p, x)[..., :8]) @ p.b[:, :K],
    "heads joined": lambda p, x: down(
        p, torch.tanh(up(p, x).unflatten(-1, (4, 12))).transpose(1, 2).flatten(-2).view(3, 5, N)
    ),
    "where": lambda p, x: down(p, torch.where(up(p, x) > 0, up(p, x), p.bias)),
    "features by row": lambda p, x: down(p, torch.softmax(torch.tanh(up(p, x)), -1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_strides_are_the_graphs(name, dtype):
    assert check(CASES[name], torch.randn(3, 5, K).to(dtype)).matches


def windows(window):
    """Return a chain on the windows of a picture, as Swin and CLAP partition it."""

    def function(p, x):
        side, w = 8, window
        x = x.view(-1, side // w, w, side // w, w, 16).transpose(2, 3).contiguous()
        return p.pair(x.view(-1, w * w, 16))

    return models.Model(function, pair=Pair(16, 4, 16))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("window", [2, 4])
def test_windows_fuse_at_any_batch(batch, window):
    x = torch.randn(batch, 64, 16)
    options = {"strict": True}
    result = nmm.rewrite(windows(window).eval(), (x,), options=options, verify=True)
    assert len(result.matches) == 1


# Results have the strides that the model gave them, at the output and wherever it is seen.

# Two chains of 32 features, and a dense weight.
CHAINS = {"a": (4, 32), "b": (24, 4), "ga": (4, 32), "gb": (24, 4), "w": (24, 32)}
Chains = functools.partial(models.Model, **CHAINS)


def left(p, x):
    return p.b @ (p.a @ x.mT)  # [..., 24, tokens]


def other(p, x):
    return p.gb @ (p.ga @ x.mT)


SEEN = {
    "left": left,
    "activation": lambda p, x: F.silu(left(p, x).mT),
    "gated": lambda p, x: (F.silu(left(p, x)) * other(p, x)).mT,
    "lora": lambda p, x: (p.w @ x.mT + 2 * left(p, x)).mT,
    "viewed behind": lambda p, x: torch.tanh(left(p, x).mT).mT.view(-1),
    "two readers": lambda p, x: (lambda y: (y, y.mT.sin(), y.sum(-1)))(left(p, x)),
    "heads": lambda p, x: F.linear(F.linear(x, p.a), p.b).unflatten(-1, (4, 6)).transpose(-2, -3),
    "convolution": lambda p, x: F.conv1d(F.conv1d(x.mT, p.a[..., None]), p.b[..., None]),
}


def _written(p, x):
    y = left(p, x).mT
    y.select(-1, 0).fill_(0.25)
    return y + 1


def _pointwise_written(p, x):
    y = torch.tanh(left(p, x).mT)
    seen = y.mT.view(-1)
    seen.mul_(2.0)
    return y


SEEN |= {"written": _written, "pointwise behind, written": _pointwise_written}


@pytest.mark.parametrize("shape", [(6, 32), (2, 5, 32)])
@pytest.mark.parametrize("name", SEEN)
def test_strides_at_the_output(name, shape):
    model = Chains(SEEN[name]).requires_grad_(False)
    result = trace_and_run(model, torch.randn(*shape), **VERIFIED)  # which compares strides, too
    # A convolution without a batch dimension is left as it is.
    assert bool(result.matches) == ((name, shape) != ("convolution", (6, 32)))


READERS = {
    "as_strided": lambda y: y.as_strided((24, 6), (6, 1)),
    "function": lambda y: torch.as_strided(y, (24, 6), (6, 1)),
    "stride": lambda y: y.stride(),
    "is_contiguous": lambda y: y.is_contiguous(),
    "view": lambda y: y.mT.view(-1),
}
BETWEEN = {"next to it": lambda y: y, "behind": torch.tanh, "further": lambda y: (y * 2).sin() + 1}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("between", BETWEEN)
def test_the_memory_order_that_is_read_is_the_graphs_own(reader, between):

    def function(p, x):
        return READERS[reader](BETWEEN[between]((p.b @ (p.a @ x.mT)).mT))

    model = Chains(function).requires_grad_(False)
    x = torch.randn(6, 32)
    result = trace_and_run(model, x)
    assert len(result.matches) == 1
    # two orders of adding 32 and 4 fp32 products near 1, doubled at most
    torch.testing.assert_close(result.graph_module(x), model(x), rtol=0, atol=2.0**-24 * 36 * 4)


# Calls that share x: each result has the layout that its readers want; near ones are one call.


def fork():
    """Return two chains of one x: one feeds another chain, the other is returned as it is."""
    parts = {"into": Pair(64, 8, 96), "out": Pair(64, 8, 48), "down": Pair(96, 8, 64)}
    return models.Model(lambda p, x: (p.down(p.into(x)), p.out(x)), **parts)


def test_a_result_for_another_kernel_is_col_and_its_neighbour_row():
    result = nmm.rewrite(fork(), (torch.randn(2, 12, 64),), verify=True)
    shared, down = calls_of(result)
    assert shared.kwargs["out_layouts"] == ["col", "row"]
    assert down.kwargs["x_layout"] == "col"
    assert result.transposes_after == 0
    (match,) = [m for m in result.matches if m.rule == "shared_x"]
    assert match.info["out_layout"] == "col,row"
    (_, spec), _ = kernel_calls(result.graph_module)
    assert spec.family == "lowrank_shared"
    assert (spec.m, spec.pairs) == (24, ((8, (96,)), (8, (48,))))
    assert (spec.result_layouts(), spec.bias) == (("col", "row"), True)


def far(between):
    """Return two chains of one x, with other work of some nodes between them."""

    def function(p, x):
        first, z = x @ p.u @ p.v, x[0]
        for _ in range(between - 1):
            z = torch.relu(z)
        return first, x @ p.u2 @ p.v2, z

    return models.Model(function, u=(64, 8), v=(8, 96), u2=(64, 8), v2=(8, 48))


@pytest.mark.parametrize(
    ("between", "rules"),
    [(0, ["shared_x"]), (46, ["shared_x"]), (47, ["lowrank"] * 2), (200, ["lowrank"] * 2)],
)
def test_results_at_most_48_nodes_apart_share_a_call(between, rules):
    assert NEAR == 48
    # the second result is two products behind the nodes between
    result = nmm.rewrite(far(between), (torch.randn(24, 64),))
    assert [match.rule for match in result.matches] == rules
