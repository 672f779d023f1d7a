"""`nmm build`: the kernels that a compiled model then finds, whatever ends a run of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ran

from nmm_compiler.cache.store import Store
from nmm_compiler.kernels.linear.specs import LowRankSpec

LINES = [
    json.dumps({"family": "lowrank", "spec": LowRankSpec(m=8, k=16, r=4, n=16 * n).to_dict()})
    for n in range(1, 9)
]


@pytest.fixture
def specs(tmp_path):
    path = tmp_path / "specs.jsonl"
    path.write_text("\n".join(LINES[:3]) + "\n\n")
    return path


def test_a_file_of_specs_is_built_once_for_every_target(cache, specs, here, nmm):
    """But for a kernel that fails."""
    fields = LowRankSpec(m=8, k=16, r=4, n=16, dtype="float8_e4m3", scales="channel").to_dict()
    wide = json.dumps({"family": "lowrank", "target": "trn1", "spec": fields})
    specs.write_text(f"{LINES[0]}\n{LINES[0]}\n{wide}\n")
    line = ("build", specs, "--target", "trn1,trn2", "--jobs", 1)
    ended = nmm(*line, code=1)
    assert "3 kernels: 2 built, 0 were in the cache, 1 failed" in ended.out + ended.err
    assert "for trn1: SpecError" in ended.out + ended.err
    assert {i.entry.key.to_dict()["target"] for i in Store.open().entries()} == {"trn1", "trn2"}
    told = json.loads(nmm(*line, "--json", code=1).out)
    assert (told["kernels"], told["built"], told["present"]) == (3, 0, 2)
    assert told["cache"] == str(cache)


@pytest.mark.parametrize("line", [
    "[]", "{}", "no JSON", '{"family": "lowrank", "spec": {"m": 1}}',
    '{"family": "lowrnk", "spec": {}}', '{"family": "lowrank", "spec": {"m": 1, "x": 2}}',
])  # fmt: skip
def test_a_line_that_is_no_kernel_is_named(cache, specs, line, nmm):
    specs.write_text(f"{LINES[0]}\n{line}\n")
    assert "specs.jsonl:2" in nmm("build", specs, code=2).err


def _started(specs):
    specs.write_text("\n".join(LINES))
    command = [sys.executable, "-m", "nmm_compiler", "build", str(specs), "--jobs", "1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _entries(cache):
    return [p for p in Path(cache).rglob("meta.json") if len(p.parent.name) == 64]


@pytest.mark.long
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_goes_on_where_it_was(cache, specs, sent, code, nmm):
    run = _started(specs)
    end = time.monotonic() + 60
    while not _entries(cache) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(run.pid, sent)
    _, said = run.communicate(timeout=30)
    assert run.returncode == code, said
    if code == 130:
        assert "stay in the cache" in said
    before = len(_entries(cache))
    assert 1 <= before < len(LINES)
    told = json.loads(nmm("build", specs, "--jobs", 1, "--json").out)
    assert told["built"] + told["present"] + told["elsewhere"] == len(LINES)
    assert told["present"] >= before
    assert all(info.state == "ok" for info in Store.open().entries())


MODEL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 96}  # fmt: skip
COMPILED = """
import json, sys, torch, transformers
import nmm_compiler as nmm
config = transformers.AutoConfig.for_model(**json.loads(sys.argv[1]))
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
nmm.compress(model, 0.3)
options = {"cache": "require", "strict": True, "inner": "eager"}
compiled = torch.compile(model, backend="nmm", dynamic=False, options=options)
with torch.no_grad():
    for m in (1, 16):
        compiled(torch.zeros(1, m, dtype=torch.long), use_cache=False)
print(sum(len(report.kernels) for report in nmm.reports()))
"""


@pytest.mark.long
def test_a_compiled_model_finds_every_kernel(cache, tmp_path, nmm):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    done = nmm("build", config, "--ratio", "0.3", "--tokens", "1,16", "--json", code=0)
    built = json.loads(done.out)["built"]
    run = ran("-c", COMPILED, json.dumps(MODEL))
    assert int(run.stdout.split()[-1]) == built > 0
