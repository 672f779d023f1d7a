"""Low-rank models over several processes compute what one process computes."""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import first_of, on_ranks, ran, same_gradients
from torch import nn

import nmm_compiler as nmm
from nmm_compiler.codegen.build_many import build_many
from nmm_compiler.errors import NeuronSetupError, OptionTypeError, ShapeError, UnknownNameError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.lowrank_models.modules import LowRankLinear
from nmm_compiler.lowrank_models.tensor_parallel import linear_roles, tensor_parallel_plan
from nmm_compiler.options import FACTOR_SPLITS
from nmm_compiler.prediction.model_kernels import model_kernels
from nmm_compiler.prices.ways import ways

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is missing")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensor_parallel.py"


class Block(nn.Module):
    """A gated MLP of low-rank linears, and a dense head; the plan that transformers would give."""

    _tp_plan = {"gate": "colwise", "up": "colwise", "down": "rowwise", "head": "colwise_rep"}  # noqa: RUF012

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (LowRankLinear(64, 16, 96, bias) for _ in range(2))
        self.down = LowRankLinear(96, 24, 64, bias)
        self.head = nn.Linear(64, 40, bias)

    def forward(self, x):
        return self.head(x + self.down(torch.relu(self.gate(x)) * self.up(x)))


class Mesh:
    """What the plan asks a mesh."""

    def __init__(self, devices):
        self.devices = devices

    def size(self):
        return self.devices


def cut(mesh, **more):
    from torch.distributed.tensor.parallel import parallelize_module

    model = Block()
    return parallelize_module(model, mesh, tensor_parallel_plan(model, mesh, **more))


def with_nmm(model, **more):
    torch._dynamo.reset()
    options = {"inner": "eager", "strict": True, "cache": "off", "kernels": "lazy", **more}
    return torch.compile(model, backend="nmm", options=options)


def check(mesh, split, compiled):
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    alone, model = Block(), cut(mesh, split=split)
    want, got = alone(x), (with_nmm(model) if compiled else model)(x)
    # Six products one after the other, sums of at most 96 terms in another order.
    bound = 6 * 96 * 2.0**-24 * float(want.abs().max())
    assert float((got - want).abs().max()) <= bound, split
    if compiled:
        # "row" sums between the two products of `down`, inside of its call.
        assert nmm.last_report().chains == 3, str(nmm.last_report())
    want.square().sum().backward()
    got.square().sum().backward()
    same_gradients(model, alone, 2.0**-18)


def every_split(also_compiled):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for split in FACTOR_SPLITS:
        check(mesh, split, False)
        if also_compiled:
            check(mesh, split, True)


@pytest.mark.parametrize("split", FACTOR_SPLITS)
def test_a_mesh_of_one_gives_the_values_and_gradients_of_the_model(split):
    """The styles and their hooks, without other processes."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check(init_device_mesh("cpu", (1,)), split, False)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def down_of_four():
    """The rows of the first of four ranks, alone: the others are not there, sums are its own."""
    from torch.distributed.device_mesh import init_device_mesh

    with first_of(4):
        yield nn.Sequential(cut(init_device_mesh("cpu", (4,))).down)


def compiled(model, **more):
    """Return the report of a call, and whether it reached a kernel, which only a device has."""
    try:
        with_nmm(model, **more)(torch.zeros(2, 5, 96 // 4))
    except NeuronSetupError:
        return nmm.last_report(), True
    return nmm.last_report(), False


def test_the_sum_of_rows_is_inside_of_the_call_where_it_pays(down_of_four):
    """The report has both figures; where there are no collectives, two products stay."""
    inside, _ = compiled(down_of_four)
    assert inside.chains == 1
    (line,) = inside.matches
    assert line.startswith("lowrank")
    way = ways(LowRankSpec(m=10, k=24, r=24, n=64, dtype="float32", tp=4, tp_axis="rows"), "trn2")
    assert way.fused <= way.separate
    apart, _ = compiled(down_of_four, target="trn1")
    assert apart.chains == 0
    (refused,) = (one.reason for one in apart.declined)
    assert "nki.collectives are documented for trn2 and trn3" in refused
    alone, _ = compiled(down_of_four, executor="simulator")
    assert "executor 'simulator' runs one process" in str(alone.declined)


def test_a_model_that_trains_on_kernels_keeps_its_products(down_of_four):
    """The kernel that sums has no gradients, so a call of it would raise in the backward pass."""
    trained, called = compiled(down_of_four, executor="neuron")
    assert (trained.chains, called) == (0, False)
    (refused,) = trained.declined
    assert "no kernel that sums over devices has gradients" in str(refused)
    assert "use executor 'reference', or torch.no_grad()" in str(refused)
    with torch.no_grad():
        report, called = compiled(down_of_four, executor="neuron")
    assert (report.chains, called) == (1, True)
    assert compiled(down_of_four, executor="reference")[0].chains == 1


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_processes_give_the_values_and_gradients_of_one_and_fuse_chains(count):
    on_ranks(count, functools.partial(every_split, count > 2))


def test_the_plan_names_every_linear_that_is_cut():
    model = Block()
    assert linear_roles(model) == {
        "gate": "colwise", "up": "colwise", "down": "rowwise", "head": "head"}  # fmt: skip
    factors = {f"{name}.{part}" for name in ("gate", "up", "down") for part in ("down", "up")}
    for split in FACTOR_SPLITS:
        assert set(tensor_parallel_plan(model, Mesh(2), split=split)) == factors | {"head"}


def block(**attributes):
    model = Block()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "mesh", "split", "error", "text"),
    [
        (Block(), Mesh(2), "columns", UnknownNameError, "rank"),
        (nn.Linear(4, 4), Mesh(2), "row", OptionTypeError, "tensor-parallel plan"),
        (Block(), Mesh(5), "row", ShapeError, "out_features 96"),
        (block(head=nn.Linear(64, 48)), Mesh(16), "rank", ShapeError, "down has rank 24"),
        (block(config=SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)), Mesh(4),
         "row", ShapeError, "2 num_key_value_heads"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_named(model, mesh, split, error, text):
    with pytest.raises(error, match=text):
        tensor_parallel_plan(model, mesh, split=split)
    tensor_parallel_plan(Block(), Mesh(4), split="rank")


@pytest.mark.long
def test_kernels_that_are_built_for_two_cores_are_found_there(cache, tmp_path):
    """`nmm build --tp 2` and then the compiled model on two processes, which may not build."""
    program = tmp_path / "run.py"
    program.write_text(FOUND.format(folder=str(EXAMPLE.parent)))
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        import tensor_parallel
    finally:
        sys.path.pop(0)
    config = tensor_parallel.low_rank().config
    wanted = model_kernels(config, ratios=[None], tokens=[12], tps=[2], dtype="float32")
    build_many([spec for spec, _ in wanted])
    done = ran(program, NMM_CACHE="require")
    assert json.loads(done.stdout.splitlines()[-1]) == len(wanted) > 0


FOUND = """
import os, socket, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
sys.path.insert(0, {folder!r})


def worker(rank, port):
    import tensor_parallel as example, nmm_compiler as nmm
    from nmm_compiler.lowrank_models.tensor_parallel import tensor_parallel_plan
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, mesh = example.low_rank(), init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, tensor_parallel_plan(model, mesh))
    compiled = torch.compile(model, backend="nmm", options={{"inner": "eager", "strict": True}})
    with torch.no_grad():
        compiled(torch.arange(12).reshape(1, 12), use_cache=False)
    if rank == 0:
        print(len({{line.name for r in nmm.reports() for line in r.kernels}}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port,), nprocs=2)
"""
