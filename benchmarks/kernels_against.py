"""`kernels.py --against CHECKOUT`: kernels of today and of another version, in today's simulator.

The other version builds its kernels in processes of its own, which import it from its checkout; its
text is then simulated here like today's, so that a change of the timing model counts for neither.
Times are predicted, not measured, without kernel start and stop. Exit code 1 when a kernel of today
takes more than 0.5 % longer.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console

import nmm_compiler
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.options import Options
from nmm_compiler.simulator.run import ArraySpec, simulate

LONGER = 1.005
# Reads a spec a line, writes its kernel, and answers with the version's folder and the function.
_BUILDER = """
import json, sys
import nmm_compiler
from nmm_compiler.kernels import FAMILIES
for line in sys.stdin:
    family, fields, target, path = json.loads(line)
    kernel = nmm_compiler.build_kernel(FAMILIES[family].spec_class(**fields), target)
    with open(path, "w", encoding="utf-8") as file:
        file.write(kernel.source)
    print(nmm_compiler.__file__, kernel.name, flush=True)
"""
_other: Any = None
_folder = ""


def main_against(console: Console, jobs: Sequence[Any], checkout: str, workers: int) -> int:
    """Print both times of each kernel; return the exit code."""
    slower = 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        start = (checkout, folder)
        with context.Pool(workers, initializer=_start, initargs=start) as pool:
            for job, then, now in pool.imap(_both, jobs):
                slower += now > LONGER * then
                console.print(
                    f"{job.target}  {job.name:40} {then:10.1f} us then  {now:10.1f} us now  "
                    f"{now / then:.3f}x",
                    highlight=False,
                )
    console.print(f"{slower} of {len(jobs)} kernels take more than {LONGER:.3f}x as long")
    return int(slower > 0)


def _start(checkout: str, folder: str) -> None:
    """Start the other version, with a cache of its own."""
    global _other, _folder
    _folder = folder
    environment = {**os.environ, "PYTHONPATH": checkout, "NMM_CACHE": "off"}
    command = [sys.executable, "-c", _BUILDER]
    pipe = subprocess.PIPE
    _other = subprocess.Popen(  # -c looks for modules in its folder first
        command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=checkout
    )


def _both(job: Any) -> tuple[Any, float, float]:
    """Return the job and the microseconds of the other version's kernel and of today's."""
    spec = job.spec
    path = os.path.join(_folder, f"{job.target}_{hash(spec)}.py")
    given = {
        field.name: value
        for field in dataclasses.fields(spec)
        if (value := getattr(spec, field.name)) != field.default
    }
    _other.stdin.write(json.dumps([spec.family, given, job.target, path]) + "\n")
    _other.stdin.flush()
    answer = _other.stdout.readline().split()
    if not answer:
        raise RuntimeError(f"the other version built no kernel for {spec.short()}")
    *version, name = answer
    assert " ".join(version) != nmm_compiler.__file__, "both versions are this one"
    arrays = [ArraySpec(t.shape, t.dtype) for t in spec.inputs()]
    then = simulate(f"{path}:{name}", *arrays, target=job.target, mode="timing").profile
    assert then is not None
    now = build_kernel(spec, job.target, options=Options(cache="off")).profile()
    return job, then.latency_us, now.latency_us
