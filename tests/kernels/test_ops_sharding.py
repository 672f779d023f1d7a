"""DTensor: each placement row of every op gives the full result without moving an operand first."""

import torch
from op_calls import TOKENS, K, N, R, calls, weight
from torch.utils._pytree import tree_leaves, tree_map_only

from nmm_compiler.ops.registration import DEFINITIONS, OPS


def problems(name, operands, keywords, mesh, wanted=None):
    """Run a call at each of its rows; return what is not as the row says.

    wanted: what one process computes; None for the call itself.
    """
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    op, found = OPS[name], []
    want = tree_leaves(op(*operands, **keywords) if wanted is None else wanted)
    rows = DEFINITIONS[name].sharding(*operands, **keywords)
    assert len({str(row) for row in rows}) == len(rows)
    for outs, ins in rows:
        given = iter(p for p in ins if p is not None)
        placed = tree_map_only(
            torch.Tensor,
            lambda t, given=given: distribute_tensor(
                t,
                mesh,
                [Replicate() if isinstance(p := next(given), Partial) else p],
                src_data_rank=None,
            ),
            operands,
        )
        with torch.no_grad(), CommDebugMode() as comm:
            got = tree_leaves(op(*placed, **keywords))
        said = [y.placements for y in got]
        if said != [(out,) for out in outs] or comm.get_total_counts():
            found.append(f"{name} {keywords} {ins}: {said}, {comm.get_total_counts()} collectives")
        for y, right in zip(got, want, strict=True):
            if not torch.allclose(y.full_tensor(), right, rtol=1e-12, atol=1e-11):
                found.append(f"{name} {keywords} {ins} -> {outs}: wrong values")
    return found


def cut_blocks(mesh):
    """Return what is wrong with MX weights of three blocks a row, which two ranks would cut."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def cut(tensor, dim):
        place = Replicate() if dim is None else Shard(dim)
        return distribute_tensor(tensor, mesh, [place], src_data_rank=None)

    op, found = OPS["corrected_matmul"], []
    x = weight(TOKENS, 96) / 8
    values = (torch.arange(N * 48) % 251).byte().reshape(N, 48)
    scales = (torch.arange(N * 3) % 4 + 124).byte().reshape(N, 3)
    for call in (
        lambda: op(cut(x, 1), cut(values, 1), cut(scales, 1)),
        lambda: torch.ops.nmm.dequantize(cut(values, 1), cut(scales, 1), "mxfp4", x.dtype),
    ):
        try:
            call()
            found.append("blocks were cut")
        except Exception as error:  # DTensor says which operator it is of
            if "3 blocks of 32 inputs" not in str(error) or "multiple of 64" not in str(error):
                found.append(repr(error))
    with torch.no_grad():
        want = op(x, values, scales)
        for way in ((1, None), (None, 0)):  # x cut by features, the weight whole or by outputs
            got = op(cut(x, way[0]), cut(values, way[1]), cut(scales, way[1])).full_tensor()
            if not torch.allclose(got, want, rtol=1e-12, atol=1e-11):
                found.append(f"{way}: wrong values")
    return found


def every_row():
    """Check all calls on two ranks: tests/kernels/test_over_ranks.py starts them."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    failures = [one for call in calls() for one in problems(*call, mesh)]
    assert failures + cut_blocks(mesh) == []


def test_every_op_has_rules_and_a_call_here():
    assert all(op.sharding is not None for op in DEFINITIONS.values())
    assert {name for name, *_ in calls()} == set(DEFINITIONS)


def test_what_is_not_linear_is_never_summed_over_devices():
    x, u, v, w = weight(TOKENS, K), weight(K, R), weight(R, N), weight(K, N)

    def sums(name, *operands, **keywords):
        rows = DEFINITIONS[name].sharding(*operands, **keywords)
        return sum("Partial" in str(outs) for outs, _ in rows)

    assert sums("lowrank_matmul", x, u, v) == 2
    assert sums("lowrank_matmul", x, u, v, activation="silu") == 0
    assert sums("gated_mlp_up", x, [u, v], [w]) == 0
    # A base has no rank to be cut along: its x w would be added once per device.
    assert sums("lowrank_matmul", x, u, v, None, w) == 1
