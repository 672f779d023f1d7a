"""Finds this machine's Neuron packages, devices, their generation and their logical cores.

No Neuron package is imported for this: versions come from the installed packages' metadata, the
instance type from the driver's files under /sys, the rest from the environment.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from nmm_compiler import targets
from nmm_compiler.errors import NeuronSetupError
from nmm_compiler.nki_api.installed import beta_1_version, version
from nmm_compiler.options import logical_core_setting, setting
from nmm_compiler.records import Record
from nmm_compiler.targets import Target

MINIMUM_NKI = "0.5"
"""The first NKI with the views that every kernel uses; a loop on the device needs 0.6."""
FIRST_NATIVE_TORCH_NEURONX = (2, 10)
"""TorchNeuron, with its device "neuron" and `nki_op`: "PyTorch 2.9 is the last version using
PyTorch/XLA" (release notes of PyTorch, SDK 2.28). 2.13 is the first public one."""
INSTALL = "pip install nki neuronx-cc torch-neuronx --extra-index-url https://pip.repos.neuron.amazonaws.com"
INSTALL_BETA_1 = 'pip install "neuronx-cc==2.22.*" torch-neuronx --extra-index-url https://pip.repos.neuron.amazonaws.com'
"""The last neuronx-cc with NKI Beta 1 in it, that of Neuron SDK 2.27."""
PACKAGES = ("nki", "neuronx-cc", "torch-neuronx", "torch-xla")
INSTANCE_TYPE = "/sys/devices/virtual/neuron_device/neuron0/info/architecture/instance_type"


@dataclass(frozen=True, kw_only=True)
class NeuronProbe(Record):
    """The Neuron packages and devices of this machine. Versions are None for missing packages.

    path: "torchneuron", "torch-xla", "simulate" (only nki) or "none": what executor "neuron" or
    "nki_simulate" would use. dialect: "nki", "neuronxcc" where NKI Beta 1 is all there is, or None:
    what kernels have to be written in to run here. instance: the type of the machine, as the driver
    spells it. target: the target that its devices are, logical_cores: physical cores of one logical
    core; None without a device. problem: what prevents running kernels, with the way out, or None.
    """

    nki: str | None
    neuronx_cc: str | None
    torch_neuronx: str | None
    torch_xla: str | None
    devices: int
    instance: str | None
    target: str | None
    logical_cores: int | None
    path: str
    dialect: str | None
    problem: str | None

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, found) lines for `nmm doctor`."""
        shown = [
            (name, getattr(self, name.replace("-", "_")) or "not installed") for name in PACKAGES
        ]
        devices = f"{self.devices}" + (f" ({self.instance})" if self.instance else "")
        cores = [("logical core", f"{self.logical_cores} physical")] if self.logical_cores else []
        return [
            *shown,
            ("Neuron devices", devices),
            *cores,
            ("Neuron path", self.path),
            ("NKI dialect", _DIALECTS[self.dialect]),
            *([("Neuron problem", self.problem)] if self.problem else []),
        ]


_DIALECTS = {
    "nki": "nki",
    "neuronxcc": "neuronxcc (NKI Beta 1, in neuronx-cc): kernels are written in it by default",
    None: "none installed: kernels are written in nki and run in the own simulator",
}


def probe() -> NeuronProbe:
    """Look for Neuron packages and devices without importing any of them."""
    versions = {name: version(name) for name in PACKAGES}
    devices = len(glob.glob("/dev/neuron[0-9]*"))
    problem = nki_problem()
    native = _numbers(versions["torch-neuronx"]) >= FIRST_NATIVE_TORCH_NEURONX
    dialect = "nki" if problem is None else None
    if versions["nki"] is None and beta_1_version() is not None:
        dialect, problem = "neuronxcc", NATIVE_PROBLEM if native else None
    path = "none" if dialect is None else "simulate"
    if dialect is not None and problem is None and versions["torch-neuronx"] is not None:
        path = "torchneuron" if native else "torch-xla"
    if path == "torch-xla" and versions["torch-xla"] is None:
        path = "none"
        problem = (
            f"torch-neuronx {versions['torch-neuronx']} needs torch-xla, which is not installed; "
            f"install it, or TorchNeuron: {INSTALL} --upgrade"
        )
    instance = _instance() if devices else None
    target = device_target(instance)
    if path in ("torchneuron", "torch-xla"):
        if not devices:
            problem = "no /dev/neuron* device; kernels can only run with executor 'nki_simulate'"
        else:
            problem = _cores_problem(target, 1)
    return NeuronProbe(
        **{name.replace("-", "_"): number for name, number in versions.items()},
        devices=devices,
        instance=instance,
        target=target.name if target else None,
        logical_cores=logical_cores(target) if devices else None,
        path=path,
        dialect=dialect,
        problem=problem,
    )


def nki_problem(wanted: str = MINIMUM_NKI) -> str | None:
    """Return why no kernel of NKI `wanted` can run with the installed nki, and the way out."""
    nki, neuronx_cc = version("nki"), version("neuronx-cc")
    if nki is None:
        if beta_1_version() is not None:
            return (
                f"package nki is not installed, only NKI Beta 1 inside neuronx-cc {neuronx_cc}; "
                f"pass options={{'dialect': 'neuronxcc'}}, or run: {INSTALL}"
            )
        return f"package nki is not installed; run: {INSTALL}"
    if _numbers(nki) < _numbers(wanted):
        return f"nki {nki} is installed, kernels need {wanted} or newer; run: {INSTALL} --upgrade"
    return None


def beta_1_problem() -> str | None:
    """Return why no kernel of NKI Beta 1 can run here, and the way out."""
    if beta_1_version() is not None:
        return None
    release = version("neuronx-cc")
    without = (
        f"neuronx-cc {release} has no neuronxcc.nki" if release else "neuronx-cc is not installed"
    )
    return (
        f"{without}, and the kernel is in dialect 'neuronxcc' (NKI Beta 1, Neuron SDK 2.27 and "
        f"older); pass options={{'dialect': 'nki'}}, or run: {INSTALL_BETA_1}"
    )


NATIVE_PROBLEM = (
    f"TorchNeuron takes no kernels of NKI Beta 1, and package nki is not installed; run: {INSTALL}"
)


def _numbers(text: str | None) -> tuple[int, ...]:
    """Return the first two numbers of a version; () of none, which is older than any."""
    return tuple(int(part) for part in re.findall(r"\d+", text or "")[:2])


def _instance() -> str | None:
    """Return the instance type that the driver names, in lower case, or None."""
    try:
        return Path(INSTANCE_TYPE).read_text().strip().lower() or None
    except (OSError, UnicodeDecodeError):
        return None


def device_target(instance: str | None) -> Target | None:
    """Return the target that an instance type ("trn2.48xlarge") holds; None for unknown ones."""
    for name in targets.names():
        if instance and instance.startswith(targets.get(name).instances):
            return targets.get(name)
    return None


def logical_cores(target: Target | None) -> int:
    """Return how many physical cores the runtime takes as one: as set, else the default."""
    cores = logical_core_setting()
    if cores is not None:
        return cores
    return target.physical_cores_per_logical_core if target else 1


def check_launch(kernel_target: str, cores: int) -> None:
    """Raise NeuronSetupError when the device is not what a kernel was made for.

    `cores` is the number of physical cores that the kernel runs on as one.
    """
    device = device_target(_instance())
    if device is not None and device.name != kernel_target:
        raise NeuronSetupError(
            f"the kernel was built for {kernel_target} and the device is {device.name}; pass "
            f"options={{'target': {device.name!r}}}"
        )
    wanted = targets.get(kernel_target)
    override = setting("NEURON_PLATFORM_TARGET_OVERRIDE")
    if override is not None and not wanted.goes_by(override):
        raise NeuronSetupError(
            f"NEURON_PLATFORM_TARGET_OVERRIDE={override} asks for other hardware than the kernel's "
            f"{kernel_target}; unset it, or pass options={{'target': ...}} for that hardware"
        )
    problem = _cores_problem(device or wanted, cores)
    if problem is not None:
        raise NeuronSetupError(problem)


def _cores_problem(target: Target | None, cores: int) -> str | None:
    set_to = logical_cores(target)
    if set_to == cores:
        return None
    why = "is set" if logical_core_setting() is not None else f"is the default of {target}"
    return (
        f"kernels are written for {cores} physical core{'s' if cores > 1 else ''} and the runtime "
        f"takes {set_to} as one (NEURON_LOGICAL_NC_CONFIG={set_to} {why}); before the process "
        f"starts, run: export NEURON_LOGICAL_NC_CONFIG={cores}, or pass options={{'lnc': {set_to}}}"
    )
