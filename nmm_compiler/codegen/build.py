"""build_kernel: a spec in, one NKI kernel out: source on disk, schedule, predicted profile.

The flow: choose -> specialize -> dialect -> lint -> cache. The result is the same object for the
same spec, target, schedule and dialect while the process lives.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.foreign import check_before_run
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.choose import choose
from nmm_compiler.codegen.code_digests import key_fields
from nmm_compiler.codegen.dialects import dialect_for
from nmm_compiler.codegen.emitted_file import kernel_source
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.tuned import tuned_choice, tuning_key
from nmm_compiler.errors import CacheError, SpecError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import Array, KernelSpec
from nmm_compiler.nki_api.api import API_VERSION
from nmm_compiler.nki_api.lint import check_source
from nmm_compiler.options import INSTRUCTION_BUDGET, Options, is_on
from nmm_compiler.records import Record
from nmm_compiler.simulator.run import ArraySpec, Simulation, simulate, simulate_ranks
from nmm_compiler.simulator.timing.profile import Profile
from nmm_compiler.targets import Target

SOURCE_FILE = "kernel.py"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Kernel:
    """One emitted kernel. `name` is its function, `path` the file that holds `source`.

    found: the source is from a store, where another process may have put it: before it runs it is
    checked to be a kernel and nothing else.
    """

    name: str
    spec: KernelSpec
    schedule: Any
    target: Target
    source: str
    path: Path
    meta: Mapping[str, Any] = dataclasses.field(repr=False)
    dialect: str = "nki"
    found: bool = False

    def check_before_run(self) -> None:
        """Raise CacheTrustError for a found source that is more than a kernel."""
        if self.found:
            check_before_run(str(self.path), self.source)

    def reference(self, *arrays: Array) -> Any:
        """Return the exact result in float64."""
        return self.spec.reference(*arrays)

    def simulate(self, *arrays: Any, mode: str = "full", strict: bool = True) -> Simulation:
        """Run the emitted source in the simulator; a kernel of many ranks in mode "timing" only."""
        self.check_before_run()
        part = self.spec.share(self.schedule.split)
        turns = self.schedule.turns(part) if mode == "timing" else None
        return simulate(
            self, *arrays, target=self.target, grid=self.spec.lnc, mode=mode, strict=strict,
            one_of_ranks=self.spec.tp, turns=turns,
        )  # fmt: skip

    def simulate_ranks(self, *arrays: Any, mode: str = "full") -> tuple[Simulation, ...]:
        """Run the emitted source on all ranks, on their shards of the whole operands."""
        self.check_before_run()
        shards = self.spec.shards(*arrays)
        return simulate_ranks(self, shards, target=self.target, grid=self.spec.lnc, mode=mode)

    @functools.lru_cache(maxsize=256)  # noqa: B019  (so many kernels live as long as the process)
    def profile(self) -> Profile:
        """Return the predicted Profile: the timing pass over a run without data."""
        arrays = [ArraySpec(t.shape, t.dtype) for t in self.spec.inputs()]
        profile = self.simulate(*arrays, mode="timing").profile
        assert profile is not None
        return profile

    @functools.cached_property
    def predicted(self) -> Profile:
        """The profile that was made when it was built, as JSON brings it: without a timeline."""
        return Profile.from_dict(self.meta["predicted"])

    def __str__(self) -> str:
        return f"Kernel({self.name}, {self.schedule.short()}, {self.path})"

    __repr__ = __str__


def _command(spec: KernelSpec, target: Target, dialect: str = "nki") -> str:
    """Return the command line that builds the kernel of `spec`."""
    words = []
    for f in dataclasses.fields(spec):
        value = getattr(spec, f.name)
        option = f"--{f.name.replace('_', '-')}"
        if f.name == "pairs":
            words += [f"{option} {r}:{','.join(map(str, ns))}" for r, ns in value]
        elif value != f.default or (f.name == "weight" and value):  # it tells linears from matmuls
            parts = value if isinstance(value, tuple) else [value]
            words.append(f"{option} {','.join(map(str, parts))}")
    if dialect != "nki":
        words.append(f"--dialect {dialect}")
    return " ".join(["nmm kernel", spec.family, *words, f"--target {target.name}"])


def build_kernel(
    spec: KernelSpec,
    target: str | Target = "trn2",
    schedule: Record | None = None,
    *,
    dialect: str | None = None,
    options: Options | None = None,
    lnc: int | None = None,
) -> Kernel:
    """Return the kernel of `spec` for `target`, from the cache when it is there.

    Args:
        spec: what to compute: family, sizes, dtype, layouts.
        target: hardware, by name or as a record.
        schedule: how to run; None takes what `tune` found, else chooses it.
        dialect: "nki", "neuronxcc" (NKI Beta 1) or "auto"; None is that of the options.
        options: which cache, and how many instructions at most.
        lnc: physical cores that share it; None is that of the spec.

    Returns:
        The kernel: its source, its file, its reference and its predicted profile.

    Raises:
        SpecError, CapacityError: nothing legal exists; with the numbers.
        CodegenError: the dialect has no form for something.
        LintError: the emitted source breaks a rule of the NKI compiler.
        CacheTrustError: in mode "require", others can write to the cache directory. A source
            from the cache that is more than a kernel raises it when it would run.
    """
    if lnc is not None:
        spec = dataclasses.replace(spec, lnc=lnc)
    return built_or_found(spec, target, schedule, dialect=dialect, options=options)[0]


def built_or_found(
    spec: KernelSpec,
    target: str | Target = "trn2",
    schedule: Record | None = None,
    *,
    dialect: str | None = None,
    options: Options | None = None,
) -> tuple[Kernel, bool]:
    """Return what `build_kernel` returns, and whether this call built it."""
    ask = asked(spec, target, schedule, dialect=dialect, options=options)
    key, chip, spoken = ask.key, ask.target, ask.dialect
    made: dict[str, Any] = {}

    def build() -> Mapping[str, str]:
        chosen = _legal(spec, chip, ask.schedule, ask.budget)
        name, source = kernel_source(spec, chosen, chip, spoken)
        check_source(source, nki=API_VERSION, filename=f"{name}.py")
        made.update(name=name, family=spec.family, spec=spec.to_dict(), target=chip.name)
        made.update(schedule=chosen.to_dict(), dialect=spoken)
        if ask.schedule is not schedule:
            made.update(tuning=tuning_key(spec, chip, ask.budget).digest)
        written = Kernel(name, spec, chosen, chip, source, Path(f"{name}.py"), made, spoken)
        made.update(predicted=written.profile().to_dict())
        return {SOURCE_FILE: source}

    entry = ask.store.get_or_build(
        key, build, lambda: made, command=lambda: _command(spec, chip, spoken)
    )
    held = _KERNELS.get(key.digest)
    if held is not None and held[0] is entry:
        return held[1], bool(made)
    family, name = FAMILIES[spec.family], entry.meta["name"]
    try:
        path = Path(entry.path) / SOURCE_FILE
    except CacheError:  # no cache directory and no temporary one: the source runs from memory
        path = Path(os.devnull) / f"{name}.py"  # which cannot exist
    kernel = Kernel(
        name=name,
        spec=spec,
        schedule=family.schedule_class.from_dict(entry.meta["schedule"]),
        target=chip,
        source=entry.files[SOURCE_FILE],
        path=path,
        meta=entry.meta,
        dialect=spoken,
        found=not made,
    )
    origin = "built" if "predicted" in made else "from the cache"
    _log.info("%s: %s, schedule %s", kernel.name, origin, kernel.schedule.short())
    _log.debug("%s: source in %s", kernel.name, kernel.path)
    if is_on("NMM_PRINT_KERNELS"):
        sys.stderr.write(f"# {kernel.path}\n{kernel.source}\n")
    _KERNELS[key.digest] = (entry, kernel)
    return kernel, bool(made)


class Asked(NamedTuple):
    """What `build_kernel` is asked for: the kernel's key, and what it is made of.

    schedule: the given one, else the one that tuning found, else None: it is chosen.
    """

    key: Key
    target: Target
    schedule: Record | None
    budget: int
    dialect: str
    store: Store


def asked(
    spec: KernelSpec,
    target: str | Target = "trn2",
    schedule: Record | None = None,
    *,
    dialect: str | None = None,
    options: Options | None = None,
) -> Asked:
    """Return the key that `build_kernel` looks up for these arguments, and its parts."""
    chip = machine_target(target, options)
    store = Store.for_kernels(options)
    budget = options.instruction_budget if options else INSTRUCTION_BUDGET
    spoken = dialect_for(chip, dialect or (options.dialect if options else "auto"))
    key = kernel_key(spec, chip, schedule, budget, spoken)
    if schedule is None:
        tuned = tuned_choice(spec, chip, budget, store, key)
        if tuned is not None:
            schedule = tuned.schedule
            key = kernel_key(spec, chip, schedule, budget, spoken)
    return Asked(key, chip, schedule, budget, spoken, store)


# The kernels of this process, each with the cache entry it was made from.
_KERNELS: dict[str, tuple[Entry, Kernel]] = {}


def _legal(spec: KernelSpec, target: Target, schedule: Record | None, budget: int) -> Any:
    """Return the given schedule, checked, or the chosen one."""
    if schedule is None:
        return choose(spec, target, budget)[0].schedule
    wanted = FAMILIES[spec.family].schedule_class
    if not isinstance(schedule, wanted):
        raise SpecError(f"{spec.family} takes a {wanted.__name__}, got {schedule!r}")
    spec.check(target)
    if schedule.split and spec.lnc == 1:
        raise SpecError(f"schedule: split {schedule.split!r} is for two cores; pass lnc=2")
    schedule.check(spec, target)
    return schedule


@functools.lru_cache(maxsize=4096)
def kernel_key(
    spec: KernelSpec,
    target: Target,
    schedule: Record | None,
    budget: int = INSTRUCTION_BUDGET,
    dialect: str = "nki",
) -> Key:
    """Return everything that can change the emitted source, by name."""
    return Key.make(
        {
            **key_fields(spec, target, budget),
            "schedule": schedule.to_dict() if schedule is not None else "chosen",
            "python": ".".join(platform.python_version_tuple()[:2]),  # it prints the source
            "dialect": dialect,
            "nki": API_VERSION,
        }
    )
