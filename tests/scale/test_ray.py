"""A local Ray cluster whose workers are killed: the choice of a serial run, nothing lost."""

import os
import signal
from pathlib import Path

import pytest

from nmm_compiler.codegen import tune, tuned
from nmm_compiler.codegen.build_many import fill
from nmm_compiler.codegen.on_ray import RayExecutor
from nmm_compiler.kernels.linear.specs import LowRankSpec

SPECS = [LowRankSpec(m=m, k=512, r=64, n=1024) for m in (8, 16, 64, 128)]


def descendants(root):
    """Return {pid: command} of the processes below `root`."""
    parents, commands = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                status = (folder / "stat").read_text()
                commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            parents[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
    below = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        if not more:
            return {pid: commands[pid] for pid in below - {root}}
        below |= more


@pytest.mark.long
def test_a_cluster_with_killed_workers(cache, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    serial = tune.tune(SPECS, jobs=1)
    apart = tmp_path / "ray"
    apart.mkdir(mode=0o700)
    monkeypatch.setenv("NMM_CACHE_DIR", str(apart))
    tuned.forget()
    killed = []

    def kill(words, done, known):
        if len(killed) < done <= 3:
            below = descendants(os.getpid()).items()
            busy = [pid for pid, command in below if command.startswith("ray::time_cand")]
            if busy:
                os.kill(busy[0], signal.SIGKILL)
                killed.append(busy[0])

    with RayExecutor(cores=3) as executor:
        made = tune.tune(SPECS, executor=executor, progress=kill)
        filled = fill([(spec, "trn2") for spec in SPECS], executor=executor)
    assert killed
    assert made == serial  # every schedule once, with the same times and the same choice
    assert filled.built == len(SPECS)
