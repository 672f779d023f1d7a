"""The ops whose weights an index chooses: references, kernels, gradients, what they refuse."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.ops import registration  # noqa: F401  (defines torch.ops.nmm)
from nmm_compiler.runtime import executor  # noqa: F401  (the executors)

EXPERTS = torch.ops.nmm.experts


def ADAPTERS(*args, u_layout="col", **keywords):
    return torch.ops.nmm.adapters_matmul(*args, u_layout=u_layout, **keywords)


def adapters(dtype=torch.float32, groups=3, tokens=(2, 4)):
    """Return x, index, u, v, gains, bias, w."""
    torch.manual_seed(0)
    x = torch.randn(*tokens, 64, dtype=dtype)
    u, v = torch.randn(groups * 8, 64, dtype=dtype) / 8, torch.randn(groups * 8, 96, dtype=dtype)
    index = torch.arange(x[..., 0].numel()).reshape(tokens) % (groups + 1) - 1
    gains = torch.arange(1, groups + 1).float()
    return x, index, u, v, gains, torch.randn(96, dtype=dtype), torch.randn(64, 96, dtype=dtype) / 8


def experts(dtype=torch.float32, groups=4, tokens=5, top_k=2, layout="row"):
    """Return x, gate_up, down, index, gates, gate_up_bias, down_bias."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 64, dtype=dtype)
    up, down = (torch.randn(groups, a, b, dtype=dtype) / 8 for a, b in ((64, 96), (48, 64)))
    if layout == "col":
        up, down = up.mT.contiguous(), down.mT.contiguous()
    index = torch.rand(tokens, groups).argsort(-1)[:, :top_k]
    index[0, 0] = -1
    gates = torch.rand(tokens, top_k)
    biases = torch.randn(groups, 96, dtype=dtype), torch.randn(groups, 64, dtype=dtype)
    return x, up, down, index, gates, *biases


def test_each_token_has_the_branch_of_its_adapter():
    x, index, u, v, gains, bias, w = adapters()
    made = ADAPTERS(x, index, u, v, gains, bias, w)
    wanted = x @ w + bias
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(4)):
        at = tuple(place)
        i = int(index[at])
        if i >= 0:
            rows = slice(8 * i, 8 * i + 8)
            wanted[at] += gains[i] * (x[at] @ u[rows].T) @ v[rows]
    torch.testing.assert_close(made, wanted)
    turned = ADAPTERS(x, index, u.T, v.T, gains, bias, w.T, u_layout="row", v_layout="col",
                      w_layout="col")  # fmt: skip
    torch.testing.assert_close(turned, wanted)


@pytest.mark.parametrize("groups", [3, 40])
def test_the_adapters_kernel_in_the_simulator(groups):
    args = adapters(torch.bfloat16, groups)
    made = ADAPTERS(*args, executor="simulator")
    torch.testing.assert_close(made, ADAPTERS(*args), rtol=0.03, atol=0.3)


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(("clamped", "tokens"), [(False, 5), (True, 5), (True, 140)])
def test_the_experts_kernel_in_the_simulator(layout, clamped, tokens):
    args = experts(torch.bfloat16, layout=layout, tokens=tokens)
    said = {"weight_layout": layout}
    if clamped:
        said |= {"halves": "interleaved", "limit": 7.0, "slope": 1.702, "plus": 1.0}
    made = EXPERTS(*args, **said, executor="simulator")
    torch.testing.assert_close(made, EXPERTS(*args, **said), rtol=0.03, atol=0.2)


def test_gradients_of_adapters():
    x, index, u, v, gains, bias, w = (
        t.double() if t.is_floating_point() else t for t in adapters()
    )
    held = [t.requires_grad_() for t in (x, u, v, bias, w)]
    assert torch.autograd.gradcheck(
        lambda x, u, v, b, w: ADAPTERS(x, index, u, v, gains, b, w), held
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"index": torch.zeros(3, dtype=torch.long)}, ShapeError, "each of 8 tokens"),
        ({"gains": torch.ones(5)}, ShapeError, "ranks add up to 24"),
        ({"u": torch.zeros(24, 60)}, ShapeError, "features of x and u"),
        ({"v": torch.zeros(24, 96, dtype=torch.bfloat16)}, SpecError, "dtypes"),
    ],
)
def test_shapes_of_adapters_that_do_not_fit(change, error, words):
    names = ("x", "index", "u", "v", "gains", "bias", "w")
    given = dict(zip(names, adapters(), strict=True)) | change
    with FakeTensorMode() as mode, pytest.raises(error, match=words):
        ADAPTERS(*map(mode.from_tensor, given.values()))


def test_shapes_of_experts_that_do_not_fit():
    with FakeTensorMode() as mode:
        args = list(map(mode.from_tensor, experts()))
        with pytest.raises(ShapeError, match="two for each input of down"):
            EXPERTS(args[0], args[1][..., :90], *args[2:])
        with pytest.raises(ShapeError, match="index and gates"):
            EXPERTS(*args[:4], args[4][:, :1], *args[5:])


def test_an_expert_that_is_none_is_an_error():
    args = list(experts())
    args[3][2, 0] = 4
    with pytest.raises(IndexError, match="none of 4 experts"):
        EXPERTS(*args)
