"""DTensor: each placement row gives the full result without moving an operand first."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    failures = []
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.debug import CommDebugMode

        import nmm_compiler.ops.registration  # noqa: F401

        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        x = torch.randn(6, 8, dtype=torch.float64)
        u = torch.randn(8, 4, dtype=torch.float64)
        v_stored = torch.randn(10, 4, dtype=torch.float64)
        want = x @ u @ v_stored.t()
        whole = Replicate()
        rows = {
            "replicate": (whole, whole, whole, whole),
            "token": (Shard(0), whole, whole, Shard(0)),
            "column": (whole, whole, Shard(0), Shard(1)),
            "row": (Shard(1), Shard(0), whole, Partial()),
            "rank": (whole, Shard(1), Shard(1), Partial()),
        }
        for name, (px, pu, pv, pout) in rows.items():
            placed = [
                distribute_tensor(t, mesh, [p])
                for t, p in zip((x, u, v_stored), (px, pu, pv), strict=True)
            ]
            with torch.inference_mode(), CommDebugMode() as comm:
                got = torch.ops.nmm.lowrank_matmul(*placed, v_layout="col")
            if tuple(got.placements) != (pout,) or comm.get_total_counts():
                failures.append(f"{name}: {got.placements}, {comm.get_total_counts()} collectives")
            if not torch.allclose(got.full_tensor(), want, rtol=1e-12, atol=1e-12):
                failures.append(f"{name}: wrong values")
        bias = distribute_tensor(torch.ones(10, dtype=torch.float64), mesh, [whole])
        placed = [
            distribute_tensor(t, mesh, [p])
            for t, p in zip((x, u, v_stored), (Shard(1), Shard(0), whole), strict=True)
        ]
        with torch.inference_mode():
            got = torch.ops.nmm.lowrank_matmul(*placed, bias, v_layout="col")
        if not torch.allclose(got.full_tensor(), want + 1, rtol=1e-12, atol=1e-12):
            failures.append("a bias was added once per device")
        with torch.inference_mode():
            got = torch.ops.nmm.matmul(placed[0], placed[1])
        if tuple(got.placements) != (Partial(),):
            failures.append(f"matmul: {got.placements}")
        dist.barrier()
    except Exception as error:  # reported to the parent, which fails the test with it
        failures.append(repr(error))
    results.put((rank, failures))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built in")
def test_five_placement_rows_on_two_ranks():
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
