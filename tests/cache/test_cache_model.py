"""Random histories of a cache against a model that is a set: no history makes it lie."""

import random
import shutil
import tempfile
import warnings
from pathlib import Path

from cache_helpers import key_of, place
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nmm_compiler.cache.store import Store

numbers = st.integers(0, 4)


def text_of(number):
    return f"y = {number}\n" * (number + 1) * 20


class History(RuleBasedStateMachine):
    """Each step is a process of its own; `whole` are the entries that must hit."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nmm-model-"))
        self.whole: set[int] = set()
        self.away: set[int] = set()

    @property
    def archive(self):
        return self.folder / "out.tar"

    @property
    def store(self):
        return Store(self.folder / "cache")

    def teardown(self):
        shutil.rmtree(self.folder)

    def _entry(self, number):
        return place(self.folder / "cache", key_of(number))

    @rule(number=numbers)
    def build(self, number):
        built = []

        def builder():
            built.append(number)
            return {"kernel.py": text_of(number)}

        with warnings.catch_warnings(action="ignore"):
            entry = self.store.get_or_build(key_of(number), builder, {"n": number})
        assert entry.files == {"kernel.py": text_of(number)}
        assert (entry.path / "kernel.py").read_text() == text_of(number)
        assert bool(built) == (number not in self.whole)
        self.whole.add(number)

    @rule(number=numbers)
    def get(self, number):
        with warnings.catch_warnings(action="ignore"):
            entry = self.store.get(key_of(number))
        assert (entry is not None) == (number in self.whole)
        assert entry is None or entry.files == {"kernel.py": text_of(number)}

    @precondition(lambda self: self.whole)
    @rule(seed=st.integers(0, 10**6), lose=st.booleans())
    def flip_a_byte_or_lose_a_file(self, seed, lose):
        generator = random.Random(seed)
        number = generator.choice(sorted(self.whole))
        file = generator.choice(sorted(self._entry(number).iterdir()))
        data = bytearray(file.read_bytes())
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        file.write_bytes(data)
        if lose:
            file.unlink()
        self.whole.discard(number)

    @rule(number=numbers)
    def delete_an_entry(self, number):
        shutil.rmtree(self._entry(number), ignore_errors=True)
        self.whole.discard(number)

    @rule()
    def delete_the_directory(self):
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        self.whole.clear()

    @rule(everything=st.booleans())
    def prune(self, everything):
        self.store.prune(0 if everything else None)
        self.whole = set() if everything else self.whole
        assert {row.state for row in self.store.verify()} <= {"same"}

    @rule()
    def export(self):
        assert self.store.export(self.archive) == len(self.whole)
        self.away = set(self.whole)

    @precondition(lambda self: self.archive.exists())
    @rule()
    def bring_back(self):
        with warnings.catch_warnings(action="ignore"):
            assert self.store.import_(self.archive) == len(self.away - self.whole)
        self.whole |= self.away
        metas = {number: self.store.get(key_of(number)).meta for number in self.away}
        assert metas == {number: {"n": number} for number in self.away}

    @invariant()
    def listed_as_it_is(self):
        entries = [info.entry for info in self.store.entries() if info.state == "ok"]
        assert {entry.key.to_dict()["spec"]["m"] for entry in entries} == self.whole


History.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHistory = History.TestCase
