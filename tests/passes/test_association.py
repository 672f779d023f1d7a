"""Three and more constant factors in a row: as written without permission, the best cut with it."""

import functools

import models
import pytest
import torch
import torch.nn.functional as F
from torch import fx

from nmm_compiler.passes.pipeline import run

# A row of matrices.
Row = functools.partial(
    models.Model,
    a=(64, 8),
    b=(8, 8),
    c=(8, 48),
    d=(48, 6),
    e=(6, 40),
)


MANY, FEW = 2000, 4
# spelling, tokens, rank that is found without and with permission (None: nothing)
ROWS = [
    ("x a b c", lambda p, x: x @ p.a @ p.b @ p.c, MANY, None, 8),
    ("few tokens", lambda p, x: x @ p.a @ p.b @ p.c, FEW, None, 8),
    ("linear", lambda p, x: F.linear(F.linear(x @ p.a, p.b), p.c.T), MANY, None, 8),
    ("two pairs", lambda p, x: x @ p.a @ p.c @ p.d @ p.e, FEW, (8, 6), (8, 6)),
    ("two pairs into one", lambda p, x: x @ p.a @ p.c @ p.d @ p.e, MANY, (8, 6), 6),
    ("five", lambda p, x: x @ p.a @ p.b @ p.c @ p.d @ p.e, MANY, 6, 6),
    ("x (a b) c", lambda p, x: x @ (p.a @ p.b) @ p.c, MANY, None, 8),
    ("x a (b c)", lambda p, x: x @ p.a @ (p.b @ p.c), FEW, None, 8),
    ("x (a b c)", lambda p, x: x @ (p.a @ p.b @ p.c), FEW, None, 8),
    ("left", lambda p, x: (p.c.T @ (p.b.T @ (p.a.T @ x.flatten(0, 1).T))).T, MANY, None, 8),
    ("tokens moved", lambda p, x: (x @ p.a).transpose(0, 1) @ p.b @ p.c, MANY, None, 8),
    ("inner value read", lambda p, x: (lambda h: (h @ p.c, h.sum()))(x @ p.a @ p.b), MANY, None,
     None),
    ("scale inside", lambda p, x: (x @ p.a @ p.b) * 0.5 @ p.c, MANY, None, None),
    ("multi_dot", lambda p, x: torch.linalg.multi_dot([x.flatten(0, 1), p.a, p.b, p.c]), MANY,
     8, 8),
    ("multi_dot of six", lambda p, x: torch.linalg.multi_dot([x.flatten(0, 1), p.a, p.c, p.d,
     p.e]), MANY, 6, 6),
    ("multi_dot, few tokens", lambda p, x: torch.linalg.multi_dot([x.flatten(0, 1), p.a, p.c, p.d,
     p.e]), FEW, None, None),
    ("einsum of four", lambda p, x: torch.einsum("btk,kr,rs,sn->btn", x, p.a, p.b, p.c), MANY,
     8, 8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "tokens", "plain", "permitted"), ROWS)
def test_rows(name, function, tokens, plain, permitted):
    model, x = Row(function), torch.randn(2, tokens // 2, 64) / 8
    with torch.no_grad():
        want = torch.utils._pytree.tree_leaves(model(x))
    for options, ranks in (({}, plain), ({"rules": ["+reassociate"]}, permitted)):
        result = run(fx.symbolic_trace(model), (x,), options=options)
        found = tuple(m.info["r"] for m in result.rewritten)
        assert found == (ranks if isinstance(ranks, tuple) else () if ranks is None else (ranks,))
        with torch.no_grad():
            got = torch.utils._pytree.tree_leaves(result.graph_module(x))
        for left, right in zip(want, got, strict=True):
            # Norms stay below 1 through a row, so two orders differ by their roundings alone.
            size = max(float(left.abs().max()), 1.0)
            assert float((left - right).abs().max()) <= 2.0**-23 * (64 + 8 + 8 + 48 + 6) * size
        assert not run(result.graph_module, (x,), options=options).rewritten
        assert found or result.declined or name == "inner value read"


def test_the_note_says_what_moved():
    model, x = Row(lambda p, x: x @ p.a @ p.b @ p.c), torch.randn(MANY, 64)
    result = run(fx.symbolic_trace(model), (x,), options={"rules": ["+reassociate"]})
    assert "reassociated" in result.rewritten[0].notes[-1]
    model = Row(lambda p, x: torch.linalg.multi_dot([x, p.a, p.b, p.c]))
    result = run(fx.symbolic_trace(model), (x,))
    assert not any("reassociated" in note for note in result.rewritten[0].notes)


def test_gradients_reach_every_factor():
    model, x = Row(lambda p, x: x @ p.a @ p.b @ p.c @ p.d @ p.e), torch.randn(MANY, 64) / 8
    graph = run(fx.symbolic_trace(model), (x,), options={"rules": ["+reassociate"]}).graph_module
    leaves = list(model.parameters())
    one, two = (torch.autograd.grad(m(x).square().sum(), leaves) for m in (model, graph))
    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-4)
