"""Which dialect of NKI a kernel is emitted in: `nki`, or `neuronxcc` for NKI Beta 1.

A kernel is always made in the current dialect; `beta1/` rewrites it as a last step.
"""

from __future__ import annotations

from nmm_compiler.codegen.beta1.translate import to_beta_1
from nmm_compiler.errors import SpecError, no_beta1_form
from nmm_compiler.kernels.base import check_name
from nmm_compiler.nki_api.installed import beta_1_only
from nmm_compiler.options import DIALECTS
from nmm_compiler.targets import Target

TITLES = {"nki": "", "neuronxcc": "neuronxcc.nki (NKI Beta 1, Neuron SDK up to 2.27)"}


def dialect_for(target: Target, asked: str = "auto") -> str:
    """Return the dialect to emit for a target.

    "auto" is neuronxcc where that is the only NKI of this machine, and nki elsewhere. Raises
    UnknownNameError for a name that is no dialect, SpecError for a target that Beta 1 lacks.
    """
    check_name("dialect", asked, DIALECTS)
    if asked == "auto":
        return "neuronxcc" if target.nki_beta_1 and beta_1_only() else "nki"
    if asked == "neuronxcc" and not target.nki_beta_1:
        raise SpecError(f"NKI Beta 1 does not compile for {target.name}; use dialect 'nki'")
    return asked


def in_dialect(source: str, dialect: str, cores: int = 1, ranks: int = 1) -> str:
    """Return an emitted file in a dialect. Raises CodegenError for what Beta 1 lacks."""
    if ranks > 1 and dialect == "neuronxcc":
        raise no_beta1_form(f"collectives between the {ranks} ranks of a kernel")
    if cores > 1 and dialect == "neuronxcc":
        raise no_beta1_form(f"two physical cores of one logical core (lnc={cores})")
    return to_beta_1(source) if dialect == "neuronxcc" else source
