"""nmm profile and what simulate shows; help and tables that fit 80 columns."""

import io
import json
import re
import time

import numpy as np
import pytest
import typer
from rich.console import Console
from rich.text import Text

from nmm_compiler.cli.commands import app
from nmm_compiler.cli.values import Answer
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.report.parts import Grid, Line
from nmm_compiler.report.text import as_text
from nmm_compiler.simulator.timing.causes import statement

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def add(a, b, block=512):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for at in range(0, a.shape[1], block):
        x = nl.ndarray((128, block), dtype=a.dtype, buffer=nl.sbuf)
        y = nl.ndarray((128, block), dtype=a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x, src=a[0:128, at : at + block])
        nisa.dma_copy(dst=y, src=b[0:128, at : at + block])
        nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
        nisa.dma_copy(dst=out[0:128, at : at + block], src=x)
    print("block is", block)
    return out


def right(a, b):
    return a.astype("float32") + b.astype("float32")


def wrong(a, b):
    return a.astype("float32") - b.astype("float32")
"""
ARRAYS = ("--arg", "a=128x2048:bf16", "--arg", "b=128x2048:bf16")


@pytest.fixture
def kernel(tmp_path):
    path = tmp_path / "add.py"
    path.write_text(KERNEL)
    return f"{path}:add"


@pytest.fixture
def nmm(nmm, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return nmm


def test_profile_says_where_the_time_goes_and_what_would_save_some(nmm, kernel, tmp_path):
    page, trace = tmp_path / "p.html", tmp_path / "p.json"
    words = ("--arg", "block=128", "--html", page, "--trace", trace)
    out = nmm("profile", kernel, *ARRAYS, *words, code=0).out
    for words in ("block is 128", "add.py:14", "VectorE", "data that a DMA brings",
                  "rows of 256 B: 1 KiB rows"):  # fmt: skip
        assert words in out, words
    for words in ("critical path", "waited for the DMA"):
        assert words in page.read_text(), words
    prose = [line for line in out.splitlines() if "/" not in line]
    assert max(map(len, prose)) <= 80
    assert "nisa.tensor_tensor" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_profile_json_adds_up(nmm, kernel):
    _, out, err = nmm("profile", kernel, *ARRAYS, "--json", code=0)
    found = json.loads(out)
    assert "block is 512" in err, "what a kernel prints is not part of the JSON"
    total = sum(line["path_us"] for line in found["lines"])
    assert total == pytest.approx(found["latency_us"])
    assert sum(s["stop_us"] - s["start_us"] for s in found["critical_path"]) == pytest.approx(total)
    assert found["advice"][0]["gain_us"] > 0


def test_profiles_of_the_values_of_an_argument(nmm, kernel, tmp_path):
    trace = tmp_path / "c.json"
    words = ("profile", kernel, *ARRAYS, "--arg", "block=128,512,2048")
    out = nmm(*words, "--trace", trace, code=0).out
    found = json.loads(nmm(*words, "--json")[1])
    fastest = min(found, key=lambda name: found[name]["latency_us"])
    assert out.index(f"fastest: {fastest}") < out.index("critical us of each source line")
    names = {e["args"]["name"].split(":")[0] for e in json.loads(trace.read_text())["traceEvents"]
             if e["name"] == "process_name"}  # fmt: skip
    assert names == {"block=128", "block=512", "block=2048"}
    assert found["block=512"]["latency_us"] < found["block=128"]["latency_us"]


def test_simulate_checks_against_a_reference_and_saves(nmm, kernel, tmp_path):
    file = kernel.removesuffix(":add")
    a = np.random.default_rng(0).standard_normal((128, 512))
    np.save(tmp_path / "a.npy", a)
    arrays = ("--arg", f"a=@{tmp_path}/a.npy:bf16", "--arg", f"b=@{tmp_path}/a.npy:bf16")
    out_file = tmp_path / "out.npz"
    right, wrong = ("--reference", f"{file}:right"), ("--reference", f"{file}:wrong")
    out = nmm("simulate", kernel, *arrays, *right, "--save", out_file, code=0).out
    assert "add.py:right: passed: 65536 elements" in " ".join(out.split())
    saved = np.load(out_file)["out0"]
    assert saved.dtype == np.float32
    assert np.abs(saved - 2 * a).max() <= 2 * np.abs(a).max() * 2**-8
    assert "FAILED" in nmm("simulate", kernel, *arrays, *wrong, code=1).out
    out = nmm("simulate", kernel, *arrays, *wrong, "--json", code=1).out
    assert json.loads(out)["reference"]["relative_error"] > 0.5


def test_kernel_as_json_and_table(nmm):
    sizes = ("--m", "16", "--k", "64", "--r", "16", "--n", "64")
    line = ("kernel", "lowrank", *sizes, "--schedules")
    found = json.loads(nmm(*line, "--json", "--check", code=0).out)
    assert found["profile"]["latency_us"] > 0
    assert found["proof"]["elements"] == 16 * 64
    assert found["schedules"][0]["schedule"] == found["schedule"]
    out = nmm(*line).out
    table = out[out.index("differs from rank 0 in") :].splitlines()
    assert "LinearSchedule(" in table[1]
    assert "LinearSchedule(" not in "".join(table[4:]), "others show what differs"


def test_a_call_over_several_lines_is_shown_whole(tmp_path):
    file = tmp_path / "calls.py"
    file.write_text("copy(\n    dst=a,\n    src=b[0:128, 0:4],\n)\nadd(a, b)\n")
    assert statement(str(file), 1) == "copy(dst=a, src=b[0:128, 0:4])"
    assert statement(str(file), 5) == "add(a, b)"
    assert statement(str(file), 50) == ""


def test_help_shows_every_word_that_was_written():
    """Square brackets in a help text are markup to rich, unless they are escaped."""
    group = typer.main.get_command(app)
    commands = {**group.commands, **group.commands["cache"].commands}
    for name, command in commands.items():
        for option in command.params:
            text = getattr(option, "help", None) or ""
            shown = Text.from_markup(text).plain
            assert shown == text.replace("\\[", "["), f"{name} {option.name}"


def test_progress_has_a_count_only_where_one_is_known(capsys):
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=60, color_system=None)
    with steps("reading [red]", terminal) as step:
        time.sleep(0.2)
        step("building " + "lowrank " * 20, 2, 4)
    assert "reading [red]" in shown.getvalue()
    assert re.search(r"building lowrank [a-z ]+… 2/4", shown.getvalue()), "the words are cut"
    with steps("reading") as step:
        step("building")
    assert capsys.readouterr().err == ""


# Nothing is printed wider than the terminal, but for a word that is wider itself.

LONG = "model.layers.*.self_attn.q_proj, model.layers.*.self_attn.o_proj"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_last_column_that_does_not_fit_is_below_its_row(width):
    figures = tuple(f"{i}.123" for i in range(width // 9))
    head = (*(f"h{i}" for i in range(len(figures))), "layers")
    grid = Grid.of(head, [(*figures, LONG), (*figures, "head")], right=head[:-1])
    lines = as_text([grid], width).splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert words == [*head, *figures, *LONG.split(), *figures, "head"]
    several = Grid.of(("n", "why", "layers"), [("1", "a b c " * 9, LONG)], right=("n",))
    lines = as_text([several], width).splitlines()
    assert max(map(len, lines)) <= width
    words = ["n", "why", "layers", "1", *"abc" * 9, *LONG.split()]
    assert sorted(" ".join(lines).split()) == sorted(words)


def test_a_sentence_is_broken_between_words_and_a_path_never(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    Answer(
        {}, [Line("2 kernels: 2 built, 0 were in the cache; 11.1 s; cache: /home/you/.cache")]
    ).say(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert len(lines) == 2
    path = "source    /home/you/.cache/nmm_compiler/v2/a/a57831c35da9b300/kernel.py"
    Answer({}, [Line(path)]).say(as_json=False)
    assert capsys.readouterr().out == f"{path}\n"
