"""New tiles in SBUF that one instruction fills."""

import nki.isa as nisa
import nki.language as nl


def filled(shape, dtype, value):
    """Return a new tile of one value."""
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def copied(src, dtype):
    """Return a copy of a tile, in its own dtype or another one."""
    tile = nl.ndarray(src.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=src)
    return tile


def loaded(src):
    """Return a part of a tensor in HBM, loaded as it lies."""
    tile = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src)
    return tile


def ramp(shape, step, first, between):
    """Return first + step column + between partition, fp32."""
    tile = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=tile, pattern=[[step, shape[1]]], offset=first, channel_multiplier=between)
    return tile


def combined(data, op, number, dtype):
    """Return op of a tile and a number, which may be one a partition."""
    tile = nl.ndarray(data.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=tile, data=data, op0=op, operand0=number)
    return tile
