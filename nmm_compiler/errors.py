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
    matcher = difflib.SequenceMatcher(b=str(name))

    def distance(other: str) -> float:
        matcher.set_seq1(other)
        return -matcher.ratio()

    shown = sorted(names, key=distance)[:_SHOWN]
    return f"{', '.join(shown)} and {len(names) - _SHOWN:,} more"


def closest(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known name nearest to `name`, or an empty string."""
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


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


class NoMatchingModulesError(NmmError, ValueError):
    """Nothing in the model is what compression was asked to factorize; lists what was seen."""


class RankError(NmmError, ValueError):
    """A ratio, budget or rank that no legal rank can meet; gives the nearest that can."""


class CalibrationError(NmmError, ValueError):
    """Calibration data that is empty, not finite, or never reaches a layer; names the layer."""


class MemoryBudgetError(NmmError, MemoryError):
    """Calibration needs more memory than there is; says how much."""


class EvaluationError(NmmError, RuntimeError):
    """lm-eval could not run a task, for example without its data; says which and why."""


class WeightError(NmmError, ValueError):
    """A weight that cannot be worked on: NaN or infinite elements; names the layer."""


class NoGradientError(NmmError, RuntimeError):
    """A gradient of numbers that are rounded was asked for."""


class RecoveryError(NmmError):
    """Fine-tuning that cannot start or has diverged; the best factors so far are in place."""


class FactorsFileError(NmmError, ValueError):
    """A file of factors that is incomplete, or does not fit the model it is loaded into."""


class CacheError(NmmError):
    """Base of what the kernel cache refuses or cannot do."""


class CacheKeyError(CacheError, ValueError):
    """A cache key, file name or metadata value that would not mean the same in another process."""


class CacheTrustError(CacheError):
    """A directory, archive or remote entry that others could have written; says how to mend it."""


class CacheMissError(CacheError, LookupError):
    """Mode "require" and the kernel is not in the cache; `keys` holds every missing key."""

    def __init__(self, message: str, keys: Sequence[object]) -> None:
        self.keys = tuple(keys)
        super().__init__(message)


class DamagedEntryError(CacheError):
    """A cache entry whose bytes are not those that were published; says which file and why."""


class CacheDirectoryError(CacheError, OSError):
    """A cache directory that cannot be named, looked at or made; says why and what to set."""


class CacheWarning(UserWarning):
    """The kernel cache lost or skipped an entry; results are right all the same."""


class NeuronSetupError(NmmError, RuntimeError):
    """A Neuron package or device is missing or too old for what was asked."""


class MachineFileError(NmmError, ValueError):
    """A file about this machine (verdicts, a calibrated target) is missing or holds no facts."""


class NoKernelError(NmmError, RuntimeError):
    """A kernel executor was named and there is no kernel to run; the `__cause__` says why."""

    def __init__(self, executor: str, what: str, reason: str) -> None:
        self.executor = executor
        super().__init__(
            f"executor {executor!r} was asked for and there is no kernel for {what}: {reason}; "
            "pass executor='auto' (kernels where they can be used, else PyTorch) or 'reference'"
        )


class SimulationError(NmmError):
    """Base of what the simulator refuses; `file` and `line` are the kernel's own."""

    exit_code = 1

    def __init__(self, message: str, file: str = "", line: int = 0) -> None:
        self.file, self.line = file, line
        super().__init__(f"{message} [{file}:{line}]" if file else message)


class KernelNotFoundError(SimulationError, LookupError):
    """The kernel file, or the function in it, is not there; lists what is."""

    exit_code = 2


class KernelArgumentError(SimulationError, TypeError):
    """Arguments that the kernel, or the simulator, cannot take: wrong count, dtype, kind."""

    exit_code = 2


class KernelFailedError(SimulationError, RuntimeError):
    """The kernel's own Python raised; the original exception is the `__cause__`."""


class UnsupportedInstructionError(SimulationError, AttributeError):
    """A name of the NKI API that the simulator does not have, or a form of it; names it."""


class OutOfBoundsError(SimulationError, IndexError):
    """An index, slice, pattern or runtime offset that leaves its tensor."""


class UninitializedReadError(SimulationError):
    """Elements are read that nothing has written."""


class HazardError(SimulationError):
    """One instruction would overwrite what it still has to read, or addresses overlap."""


class TensorShapeError(SimulationError, ValueError):
    """Shapes, sizes or partitions that the instruction does not take."""


class TensorDtypeError(SimulationError, TypeError):
    """A dtype that the instruction does not take."""


class OperandValueError(SimulationError, ValueError):
    """An operand holds values that the instruction was promised it does not hold."""


class EngineRuleError(SimulationError):
    """An operand in a memory, or an op on an engine, that the hardware does not connect."""


class TargetRuleError(SimulationError):
    """Something that only other targets have."""


class OnChipCapacityError(SimulationError, CapacityError):
    """SBUF or PSUM is full: lists the live tensors with their sizes."""


class InstructionLimitError(SimulationError):
    """More instructions than `max_instructions`: an endless loop, or a limit set too low."""

    exit_code = 2


class ProgramsDisagreeError(SimulationError):
    """The programs of a grid took different paths: one waits for a step that the other skips."""


class SimulatorFaultError(SimulationError):
    """The simulator's own code raised in an NKI call; the original exception is the `__cause__`.

    call: the function with its arguments, as far as they can be shown.
    """

    exit_code = 70

    def __init__(self, call: str, cause: BaseException, file: str = "", line: int = 0) -> None:
        text = " ".join(str(cause).split())[:300]
        super().__init__(
            f"a fault of the simulator in {call}: {type(cause).__name__}: {text}; please report it "
            "with this line, and pass other arguments meanwhile",
            file,
            line,
        )


class ExportError(NmmError):
    """A model, or an operation in it, that cannot be written as MLIR; says which and why."""


class SourceFileError(NmmError, OSError):
    """A file that is no readable Python source: a folder, a pipe, too large, not UTF-8."""


class ResourceLimitError(NmmError):
    """Work on a user's file took more time or memory than its limit."""


class WorkerEndedError(NmmError):
    """A user's file ended or crashed the process that worked on it."""


class ChangedFileError(NmmError):
    """A kernel's file no longer holds the text that was verified; nothing of it was executed."""


class OutputError(NmmError, OSError):
    """A file that cannot be written; nothing half-written is left behind."""


class UserFileError(NmmError):
    """A file or directory that the user named ran or loaded, and raised; names it and the line."""

    def __init__(self, path: str, what: str, cause: BaseException, line: int = 0) -> None:
        self.path, self.line = path, line
        place = f"{path}:{line}" if line else path
        text = " ".join(str(cause).split())[:400]
        super().__init__(f"{place}: {what}: {type(cause).__name__}: {text}; mend it there")


class TimelineMissingError(NmmError, ValueError):
    """A profile read back from JSON holds the figures, not the timeline behind them."""

    def __init__(self) -> None:
        super().__init__(
            "this Profile came from JSON and has no timeline; simulate the kernel again with "
            "mode='timing' to get one"
        )


class ImpossibleProfileError(NmmError, ValueError):
    """A profile whose latency is below what the hardware's peak allows: a fault of the model."""

    exit_code = 70

    def __init__(self, what: str, least_us: float, latency_us: float) -> None:
        super().__init__(
            f"{what} take at least {least_us:.4g} us at the target's peak, but the profile says "
            f"{latency_us:.4g} us; this is a fault in the timing model, please report the kernel"
        )


class NoShapesError(NmmError, ValueError):
    """A graph without shape metadata came without example inputs."""

    def __init__(self, node: str) -> None:
        super().__init__(
            f"the graph carries no shapes (first missing: node {node!r}); pass example_inputs, "
            "for instance nmm_compiler.rewrite(graph, (torch.empty(4, 512),))"
        )


class CaptureError(NmmError):
    """A model that could not be turned into one graph."""


class BrokenRuleError(NmmError):
    """A rewrite rule raised, or left the graph in a state that does not lint."""

    def __init__(self, rule: str, node: str, cause: BaseException | str) -> None:
        self.rule, self.node = rule, node
        shown = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(
            f"rule {rule!r} failed on node {node!r}: {shown}; the graph is unchanged. Fix "
            f"the rule, or leave it out with Options(rules=('-{rule}',))"
        )


class InternalFaultError(NmmError):
    """A fault of this package's own, met under strict; the original exception is the `__cause__`.

    Without strict, the place that met it stays as it was.
    """

    exit_code = 70

    def __init__(self, what: str) -> None:
        super().__init__(
            f"a fault in nmm_compiler, {what}; please report it with the traceback. Without "
            "options={'strict': True} the place is left alone and the rest is rewritten"
        )


class VerificationError(NmmError, AssertionError):
    """A rewritten graph that does not compute what the graph did; names the match."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the rewritten graph is wrong: {what}. Leave the rule out with "
            "options={'rules': ['-its_name']}; a built-in rule that is wrong is a fault in "
            "nmm_compiler, please report it"
        )


class NoRealInputsError(NmmError, ValueError):
    """Verification of a rewrite without inputs that hold data."""

    def __init__(self, given: object) -> None:
        super().__init__(
            f"verify=True runs the graph and needs inputs with data, got {given!r:.80}; pass real "
            "example_inputs, or call result.check(*inputs) later"
        )


class PredictionError(NmmError, ValueError):
    """A model, a config or a setting that no latency can be predicted for."""


class PatternError(NmmError, ValueError):
    """A pattern function of a rule cannot be read; the message says why."""

    def __init__(self, function: object, why: str) -> None:
        name = getattr(function, "__name__", "function")
        super().__init__(
            f"the pattern {name!r} cannot be read: {why}; a pattern is a function of tensors, and "
            "of numbers with defaults, that returns one tensor. A class made from "
            "nmm_compiler.Rule says what two functions cannot"
        )


class RuleNotFiredError(NmmError, ValueError):
    """A rule to be proved matches nothing in what it was given."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"rule {rule!r} matches nothing: {why}")


class AheadOfTimeError(NmmError, RuntimeError):
    """An inner backend returned something that cannot be written to a file."""

    def __init__(self, inner: str) -> None:
        super().__init__(
            f"inner backend {inner!r} returns a callable that cannot be saved; pass "
            "options={'inner': 'inductor'} or 'eager' to aot_compile"
        )


class TemplateError(NmmError, TypeError):
    """A kernel template uses a record as code generation cannot write it out."""


class DialectError(NmmError, ValueError):
    """A kernel says something that the wanted dialect of NKI has no form for."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"NKI Beta 1 (neuronxcc.nki) has no form for {what}, which this kernel needs; emit it "
            "with dialect 'nki', or pass a schedule that does without"
        )


TO_MEND = (BrokenRuleError, CacheMissError, MachineFileError, NeuronSetupError, OptionTypeError)
"""What the user has to mend: raised from wherever it is met, and never taken for a fault."""


class WorkerError(NmmError, RuntimeError):
    """A process that builds or times kernels ended, or its call raised."""

    def __init__(self, attempts: int, said: str = "") -> None:
        super().__init__(
            f"a worker process failed: {said}"
            if said
            else f"{attempts} worker processes ended within the same call, the last one too; the "
            "machine may be short of memory, so try fewer with jobs="
        )
