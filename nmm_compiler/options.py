"""Every option of the package, in one frozen record, and the only place that reads the environment.

`Options.make` accepts what users pass (a dict, an Options, keywords), refuses unknown names with
the closest known one, and checks each value. Target, dialect, lnc and instruction budget can
change an emitted kernel, and so belong to the cache key; all others must not.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, cast

from nmm_compiler import targets
from nmm_compiler.errors import CacheTrustError, OptionTypeError, UnknownNameError
from nmm_compiler.records import hints_of
from nmm_compiler.targets.this_machine import FILE

TARGETS = targets.names()
KERNEL_EXECUTORS = ("simulator", "nki_simulate", "neuron")
"""Executors that run a kernel or raise; the others may compute a call in PyTorch."""
EXECUTORS = ("auto", "reference", *KERNEL_EXECUTORS)
KERNELS = ("build", "lazy")
DIALECTS = ("auto", "nki", "neuronxcc")
DTYPES = ("bfloat16", "float16", "float32")
"""What a whole model computes in."""
WEIGHTS = (*DTYPES, "float8_e4m3")
"""Formats of a model's stored matrices."""
FACTORS = ("int8", "fp8", "float8_e4m3", "mxfp8")
"""Formats that factors are rounded to; the second and third are one."""
FACTOR_SPLITS = ("row", "rank")
"""How factors are cut for the cores that share a model."""
CACHE_MODES = ("off", "ro", "rw", "require")
_CACHE = re.compile(rf"(?:({'|'.join(CACHE_MODES)})(?::|$))?([~.].*|.*/.*)?", re.DOTALL)
"""A mode and a directory, or one of both."""
LARGEST_BUCKET = 4096
"""The last power of two of the default ladder of token counts; multiples of it follow."""
LADDER = tuple(1 << power for power in range(LARGEST_BUCKET.bit_length()))
"""Token counts of calls that the backend builds kernels for by default."""
# The largest kernel that AWS's documentation compiles and runs is the blocked matrix product of its
# kernel-optimization tutorial: 32,768 matmuls, 5,403 copies and about 2,000 DMAs, all unrolled.
# By a public report to aws-neuron-sdk far larger ones took half an hour and 30 GB to compile.
INSTRUCTION_BUDGET = 40_000
SWITCHES = ("attention", "norms", "simulated")
"""What the passes do only where `Options.rules` has "+name"."""


@dataclasses.dataclass(frozen=True)
class Values:
    """What an option takes beside its type: one of `names`, or else what passes `test`.

    wanted: the same in words, for the error.
    """

    wanted: str = ""
    test: Callable[[Any], object] | None = None
    names: tuple[str, ...] = ()

    def take(self, value: Any) -> object:
        """Return whether a value of the right type is taken."""
        if value in self.names:
            return True
        return not self.names if self.test is None else self.test(value)


TargetName = Annotated[str, Values(names=TARGETS, test=lambda name: name.endswith(FILE))]
"""A target, or the file of a machine's calibration."""


def check_fields(record: Any) -> None:
    """Raise OptionTypeError or UnknownNameError for a field that its annotation does not permit.

    `Annotated[type, Values(...)]` says more than a type can. A bool is no number here, and a whole
    number is a float too. A default is not checked.
    """
    hints = hints_of(cast(Any, type(record)))
    for field in dataclasses.fields(record):
        name, value = field.name, getattr(record, field.name)
        if value is field.default:
            continue
        kind, values, *_ = typing.get_args(Annotated[hints[name], Values()])  # the inner one first
        right_type = is_of(value, kind)
        if right_type and (value is None or values.take(value)):
            continue
        if right_type and values.names:
            raise UnknownNameError(name, value, values.names)
        listed = f"one of {', '.join(values.names)}" if values.names else name_of(kind)
        raise OptionTypeError(name, value, values.wanted or listed)


def name_of(kind: Any) -> str:
    """Return what to pass for an annotated type."""
    return f"a value of {kind.__name__ if isinstance(kind, type) else kind}"


def is_of(value: object, kind: Any) -> bool:
    """Return whether a value is of an annotated type, with the items of a tuple or mapping."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_of(value, one) for one in inner)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not isinstance(value, origin or kind):
        return False
    if isinstance(value, tuple):
        return all(is_of(item, inner[0]) for item in value)
    if isinstance(value, Mapping):
        return all(is_of(k, inner[0]) and is_of(v, inner[1]) for k, v in value.items())
    return True


def check_names(cls: type, given: Mapping[str, Any]) -> None:
    """Raise UnknownNameError for a name that is no field of a record of options."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in given:
        if name not in known:
            raise UnknownNameError("option", name, known)


def _is_increasing(counts: tuple[int, ...]) -> bool:
    return min(counts, default=0) > 0 and list(counts) == sorted({*counts})


def _are_hashable(rules: tuple[Any, ...]) -> bool:
    return all(isinstance(one, Hashable) for one in rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is compiled. Options compare equal by value, as torch.compile wants.

    target: hardware that kernels are written for; a file of `nmm doctor --fit` (*.json) too.
    dialect: NKI that kernels are written in, "nki" or "neuronxcc" (NKI Beta 1); "auto" is the
        second where no other is installed.
    executor: runs a rewritten call; "auto" is the Neuron device when the tensors are on
        one, else "reference" (PyTorch).
    lnc: physical cores of a logical one that run each kernel, 1 or 2, as the runtime is set
        (NEURON_LOGICAL_NC_CONFIG).
    inner: torch.compile backend for the rest of the graph, by name; "auto" picks it.
    kernels: "build" writes every kernel while compiling, "lazy" when a call first needs it.
    freeze: weights never change after compilation, so packed copies need no checks.
    buckets: increasing token counts that kernels are built for; None uses the default ladder.
    strict: raise on an internal failure, and where a kernel fails its first run on a device; the
        default is a warning and the plain graph, or PyTorch in place of that kernel.
    verify: run each graph before and after the rewrite on its inputs and raise where they differ.
    report: called with the CompileReport of each graph; True prints it; a path ending in .html is
        written as one page with all graphs compiled so far.
    rules: rewrite rules of your own (nmm_compiler.rule, nmm_compiler.Rule), which run after the
        built-in ones; "..." in the list stands for the built-in ones, and a name for one of them.
        "-name" leaves a rule out. "+attention" makes scaled_dot_product_attention a kernel too,
        which is else left to the inner backend, "+norms" takes a norm before our calls, and a
        residual behind them, into their kernels, where that is predicted to be no slower, and
        "+simulated" compares one call with its products and a dense product by running each kernel
        in the simulator once, which takes up to seconds a shape, and not by a closed form.
    instruction_budget: instructions of one compiled kernel; a kernel that would need more runs its
        blocks of tokens in a loop on the device.
    cache: the kernel cache: a mode (off, ro, rw, require), a directory, or "mode:directory"; None
        asks the environment, which also has its bound and its shared store (docs/cache.md).
    """

    target: TargetName = "trn2"
    dialect: Annotated[str, Values(names=DIALECTS)] = "auto"
    executor: Annotated[str, Values(names=EXECUTORS)] = "auto"
    lnc: Annotated[int, Values("1 or 2 physical cores of a logical one", (1, 2).__contains__)] = 1
    inner: Annotated[str, Values("the name of a torch.compile backend")] = "auto"
    kernels: Annotated[str, Values(names=KERNELS)] = "build"
    freeze: bool = False
    buckets: Annotated[
        tuple[int, ...] | None,
        Values("increasing positive token counts, e.g. (1, 128)", _is_increasing),
    ] = None
    strict: bool = False
    verify: bool = False
    report: Annotated[
        bool | str | Callable[[Any], None],
        Values(
            "True, False, a function of the report, or the path of an .html file to write",
            lambda report: not isinstance(report, str) or report.endswith(".html"),
        ),
    ] = False
    rules: Annotated[
        tuple[Any, ...],
        Values("a list of rules", _are_hashable),
    ] = ()
    instruction_budget: Annotated[int, Values("a number of instructions above 0", (0).__lt__)] = (
        INSTRUCTION_BUDGET
    )
    cache: Annotated[
        str | None,
        Values(
            "off, ro, rw, require, a directory with a slash, or mode:directory",
            _CACHE.fullmatch,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        for rule in self.rules:
            if isinstance(rule, str) and rule.startswith("+") and rule[1:] not in SWITCHES:
                raise UnknownNameError("switch of rules", rule, [f"+{name}" for name in SWITCHES])

    def has(self, switch: str) -> bool:
        """Return whether one of SWITCHES is on."""
        return f"+{switch}" in self.rules

    @property
    def price(self) -> str:
        """How the passes compare calls, of `prices.kernel.PRICES`."""
        return "simulated" if self.has("simulated") else "closed_form"

    @property
    def disable(self) -> tuple[str, ...]:
        """The names of the rules that are left out."""
        return tuple(r[1:] for r in self.rules if isinstance(r, str) and r.startswith("-"))

    @classmethod
    def make(cls, options: Options | Mapping[str, Any] | None = None, **more: Any) -> Options:
        """Return Options from a dict, an Options or None, with keywords laid over it.

        Raises UnknownNameError for a name that is no option, OptionTypeError for a bad value.
        """
        if isinstance(options, Options):
            options = vars(options)
        if not isinstance(options, (Mapping, types.NoneType)):
            raise OptionTypeError("options", options, "a dict or an nmm_compiler.Options")
        given = {**(options or {}), **more}
        check_names(cls, given)
        for name in ("buckets", "rules"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        return cls(**given)

    def call_options(self) -> dict[str, Any]:
        """Return the options that a rewritten call needs when it runs, without defaults."""
        names = ("dialect", "lnc", "buckets", "freeze", "strict", "instruction_budget", "cache")
        default = Options()
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(default, n)}


VARIABLES = {
    "NMM_CACHE": "the mode of the kernel cache",
    "NMM_CACHE_DIR": "its directory",
    "NMM_CACHE_MAX_BYTES": "the bytes that it may have",
    "NMM_REMOTE_CACHE": "the fsspec URL of the shared store",
    "NMM_DUMP": "a directory: each graph is written there after each step of the passes",
    "NMM_PRINT_KERNELS": "the source of every kernel goes to standard error",
    "NMM_TRACEBACK": "a command shows the traceback of an error",
    "NMM_VERDICTS": "the file that `nmm doctor --device` wrote, or off",
    "_NMM_COMPLETE": "a shell asks for the words that may follow on a command line",
    "XDG_CACHE_HOME": "where the user's caches are",
    "NEURON_LOGICAL_NC_CONFIG": "physical cores of a logical one",
    "NEURON_PLATFORM_TARGET_OVERRIDE": "the hardware that AWS's tools build for",
    "NEURON_RT_VIRTUAL_CORE_SIZE": "the old name of NEURON_LOGICAL_NC_CONFIG",
    "NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE": "AWS's compiler turns on TensorE what a DMA would",
}
"""Every environment variable that is read, and what it says."""


def setting(name: str) -> str | None:
    """Return a variable of `VARIABLES`, None where it is empty or not set."""
    assert name in VARIABLES, name
    return os.environ.get(name, "").strip() or None


def is_on(name: str) -> bool:
    """Return whether a variable of `VARIABLES` is set, and not to 0 or false."""
    return (setting(name) or "0").lower() not in ("0", "false")


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait, in this process and its children.

    By default they spin, which takes the cores from a process beside them. OpenMP reads this when
    torch is imported: call it before. A value that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def verdict_file(options: Options | None = None, *, to_write: bool = False) -> Path | None:
    """Return where the verdicts of `nmm doctor --device` are: NMM_VERDICTS names the file.

    Else a file beside the kernel cache; None for "off", or where the cache has no directory.
    Raises OptionTypeError for a given file that is not there, unless it is about to be written.
    """
    given = setting("NMM_VERDICTS")
    if given == "off":
        return None
    if given:
        path = Path(os.path.expanduser(given))
        if not to_write and not path.is_file():
            raise OptionTypeError(
                "NMM_VERDICTS", given, "a file that nmm doctor --device wrote, or 'off'"
            )
        return path
    try:
        return _verdicts_in(cache_dir(options))
    except CacheTrustError:
        return None


@functools.lru_cache(maxsize=64)  # each call that looks for a kernel asks
def _verdicts_in(folder: Path) -> Path:
    return folder / "device.json"


def logical_core_setting() -> int | None:
    """Return how many physical cores the environment makes one logical core; None if not set.

    Raises OptionTypeError for anything but 1 or 2.
    """
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"):  # new name, old name
        found = setting(name)
        if found is not None:
            if found not in ("1", "2"):
                raise OptionTypeError(name, found, "1 or 2")
            return int(found)
    return None


def neuron_environment(target: str) -> AbstractContextManager[Any]:
    """Tell AWS's NKI tools which hardware to build for, for the block.

    Sets NEURON_PLATFORM_TARGET_OVERRIDE; not safe against other threads doing so.
    """
    from unittest import mock  # it imports asyncio

    return mock.patch.dict(os.environ, {"NEURON_PLATFORM_TARGET_OVERRIDE": target})


def _named_cache(options: Options | None) -> Sequence[str | None]:
    """Return the mode and the directory that the options name."""
    return _CACHE.fullmatch(options.cache or "" if options else "").groups()  # type: ignore[union-attr]


def cache_mode(options: Options | None = None) -> str:
    """Return the cache mode: the option, else NMM_CACHE, else "rw"."""
    given, _ = _named_cache(options)
    mode = given or setting("NMM_CACHE") or "rw"
    if mode not in CACHE_MODES:
        raise UnknownNameError("NMM_CACHE", mode, CACHE_MODES)
    return mode


def cache_dir(options: Options | None = None) -> Path:
    """Return the cache directory: the option, else NMM_CACHE_DIR, else the user's cache folder.

    Raises CacheTrustError when that needs a home directory and there is none.
    """
    _, named = _named_cache(options)
    given = named or setting("NMM_CACHE_DIR")
    return _folder(given, setting("XDG_CACHE_HOME"), os.environ.get("HOME"))


@functools.lru_cache(maxsize=64)
def _folder(given: str | None, base: str | None, home: str | None) -> Path:
    """Return the cache directory of these settings; home: what "~" stands for."""
    try:
        if given:
            return Path(given).expanduser()
        found = (Path(base) if base else Path.home() / ".cache") / "nmm_compiler"
    except RuntimeError as error:  # no HOME and no passwd entry, or "~somebody" who is nobody
        raise CacheTrustError(
            f"the kernel cache has no directory: {error}; set NMM_CACHE_DIR to a directory of your "
            "own"
        ) from None
    if not found.is_absolute():
        raise CacheTrustError(
            f"the kernel cache would be in {str(found)!r}, which is no absolute path; set "
            "NMM_CACHE_DIR (or HOME) to an absolute one"
        )
    return found


def cache_max_bytes() -> int:
    """Return the cache's size bound in bytes: NMM_CACHE_MAX_BYTES, else 1 GiB."""
    given = setting("NMM_CACHE_MAX_BYTES")
    if given is None:
        return 1 << 30
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise OptionTypeError("NMM_CACHE_MAX_BYTES", given, "a whole number of bytes")
    return int(given)
