"""Options: what is refused, what wins over what, and what may reach the cache key."""

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from nmm_compiler import options as module
from nmm_compiler.errors import NmmError, OptionTypeError, UnknownNameError, nearest
from nmm_compiler.options import Options

FIELDS = {field.name: field.default for field in dataclasses.fields(Options)}

valid = st.fixed_dictionaries(
    {},
    optional={
        "target": st.sampled_from(module.TARGETS),
        "executor": st.sampled_from(module.EXECUTORS),
        "inner": st.sampled_from(["auto", "inductor", "eager", "aot_eager", "neuron", "openxla"]),
        "kernels": st.sampled_from(module.KERNELS),
        "freeze": st.booleans(),
        "buckets": st.none()
        | st.lists(st.integers(1, 10**6), min_size=1, max_size=5, unique=True).map(sorted),
        "strict": st.booleans(),
        "report": st.booleans() | st.just(print),
        "rules": st.lists(st.sampled_from(["...", "-lora", "+norms", "+attention"]), max_size=3),
        "cache": st.none() | st.sampled_from([*module.CACHE_MODES, "/a", "ro:/a", "rw:~/b"]),
    },
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(["trn2", "auto", "inductor", "rw", (1, 2), (2, 1), print, int, object()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("NMM_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@settings(deadline=None)
@given(valid)
def test_what_is_valid_is_taken_and_stays(given_options):
    options = Options.make(given_options)
    for name, value in given_options.items():
        assert getattr(options, name) == (tuple(value) if isinstance(value, list) else value)
    for name in set(FIELDS) - set(given_options):
        assert getattr(options, name) == FIELDS[name]
    assert Options.make(options) == options
    assert Options.make(dataclasses.asdict(options)) == options
    assert hash(Options.make(given_options)) == hash(options)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), anything, max_size=4))
def test_any_value_is_taken_or_refused_with_an_error_of_ours(given_options):
    try:
        options = Options.make(given_options)
    except NmmError as error:
        options, said = None, str(error)
    if options is None:
        assert any(name in said for name in given_options)
        return
    assert Options.make(options) == options
    assert isinstance(hash(options), int)


@settings(deadline=None)
@given(st.one_of(st.text(), st.integers(), st.none(), st.tuples(st.text())), anything)
def test_a_name_that_is_no_option_is_refused(name, value):
    if name in FIELDS:
        return
    with pytest.raises(UnknownNameError):
        Options.make({name: value})


BUCKETS = [], (), [0], [-1, 1], [1, 1], [2, 1], [1.0], [True], ["1"], "12", 128, {1, 2}


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("target", "trn22", "trn2"),
        ("target", 2, "trn1, trn2, trn3"),
        ("executor", "neurom", "neuron"),
        ("kernels", "built", "build"),
        ("cache", "read", "off, ro, rw, require"),
        ("inner", None, "inner"),
        ("freeze", 1, "bool"),
        ("strict", "yes", "bool"),
        ("report", 3, "report"),
        ("rules", "lora", "list of rules"),
        ("rules", ["+lora"], "+attention, +norms"),
        ("cache", 3, "directory"),
        ("cache", "ro:here", "a directory with a slash"),
        ("lnc", 2.0, "1 or 2"),
        ("lnc", True, "1 or 2"),
        ("lnc", 3, "1 or 2"),
        ("instruction_budget", 0, "above 0"),
        ("instruction_budget", 1e4, "above 0"),
        *(("buckets", one, "increasing positive token counts") for one in BUCKETS),
    ],
)
def test_a_bad_value_names_the_option_and_the_way_out(option, value, said):
    with pytest.raises((OptionTypeError, UnknownNameError)) as caught:
        Options.make({option: value})
    assert option in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("options", [3, "trn2", ["target"], (("target", "trn2"),), True])
def test_options_are_a_dict_or_options(options):
    with pytest.raises(OptionTypeError, match="a dict or an"):
        Options.make(options)


def test_keywords_lie_over_the_rest():
    base = Options.make({"target": "trn1", "strict": True})
    assert Options.make(base, target="trn3") == Options(target="trn3", strict=True)
    assert Options.make({"target": "trn1"}, target="trn3").target == "trn3"
    assert Options.make(None, freeze=True) == Options(freeze=True)
    assert base.target == "trn1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.target = "trn2"


# What reaches a kernel


@settings(deadline=None)
@given(valid)
def test_call_options_bring_back_what_a_call_needs(given_options):
    options = Options.make(given_options)
    again = Options.make(options.call_options())
    for name in ("buckets", "freeze", "strict", "cache"):
        assert getattr(again, name) == getattr(options, name)
    assert Options().call_options() == {}


# The environment


@pytest.mark.parametrize(
    ("function", "variable", "text", "value", "option", "other", "default"),
    [
        (module.cache_mode, "NMM_CACHE", "ro", "ro", "off", "off", "rw"),
        (module.cache_mode, "NMM_CACHE", "ro", "ro", "off:/b", "off", "rw"),
        (module.cache_dir, "NMM_CACHE_DIR", "/a", Path("/a"), "/b", Path("/b"), None),
        (module.cache_dir, "NMM_CACHE_DIR", "/a", Path("/a"), "ro:/b", Path("/b"), None),
    ],
)
def test_an_option_wins_over_the_environment_over_the_default(
    monkeypatch, function, variable, text, value, option, other, default
):
    if default is not None:
        assert function() == function(Options()) == default
    monkeypatch.setenv(variable, f" {text} ")
    assert function() == function(Options()) == value
    assert function(Options(cache=option)) == other
    monkeypatch.setenv(variable, "  ")
    if default is not None:
        assert function() == default


def test_switches_of_rules_are_read_by_name():
    options = Options.make(rules=["+norms", "-lora", "..."])
    assert (options.has("norms"), options.has("attention")) == (True, False)
    assert options.disable == ("lora",)
    assert (options.price, Options(rules=("+simulated",)).price) == ("closed_form", "simulated")


def test_the_default_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module.cache_dir() == tmp_path / ".cache" / "nmm_compiler"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert module.cache_dir() == tmp_path / "xdg" / "nmm_compiler"
    monkeypatch.setenv("NMM_CACHE_DIR", "~/kernels")
    assert module.cache_dir() == tmp_path / "kernels"


def test_a_bad_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("NMM_CACHE", "readonly")
    with pytest.raises(UnknownNameError, match="NMM_CACHE"):
        module.cache_mode()
    for text in ("1G", "-1", "1.5", "1e9", "0x10"):
        monkeypatch.setenv("NMM_CACHE_MAX_BYTES", text)
        with pytest.raises(OptionTypeError, match="NMM_CACHE_MAX_BYTES"):
            module.cache_max_bytes()


def test_the_neuron_environment_is_set_for_the_block_only(monkeypatch):
    name = "NEURON_PLATFORM_TARGET_OVERRIDE"
    monkeypatch.delenv(name, raising=False)
    seen = []

    def fail():
        with module.neuron_environment("trn2"):
            seen.append(os.environ[name])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == ["trn2"]
    assert name not in os.environ
    monkeypatch.setenv(name, "trn1")
    with module.neuron_environment("trn2"):
        assert os.environ[name] == "trn2"  # the kernel at hand decides
    assert os.environ[name] == "trn1"


# What every error of an unknown name has in common.

MANY = [f"task_{i}" for i in range(10_000)]


def test_known_names_are_listed_up_to_eight_the_nearest_first():
    assert nearest("x", ["b", "a"]) == "b, a"
    shown = nearest("task_77", MANY)
    assert shown.startswith("task_77, ")
    assert shown.endswith(" and 9,992 more")
    assert shown.count(", ") == 7
    text = str(UnknownNameError("task", "task_x" * 1000, MANY, ("FILE.py",)))
    assert len(text) < 600
    assert text.endswith("; or FILE.py)")
