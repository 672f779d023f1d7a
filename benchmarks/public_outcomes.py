"""How a run of a public kernel ended: its limit of CPU time, and a word for what went wrong."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from row_file import RowFile

import nmm_compiler
from nmm_compiler.errors import KernelFailedError, NmmError, UnsupportedInstructionError

STOPPED = "too slow", "the process ended while the case ran, by its limit of time or memory"
"""Outcome and text of a case that ends its process."""

LARGE_IN_A_SIMULATOR = "4096", "5120", "8192", "16384", "32768", "36864"
"""Sizes in the names of cases that nki-library leaves out where its tests run in a simulator."""
LEFT_OUT_IN_A_SIMULATOR = (
    "its name holds a size that the library's own runs in a simulator leave out "
    "(test/utils/simulation_setup.py)", False,
)  # fmt: skip
# (what a case's row or error says, why the case is not right, whether NKI 0.3 or newer can run it)
EXPLAINED = (
    ("got an unexpected keyword argument 'dtype'",
     "nisa.tensor_copy(dst, src, engine, name) has no dtype= in any stub since SDK 2.27; the "
     "documentation's own copy of the example has dropped it", False),
    ("KeyError: 'mask_out_hbm'",
     "the test's own code: it looks an input up without the suffix that it gave it", False),
    ("neuronxcc.starfish",
     "the test imports neuronxcc.starfish, the compiler's private package", False),
    ("test_rope_manual",
     "its live tiles take 393,216 B per SBUF partition, more than trn2 has; the NKI compiler would "
     "spill, the simulator refuses instead", True),
    ("nisa.register_alloc: NkiTensor",
     "nki.isa.register_alloc: x \"can be one of\" None and int; the kernel passes a tensor", False),
    ("nki.language.range is not",
     "the kernel calls nl.range, which no published nki.language has", False),
    ("test_rmsnorm_mx_quantize_tkg",
     "the test's kernel stores 4 of each 32 partitions of the scales, the test expects 0 in the "
     "others; tiling-overview: what is not written of an output \"becomes garbage data\"", True),
    ("test_quantize_mx_hw",
     "the test's kernel stores partitions between the scales and expects 0 there; mxfp-matmul: "
     "\"the first 4 partitions of each quadrant are occupied, leaving the remaining 28 unused\"",
     True),
    *((view, "where 512 does not divide the intermediate size the kernel quantizes rows that "
       "nothing wrote, its own word is garbage, and multiplies them by 0; nki_simulator: memory "
       "\"contains arbitrary leftover values\", NaN may be among them", True)
      for view in ("'inp_qtz_cur_t' (128, 1, 4)", "'out_sb' (128, 1, ")),
    ("nisa.core_barrier: data 'block_idx",
     "nki.isa.core_barrier: data \"must be data in shared HBM\"; the kernel passes a counter in "
     "SBUF", True),
    ("258,160 SBUF bytes per partition are live",
     "its live tiles take more of SBUF than trn3 has; the NKI compiler would spill, the simulator "
     "refuses instead", True),
    ("gate_up_projection_mx_shard_H.py:325",
     "the kernel asks for the dtype of a bias that the test does not pass", False),
    ("The size of tensor a (384) must match the size of tensor b (3)",
     "the library's own torch reference multiplies 384 columns by 3 scales", False),
    ("TooSlowError", "ran longer than --seconds", True),
    (STOPPED[1], "its process ended at --file-seconds or --gib", True),
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


class OutcomeFile(RowFile):
    """Outcomes of cases in a file of JSON lines, each written as soon as it is known."""

    def __init__(self, path: Path | None, again: bool) -> None:
        """Read what the file holds. again: what was not right counts as unknown."""
        super().__init__(path, "name", "case")
        self.code = simulator_digest()
        if again:
            good = ("pass", "skipped")
            self.rows = {key: row for key, row in self.rows.items() if row["outcome"] in good}

    def known(self, name: str, case: str, seconds: float) -> tuple[str, str] | None:
        """Return (outcome, text) of a case, or None if it is to be run within `seconds`."""
        row = self.rows.get((name, case))
        if row is None or (row["outcome"] == "too slow" and row["seconds"] < seconds):
            return None
        return row["outcome"], row["text"]

    def keep(self, name: str, case: str, found: tuple[str, str], seconds: float) -> None:
        """Keep (outcome, text) of a case, and its limit of CPU seconds."""
        named = {"name": name, "case": case, "outcome": found[0], "text": found[1]}
        self.add({**named, "seconds": seconds, "code": self.code})

    def origin(self) -> str:
        """Return a line that says how many outcomes the present simulator has found."""
        own = sum(row["code"] == self.code for row in self.rows.values())
        return f"{self.path}: {own} of {len(self.rows)} outcomes are of this simulator's text"


def simulator_digest() -> str:
    """Return a digest of the files of the simulator."""
    found = hashlib.sha256()
    for path in sorted((Path(nmm_compiler.__file__).parent / "simulator").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


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
