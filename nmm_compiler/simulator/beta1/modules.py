"""What a Beta 1 file imports: `neuronxcc.nki`, its submodules, its kernels, and other packages.

A kernel is what `nki.jit` and similar decorators make. A launch grid is any number of programs that
share tensors in shared HBM. Programs of one core run one after the other; `nl.nc(2)` spreads a
dimension over two cores, which run at once as the current dialect's LNC programs do.

A name of the dialect that is missing raises an error when it is used. Kernel files import more than
the kernel needs. So private modules of the compiler and packages of the frameworks load as
placeholders, and only a call of one is refused, by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable
from operator import getitem
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from nmm_compiler.errors import KernelArgumentError, SimulationError, UnsupportedInstructionError
from nmm_compiler.simulator.arguments import each
from nmm_compiler.simulator.beta1 import instructions, language
from nmm_compiler.simulator.beta1.index import need
from nmm_compiler.simulator.beta1.language import Allocator, Dimension, spmd_dim
from nmm_compiler.simulator.beta1.tensor import Tensor, session
from nmm_compiler.simulator.language.base import (
    MemoryRegion,
    hbm,
    no_reorder,
    psum,
    sbuf,
    shared_hbm,
    tile_size,
)
from nmm_compiler.simulator.loading import standins
from nmm_compiler.simulator.machine import (
    CURRENT,
    current,
    defined_at,
    kernel_frame,
    place_instructions,
)
from nmm_compiler.simulator.tensors.tensor import NkiTensor, kind_of


def _unwrapped(programs_run: int, _: str, value: Any) -> Any:
    """Return the tensor of the simulator that a result is, or what is no tensor."""
    if not isinstance(value, Tensor):
        return value
    if value.memory != "hbm":  # AWS's documentation stores it (2.26, nki.isa.range_select)
        current().warn(f"{value!r} is returned from on chip, and stored in HBM for that")
        on_chip, value = value, language.NAMES["ndarray"](value.shape, value.dtype, buffer=hbm)
        language.store(value, on_chip)
    view = value.tile()
    storage = view.storage
    need(
        programs_run == 1 or storage.region is shared_hbm or storage.is_input,
        f"each of {programs_run} programs returned its own {value!r}; allocate it in nl.shared_hbm",
        SimulationError,
    )
    storage.region = shared_hbm  # outputs in nl.hbm are legal in this dialect
    return view


class Beta1Kernel(standins.JitKernel):
    """The result of `nki.jit` in Beta 1: launched as kernel(...) or kernel[grid](...).

    checked: parameters are read-only unless annotated as mutable; kernels of the older convention,
        which fill their last parameters, are launched unchecked.
    """

    def __init__(
        self, function: Any, launch: tuple[Dimension, ...] = (), *, checked: bool = True
    ) -> None:
        if isinstance(function, Beta1Kernel):  # of two decorators
            function, launch, checked = function.function, function.launch, function.checked
        spread = [max(dimension) + 1 for dimension in launch]  # over so many cores
        if sum(cores > 1 for cores in spread) > 1:
            sizes = tuple(map(len, launch))
            raise KernelArgumentError(
                f"launch grid {sizes} spreads two dimensions over cores; one may"
            )
        super().__init__(function, max(spread, default=1))
        self.launch, self.checked = launch, checked

    def __getitem__(self, grid: Any) -> Beta1Kernel:
        given = grid if type(grid) is tuple else (grid,)
        launch = tuple(d if isinstance(d, Dimension) else spmd_dim(d, 1) for d in given)
        return type(self)(self.function, launch, checked=self.checked)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the programs of a core, on tensors of this dialect."""
        now, machine = session(), current()
        given = inspect.signature(self.function).bind(*args, **kwargs)
        for name, value in given.arguments.items() if self.checked else ():
            annotation = given.signature.parameters[name].annotation
            if isinstance(value, NkiTensor) and "mutable" not in str(annotation):
                now.read_only[value.storage.identity] = name
        tensors = each(
            lambda _, v: Tensor(v) if isinstance(v, NkiTensor) else v, "", (args, kwargs)
        )
        returned: Any = None
        machine.launch = tuple(map(len, self.launch))
        every, core = itertools.product(*map(range, machine.launch)), machine.program_id
        mine = [p for p in every if sum(map(getitem, self.launch, p)) == core]
        for machine.program in mine:
            # tensors in shared HBM are those of the program before on this core
            machine.programs.sequence.pop((machine.place, "shared_hbm"), None)
            returned = self.function(*tensors[0], **tensors[1])
            now.flush()
        with place_instructions(defined_at(self.function)):
            return each(functools.partial(_unwrapped, len(mine)), "", returned)

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """Run inside a kernel."""
        need(
            not self.launch,
            f"kernel {self.function.__name__} with a launch grid inside another kernel "
            "(err_nested_kernel_with_spmd_grid); call it without one",
            UnsupportedInstructionError,
        )
        return self.function(*args, **kwargs)


class Benchmark(Beta1Kernel):
    """The result of `nki.benchmark`: a call simulates the timing; `benchmark_result` holds it."""

    benchmark_result: SimpleNamespace | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Time the kernel in the simulator; inside a kernel, run inline."""
        if CURRENT.machine is not None:
            return super().__call__(*args, **kwargs)
        profile = standins.run(self, *args, mode="timing", named=kwargs).profile
        latency = SimpleNamespace(get_latency_percentile=lambda percentile: profile.device_us)
        self.benchmark_result = SimpleNamespace(nc_latency=latency)  # a simulation has no spread
        return None


benchmark = standins.decorator(Benchmark)
unchecked = standins.decorator(functools.partial(Beta1Kernel, checked=False))
_MODES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("auto", "jax", "torchxla", "baremetal", "simulation"), standins.decorator(Beta1Kernel)
    ),
    "benchmark": benchmark,
    "trace": unchecked,  # not documented; nki-samples marks functions that kernels call with it
}


def jit(function: Any = None, mode: str = "auto", **options: Any) -> Any:
    """Return `nki.jit`'s kernel; every mode runs in the simulator, "benchmark" only times it."""
    if mode not in _MODES:
        raise KernelArgumentError(f"nki.jit: mode {mode!r}; Beta 1 has {', '.join(_MODES)}")
    return _MODES[mode](function, **options)


def simulate_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel on NumPy arrays; return its outputs."""
    return standins.simulate_kernel(Beta1Kernel(kernel, checked=False))(*args, **kwargs)


# Modules

FRAMEWORKS = frozenset(
    [
        "torch_neuronx",
        "torch_xla",
        "libneuronxla",
        "neuronx_distributed",
        "neuronx_distributed_inference",
        "jax",
        "jax_neuronx",
        "diffusers",
    ]
)
"""Packages that kernel files import and that need not be installed here."""


class Placeholder:
    """An absent module or object: it may be imported and passed on, but not called or read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> NoReturn:
        raise UnsupportedInstructionError(
            f"{self._name} is not part of the documented NKI Beta 1 API, or not installed here; "
            "the simulator has only the documented names",
            *kernel_frame(),
        )

    __iter__ = __bool__ = _refuse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a decorated function unchanged; refuse any other call."""
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # a decorator
        return self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return unchecked if name == "nki_jit" else Placeholder(f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


def _tile_number(index: tuple[int, ...], tiles: Any) -> int:
    """Return the physical tile of a block: modulo the number of tiles in each dimension."""
    counts = tuple(tiles) or (1,) * len(index)
    return int(np.ravel_multi_index(index, counts, mode="wrap"))


def _modulo(
    region: MemoryRegion,
    *,
    base_addr: int = 0,
    base_bank: int = 0,
    base_partition: int = 0,
    num_bank_tiles: Any = (),
    num_par_tiles: Any = (),
    num_free_tiles: Any = (),
) -> Allocator:
    """Place block i in physical tile i modulo the number of tiles."""

    def place(index: tuple[int, ...], partitions: int, size: int) -> tuple[int, int, int]:
        bank = base_bank + _tile_number(index, num_bank_tiles) if region is psum else 0
        partition = base_partition + _tile_number(index, num_par_tiles) * partitions
        byte = base_addr + _tile_number(index, num_free_tiles) * size
        return bank, partition, byte

    return Allocator(region, place)


def _allocators(region: MemoryRegion) -> dict[str, Any]:
    return {
        "alloc": functools.partial(Allocator, region),
        "mod_alloc": functools.partial(_modulo, region),
        "auto_alloc": lambda: region,
    }


_unchanged = standins.decorator(lambda kernel: kernel)
"""An option for the compiler's own passes."""
MODULES = standins.modules_of({
    "neuronxcc": {},
    "neuronxcc.nki": {
        "jit": jit, "trace": unchecked, "benchmark": benchmark, "baremetal": unchecked,
        "profile": unchecked, "simulate_kernel": simulate_kernel, "tensor": Tensor,
    },
    "neuronxcc.nki.language": language.NAMES,
    "neuronxcc.nki.language.constants": {
        "sizeinbytes": lambda dtype: kind_of(dtype).item_bytes, "tile_size": tile_size,
    },
    "neuronxcc.nki.isa": instructions.NAMES,
    "neuronxcc.nki.isa.constants": {
        name: value for name, value in instructions.NAMES.items() if isinstance(value, type)
    },
    "neuronxcc.nki.typing": standins.TYPING,
    "neuronxcc.nki.compiler": {
        "enable_stack_allocator": _unchanged, "force_auto_alloc": _unchanged,
        "skip_middle_end_transformations": _unchanged, "no_reorder": no_reorder,
        "allocation_scope": contextlib.nullcontext,
        "multi_buffer": lambda factor=2: contextlib.nullcontext(),
    },
    "neuronxcc.nki.compiler.sbuf": _allocators(sbuf),
    "neuronxcc.nki.compiler.psum": _allocators(psum),
})  # fmt: skip


def stands_in(name: str) -> bool:
    """Return whether an import of `name` gets a module of this file."""
    top = name.partition(".")[0]
    return top == "neuronxcc" or (top in FRAMEWORKS and importlib.util.find_spec(top) is None)


@functools.cache
def find(name: str) -> Any:
    """Return the stand-in of a module, or a placeholder for it."""
    return MODULES.get(name) or Placeholder(name)


def import_module(name: str, fromlist: Any) -> Any:
    """Return what `import name` or `from name import ...` binds."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent, child = find(".".join(parts[:end])), find(".".join(parts[: end + 1]))
        vars(parent).setdefault(parts[end], child)
    return find(name if fromlist else parts[0])
