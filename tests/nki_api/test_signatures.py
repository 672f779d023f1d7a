"""The signatures that the lint reads are those of the simulator's functions, as documented."""

import inspect

import pytest

from nmm_compiler.nki_api.api import api
from nmm_compiler.simulator.loading.standins import MODULES

TABLE = {
    name: function
    for name, function in api().functions.items()
    if name.rpartition(".")[2] in vars(MODULES[name.rpartition(".")[0]])
}
DOCUMENTED = [
    "nc_matmul(dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, "
    "is_transpose=False, accumulate=None, tile_position=(), tile_size=(), "
    "perf_mode=matmul_perf_mode.none, name=None)",
    "activation(dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, "
    "reduce_cmd=reduce_cmd.idle, name=None)",
    "dma_copy(dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown, "
    "engine=engine.unknown, name=None)",
    "sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=dma_engine.dma, "
    "name=None)",
    "ndarray(shape, dtype, buffer=sbuf, name='', address=None)",
    "shared_identity_matrix(n, dtype=uint8, dst=None)",
    "rms_norm(x, w, axis, n, epsilon=1e-06, dtype=None, compute_dtype=None)",
    "load_transpose2d(src, dtype=None)",
]
"""Some signatures of the stubs of NKI 0.6, one for each way in which a default is written."""


@pytest.mark.parametrize("signature", DOCUMENTED)
def test_signatures_are_the_documented_ones(signature):
    short = signature.partition("(")[0]
    (found,) = (f for name, f in TABLE.items() if name.endswith(f".{short}"))
    assert str(found) == signature


@pytest.mark.parametrize("name", TABLE)
def test_a_function_takes_its_arguments_by_position_or_name(name):
    module, _, short = name.rpartition(".")
    parameters = inspect.signature(vars(MODULES[module])[short]).parameters.values()
    assert {p.kind for p in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
