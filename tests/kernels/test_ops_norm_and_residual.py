"""Calls of the ops with a norm of x and a residual: values, kernels, placements, refusals."""

import pytest
import torch
from torch.nn.functional import layer_norm, linear, rms_norm, silu

import nmm_compiler  # noqa: F401
from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.runtime import executor as _registered  # noqa: F401

OPS = torch.ops.nmm


def random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) / 4).to(dtype)


X, GAIN, BIAS = random(2, 3, 12), random(12, seed=1), random(12, seed=2)
U, V, RESIDUAL = random(12, 5), random(5, 8), random(2, 3, 8)
NONE = (None,) * 4


def test_values_are_those_of_the_modules():
    unit = layer_norm(X, (12,), GAIN + 1.0, BIAS, 1e-5)
    keywords = {"norm": "layer", "norm_offset": 1.0, "norm_eps": 1e-5}
    got = OPS.lowrank_matmul(X, U, V, *NONE, GAIN, BIAS, RESIDUAL, **keywords)
    torch.testing.assert_close(got, RESIDUAL + unit @ U @ V)
    unit = rms_norm(X, (12,), GAIN, 1e-5)
    keywords = {"norm": "rms", "norm_eps": 1e-5}
    one, two = OPS.lowrank_matmul_shared_x(X, [U, U], [V, 2 * V], [None, None], GAIN, **keywords)
    torch.testing.assert_close((one, two), (unit @ U @ V, unit @ U @ V * 2))
    w, down = random(12, 8), random(8, 12)
    got = OPS.gated_mlp(X, [w], [w], [down], None, None, None, GAIN, None, X, **keywords)
    torch.testing.assert_close(got, X + (silu(unit @ w) * (unit @ w)) @ down)
    columns = X.reshape(6, 12).t().contiguous()
    got = OPS.matmul(
        columns, w, None, GAIN, None, RESIDUAL.reshape(6, 8).t(), x_layout="col", out_layout="col",
        **keywords,
    )  # fmt: skip
    torch.testing.assert_close(got, (RESIDUAL + linear(unit, w.t())).reshape(6, 8).t())


def test_what_does_not_fit_is_refused_while_tracing():
    meta = [t.to("meta") for t in (X, U, V)]
    for more, keywords, error, words in (
        ((GAIN[:5],), {"norm": "rms"}, ShapeError, "norm_gain has shape"),
        ((GAIN, None, RESIDUAL[:1]), {"norm": "rms"}, ShapeError, "residual has shape"),
        ((GAIN,), {}, SpecError, "belong to a norm"),
        ((GAIN,), {"norm": "rsm"}, UnknownNameError, "did you mean 'rms'"),
        ((GAIN.float(),), {"norm": "rms"}, SpecError, "dtypes"),
    ):
        with pytest.raises(error, match=words):
            DEFINITIONS["lowrank_matmul"].fake(*meta, *NONE, *more, **keywords)


def test_features_of_x_stay_whole_under_a_norm():
    from torch.distributed.tensor import Partial, Replicate, Shard

    rule = DEFINITIONS["lowrank_matmul"].sharding
    plain = rule(X, U, V)
    normed = rule(X, U, V, *NONE, GAIN, None, RESIDUAL, norm="rms")
    assert any(ins[0] == Shard(2) for _, ins in plain)
    assert not any(ins[0] == Shard(2) for _, ins in normed)
    for (out,), ins in normed:
        assert ins[-3:] == [Replicate(), None, out]
    assert any(out == Partial() for (out,), _ in normed)
