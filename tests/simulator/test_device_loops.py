"""Loops on the device: what a turn costs, and how large the compiled program is."""

import textwrap

import pytest
from simulator_kernels import kernel_file

from nmm_compiler.simulator.run import ArraySpec, simulate

LOOP = textwrap.dedent(
    '''
    import nki
    import nki.isa as nisa
    import nki.language as nl

    @nki.jit
    def double(a, on_device):
        """Return 2 a for a [blocks * 128, 512]."""
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        blocks = a.shape[0] // 128
        a_blocks = a.reshape_dim(0, (blocks, 128))
        out_blocks = out.reshape_dim(0, (blocks, 128))

        def body(i):
            at = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.register_store(at, i)
            turn(out_blocks.select(0, at), a_blocks.select(0, at))

        if on_device:
            nl.fori_loop(0, blocks, body)
        else:
            for i in range(blocks):
                turn(out_blocks.select(0, i), a_blocks.select(0, i))
        return out

    def turn(out, a):
        held = nl.ndarray((128, 512), dtype=a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=held, src=a[0:128, 0:512])
        nisa.tensor_scalar(dst=held, data=held, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=out[0:128, 0:512], src=held)
    '''
)


KERNEL = f"{kernel_file(LOOP)}:double"


def profile(blocks, on_device):
    array = ArraySpec((128 * blocks, 512), "bfloat16")
    return simulate(KERNEL, array, on_device=on_device, target="trn2", mode="timing").profile


def test_turns_do_not_overlap_so_that_their_times_add_up():
    one, eight = (profile(n, True).latency_us for n in (1, 8))
    assert eight == pytest.approx(8 * one, rel=0.02)
    assert profile(8, False).latency_us < 0.6 * eight


def test_the_program_holds_the_body_of_a_loop_once():
    looped, unrolled = profile(8, True), profile(8, False)
    assert looped.program_instructions == 4
    assert sum(sum(ops.values()) for ops in looped.instructions.values()) == 8 * 4
    assert unrolled.program_instructions == 8 * 3


def test_one_runtime_index_costs_a_copy_nothing_but_its_wait():
    """The bytes of the index are no data: they must not make a descriptor per element."""
    looped, unrolled = profile(1, True), profile(1, False)
    assert looped.latency_us < unrolled.latency_us + 2
    assert looped.hbm_read_bytes == unrolled.hbm_read_bytes
