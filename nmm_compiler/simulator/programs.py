"""Runs the programs of a grid (LNC=2) and of all ranks one at a time; switches where they wait.

Each program is a thread, and only the holder of the baton runs. It passes the baton on at a
barrier, at an exchange and at its end. So every run is the same, and a program that waits for ever
is an error and no hang.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nmm_compiler.errors import SimulationError
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.tensors.tensor import NkiTensor, make_tensor

_LOOK_SECONDS = 0.1  # how often the waiting thread wakes up to take a signal


class Stopped(BaseException):
    """Ends a program whose peer has failed."""


class Programs:
    """The baton and the tensors that programs share."""

    def __init__(self, count: int) -> None:
        self.turns = [threading.Semaphore(0) for _ in range(count)]
        self.waiting = collections.deque(self.turns)
        self.events = 0
        self.failure: BaseException | None = None
        self.tensors: dict[tuple[int, int], NkiTensor] = {}
        self.mail: dict[tuple[Any, ...], dict[int, Any]] = {}
        # how often each program has come to a kind of place
        self.sequence: dict[tuple[Any, ...], Iterator[int]] = collections.defaultdict(
            itertools.count
        )
        # by rank, since its programs last met: who used each storage in shared HBM, and how many
        # writes each program has begun
        self.uses: dict[int, tuple[dict[int, np.ndarray], collections.Counter[int]]] = (
            collections.defaultdict(lambda: ({}, collections.Counter()))
        )
        self.agreed: dict[tuple[Any, ...], Any] = {}

    def shared(
        self, machine: Machine, name: str, shape: tuple[int, ...], dtype: Any, region: Any
    ) -> NkiTensor:
        """Return the n-th shared_hbm tensor, the same for all programs of a rank."""
        place = next(self.sequence[machine.place, "shared_hbm"])
        tensor = self.tensors.get((machine.rank, place))
        if tensor is None:
            tensor = make_tensor(Storage(machine, name, region, "hbm", shape, dtype))
            self.tensors[machine.rank, place] = tensor
        machine.need(
            tensor.shape == shape and tensor.dtype == dtype,
            f"shared_hbm tensor number {place} is {shape} {dtype} in program "
            f"{machine.program_id} and {tensor.shape} {tensor.dtype} in another; all programs "
            "must allocate the same",
        )
        storage = tensor.storage
        unused = dataclasses.replace(
            storage.allocation, first_index=-1, last_index=-1, last_write=-1
        )
        machine.trace.allocations.setdefault(storage.identity, unused)
        return make_tensor(storage)

    def _hand_over(self) -> None:
        """Give the baton to the program that has waited longest."""
        if self.waiting:
            self.waiting.popleft().release()

    def _wait(self, program: int) -> None:
        """Wait for the baton."""
        self.turns[program].acquire()
        if self.failure is not None:
            raise Stopped

    def meet(
        self, machine: Machine, what: str, key: Any, who: int, count: int, sent: Any = None,
        *, orders: bool = False,
    ) -> dict[int, Any]:  # fmt: skip
        """Return what each of `count` brings to its n-th meeting of a kind, when all are there.

        It lets the others run until then, and raises when a round of all programs changes nothing.
        orders: they are the programs of a rank, whose uses of shared HBM are in order from then on.
        """
        place = key, next(self.sequence[machine.place, key])
        met = self.mail.setdefault(place, {})
        met[who] = sent
        if len(met) == count:
            del self.mail[place]
            if orders:
                self.uses.pop(machine.rank, None)
        self.events += 1
        seen = -1
        while len(met) < count:
            if seen == self.events:
                raise machine.error(
                    SimulationError,
                    f"program {machine.program_id} of rank {machine.rank} waits for {what}, which "
                    "the other program never reaches; all programs must take the same path",
                )
            seen = self.events
            self.waiting.append(self.turns[machine.place])
            self._hand_over()
            self._wait(machine.place)
        return met

    def agree(self, machine: Machine, what: str, value: Any) -> None:
        """Refuse the n-th `what` of a program if it differs from that of another."""
        number = next(self.sequence[machine.place, what])
        machine.need(
            self.agreed.setdefault((machine.rank, what, number), value) == value,
            f"{what} number {number} of program {machine.program_id} is not what another program "
            "has; all programs of a grid share it, so make it the same",
        )

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Run all programs to their end; raise the first failure.

        An exception in the waiting thread (a signal's: Ctrl-C, a limit of time) stops the programs
        at their next exchange. It looks for one ten times a second: a signal that another thread
        takes does not wake it.
        """

        def body_of(program: int) -> None:
            try:
                self._wait(program)
                bodies[program]()
            except BaseException as error:  # Stopped comes after the failure that stops it
                self.failure = self.failure or error
            finally:
                self.events += 1
                self._hand_over()

        threads = [
            threading.Thread(target=body_of, args=(p,), name=f"nki-program-{p}", daemon=True)
            for p in range(len(bodies))
        ]
        for thread in threads:
            thread.start()
        self._hand_over()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_LOOK_SECONDS)
        except BaseException as error:
            self.failure = error
            raise
        if self.failure is not None:
            raise self.failure
