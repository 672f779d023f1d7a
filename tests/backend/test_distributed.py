"""Two processes: tensor parallelism keeps a chain cut along its rank, FSDP2 keeps all chains."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import first_of, on_ranks, same_gradients
from torch import nn
from toy_models import Model, Pair

import nmm_compiler as nmm

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is missing")


def stack():
    def function(m, x):
        for layer in m.layers:
            x = torch.tanh(layer(x))
        return x

    return Model(function, layers=nn.ModuleList(Pair(48, 6, 48) for _ in range(2)))


def compiled(model, inner):
    torch._dynamo.reset()
    options = {"inner": inner, "strict": True, "cache": "off"}
    return torch.compile(model, backend="nmm", options=options)


def close(got, want):
    # Sums of 64 and 8 terms of size 1 at most, in another order.
    return torch.allclose(got, want, rtol=0, atol=2.0**-23 * 72)


def parallel(model, **plan):
    """Cut the linears of a model over both processes: name=style."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel as styles

    made = {name: getattr(styles, style)(**more) for name, (style, more) in plan.items()}
    return styles.parallelize_module(model, init_device_mesh("cpu", (2,)), made)


def cut_along_rank(bias):
    return parallel(Pair(64, 8, 48, bias), a=("ColwiseParallel", {}), b=("RowwiseParallel", {}))


def assert_one_call():
    report = nmm.last_report()
    assert (report.chains, len(report.kernels)) == (1, 1), str(report)
    assert "r4 " in report.kernels[0].spec, report.kernels[0].spec  # of rank 8, half


def tensor_parallel(bias, inner):
    """A chain cut along its rank is one call on each device."""
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    alone, model = Pair(64, 8, 48, bias), cut_along_rank(bias)
    got = compiled(model, inner)(x)
    assert_one_call()
    assert close(got, alone(x)), f"{inner}: values"
    got.square().sum().backward()
    alone(x).square().sum().backward()
    same_gradients(model, alone, 2.0**-20)


def sums_between():
    """A sum over the devices between the products has rank width: it stays where it is, named."""
    from torch.distributed.tensor import Replicate

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    alone = Pair(64, 8, 48, False)
    rows = ("RowwiseParallel", {"input_layouts": Replicate()})
    model = parallel(Pair(64, 8, 48, False), a=rows, b=("ColwiseParallel", {}))
    got = compiled(model, "eager")(x)
    report = nmm.last_report()
    assert close(got, alone(x).chunk(2, -1)[dist.get_rank()]), "sums: values"
    assert report.chains == 0, str(report)
    (declined,) = report.declined
    assert "a move between devices" in declined.reason, str(report)
    assert "cut both factors" in declined.remedy, str(report)


def fully_sharded():
    """FSDP2: compiled blocks read whole parameters."""
    from torch.distributed.fsdp import fully_shard

    model, alone = stack(), stack()
    options = {"inner": "eager", "strict": True, "cache": "off"}
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="nmm", options=options)
        fully_shard(model.layers[index])
    fully_shard(model)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    got = model(x)
    assert close(got, alone(x)), "fsdp: values"
    assert nmm.last_report().chains == 1, str(nmm.reports())
    got.square().sum().backward()
    alone(x).square().sum().backward()
    same_gradients(model, alone, 2.0**-20, partial(re.sub, r"^(layers.\d)", r"\1._orig_mod"))


def test_a_chain_that_is_cut_along_its_rank_is_one_call():
    """On one of two devices; the values of both are compared in processes, below."""
    with first_of(2):
        compiled(cut_along_rank(True), "eager")(torch.randn(2, 5, 64)).sum()
    assert_one_call()


@pytest.mark.long
def test_tensor_parallel_and_fsdp2():
    kinds = [(True, "eager"), (False, "aot_eager"), (True, "aot_eager")]
    on_ranks(2, *(partial(tensor_parallel, *kind) for kind in kinds), sums_between, fully_sharded)
