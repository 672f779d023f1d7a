"""Layouts: which results are turned, which transposes go, in graph and kernels."""

import functools
import re

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Pair, kernel_calls, kinds_of, trace_and_run
from torch import nn

import nmm_compiler as nmm
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.passes.result import graph_parts

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


def layouts(result):
    return [f"{m.info['x_layout']}>{m.info['out_layout']}" for m in result.matches]


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
    assert layouts(result) == expected
    assert result.transposes_after == 0


@pytest.mark.parametrize(
    ("function", "before"),
    [
        # (a transposed view that is returned moves nothing, and is not counted)
        (lambda p, x: up(p, x.T).T, 1),
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
    "transpose": lambda p, x: mlp(p, x.transpose(0, 1)).transpose(-1, -2),
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
    """Nothing takes the place of such a result's node, so the call is found by what was added."""
    shapes = ((64, 8), (8, 96), (96, 8), (8, 64))
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
    result = trace_and_run(model, torch.randn(4, 64))
    unread = [match for match in result.matches if not match.emitted]
    assert unread, "the layout assignment turns the tensor between the two calls"
    pictures = graph_parts(result.original, result.graph_module, unread)
    texts = [part.text for section in pictures for part in section.parts]
    assert texts[1].startswith("after: ")
    assert "0 nodes" not in " ".join(texts)


def two_layouts(p, x):
    y = torch.tanh(up(p, x))
    return down(p, y), y.mT.contiguous(), y.sum(-1)


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
    "both orders read": two_layouts,
    "heads joined": lambda p, x: down(
        p, torch.tanh(up(p, x).unflatten(-1, (4, 12))).transpose(1, 2).flatten(-2).view(3, 5, N)
    ),
    "in place": lambda p, x: (lambda y: (y.mul_(2.0), down(p, torch.tanh(y)), y))(up(p, x)),
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
