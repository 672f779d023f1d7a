"""Child processes of tests: a program that has to end well, and ranks that sum with gloo."""

import contextlib
import os
import socket
import subprocess
import sys
from concurrent.futures import Future

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# As in conftest.py: what a program imports is no garbage.
_START = "import gc\ngc.set_threshold(50_000, 20, 100)\n"


def ran(*words, cwd=None, timeout=300, **environment):
    """Run Python on the words ("-c", text, ...), with variables; return the finished process."""
    if words[0] == "-c":
        words = "-c", _START + words[1], *words[2:]
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, timeout=timeout, check=False,
        env={**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


class Executor:
    """Answers each call at once, in this process, by answer(function, what it is given)."""

    def __init__(self, answer=lambda function, *given: function(*given)):
        self.answer = answer

    def submit(self, function, /, *given):
        future = Future()
        try:
            future.set_result(self.answer(function, *given))
        except Exception as error:  # the caller asks the future for it
            future.set_exception(error)
        return future

    def shutdown(self, **how):
        """Nothing waits."""


def same_gradients(model, alone, within, renamed=str):
    """Assert that a model cut over ranks has the gradients of the whole one.

    within: of the largest element of each. renamed: a parameter's name as the cut model has it.
    """
    for name, parameter in alone.named_parameters():
        off = model.get_parameter(renamed(name)).grad.full_tensor() - parameter.grad
        assert float(off.abs().max()) <= within * float(parameter.grad.abs().max()), name


@contextlib.contextmanager
def first_of(count):
    """Make this process the first of a group whose others are not there: sums are its own."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(rank, count, port, checks, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    said = ""
    try:
        for check in checks:
            check()
        dist.barrier()
    except Exception as error:  # reported to the parent, which fails the test with it
        said = f"{type(error).__name__}: {error}"
    results.put(said)
    dist.destroy_process_group()


def on_ranks(count, *checks):
    """Call checks, which a module holds, in each process of a group."""
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("forkserver")  # imports once for all
    context.set_forkserver_preload(
        ["torch.distributed.tensor.parallel", "torch._dynamo.testing", "nmm_compiler.backend"]
    )
    results = context.Queue()
    each = [
        context.Process(target=_rank, args=(rank, count, port, checks, results))
        for rank in range(count)
    ]
    for one in each:
        one.start()
    # The exit code says nothing: gloo's threads may abort an interpreter that is going away.
    assert [results.get(timeout=240) for _ in each] == [""] * count
    for one in each:
        one.join(20)
