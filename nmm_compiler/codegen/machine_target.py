"""Which target kernels are chosen for: the named one, as this machine is known to be."""

from __future__ import annotations

from nmm_compiler import options as settings
from nmm_compiler.nki_api.installed import version
from nmm_compiler.options import Options
from nmm_compiler.targets import Source, Target, get
from nmm_compiler.targets.this_machine import changed, with_verdicts


def machine_target(target: str | Target, options: Options | None = None) -> Target:
    """Return the named target, less what `nmm doctor --device` saw fail; a Target passes through.

    NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE makes AWS's compiler turn on TensorE what a DMA would, and it
    takes the last PSUM bank for that.
    """
    if isinstance(target, Target):
        return target
    chip = get(target)
    path = settings.verdict_file(options)
    if path is not None:
        chip = with_verdicts(chip, path, _installed_nki)
    if chip.dma_transposes and settings.is_on("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE"):
        why = Source("documented", "nki.language.tile_size.psum_num_banks: one bank is reserved")
        chip = changed(chip, {"psum_banks": chip.psum_banks - 1}, why)
    return chip


def _installed_nki() -> str | None:
    return version("nki")
