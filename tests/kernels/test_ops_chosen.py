"""The ops whose weights an index chooses: references, kernels, gradients, what they refuse."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.lowrank_models.quantize import QuantizedLinear
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


def experts(dtype=torch.float32, groups=4, tokens=5, top_k=2, layout="row", n=48):
    """Return x, gate_up, down, index, gates, gate_up_bias, down_bias."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 64, dtype=dtype)
    up, down = (torch.randn(groups, a, b, dtype=dtype) / 8 for a, b in ((64, 2 * n), (n, 64)))
    if layout == "col":
        up, down = up.mT.contiguous(), down.mT.contiguous()
    index = torch.rand(tokens, groups).argsort(-1)[:, :top_k]
    index[0, 0] = -1
    gates = torch.rand(tokens, top_k)
    biases = torch.randn(groups, 2 * n, dtype=dtype), torch.randn(groups, 64, dtype=dtype)
    return x, up, down, index, gates, *biases


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("form", ["fp8", "mxfp4", "factors", "fp8+8", "mxfp8+8", "+8"])
def test_experts_in_other_forms(form, clamped):
    """Alike in eager PyTorch, traced, and in the simulator, as the weights multiplied out."""
    x, up, down, index, gates, *biases = experts(torch.bfloat16, layout="col", n=32)
    form, _, rank = form.partition("+")
    kept, call = {}, {"format": form, "weight_layout": "col", "factor_layout": "col"}
    for name, weight in (("gate_up", up), ("down", down)):
        groups, n, k = weight.shape
        if rank or form == "factors":
            u, v = torch.randn(groups, 8, k) / 8, torch.randn(groups, n, 8) / 8
            call[f"{name}_u"] = u.bfloat16()
            call[f"{name}_v" if rank else name] = v.bfloat16()
            kept[name] = v.bfloat16().float() @ u.bfloat16().float()
        if form != "factors":
            base = [QuantizedLinear.of(one, form) for one in weight] if form else []
            wide = torch.stack([one.dequantized(torch.float32) for one in base]) if form else weight
            kept[name] = wide.float() + kept.get(name, 0)
            values = torch.stack([one.values for one in base]) if form else weight
            scales = torch.stack([one.scale for one in base]) if form else None
            if form == "fp8":
                values, scales = values.view(torch.float8_e4m3fn), scales.squeeze(-1)
            call |= {name: values} | ({f"{name}_scale": scales} if form else {})
    said = {"limit": 7.0, "slope": 1.702, "plus": 1.0} if clamped else {}
    if form.startswith("mx"):
        call = {name: filled(one, name, biases) for name, one in call.items()}
        biases[0] = filled(biases[0].unsqueeze(-1), "gate_up_bias", biases).squeeze(-1)
    names = ("gate_up_bias", "down_bias")
    call |= dict(zip(names, biases, strict=True))
    first, second = call.pop("gate_up"), call.pop("down")
    args = (x, first, second, index, gates)
    wide = dict(zip(names, experts(torch.bfloat16, layout="col", n=32)[5:], strict=True))
    wanted = EXPERTS(x.float(), kept["gate_up"], kept["down"], index, gates,
                     **{name: one.float() for name, one in wide.items()},
                     weight_layout="col", **said)  # fmt: skip
    made = EXPERTS(*args, **call, **said)
    traced = torch.compile(lambda *a: EXPERTS(*a, **call, **said), backend="eager")(*args)
    target = "trn3" if form.startswith("mx") else "trn2"
    simulated = EXPERTS(*args, **call, **said, target=target, executor="simulator")
    for one, limit in (
        (made, 0.02),
        (traced, 0.02),
        (simulated, 0.08 if target == "trn3" else 0.02),
    ):
        assert (one.float() - wanted).norm() <= limit * wanted.norm()


def filled(one, name, biases):
    """Fill up with zeros what MX weights take in whole 128s."""
    if not isinstance(one, torch.Tensor):
        return one
    if name in ("gate_up", "gate_up_scale", "gate_up_v", "gate_up_bias"):
        one = torch.cat([torch.nn.functional.pad(h, (0, 0, 0, 96)) for h in one.chunk(2, 1)], 1)
    inputs = {"gate_up": 64, "gate_up_scale": 64, "down": 32, "down_scale": 32, "down_u": 32}
    if name in inputs:
        whole = one.shape[-1] * 128 // inputs[name]
        one = torch.nn.functional.pad(one, (0, whole - one.shape[-1]))
    return one.contiguous()


@pytest.mark.parametrize(
    ("op", "operands", "place", "wrong", "error", "words"),
    [
        (ADAPTERS, adapters, 1, torch.zeros(3).long(), ShapeError, "each of 8 tokens"),
        (ADAPTERS, adapters, 4, torch.ones(5), ShapeError, "ranks add up to 24"),
        (ADAPTERS, adapters, 2, torch.zeros(24, 60), ShapeError, "features of x and u"),
        (ADAPTERS, adapters, 3, torch.zeros(24, 96).bfloat16(), SpecError, "dtypes"),
        (EXPERTS, experts, 1, torch.zeros(4, 64, 90), ShapeError, "two for each input of down"),
        (EXPERTS, experts, 4, torch.zeros(5, 1), ShapeError, "index and gates"),
    ],
)
def test_shapes_that_do_not_fit(op, operands, place, wrong, error, words):
    given = list(operands())
    given[place] = wrong
    with FakeTensorMode() as mode, pytest.raises(error, match=words):
        op(*map(mode.from_tensor, given))


def test_an_expert_that_is_none_is_an_error():
    args = list(experts())
    args[3][2, 0] = 4
    with pytest.raises(IndexError, match="none of 4 experts"):
        EXPERTS(*args)
