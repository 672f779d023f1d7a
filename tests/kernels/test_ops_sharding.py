"""DTensor: each placement row of every op gives the full result without moving an operand first."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._pytree import tree_leaves, tree_map_only

from nmm_compiler.ops.registration import DEFINITIONS, OPS

K, R, N, TOKENS = 8, 4, 12, 6


def weight(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def calls():
    """Yield (op, operands, keywords): all layouts, with and without what may be left out."""
    x, u, v, w, bias = weight(TOKENS, K), weight(K, R), weight(R, N), weight(K, N), weight(N)
    back, deep, gate = weight(N, K), weight(2, TOKENS, K), [u, v]
    stored = {"u_layout": "col", "v_layout": "col"}
    ut, vt = u.t().contiguous(), v.t().contiguous()
    yield "lowrank_matmul", (deep, u, vt), {"v_layout": "col"}
    yield "lowrank_matmul", (deep, ut, vt, bias, w), {**stored, "scale": 0.5}
    yield "lowrank_matmul", (x, u, v, bias), {"activation": "silu"}
    yield "lowrank_matmul", (x.t().contiguous(), u, v), {"x_layout": "col", "out_layout": "col"}
    adapter = {"inner_activation": "gelu"}
    yield "lowrank_matmul", (x, u, v, bias, None, weight(R)), adapter
    yield "lowrank_matmul", (deep, ut, vt), {**stored, **adapter, "activation": "relu"}
    yield "lowrank_matmul", (x, u, v, bias, None, None, weight(R)), {"inner_eps": 1e-3}
    yield "matmul", (x, w, bias), {}
    yield "matmul", (deep, back), {"w_layout": "col", "out_layout": "col"}
    yield "matmul_as_stored", (x, w, bias), {"out_layout": "col"}
    yield "matmul_as_stored", (x, deep[0]), {"x_layout": "col", "token_axis": "k"}
    both = {"activations": ["identity", "relu"]}
    yield "lowrank_matmul_shared_x", (x, [u, u], [v, v], [None, bias]), {}
    yield "lowrank_matmul_shared_x", (x, [u, u], [v, v], [bias, None]), both
    layouts = {"out_layouts": ["row", "col"], **stored}
    yield "lowrank_matmul_shared_u", (x, ut, [vt, vt], [None, bias]), layouts
    yield "gated_mlp_up", (deep, gate, [w]), {}
    yield "gated_mlp_up", (x, gate, gate, bias, None), {"activation": "gelu"}
    yield "gated_mlp", (x, gate, gate, [back]), {}
    yield "gated_mlp", (x, [w], gate, [weight(N, R), u.t().contiguous()], bias, bias, weight(K)), {}
    q, key = weight(2, 4, 6, 8), weight(2, 2, 10, 8)
    yield "attention", (q, key, key), {}
    yield "attention", (q, q, q, weight(2, 6, 4)), {"rotates": "qk"}
    index = torch.arange(2 * TOKENS).reshape(TOKENS, 2) % 2
    yield "adapters_matmul", (x, index[:, 1], u, v, weight(2), bias, w), {}
    experts = (x, weight(2, K, 8), weight(2, 4, K), index, weight(TOKENS, 2))
    yield "experts", experts, {}
    stored = torch.full((N, 32), 0x21, dtype=torch.uint8), torch.full((N, 2), 127).byte()
    yield "corrected_matmul", (weight(TOKENS, 64), *stored), {}
    of_fp8 = fp8(weight(N, K)), weight(N)
    yield "corrected_matmul", (x, *of_fp8, u, v, bias), {"format": "fp8"}
    yield from corrected_calls()
    yield from scaled_calls()


def corrected_calls():
    """Yield calls of several few-bit weights, each half of a weight with numbers of its own."""
    x, u, v = weight(TOKENS, 64) / 8, weight(64, R), weight(R, 64)
    ws = [(torch.arange(64 * 32) * step % 251).byte().reshape(64, 32) for step in (3, 5, 7)]
    scales = [(torch.arange(64 * 2) % step + 120).byte().reshape(64, 2) for step in (2, 3, 5)]
    shared = (x, ws[:2], scales[:2], [u, None], [v, None], [None, weight(64)])
    yield "corrected_matmul_shared_x", shared, {"activations": ["identity", "silu"]}
    yield "corrected_matmul_shared_x", shared, {}
    wide = [fp8(weight(64, 64)) for _ in range(3)], [weight(64), weight(1), weight(64)]
    yield "corrected_mlp", (x, *wide, [u] * 3, [v] * 3), {"format": "fp8"}
    yield "corrected_mlp", (x, ws, scales, [None] * 3, [None] * 3), {}
    yield "corrected_mlp", (x, ws, scales, [u, None, u], [v, None, v]), {"activation": "gelu"}
    stored = {"u_layout": "col", "v_layout": "col", "out_layout": "col"}
    u, v = u.t().contiguous(), v.t().contiguous()
    yield "corrected_mlp", (x, ws, scales, [None, u, u], [None, v, v]), stored


def scaled_calls():
    """Yield calls of fp8 weights, with a scale for each output or one, for a plain x and fp8."""
    x, su, sv, sk = weight(TOKENS, K), weight(R), weight(N), weight(K)
    u, v, w, down = (fp8(t) for t in (weight(K, R), weight(R, N), weight(K, N), weight(N, K)))
    ut, vt = u.t().contiguous(), v.t().contiguous()
    stored = {"u_layout": "col", "v_layout": "col"}
    yield "matmul_scaled", (x, [sv], w), {}
    yield "lowrank_matmul_scaled", (x, [su, sv], ut, vt, weight(N)), stored
    yield "lowrank_matmul_scaled", (x, [weight(1), sv], u, v), {"activation": "relu"}
    of_x = {"x_scale": 0.5, "out_dtype": "float64"}
    yield "lowrank_matmul_scaled", (fp8(x), [su, sv], u, v), of_x
    yield "lowrank_matmul_shared_x_scaled", (x, [su, su, sv, sv], [u, u], [v, v], [None, None]), {}
    yield "lowrank_matmul_shared_u_scaled", (x, [su, sv, sv], u, [v, v], [None, None]), {}
    yield "gated_mlp_up_scaled", (x, [su, sv, sv], [u, v], [w]), {}
    yield "gated_mlp_scaled", (x, [su, sv, sv, sk], [u, v], [w], [down]), {}


def fp8(t):
    return t.to(torch.float8_e4m3fn)


def problems(name, operands, keywords, mesh):
    """Run a call at each of its rows; return what is not as the row says."""
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    op, found = OPS[name], []
    want = tree_leaves(op(*operands, **keywords))
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


def _worker(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    failures = []
    try:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        for call in calls():
            failures += problems(*call, mesh)
        failures += cut_blocks(mesh)
        dist.barrier()
    except Exception as error:  # reported to the parent, which fails the test with it
        failures.append(repr(error))
    results.put((rank, failures))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built in")
def test_every_placement_row_of_every_op_on_two_ranks():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_worker, args=(rank, port, results)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    # The exit code says nothing: gloo's threads may abort an interpreter that is going away.
    assert sorted(results.get(timeout=60) for _ in workers) == [(0, []), (1, [])]
    for worker in workers:
        worker.join(20)


def test_every_op_has_rules_and_a_call_here():
    assert all(op.sharding is not None for op in DEFINITIONS.values())
    assert {name for name, *_ in calls()} == set(DEFINITIONS)


def rows(name, *operands, **keywords):
    return [
        (str(outs), str(ins)) for outs, ins in DEFINITIONS[name].sharding(*operands, **keywords)
    ]


def test_what_is_not_linear_is_never_summed_over_devices():
    x, u, v, w = weight(TOKENS, K), weight(K, R), weight(R, N), weight(K, N)
    plain = rows("lowrank_matmul", x, u, v)
    assert sum("Partial" in out for out, _ in plain) == 2
    assert not any(
        "Partial" in out for out, _ in rows("lowrank_matmul", x, u, v, activation="silu")
    )
    assert not any("Partial" in out for out, _ in rows("gated_mlp_up", x, [u, v], [w]))
    # A base has no rank to be cut along: its x w would be added once per device.
    assert sum("Partial" in out for out, _ in rows("lowrank_matmul", x, u, v, None, w)) == 1
