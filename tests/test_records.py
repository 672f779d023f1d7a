"""Records: one line, JSON there and back, a digest that says who they are."""

import dataclasses
import importlib
import pkgutil
import types
import typing

import pytest
from hypothesis import given, settings, strategies as st

import nmm_compiler
from nmm_compiler.kernels.linear.specs import LowRankSharedSpec
from nmm_compiler.records import Record, json_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(Record):
    rows: int
    columns: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Record):
    name: str
    tile: Tile
    tiles: tuple[Tile, ...] = ()
    pair: tuple[int, float] = (0, 0.0)
    spare: Tile | None = None
    costs: dict[str, float] = dataclasses.field(default_factory=dict)
    by_name: dict[str, Tile] = dataclasses.field(default_factory=dict)
    note: str | None = None
    exact: bool = False


numbers = st.floats(allow_nan=False, allow_infinity=False)
tiles = st.builds(Tile, rows=st.integers(), columns=st.integers())
plans = st.builds(
    Plan,
    name=st.text(),
    tile=tiles,
    tiles=st.lists(tiles, max_size=3).map(tuple),
    pair=st.tuples(st.integers(), numbers),
    spare=st.none() | tiles,
    costs=st.dictionaries(st.text(), numbers, max_size=3),
    by_name=st.dictionaries(st.text(), tiles, max_size=3),
    note=st.none() | st.text(),
    exact=st.booleans(),
)


@settings(deadline=None)
@given(plans)
def test_json_there_and_back(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert type(again.tile) is Tile
    assert all(type(tile) is Tile for tile in (*again.tiles, *again.by_name.values()))
    assert again.to_json() == plan.to_json()
    assert Plan.from_json(plan.to_json(indent=2)) == plan
    assert Plan.from_dict(plan.to_dict()) == plan


@settings(deadline=None)
@given(plans, plans)
def test_digests_agree_exactly_when_records_do(a, b):
    assert (a.digest(64) == b.digest(64)) == (a.to_json() == b.to_json())
    if a.to_json() == b.to_json():
        assert a == b


def test_digest_has_the_length_asked_for_and_a_fixed_meaning():
    import hashlib

    text = b'Tile:{"columns": 512, "rows": 1}'  # names in order
    assert Tile(rows=1).digest(64) == hashlib.sha256(text).hexdigest()
    assert Tile(rows=1).digest() == hashlib.sha256(text).hexdigest()[:12]


def test_one_line_with_what_is_not_default():
    assert str(Tile(rows=3)) == "Tile(rows=3)"
    assert str(Tile(rows=3, columns=1)) == "Tile(rows=3, columns=1)"
    shown = str(Plan(name="a", tile=Tile(rows=1), note="b"))
    assert shown.startswith("Plan(name=a, tile=Tile(rows=1), ")
    assert "exact" not in shown


def test_frozen_and_strict():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tile(rows=1).rows = 2
    with pytest.raises(TypeError, match="height"):
        Tile.from_dict({"rows": 1, "height": 2})
    with pytest.raises(TypeError, match="rows"):
        Tile.from_dict({})
    with pytest.raises(ValueError, match="zip"):
        Plan.from_dict({"name": "a", "tile": {"rows": 1}, "pair": [1, 2.0, 3]})


@pytest.mark.parametrize("value", [{1}, b"x", object(), 1j])
def test_what_json_has_no_word_for_is_refused(value):
    with pytest.raises(TypeError):
        Tile(rows=value).to_json()


# The records of the package


def _records():
    for module in pkgutil.walk_packages(nmm_compiler.__path__, "nmm_compiler."):
        template = ".kernels.pieces" in module.name or module.name.endswith(".kernel")
        # NKI code too, and what needs torch-mlir
        template = template or module.name.endswith(("rungs", "mlir.lower"))
        if not template and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = []
    waiting = [Record]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith("nmm_compiler."):
                found.append(kind)
    return found


def _fault(annotation):
    """Return what JSON cannot bring back in a field's type, or None."""
    if annotation in (int, float, str, bool, type(None), typing.Any):
        return None
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return None
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in inner if kind is not type(None)]
        shapes = [json_kind(kind) for kind in kinds]
        if any(shapes.count(shape) > 1 for shape in (list, dict)):
            return f"{annotation}: JSON of these looks alike, from_dict cannot tell which it is"
        return next(filter(None, map(_fault, kinds)), None)
    if origin is tuple:
        return next(filter(None, (_fault(k) for k in inner if k is not Ellipsis)), None)
    if origin is dict:
        return _fault(inner[1]) if inner[0] is str else f"{annotation}: names must be strings"
    if origin is typing.Literal:
        return None
    return f"{annotation}: not a type that JSON brings back"


def test_every_record_of_the_package_can_come_back():
    faults = []
    kinds = _records()
    for kind in kinds:
        assert dataclasses.is_dataclass(kind)
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            fault = _fault(hints[field.name])
            if fault:
                faults.append(f"{kind.__module__}.{kind.__name__}.{field.name}: {fault}")
    assert not faults, "\n".join(faults)
    assert len(kinds) > 10


def test_a_union_comes_back_as_the_member_that_its_json_is_of():
    spec = LowRankSharedSpec(m=4, k=8, pairs=((2, (4, 6)),), bias=(True, False))
    again = LowRankSharedSpec.from_json(spec.to_json())
    assert again == spec
    assert again.bias == (True, False)
    assert again.out_layout == "row"
