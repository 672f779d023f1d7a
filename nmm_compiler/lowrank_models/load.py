"""Loads a model from a directory that may be incomplete, damaged or hostile, or raises one line.

`from_pretrained` raises all kinds of exceptions for damaged files, and initializes missing weights
with a warning. Commands read directories through `load`, which first looks at the files
(sizes, JSON, names in the index), then lets transformers load them, and
refuses a model with weights that are missing or of another shape. Nothing in the directory is
executed: no remote code, and pickled weights go through torch's `weights_only` reader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmm_compiler.errors import FileError, NmmError, one_line
from nmm_compiler.lowrank_models import hf
from nmm_compiler.outputs import read_json

_INDEX = "model.safetensors.index.json"
# Sizes past these are damage, and would keep transformers busy for hours.
_LARGEST = {"_size": 1 << 20, "n_embd": 1 << 20, "layers": 4096, "n_layer": 4096, "experts": 65536}


def load(directory: str | Path) -> Any:
    """Return the transformers model of a directory, low-rank or dense, in eval mode.

    Args:
        directory: what `save`, or `save_pretrained` of a compressed model, wrote.

    Returns:
        The model, of the architecture that its config names. No code of the directory runs.

    Raises:
        FileError: the directory is not a whole model; the message is one line.
    """
    with _in_one_line(str(directory)):
        check_files(Path(directory))
        return _load(Path(directory))


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Turn whatever transformers raises for what is in files into a FileError of one line."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, NmmError) else f"{type(error).__name__}: "
        raise FileError(
            f"{what} cannot be loaded: {kind}{one_line(error)}; copy the whole directory again"
        ) from error


def check_files(directory: Path) -> None:
    """Raise FileError unless config and index can be read as such, and the files are there."""
    config = read_json(directory / "config.json")
    for key, value in config.items():
        largest = next((v for end, v in _LARGEST.items() if key.endswith(end)), None)
        if largest is not None and isinstance(value, (int, float)) and not 0 <= value <= largest:
            raise FileError(f"config.json has {key} {value!s:.40}; restore the file")
    whole = directory / "model.safetensors"
    for path in [whole] if whole.exists() else indexed(directory):
        if not path.is_file():  # a pipe would hang
            raise FileError(f"{path.name} is missing, or no regular file")


def indexed(directory: Path) -> list[Path]:
    """Return the safetensors files that a directory's index names, all in it; [] without one."""
    if not (directory / _INDEX).exists():
        return []
    names = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise FileError(f"{_INDEX} has no weight_map; restore the file")
    for name in names.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise FileError(
                f"{_INDEX} names {name!r:.80}, which is no safetensors file of this directory"
            )
    return [directory / name for name in sorted(set(names.values()))]


def _load(directory: Path) -> Any:
    import transformers

    hf.register()
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(directory, **here)
    kind = _model_class(config)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its warnings are errors here
    try:
        model, info = kind.from_pretrained(directory, output_loading_info=True, **here)
    finally:
        transformers.logging.set_verbosity(verbosity)
    for what, keys in info.items():
        if what in ("missing_keys", "mismatched_keys") and keys:
            shown = ", ".join(sorted(map(str, keys))[:4])
            raise FileError(
                f"the weights lack {shown} ({len(keys)} in all), which {type(model).__name__} needs"
            )
    return model.eval()


def _model_class(config: Any) -> Any:
    """Return the class that config.json names, AutoModel where it names none.

    Raises FileError for a name that transformers does not know: another class would leave
    weights out, and load.
    """
    import transformers

    named = getattr(config, "architectures", None)
    if named is None:
        return transformers.AutoModel
    name = named[0] if isinstance(named, list) and named else named
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise FileError(
            f"config.json has architectures {named!r:.100}, and transformers "
            f"{transformers.__version__} has no such model; restore the line of the original"
        )
    return kind


def load_tokenizer(directory: str | Path) -> Any:
    """Return the tokenizer of a directory, or None; FileError for one that is damaged."""
    import transformers

    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model")
    if not any((Path(directory) / file).is_file() for file in files):
        return None
    with _in_one_line(f"the tokenizer in {directory}"):
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
