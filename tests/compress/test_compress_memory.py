"""The memory that compression needs beyond the model and the statistics, and that it gives back.

The bound is 3 times the largest matrix in float64, plus one working copy of each moment that the
layer is weighed with, plus vectors of its length (of which LAPACK's workspace has seven).
"""

import gc
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from nmm_compiler.compress import factorize, measure
from nmm_compiler.compress.apply import calibrate, compress

_VECTORS = 12


def traced_peak(run, path):
    """Return the most bytes that tensors, LAPACK's workspace included, held at once during run."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    gc.freeze()  # what other tests left is not freed meanwhile
    try:
        with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
            run()
    finally:
        gc.unfreeze()
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
    totals = [e["args"]["Total Allocated"] for e in sorted(events, key=lambda e: e["ts"])]
    first = sorted(events, key=lambda e: e["ts"])[0]["args"]
    return max(totals) - (totals[0] - first["Bytes"])


@pytest.mark.parametrize(
    ("n", "k", "method"),
    [
        (128, 512, "svd"),
        (512, 128, "svd"),
        (256, 256, "svd"),
        (128, 512, "whitened"),
        (512, 128, "whitened"),
        (128, 512, "two-sided"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_layer_stays_within_the_bound(n, k, method, dtype, tmp_path, monkeypatch):
    for module in (
        measure,
        factorize,
    ):  # blocks are as small against these as in life
        monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 1 << 12)
    model = nn.Sequential(nn.Linear(k, n, bias=False)).to(dtype)
    data = [torch.randn(64, k).to(dtype) for _ in range(2)]
    statistics = None
    if method != "svd":
        statistics = calibrate(model, data, gradients=method == "two-sided", progress=False)
    peak = traced_peak(
        lambda: compress(
            model, 0.2, calibration=statistics, method=method, allocation="uniform", align=8,
            progress=False,
        ),
        tmp_path / "trace.json",
    )  # fmt: skip
    moments = {"svd": 0, "whitened": k * k, "two-sided": k * k + n * n}[method]
    assert peak > n * k * dtype.itemsize  # the trace saw something
    assert peak <= 8 * (3 * n * k + moments + _VECTORS * max(n, k))


# The process of the long test: argv is the method, then the number of layers.
_MEASURE = """
import re, sys
import torch
from torch import nn
from nmm_compiler.compress.apply import calibrate, compress

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

method, layers = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
shapes = [(2048, 8192), (8192, 2048), (2048, 2048)] * layers
if method != "svd":
    shapes = [(2048, 4096), (4096, 2048)] * layers
parts = [nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for n, k in shapes[:layers]]
model = nn.ModuleList(parts)
model.forward = lambda x: [part(x[:, : part.in_features]) for part in parts]
statistics = None
if method != "svd":
    data = [torch.randn(64, 4096, dtype=torch.bfloat16) for _ in range(2)]
    statistics = calibrate(model, data, gradients=False, progress=False)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
compress(
    model, 0.2, calibration=statistics, method=method, allocation="uniform", align=128,
    progress=False,
)
moment = 0 if method == "svd" else max(min(shape) for shape in shapes[:layers]) ** 2
print(status("VmHWM") - before, max(n * k for n, k in shapes[:layers]), moment)
"""


@pytest.mark.long
@pytest.mark.parametrize(("method", "layers"), [("svd", 1), ("svd", 6), ("whitened", 3)])
def test_the_process_grows_by_no_more_than_the_bound(method, layers):
    """Resident memory, so with all that libraries and the allocator keep for themselves."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, method, str(layers)],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    growth, largest, moment = map(int, done.stdout.split())
    assert growth <= 8 * (3 * largest + moment)
