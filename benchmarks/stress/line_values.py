"""What the random command lines are made of: files, values of each option, environments.

Values and environments are in data/command_lines.toml.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

KERNEL = """import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def add(kernel, b):
    out = nl.ndarray(kernel.shape, dtype=kernel.dtype, buffer=nl.shared_hbm)
    left = nl.ndarray(kernel.shape, dtype=kernel.dtype, buffer=nl.sbuf)
    right = nl.ndarray(kernel.shape, dtype=kernel.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=left, src=kernel)
    nisa.dma_copy(dst=right, src=b)
    nisa.tensor_tensor(dst=left, data1=left, data2=right, op=nl.add)
    nisa.dma_copy(dst=out, src=left)
    return out
"""
MODEL = """import torch


def model():
    low = torch.nn.Sequential(torch.nn.Linear(16, 2, bias=False), torch.nn.Linear(2, 8))
    return low, {"input": torch.randn(4, 16)}


def none():
    return None


def clash():
    return torch.nn.Linear(2, 2), {"model": 1, "options": 2}


def leave():
    raise SystemExit(3)


class Refuses(torch.nn.Module):
    def forward(self, x):
        raise LookupError("forward")


def refuses():
    return Refuses(), {"x": torch.ones(2)}


value = 3
"""
SPECS = """{"family": "matmul", "spec": {"m": 8, "k": 16, "n": 16}}
{"family": "lowrank", "spec": {"m": 8, "k": 64, "r": 8, "n": 64}, "target": "trn3"}
"""
RAISING = {
    "raises": "raise ValueError('at import')\n",
    "leaves": "import sys\nsys.exit('gone')\n",
    "syntax": "def f(:\n",
    "deep": "def model():\n    return model()\n\n\ndef add(b):\n    return add(b)\n",
    "odd": "class Odd(BaseException):\n    pass\n\n\nraise Odd(b'\\xff')\n",
}
OTHER = """{"executor": "neuron", "target": "trn2", "verdicts": [{"rung": [], "verdict": "failed"}],
"base": "trn2", "numbers": {"tensor_clock_hz": [1%s, "x"]}}""" % ("0" * 400)
FILES = {
    **{f"{name}.py": text for name, text in {"add": KERNEL, "model": MODEL, **RAISING}.items()},
    "latin.py": "x = '\xe9'\n",
    "nul.py": "x = 1\0\n",
    "text.txt": "one line of text\n" * 40,
    "key.json": '{"family": "toy", "spec": {"m": 8}}',
    "deep.json": "[" * 100_000,
    "noise.tar": "noise" * 500,
    "other.json": OTHER,
    "specs.jsonl": SPECS,
    "broken/config.json": '{"model_type": "llama", "hidden_size": "x"}',
}
"""What the directory of the lines has."""
OUTPUT_NAMES = ("archive", "html", "out", "output", "repro", "save_to", "to_list", "trace")
_DATA = Path(__file__).resolve().parents[1] / "data" / "command_lines.toml"
_TABLES = tomllib.loads(_DATA.read_text(encoding="utf-8"))
INPUTS = tuple(_TABLES["inputs"])
_LISTS = {
    "@small": tuple(_TABLES["small"]),
    "@inputs": INPUTS,
    "@outputs": tuple(_TABLES["outputs"]),
    "@add": tuple(f"{name}.py:add" for name in RAISING),
    "@model": tuple(f"{name}.py:model" for name in RAISING),
    "@number": ("9" * 30,),
    "@digits": ("9" * 5000,),
    "@surrogate": ("\udcff",),
    "@name": ("x" * 300,),
    "@path": ("x/" * 3000,),
}


def _values(words: list[str]) -> tuple[str, ...]:
    return tuple(value for word in words for value in _LISTS.get(word, (word,)))


BAD = _values(_TABLES["bad"])
GOOD = {name: _values(words) for name, words in _TABLES["good"].items()}
ENVIRONMENT = {name: _values(words) for name, words in _TABLES["environment"].items()}
PROCESS_ENVIRONMENT = {
    **ENVIRONMENT,
    **{name: _values(words) for name, words in _TABLES["process_environment"].items()},
}
# Devices of the workshop's own: a line that replaced one of /dev would harm the whole machine.
DEVICES = {"null": 3, "full": 7}
STREAMS = ("plain",) * 12 + ("ascii", "full", "gone", "closed")
# A line that nothing is wrong with would run for half a minute.
ALWAYS = {"demo": ("--target", "trn9"), "eval": ("--tasks",)}
FIELDS = ("m", "k", "n", "r", "pairs", "dtype", "scales", "x_layout", "out_layout",
          "activation", "lnc", "bias")  # fmt: skip
"""Fields of kernel specs, which `nmm kernel` takes as options."""
