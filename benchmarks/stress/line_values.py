"""What the random command lines are made of: files, values of each option, environments."""

from __future__ import annotations

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
    "mute": "import sys\n\n\ndef add(kernel, b):\n    sys.stdout.close()\n\n\nmodel = add\n",
}
INPUTS = (
    *(f"{name}.py" for name in RAISING), "add.py", "model.py", "latin.py", "nul.py", "text.txt",
    "key.json", "deep.json", "noise.tar", "directory", "none.py", "verdicts.json", "mine.json",
    "other.json",
)  # fmt: skip
BAD = (
    "", " ", "-1", "0", "-0", "1", "3.5", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000,
    "0x10", "1_0", "٣", "²", "true", "None", "=", "a=b", "a:b", ":", "::", "x", "[red]",
    "[/red]", "{}", "\\", "'", '"', "*", "/proc", "-", "--", "~", "~nobody_here/x", "$HOME", "é",
    "\udcff", "\u202e", "\x1b[31m", "a\nb", "x" * 300, "x/" * 3000, "null", "full",
    "/proc/self/mem", "null/x", "directory", "none/none", "empty", "trn22", "--json", "--help",
)  # fmt: skip
SMALL = ("1", "8", "16", "64", "128")
OUTPUTS = ("new.json", "old.json", "made/new.json", "null", "full", "directory", "link")
GOOD: dict[str, tuple[str, ...]] = {
    "family": ("lowrank", "lowrank_shared", "matmul", "gated_mlp_up", "gated_mlp"),
    "m": SMALL, "k": SMALL, "n": SMALL, "r": SMALL, "batch": SMALL,
    "tokens": SMALL, "rank": SMALL, "recover_steps": ("0", "1"),
    "grid": ("1", "2"), "keep": ("0", "100000"), "ratio": ("0", "0.2", "0.999"),
    "target": ("trn1", "trn2", "trn3", "mine.json", "other.json"),
    "pairs": ("16:64", "16:64,32"), "dtype": ("bfloat16", "float16", "float32", "float8_e4m3"),
    "scales": ("tensor", "channel"),
    "x_layout": ("row", "col"), "out_layout": ("row", "col"), "activation": ("gelu", "silu"),
    "bias": ("true", "3"), "fit": ("verdicts.json", *INPUTS),
    "kernel": ("add.py:add", "add.py", *(f"{name}.py:add" for name in RAISING), "model.py:value"),
    "arg": ("kernel=128x64:float32", "b=128x64:float32", "b=3", "kernel=8x8:bfloat16", "mode=1"),
    "files": INPUTS, "nki": ("0.6", "0.5", "0.3"), "trace": OUTPUTS, "out": OUTPUTS,
    "model": ("model.py:model", *(f"model.py:{name}" for name in
              ("none", "clash", "leave", "refuses", "value", "nope")),
              *(f"{name}.py:model" for name in RAISING), "directory", "broken"),
    "compress model": ("tiny", "directory", "broken"), "eval model": ("directory",),
    "out_dir": ("made/model", "old.json", "directory"),
    "output": ("new.mlir", *OUTPUTS),
    "text": INPUTS, "config": INPUTS,
    "include": ("0", "*", "["), "exclude": ("0", "*", "["),
    "dialect": ("torch", "linalg", "stablehlo"),
    "export kernels": ("call", "inline"), "factors": ("int8", "fp8"),
    "weights": ("args", "resources"),
    "entry": ("0", "a", ""), "html": OUTPUTS, "repro": OUTPUTS, "save_to": OUTPUTS,
    "rules": ("model.py:value", "add.py:add", *(f"{name}.py:model" for name in RAISING)),
    "prompt": SMALL, "context": SMALL, "tp": ("1", "2", "1,2"),
    "lnc": ("1", "2"), "price": ("closed_form", "tuned"),
    "reference": ("add.py:add", *(f"{name}.py:add" for name in RAISING)),
    "time_limit": ("5", "20"), "memory_limit": ("1", "4"),
    "executor": ("simulator", "nki_simulate", "neuron"),
    "wanted": ("specs.jsonl", "tiny", "broken", "noise.tar", *INPUTS), "jobs": ("1", "2"),
    "to_list": OUTPUTS, "on": ("local", "moon"), "archive": ("new.tar", *OUTPUTS),
    "search": ("candidates",),
    "kernels": ("add.py:add", "add.py", *(f"{name}.py:add" for name in RAISING)),
}  # fmt: skip
OUTPUT_NAMES = ("archive", "html", "out", "output", "repro", "save_to", "to_list", "trace")
OTHER = """{"executor": "neuron", "target": "trn2", "verdicts": [{"rung": [], "verdict": "failed"}],
"base": "trn2", "numbers": {"tensor_clock_hz": [1%s, "x"]}}""" % ("0" * 400)
ENVIRONMENT = {
    "NMM_CACHE": ("nonsense", "ro", "off", "require", "²"),
    "NMM_CACHE_DIR": ("empty", "null", "/proc/none", "relative", "x" * 300, "x/" * 3000),
    "NMM_CACHE_MAX_BYTES": ("-1", "1e9", "9" * 5000, "nan", "٣", "0"),
    "NMM_REMOTE_CACHE": ("nonsense://x", "::", "directory", "file:///proc/none", "http://[::1"),
    "NMM_VERDICTS": ("verdicts.json", "other.json", "key.json", "directory", "null", "off", "²"),
    "NMM_PRINT_KERNELS": ("1",),
    "NEURON_PLATFORM_TARGET_OVERRIDE": ("trn1", "nonsense"),
    "NEURON_LOGICAL_NC_CONFIG": ("1", "-1", "²", "9" * 5000),
    "NMM_NONSENSE": ("1",),
    "COLUMNS": ("abc", "0", "-5", "1", "²", "999999999", "7"),
    "LINES": ("abc", "²", "0"),
    "TERMINAL_WIDTH": ("abc", "0"),
    "TERM": ("dumb", "", "nonsense"),
    "FORCE_COLOR": ("1",),
    "TTY_COMPATIBLE": ("nonsense",),
    "LANG": ("C", "nonsense"),
}
PROCESS_ENVIRONMENT = {
    **ENVIRONMENT,
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16"),
    "PYTHONUTF8": ("0",),
    "PYTHONWARNINGS": ("nonsense",),
    "HOME": ("/nonexistent", "/dev/null"),
}
# Devices of the workshop's own: a line that replaced one of /dev would harm the whole machine.
DEVICES = {"null": 3, "full": 7}
STREAMS = ("plain",) * 12 + ("ascii", "full", "gone", "closed")
# A line that nothing is wrong with would run for half a minute.
ALWAYS = {"demo": ("--target", "trn9"), "eval": ("--tasks",)}
FIELDS = ("m", "k", "n", "r", "pairs", "dtype", "scales", "x_layout", "out_layout",
          "activation", "lnc", "bias")  # fmt: skip
"""Fields of kernel specs, which `nmm kernel` takes as options."""
