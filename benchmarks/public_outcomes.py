"""How a run of a public kernel ended: its limit of CPU time, and a word for what went wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from nmm_compiler.errors import KernelFailedError, NmmError, UnsupportedInstructionError

# (what a case's row or error says, why the case is not right, whether NKI 0.3 or newer can run it)
EXPLAINED = (
    ("got an unexpected keyword argument 'dtype'",
     "the sample is written for NKI 0.2: nisa.tensor_copy lost dtype= in 0.3", False),
    ("KeyError: 'mask_out_hbm'",
     "the test's own code: it looks an input up without the suffix that it gave it", False),
    ("neuronxcc.starfish",
     "the test imports neuronxcc.starfish, the compiler's private package", False),
    ("test_rope_manual",
     "its live tiles take 393,216 B per SBUF partition, more than trn2 has; the NKI compiler would "
     "spill, the simulator refuses instead", True),
    ("dge_mode none; direct transposes take",
     "nki.isa.dma_transpose: a direct one has dge_mode unknown or hwdge, the kernel passes 3, "
     "none", False),
    ("nisa.register_alloc: NkiTensor",
     "nki.isa.register_alloc takes an int or nothing; the kernel passes a tensor", False),
    ("nki.language.range is not",
     "the kernel calls nl.range, which no published nki.language has", False),
    ("test_rmsnorm_mx_quantize_tkg",
     "the test's kernel stores 4 of each 32 partitions of the scales and the test expects 0 in the "
     "others, which nothing writes", True),
    ("test_quantize_mx_hw",
     "the test's kernel stores partitions between the scales, which nisa.quantize_mx does not "
     "write, and expects 0 there", True),
    ("'inp_qtz_cur_t' (128, 1, 4)",
     "with selected experts and an intermediate size of 64 the kernel quantizes rows that nothing "
     "wrote, and contracts over them", True),
    ("comparison, nl.equal of nisa.tensor_scalar depend on memory",
     "with fewer positions than a batch holds, cross_entropy_backward compares targets that "
     "nothing wrote; it stores no result of theirs", True),
    ("The size of tensor a (384) must match the size of tensor b (3)",
     "the library's own torch reference multiplies 384 columns by 3 scales", False),
    ("slice 0:0 of dimension 0 of tensor 'targets_hbm'",
     "NkiTensor.slice: start < end; one token leaves an empty slice to the first of two cores",
     True),
    ("TooSlowError", "ran longer than --seconds", True),
)  # fmt: skip
# The same for NKI Beta 1: the rule of SDK 2.26's documentation that refuses the case.
EXPLAINED_BETA_1 = (
    ("err_control_flow_condition_depending_on_arange",
     "nki.errors: no control flow on nl.arange, which `and` between two masks is; "
     "nki.api.shared, NKI API Masking, joins them with `&`"),
    ("test_nki_nl_gather_flattened",
     "trainium_inferentia2_arch: an engine's access starts at partition 0, 32, 64 or 96; the "
     "example fills a tile number by number"),
    ("name 'warnings' is not defined", "the test's own code: it does not import warnings"),
)  # fmt: skip


class TooSlowError(BaseException):
    """A case ran longer than its time limit."""


class WrongError(Exception):
    """Values, shapes or number of outputs differ from the reference."""


def classify(error: BaseException) -> str:
    if isinstance(error, WrongError):
        return "wrong"
    if isinstance(error, TooSlowError):
        return "too slow"
    causes = (error, error.__cause__)
    if any(isinstance(e, MemoryError) or "DefaultCPUAllocator" in str(e) for e in causes):
        return "too large"
    if type(error).__name__ == "Skipped":
        return "skipped"
    if isinstance(error, UnsupportedInstructionError):
        return "unsupported"
    if isinstance(error, SyntaxError):
        return "syntax error in the checkout"
    if isinstance(error, KernelFailedError):
        cause = error.__cause__
        if isinstance(cause, TooSlowError):  # the limit of time struck inside of the kernel
            return "too slow"
        return "unsupported" if isinstance(cause, ImportError) else "failed"
    return "refused" if isinstance(error, NmmError) else "failed"


def timed(limit: float, function: Callable[[], Any]) -> None:
    """Run `function`; TooSlowError after `limit` seconds of CPU time, whatever else runs."""

    def stop(*_: Any) -> None:
        raise TooSlowError(f"longer than {limit:.0f} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        function()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
