"""What a schedule counts twice, against the tiles that its kernel allocates in the simulator."""

import types

from nmm_compiler.codegen.choose import rank
from nmm_compiler.codegen.emitted_file import kernel_source
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.targets import get

SPEC = LowRankSpec(m=600, k=128, r=128, n=512, x_layout="col")


def kinds():
    """Return one schedule of each way to keep u and v, in few and in many blocks."""
    found = {}
    for choice in rank(SPEC, get("trn2")):
        s = choice.schedule
        key = (s.u.resident, s.u.stream, s.v.resident, s.m_block < SPEC.m, s.u.block < SPEC.r)
        found.setdefault(key, s)
    return list(found.values())


def tile_bytes(schedule):
    """Return bytes per partition of all the tiles that u, and v, is loaded into over a run."""
    name, source = kernel_source(SPEC, schedule, get("trn2"))
    kernel = types.SimpleNamespace(name=name, path=f"{name}.py", source=source)
    arrays = [ArraySpec(t.shape, t.dtype) for t in SPEC.inputs()]
    trace = simulate(kernel, *arrays, mode="timing").trace
    tiles = {"u": {}, "v": {}}
    for instruction in trace.instructions:
        if instruction.engine == "dma":
            source = trace.allocations[instruction.reads[0].storage]
            made = trace.allocations[instruction.writes[0].storage]
            if source.name in tiles and made.memory == "sbuf":
                tiles[source.name][made.storage] = made.bytes_per_partition
    return {name: sum(made.values()) for name, made in tiles.items()}


def test_what_is_loaded_again_has_a_second_buffer():
    """Tiles that are allocated anew during the run load ahead only into a second buffer."""
    seen = set()
    for schedule in kinds():
        held = schedule.sbuf_bytes(SPEC)
        again = {name for name, size in tile_bytes(schedule).items() if size > held[name]}
        counted = schedule.overlapped_bytes(SPEC) - sum(held.values())
        assert counted >= sum(held[name] for name in again | {"y"}), schedule.short()
        streams = {"u": schedule.u.stream, "v": schedule.v.stream}
        kept = {name for name in streams if name not in again and not streams[name]}
        most = sum(held[name] for name in {"x", "y", "u", "v"} & held.keys() - kept)
        rest = sum(held.get(name, 0) for name in ("sum", "flat", "flat_v"))
        assert counted <= most + rest, schedule.short()
        seen |= {("u", "u" in again), ("v", "v" in again)}
    assert len(seen) == 4  # both are kept in some schedule and loaded again in another
