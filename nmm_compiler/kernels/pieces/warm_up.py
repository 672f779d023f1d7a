"""Products of zeros, which bring TensorE to its full clock before the first operands are there."""

import nki.isa as nisa
import nki.language as nl


def warm_up(dst, passes):
    """Begin a sum, a PSUM bank wide, with products of zeros while the first operands arrive.

    TensorE runs at half its clock until it has worked for some microseconds. A pass over fewer
    columns would wait for the one before it, since both add to one sum.
    """
    zeros = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    for i in range(passes):
        nisa.nc_matmul(
            dst=dst,
            stationary=zeros[0:128, 0 : dst.shape[0]],
            moving=zeros,
            accumulate=i > 0,
        )
