"""The table of signatures that the lint reads is what the simulator's stand-ins take."""

import inspect

import pytest

from nmm_compiler.nki_api.api import api
from nmm_compiler.simulator.loading.standins import MODULES

TABLE = {
    name: function
    for name, function in api().functions.items()
    if not name.startswith("nki.collectives.")  # several devices: the simulator refuses all calls
}


def standin(name):
    module, _, short = name.rpartition(".")
    return vars(MODULES[module])[short]


def spelled(value):
    """Return a default as the table spells it: enum.member, memory, dtype, or a literal."""
    if value is Ellipsis:
        return "..."
    kind = type(value)
    if hasattr(kind, "__members__"):
        return value.name if kind.__name__ == "MemoryRegion" else f"{kind.__name__}.{value.name}"
    return str(value) if kind.__name__ == "DType" else repr(value)


def test_the_table_is_as_large_as_the_documented_api():
    assert len(TABLE) == 155


@pytest.mark.parametrize("name", TABLE)
def test_a_standin_takes_what_the_table_says(name):
    parameters = inspect.signature(standin(name)).parameters.values()
    assert {p.kind for p in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [p.name for p in parameters] == [p.name for p in TABLE[name].parameters]
    for have, want in zip(parameters, TABLE[name].parameters, strict=True):
        if have.default is have.empty:
            assert want.default is None, have.name
        elif f"nki.language.{want.default}" in TABLE:  # an operator, which the instruction looks up
            assert have.default is None, have.name
        else:
            assert spelled(have.default) == want.default, have.name


def test_standins_have_no_names_beside_the_table():
    for module in ("nki.isa", "nki.language"):
        functions = {
            f"{module}.{name}"
            for name, value in vars(MODULES[module]).items()
            if inspect.isfunction(value)
        }
        assert functions <= set(TABLE)


def test_members_of_enumerations_agree():
    for owner, members in api().members.items():
        if owner.startswith("nki.isa."):
            assert set(standin(owner).__members__) == set(members), owner
