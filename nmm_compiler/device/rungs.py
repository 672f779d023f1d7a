"""The kernels of `nmm doctor --device`: one construct each, in the form that emitted kernels use.

An NKI file: it is executed where nki is installed, or in the simulator, and never imported here.
ladder.py says what each kernel is given and what it must return.
"""

import nki
import nki.isa as nisa
import nki.language as nl


def in_sbuf(x):
    """Return x, a tensor or a view of one, in SBUF."""
    held = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=held, src=x)
    return held


def in_hbm(held):
    """Return what SBUF holds as a tensor in HBM."""
    out = nl.ndarray(held.shape, dtype=held.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=held)
    return out


def in_tiles(x):
    """Return a view of x, rows in tiles of 128: [128, rows / 128, columns]."""
    return x.reshape_dim(0, (x.shape[0] // 128, 128)).permute((1, 0, 2))


@nki.jit
def copy(x):
    """Copy x through SBUF."""
    return in_hbm(in_sbuf(x))


@nki.jit
def permuted_copy(x):
    """Copy x by tiles of 128 rows in SBUF."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=in_tiles(out), src=in_sbuf(in_tiles(x)))
    return out


@nki.jit
def broadcast_copy(scale):
    """Return a number on every partition."""
    return in_hbm(in_sbuf(scale.reshape((1, 1)).broadcast(0, 128)))


def stored(sums, dtype):
    """Return sums, which are in PSUM, as a tensor in HBM."""
    held = nl.ndarray(sums.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=held, src=sums, engine=nisa.engine.vector)
    return in_hbm(held)


@nki.jit
def matmul(a, b):
    """Return the product of the transpose of a with b, in fp32."""
    left, right = in_sbuf(in_tiles(a)), in_sbuf(in_tiles(b))
    tiles, n = right.shape[1], b.shape[1]
    sums = nl.ndarray((a.shape[1], n), dtype=nl.float32, buffer=nl.psum)
    for i in range(tiles):
        nisa.nc_matmul(
            dst=sums, stationary=left[0:128, i, 0 : a.shape[1]], moving=right[0:128, i, 0:n],
            accumulate=i > 0,
        )  # fmt: skip
    return stored(sums, nl.float32)


@nki.jit
def double_row(a, b):
    """Return the product of fp8 operands, two rows a pass."""
    left, right = in_sbuf(in_tiles(a)), in_sbuf(in_tiles(b))
    tiles, n = right.shape[1], b.shape[1]
    sums = nl.ndarray((a.shape[1], n), dtype=nl.float32, buffer=nl.psum)
    for i in range(0, tiles - 1, 2):
        nisa.nc_matmul(
            dst=sums, stationary=left[0:128, i : i + 2, 0 : a.shape[1]],
            moving=right[0:128, i : i + 2, 0:n], accumulate=i > 0,
            perf_mode=nisa.matmul_perf_mode.double_row,
        )  # fmt: skip
    if tiles % 2 > 0:
        nisa.nc_matmul(
            dst=sums, stationary=left[0:128, tiles - 1, 0 : a.shape[1]],
            moving=right[0:128, tiles - 1, 0:n], accumulate=True,
        )  # fmt: skip
    return stored(sums, nl.float32)


@nki.jit
def tensor_transpose(x):
    """Return x transposed on TensorE."""
    held = in_sbuf(x)
    turned = nl.ndarray((x.shape[1], x.shape[0]), dtype=x.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=held, engine=nisa.engine.tensor)
    return stored(turned, x.dtype)


@nki.jit
def dma_transpose(x):
    """Return x transposed by DMA; rows of the result are 32 bytes apart."""
    rows, columns = x.shape
    pitch = (rows + 15) // 16 * 16
    turned = nl.ndarray((columns, pitch), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_transpose(dst=turned[0:columns, 0:rows], src=x, axes=(1, 0))
    return in_hbm(turned[0:columns, 0:rows])


@nki.jit
def dma_transpose_tiles(x):
    """Return x transposed by one DMA of several tiles."""
    rows, columns = x.shape
    out = nl.ndarray((columns, rows), dtype=x.dtype, buffer=nl.shared_hbm)
    turned = nl.ndarray((128, columns // 128, rows), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_transpose(dst=turned, src=x.reshape_dim(1, (columns // 128, 128)), axes=(2, 1, 0))
    nisa.dma_copy(dst=in_tiles(out), src=turned)
    return out


@nki.jit
def two_results(x):
    """Return x and 2 x."""
    held = in_sbuf(x)
    twice = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=twice, data=held, op0=nl.multiply, operand0=2.0)
    return in_hbm(held), in_hbm(twice)


@nki.jit
def matmuls(a, b):
    """Return the product of a, turned, and 512 columns of b, once for each 8 columns of b.

    TensorE is busy all the time.
    """
    left, right = in_sbuf(a), in_sbuf(b[0:128, 0:512])
    sums = nl.ndarray((a.shape[1], 512), dtype=nl.float32, buffer=nl.psum)
    for i in range(b.shape[1] // 8):
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=i > 0)
    return stored(sums, nl.float32)


@nki.jit
def additions(x):
    """Return a multiple of x: VectorE adds 2048 columns once for each 256 columns of x."""
    held = in_sbuf(x[0:128, 0:2048])
    total = nl.ndarray(held.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=total, src=held, engine=nisa.engine.vector)
    for _ in range(x.shape[1] // 256):
        nisa.tensor_tensor(dst=total, data1=total, data2=held, op=nl.add, engine=nisa.engine.vector)
    return in_hbm(total[0:128, 0:8])


@nki.jit
def activations(x):
    """Return x: ScalarE copies 2048 columns once for each 256 columns of x."""
    held = in_sbuf(x[0:128, 0:2048])
    for _ in range(x.shape[1] // 256):
        nisa.activation(dst=held, op=nl.copy, data=held)
    return in_hbm(held[0:128, 0:8])


@nki.jit
def long_loads(x):
    """Return the first 8 columns of every tile of x; whole tiles are loaded."""
    rows, columns = x.shape
    tiles = rows // 128
    kept = nl.ndarray((128, tiles, 8), dtype=x.dtype, buffer=nl.sbuf)
    for i in range(tiles):
        held = in_sbuf(x[128 * i : 128 * (i + 1), 0:columns])
        nisa.tensor_copy(dst=kept[0:128, i, 0:8], src=held[0:128, 0:8], engine=nisa.engine.vector)
    return in_hbm(kept)


@nki.jit
def short_loads(x):
    """Return x; each row is loaded by a DMA of its own."""
    rows, columns = x.shape
    held = nl.ndarray((64, rows // 64, columns), dtype=x.dtype, buffer=nl.sbuf)
    for i in range(rows):
        place = i % 64
        nisa.dma_copy(dst=held[place : place + 1, i // 64, 0:columns], src=x[i : i + 1, 0:columns])
    return in_hbm(held)


@nki.jit
def transposing_loads(x):
    """Return the first 8 rows of every tile of x, turned; whole tiles are."""
    rows, columns = x.shape
    tiles = rows // 2048
    kept = nl.ndarray((columns, tiles, 8), dtype=x.dtype, buffer=nl.sbuf)
    for i in range(tiles):
        turned = nl.ndarray((columns, 2048), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_transpose(dst=turned, src=x[2048 * i : 2048 * (i + 1), 0:columns], axes=(1, 0))
        nisa.tensor_copy(
            dst=kept[0:columns, i, 0:8], src=turned[0:columns, 0:8], engine=nisa.engine.vector
        )
    return in_hbm(kept)
