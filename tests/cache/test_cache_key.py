"""The key: what reaches the digest, what is refused, and what a difference is called."""

import dataclasses
import enum
import hashlib
import math
import pathlib

import pytest
from hypothesis import given, settings, strategies as st

from nmm_compiler.cache.key import Key
from nmm_compiler.errors import CacheError
from nmm_compiler.records import Record

json_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
entries = st.dictionaries(st.text(min_size=1), json_data, min_size=1, max_size=5)


def test_digest_is_pinned():
    # Entries written by an earlier version must still be found: this value may only change
    # together with KEY_FORMAT.
    key = Key.make({"family": "lowrank", "m": 512, "scale": 1.0, "bias": False, "tile": None})
    document = (
        b'{"entries":{"bias":false,"family":"lowrank","m":512,"scale":1.0,"tile":null},"format":1}'
    )
    assert key.digest == hashlib.sha256(document).hexdigest()


@settings(deadline=None)
@given(entries)
def test_same_entries_same_digest_in_any_order(data):
    backwards = dict(reversed(list(data.items())))
    assert Key.make(data).digest == Key.make(backwards).digest
    assert Key.make(data) == Key.make(backwards)
    assert hash(Key.make(data)) == hash(Key.make(backwards))
    assert Key.make(Key.make(data).to_dict()) == Key.make(data)


@settings(deadline=None)
@given(entries, entries)
def test_digests_differ_exactly_when_a_name_differs(a, b):
    left, right = Key.make(a), Key.make(b)
    assert (left.digest == right.digest) == (left.changes(right) == ())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *(
            ({"v": a}, {"v": b})
            for a, b in (
                (1, 1.0), (1, True), (0, False), (0, None), ("1", 1), ("", None), ([], {}),
                (0.0, -0.0),
            )
        ),
        ({"m": 1, "n": 2}, {"m": 2, "n": 1}),
        ({"a": {"b": 1}}, {"a.b": 1}),
    ],
)  # fmt: skip
def test_values_that_python_calls_equal_and_names_are_kept_apart(a, b):
    assert Key.make(a) != Key.make(b)


def test_changes_name_the_field():
    ours = Key.make({"target": "trn2", "spec": {"m": 512, "k": 8, "tile": [1, 2]}, "flag": True})
    theirs = Key.make({"target": "trn2", "spec": {"m": 1024, "k": 8, "n": 1}, "nki": "0.6"})
    assert ours.changes(theirs) == (
        ("spec.m", "512", "1024"),
        ("spec.tile", "[1,2]", "(absent)"),
        ("flag", "true", "(absent)"),
        ("spec.n", "(absent)", "1"),
        ("nki", "(absent)", "0.6"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec(Record):
    m: int
    tiles: tuple[int, ...] = (1, 2)


class Color(enum.Enum):
    RED = 1


def test_records_and_tuples_are_their_json():
    assert Key.make({"spec": Spec(m=3)}) == Key.make({"spec": {"m": 3, "tiles": [1, 2]}})


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, frozenset(), pathlib.Path("/x"), b"x", object(), Color.RED, math.nan, math.inf,
        {1: "x"}, {"a": [1, {2}]}, print, 1j,
    ],
)  # fmt: skip
def test_what_could_differ_between_processes_is_refused_by_name(value):
    with pytest.raises(CacheError, match=r"key\.spec"):
        Key.make({"spec": value})


@pytest.mark.parametrize("value", [{}, [], None, "x", 3])
def test_a_key_needs_named_entries(value):
    with pytest.raises(CacheError):
        Key.make(value)
