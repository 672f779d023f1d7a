"""Random histories of a cache against a model that is a dict: no history makes it lie."""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from pathlib import Path

from cache_helpers import key_of, place
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nmm_compiler.cache.store import Store

numbers = st.integers(0, 4)
stores = st.integers(0, 1)


def text_of(number: int) -> str:
    return f"y = {number}\n" * (number + 1) * 20


class History(RuleBasedStateMachine):
    """Two stores on one directory, as two processes have; `whole` are the entries that must hit."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nmm-model-"))
        self.stores = [self._open(), self._open()]
        self.whole: set[int] = set()

    def _open(self, mode: str = "rw") -> Store:
        return Store(self.folder / "cache", mode, check=lambda name, text: None)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def _entry(self, number: int) -> Path:
        return place(self.folder / "cache", key_of(number))

    @rule(store=stores, number=numbers)
    def build(self, store, number):
        built = []

        def builder():
            built.append(number)
            return {"kernel.py": text_of(number)}

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry = self.stores[store].get_or_build(key_of(number), builder, {"n": number})
        assert entry.files == {"kernel.py": text_of(number)}
        assert (entry.path / "kernel.py").read_text() == text_of(number)
        assert bool(built) == (number not in self.whole)
        self.whole.add(number)

    @rule(store=stores, number=numbers)
    def get(self, store, number):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry = self.stores[store].get(key_of(number))
        assert (entry is not None) == (number in self.whole)
        assert entry is None or entry.files == {"kernel.py": text_of(number)}

    @precondition(lambda self: self.whole)
    @rule(seed=st.integers(0, 10**6))
    def flip_a_byte(self, seed):
        generator = random.Random(seed)
        number = generator.choice(sorted(self.whole))
        file = generator.choice(sorted(self._entry(number).iterdir()))
        data = bytearray(file.read_bytes())
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        file.write_bytes(data)
        self.whole.discard(number)

    @precondition(lambda self: self.whole)
    @rule(seed=st.integers(0, 10**6))
    def lose_a_file(self, seed):
        generator = random.Random(seed)
        number = generator.choice(sorted(self.whole))
        generator.choice(sorted(self._entry(number).iterdir())).unlink()
        self.whole.discard(number)

    @rule(number=numbers)
    def delete_an_entry(self, number):
        shutil.rmtree(self._entry(number), ignore_errors=True)
        self.whole.discard(number)

    @rule()
    def delete_the_directory(self):
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        self.whole.clear()

    @rule(store=stores)
    def reopen(self, store):
        self.stores[store] = self._open()

    @rule(store=stores)
    def clear(self, store):
        self.stores[store].clear()
        self.whole.clear()

    @rule(store=stores)
    def prune(self, store):
        self.stores[store].prune()
        assert self.stores[store].verify().ok

    @rule(store=stores)
    def away_and_back(self, store):
        archive = self.folder / "out.tar"
        assert self.stores[store].export(archive) == len(self.whole)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            taken = self.stores[1 - store].import_(archive)
        assert taken == (0, len(self.whole))

    @invariant()
    def listed_as_it_is(self):
        infos = self._open("ro").list()
        whole = {i.key.to_dict()["spec"]["m"] for i in infos if i.state == "ok"}
        assert whole == self.whole


History.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHistory = History.TestCase
