"""The catalogue of errors: one class per mistake a user can make.

Every message names the thing, gives the values, and ends with the way out. A pattern that the
compiler leaves alone is not an error but a value (`nmm_compiler.passes.rules.Declined`).
Rooms add their own classes here, so that the whole catalogue can be read in one place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_SHOWN = 8
"""Known names that an error lists."""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the known names, of more than eight the nearest to `name` and how many there are."""
    names = list(known)
    if len(names) <= _SHOWN:
        return ", ".join(names)
    shown = difflib.get_close_matches(str(name), names, n=_SHOWN, cutoff=0.0)
    return f"{', '.join(shown)} and {len(names) - _SHOWN:,} more"


def closest(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known name nearest to `name`, or an empty string."""
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def one_line(error: object, most: int = 300) -> str:
    """Return the text of an error, which may be of any library, on one line and not without end."""
    try:
        text = " ".join(str(error).split())
    except Exception as second:  # the error's own __str__ may raise anything
        return f"(its message raised {type(second).__name__})"
    return text if len(text) <= most else f"{text[:most]}..."


class NmmError(Exception):
    """Base of every error this package raises on purpose.

    exit_code: what the command line ends with: 2 for an argument, a file or the environment, 1 for
    an error in a kernel, 70 for a fault of this package.
    """

    exit_code = 2


class UnknownNameError(NmmError, ValueError):
    """A name that must come from a fixed set does not: target, dtype, layout, option, method...

    forms: what may be given instead of a known name, such as "DIRECTORY".
    """

    def __init__(
        self, kind: str, name: object, known: Sequence[str], forms: Sequence[str] = ()
    ) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        choices = "; or ".join(filter(None, (nearest(name, known), ", ".join(forms))))
        super().__init__(
            f"unknown {kind} {name!r:.200}{closest(str(name), known)} (known: {choices})"
        )


class OptionTypeError(NmmError, TypeError):
    """An option has a value of the wrong type or outside its range."""

    def __init__(self, option: str, value: object, wanted: str) -> None:
        super().__init__(f"option {option!r} is {value!r}; pass {wanted}")


class ShapeError(NmmError, ValueError):
    """Operands whose shapes do not chain, or a dimension that is not a positive integer."""


class SpecError(NmmError, ValueError):
    """A kernel spec or a schedule that contradicts itself or the spec it is for."""


class CapacityError(NmmError):
    """Nothing legal fits the target: says which limit, the numbers, and what would fit."""


class MissingPackageError(NmmError, ImportError):
    """Optional packages are needed and not installed; names all of them and one command."""

    def __init__(
        self, package: str | Sequence[str], purpose: str, extra: str, command: str | None = None
    ) -> None:
        way_out = command or f"pip install 'nmm-compiler[{extra}]'"
        names = [package] if isinstance(package, str) else list(package)
        many = ("package", "is") if len(names) == 1 else ("packages", "are")
        super().__init__(
            f"{purpose} needs the {many[0]} {', '.join(map(repr, names))}, which {many[1]} not "
            f"installed; run: {way_out}"
        )


class LintError(NmmError):
    """Kernel source that the NKI compiler refuses; `findings` has a line and a code for each."""

    def __init__(self, filename: str, nki: str, findings: Sequence[object]) -> None:
        self.filename, self.findings = filename, tuple(findings)
        shown = "\n".join(f"  {filename}:{finding}" for finding in self.findings)
        super().__init__(
            f"{len(self.findings)} error{'s' * (len(self.findings) != 1)} for NKI {nki}, see "
            f"docs/lint.md for the codes:\n{shown}"
        )


class ModelError(NmmError, ValueError):
    """A model, its data or its config that cannot be worked on; names the part and the values."""


class FileError(NmmError, ValueError):
    """A file or directory that the user named and that does not hold what it should.

    Nothing of a kernel file that is refused was executed.
    """


class WorkerError(NmmError, RuntimeError):
    """A process that worked for us ended, ran out of its time or memory, or its call raised."""


class CacheError(NmmError):
    """Base of what the kernel cache refuses or cannot do."""


class CacheTrustError(CacheError):
    """A cache directory, archive or entry that cannot be used safely; says how to mend it."""


class CacheMissError(CacheError, LookupError):
    """Mode "require" and the kernel is not in the cache; `keys` holds every missing key."""

    def __init__(self, message: str, keys: Sequence[object]) -> None:
        self.keys = tuple(keys)
        super().__init__(message)


class DamagedEntryError(CacheError):
    """A cache entry whose bytes are not those that were published; says which file and why."""


class CacheWarning(UserWarning):
    """The kernel cache lost or skipped an entry; results are right all the same."""


class NeuronSetupError(NmmError, RuntimeError):
    """The executor asked for cannot run a call: a package, a device or a kernel is missing."""


class SimulationError(NmmError):
    """Base of what the simulator refuses; `file` and `line` are the kernel's own."""

    exit_code = 1

    def __init__(self, message: str, file: str = "", line: int = 0) -> None:
        self.file, self.line = file, line
        super().__init__(f"{message} [{file}:{line}]" if file else message)


class KernelArgumentError(SimulationError, TypeError):
    """Arguments that the kernel, or the simulator, cannot take: wrong count, dtype, kind."""

    exit_code = 2


class KernelFailedError(SimulationError, RuntimeError):
    """The kernel's own Python raised; the original exception is the `__cause__`."""


class UnsupportedInstructionError(SimulationError, AttributeError):
    """A name of the NKI API that the simulator does not have, or a form of it; names it."""


class OutOfBoundsError(SimulationError, IndexError):
    """An index, slice, pattern or runtime offset that leaves its tensor."""


class OperandError(SimulationError, ValueError, TypeError):
    """An operand's shape, dtype, memory or engine that the instruction does not take here."""


class HazardError(SimulationError):
    """Data that nothing has written, that is lost, or that is not what was promised is read."""


class OnChipCapacityError(SimulationError, CapacityError):
    """SBUF or PSUM is full: lists the live tensors with their sizes."""


class OutputError(NmmError, OSError):
    """A file that cannot be written; nothing half-written is left behind."""


class BrokenRuleError(NmmError, ValueError):
    """A rewrite rule that cannot be read, that raised, or that left the graph broken."""


class InternalFaultError(NmmError):
    """A fault of this package's own; the original exception is the `__cause__`."""

    exit_code = 70


class CodegenError(NmmError, ValueError):
    """A kernel's text that cannot be written out, as a whole or in the wanted dialect of NKI."""


class VerificationError(NmmError, AssertionError):
    """A rewritten graph that does not compute what the graph did; names the match."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the rewritten graph is wrong: {what}. Leave the rule out with "
            "options={'rules': ['-its_name']}; a built-in rule that is wrong is a fault in "
            "nmm_compiler, please report it"
        )


TO_MEND = (BrokenRuleError, CacheMissError, FileError, NeuronSetupError, OptionTypeError)
"""What the user has to mend: raised from wherever it is met, and never taken for a fault."""


def user_file_error(path: str, what: str, cause: BaseException, line: int = 0) -> FileError:
    """Return the error of a user's file that ran or loaded, and raised; names it and the line."""
    place = f"{path}:{line}" if line else path
    text = f"{type(cause).__name__}: {one_line(cause, 400)}"
    return FileError(f"{place}: {what}: {text}; mend it there")


def impossible_profile(what: str, least_us: float, latency_us: float) -> InternalFaultError:
    """Return the error of a latency below what the hardware's peak allows."""
    return InternalFaultError(
        f"{what} take at least {least_us:.4g} us at the target's peak, but the profile says "
        f"{latency_us:.4g} us; this is a fault in the timing model, please report the kernel"
    )


def no_real_inputs(given: object) -> ModelError:
    """Return the error of a verification without inputs that hold data."""
    return ModelError(
        f"verify=True runs the graph and needs inputs with data, got {given!r:.80}; pass real "
        "example_inputs, or call result.check(*inputs) later"
    )


def broken_rule(rule: str, node: str, cause: BaseException | str) -> BrokenRuleError:
    """Return the error of a rule that raised, or left the graph in a state that does not lint."""
    shown = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    return BrokenRuleError(
        f"rule {rule!r} failed on node {node!r}: {shown}; the graph is unchanged. Fix "
        f"the rule, or leave it out with Options(rules=('-{rule}',))"
    )


def unreadable_pattern(function: object, why: str) -> BrokenRuleError:
    """Return the error of a rule's pattern function that cannot be read."""
    name = getattr(function, "__name__", "function")
    return BrokenRuleError(
        f"the pattern {name!r} cannot be read: {why}; a pattern is a function of tensors, and "
        "of numbers with defaults, that returns one tensor. A class made from "
        "nmm_compiler.Rule says what two functions cannot"
    )


def internal_fault(what: str) -> InternalFaultError:
    """Return the error of a fault met under strict; else the place that met it stays as it was."""
    return InternalFaultError(
        f"a fault in nmm_compiler, {what}; please report it with the traceback. Without "
        "options={'strict': True} the place is left alone and the rest is rewritten"
    )


def no_kernel(executor: str, what: str, reason: str) -> NeuronSetupError:
    """Return the error of an executor that was named and has no kernel to run."""
    return NeuronSetupError(
        f"executor {executor!r} was asked for and there is no kernel for {what}: {reason}; "
        "pass executor='auto' (kernels where they can be used, else PyTorch) or 'reference'"
    )


def no_beta1_form(what: str) -> CodegenError:
    """Return the error of a kernel that NKI Beta 1 cannot say."""
    return CodegenError(
        f"NKI Beta 1 (neuronxcc.nki) has no form for {what}, which this kernel needs; emit it "
        "with dialect 'nki', or pass a schedule that does without"
    )
