"""A wrong word is answered before torch is imported: for every argument of every command."""

import json
from typing import get_args, get_type_hints

import pytest
import typer
from processes import ran

from nmm_compiler.cli import models
from nmm_compiler.cli.commands import app

FREE = {
    # Words that no list holds: patterns, values of a kernel's own, and a search for lm-eval.
    "include", "exclude", "arg", "entry",
}  # fmt: skip
SIZES = ["--m", "8", "--k", "64", "--r", "16", "--n", "64"]
NEEDED = {
    "kernel": ["lowrank", *SIZES],
    "explain": ["llama-3.2-1b"], "plan": ["llama-3.2-1b"], "build": ["llama-3.2-1b"],
    "simulate": ["add.py:add"], "profile": ["add.py:add"],
    "lint": ["add.py"], "compress": ["smollm2-135m", "out"], "eval": ["directory"],
    "export": ["llama-3.2-1b", "-o", "x.mlir"],
}  # fmt: skip
"""Arguments that are right, up to the one that is wrong."""


def texts(command):
    """Return {parameter: flag, "" for an argument} of the texts that a command takes."""
    found = {}
    for name, hint in get_type_hints(command.callback, include_extras=True).items():
        kind, info = (*get_args(hint), None, None)[:2]
        if info is None or not {str, list[str]} & {kind, *get_args(kind)}:
            continue
        flags = [*(getattr(info, "param_decls", None) or ()), f"--{name.replace('_', '-')}"]
        found[name] = "" if isinstance(info, typer.models.ArgumentInfo) else flags[0]
    return found


def wrong_lines():
    """Return, for each argument that takes one of a set of words, a line where it is wrong."""
    lines = {}
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        right = NEEDED.get(name, [])
        for parameter, flag in texts(command).items():
            if parameter not in FREE:
                words = [*right, flag, "no-such-word"] if flag else ["no-such-word", *right[1:]]
                lines[f"{name} {parameter}"] = [name, *words]
    for option in ("dtype", "x-layout", "activation", "scales"):
        words = ["lowrank", *SIZES, f"--{option}", "no-such-word"]
        lines[f"kernel {option}"] = ["kernel", *words]
    lines["kernel no option"] = ["kernel", "lowrank", *SIZES, "--no-such-word", "8"]
    return lines


LINES = wrong_lines()
PROGRAM = """
import contextlib, io, json, sys, time
for name in ("torch", "transformers", "lm_eval"):
    sys.modules[name] = None  # importing one raises ImportError
from nmm_compiler.cli.main import main
found = {}
for name, words in json.loads(sys.argv[1]).items():
    said, start = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
    found[name] = [code, said.getvalue(), time.process_time() - start]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    place = tmp_path_factory.mktemp("words")
    (place / "add.py").write_text("import nki\n\n\n@nki.jit\ndef add(a):\n    return a\n")
    done = ran("-c", PROGRAM, json.dumps(LINES), cwd=place, timeout=120)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_command_that_takes_words_is_tried():
    assert len(LINES) >= 35
    assert {line.split()[0] for line in LINES} >= set(NEEDED)


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_word_is_named_without_importing_torch(answers, line):
    code, said, seconds = answers[line]
    assert code == 2, said
    assert "no-such-word" in said, said
    assert "import of torch" not in said, said
    assert len(said) < 700, said
    assert seconds < 2


def test_a_device_without_an_end_is_no_file_to_read(nmm):
    assert "is a device" in nmm("plan", "gpt2", "--routing", "/dev/full", code=2).err


def test_public_names_do_for_every_command_that_needs_no_weights():
    for name in models.public_names():
        assert models.check(name) == name
    for name in models.PACKAGED:
        assert models.check(name, weights=True) == name


@pytest.mark.parametrize("line", ["compress {} out --ratio 0.2", "eval {}"])
def test_a_public_name_without_weights_says_what_to_give(line, nmm):
    for name in [*models.public_names(), "no-such-model"]:
        if name in models.PACKAGED and line.startswith("compress"):
            continue
        shown = " ".join(nmm(*line.format(name).split(), code=2).err.split())
        assert shown.count("error:") == 1
        assert name in shown
        way = f"nmm compress {name} DIRECTORY" if name in models.PACKAGED else "hf download REPO"
        assert way in shown
