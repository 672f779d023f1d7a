"""Loads damaged and hostile model directories: each gives the model exactly, or one line.

Each attempt copies a small sharded low-rank model, damages one thing in it, and loads it as the
commands do. Right is the exact model or an error of the catalogue in one line that names what is
wrong. Wrong is another model, or a file outside of the directory that was read or made.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.stress.save import model
from benchmarks.stress.tally import Tally

_IDS = torch.arange(12).reshape(2, 6)
_LAYER = "model.layers.1.mlp.up_proj"
_SECONDS = 60
Damage = Callable[[Path, random.Random], None]


def _config(key: str, value: Any, *inside: str) -> Damage:
    """Set (or, for `...`, remove) a key of config.json, or of an object in it."""

    def damage(directory: Path, _: random.Random) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        place = config
        for name in inside:
            place = place[name]
        if value is ...:
            place.pop(key, None)
        else:
            place[key] = value
        path.write_text(json.dumps(config))

    return damage


def _text(name: str, text: str | bytes) -> Damage:
    data = text.encode() if isinstance(text, str) else text
    return lambda directory, _: (directory / name).write_bytes(data) and None


def _cut(pattern: str) -> Damage:
    def damage(directory: Path, generator: random.Random) -> None:
        path = generator.choice(sorted(directory.glob(pattern)))
        data = path.read_bytes()
        path.write_bytes(data[: generator.randrange(len(data))])

    return damage


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the tensors of the shard that holds the layer's factors."""

    def damage(directory: Path, _: random.Random) -> None:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        path = directory / index["weight_map"][f"{_LAYER}.up.weight"]
        tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return damage


def _header(data: bytes) -> Damage:
    def damage(directory: Path, _: random.Random) -> None:
        next(iter(sorted(directory.glob("*.safetensors")))).write_bytes(data)

    return damage


def _index(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(directory: Path, _: random.Random) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return damage


def _instead(make: Callable[[Path], object], pattern: str = "*.safetensors") -> Damage:
    """Put something else where a file is."""

    def damage(directory: Path, generator: random.Random) -> None:
        path = generator.choice(sorted(directory.glob(pattern)))
        path.unlink()
        make(path)

    return damage


def _put(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return _weights(lambda tensors: tensors.__setitem__(key, change(tensors[key]).contiguous()))


def _without(key: str) -> Damage:
    return _weights(lambda tensors: tensors.pop(key))


def _header_of(entry: dict[str, Any]) -> bytes:
    text = json.dumps({"x": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


_QUANT = "quantization_config"
_REMOTE = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
_SWAP = {_LAYER: 7, "model.layers.0.mlp.up_proj": 9}
DAMAGES: tuple[Damage, ...] = (
    *(_text("config.json", t) for t in ("", "[1]", "{", "null", "\0", "[" * 100_000, '{"a": NaN}')),
    _cut("config.json"), _cut("config.json"), _text("config.json", b"\xff\xfe\x00"),
    *(_config("hidden_size", v) for v in (-1, 0, 10**9, "64", None, 2.5, [64], 128)),
    *(_config("num_hidden_layers", v) for v in (10**7, -1, 1, 5, None)),
    *(_config("vocab_size", v) for v in (10**12, 65, 0)),
    *(_config("model_type", v) for v in (..., None, "evil", 3, "../x", "bert")),
    *(_config("architectures", v) for v in (3, ["Evil"], ["Trainer"], [None], "x", [["a"]])),
    *(_config(_QUANT, v) for v in (..., None, [], "nmm_lowrank", {}, 3)),
    *(_config("quant_method", v, _QUANT) for v in (..., None, "gptq", "evil", 3)),
    *(_config("ranks", v, _QUANT) for v in (..., None, [], {}, "x", 3, {"": 1}, {"evil": 4})),
    *(_config(_LAYER, v, _QUANT, "ranks") for v in (..., None, "4", True, 0, -4, 1.5, 10**15, 5)),
    _config("../../etc/passwd", 4, _QUANT, "ranks"), _config("ranks", _SWAP, _QUANT),
    _config("auto_map", _REMOTE), _config("transformers_weights", "../../etc/passwd"),
    *(_config("dtype", v) for v in ("evil", 3, "int8")), _config("rope_parameters", "x"),
    *(_config("hidden_act", v) for v in ("evil", 3)), _config("num_attention_heads", 0),
    *(_instead(lambda path: None) for _ in range(2)), _instead(lambda path: path.mkdir()),
    _instead(lambda path: os.mkfifo(path)), _instead(lambda path: path.symlink_to("/dev/zero")),
    _instead(lambda path: os.mkfifo(path), "model.safetensors.index.json"),
    *(_cut("*.safetensors") for _ in range(6)), _text("model.safetensors", b""),
    _header(b""), _header(b"\xff" * 64), _header(struct.pack("<Q", 2) + b"[]"),
    _header(_header_of({"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 60]})),
    _header(_header_of({"dtype": "EVIL", "shape": [4], "data_offsets": [0, 16]})),
    _header(_header_of({"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 16]})),
    *(_without(f"{_LAYER}{part}.weight") for part in (".up", ".down", "")),
    _put(f"{_LAYER}.up.weight", lambda t: t.T), _put(f"{_LAYER}.up.weight", lambda t: t[:, :-1]),
    _put(f"{_LAYER}.down.weight", lambda t: t.to(torch.int8)),
    _put(f"{_LAYER}.down.weight", lambda t: t.reshape(-1)),
    _put(f"{_LAYER}.down.weight", lambda t: t[:0]),
    *(_text("model.safetensors.index.json", t) for t in ("", "{}", "[]", '{"weight_map": 3}')),
    _index(lambda index: index.update(weight_map={})),
    _index(lambda index: index["weight_map"].update({f"{_LAYER}.up.weight": "../../etc/passwd"})),
    _index(lambda index: index["weight_map"].update({f"{_LAYER}.up.weight": "/etc/passwd"})),
    _index(lambda index: index["weight_map"].update({f"{_LAYER}.up.weight": 3})),
    _index(lambda index: index["weight_map"].update({f"{_LAYER}.up.weight": "gone.safetensors"})),
    *(_text("generation_config.json", t) for t in ("", "[", "[1]", '{"max_length": "x"}')),
    *(_text("tokenizer.json", t) for t in ("", "{}", "[1]", "\0")),
    _text("tokenizer_config.json", '{"tokenizer_class": "evil", "auto_map": {"a": "b.c"}}'),
    _text("adapter_config.json", '{"base_model_name_or_path": "/etc"}'),
)  # fmt: skip


def attempt(count: int, seed: int) -> Tally:
    """Load `count` damaged directories; every kind of damage is used in turn."""
    generator, tally = random.Random(seed), Tally()
    root = Path(tempfile.mkdtemp(prefix="nmm-stress-models-"))
    try:
        whole = model(1, 2)
        from nmm_compiler.compress import hf

        hf.save_pretrained(whole, root / "whole", max_shard_size="60KB")
        with torch.no_grad():
            expected = whole(_IDS).logits
        for i in range(count):
            directory = root / f"{i}"
            shutil.copytree(root / "whole", directory)
            (directory / "evil.py").write_text(f"open({str(root / 'executed')!r}, 'w')\n")
            DAMAGES[i % len(DAMAGES)](directory, generator)
            _one(i, directory, expected, tally)
            shutil.rmtree(directory)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return tally


def _too_long(*_: object) -> None:
    raise TimeoutError(f"no answer in {_SECONDS} s")


def _one(i: int, directory: Path, expected: torch.Tensor, tally: Tally) -> None:
    from nmm_compiler.compress.load import load_directory, load_tokenizer
    from nmm_compiler.errors import NmmError

    tally.attempts += 1
    fault = ""
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_SECONDS)
    try:
        load_tokenizer(directory)
        with torch.no_grad():
            found = load_directory(directory)(_IDS).logits
        if not torch.equal(found, expected):
            tally.wrong, fault = tally.wrong + 1, "another model loads"
    except NmmError as error:
        if "\n" in str(error) or "TimeoutError" in str(error):
            tally.tracebacks, fault = tally.tracebacks + 1, f"not one line: {error!s:.300}"
    except Exception as error:
        tally.tracebacks, fault = tally.tracebacks + 1, f"{type(error).__name__}: {error!s:.200}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if (directory.parent / "executed").exists():
        tally.wrong, fault = tally.wrong + 1, "code of the directory was executed"
    if fault:
        tally.examples.append(f"damage {i % len(DAMAGES)} of a model directory: {fault}")
    else:
        tally.right += 1
