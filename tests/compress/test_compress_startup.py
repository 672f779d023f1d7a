"""A saved low-rank model in processes that never import this package."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from nmm_compiler.compress import hf, hf_hook
from nmm_compiler.compress.apply import compress

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent.parent
STARTUP = ROOT / "startup"
LOAD = (
    "from transformers import AutoModelForCausalLM\n"
    "import torch\n"
    "model = AutoModelForCausalLM.from_pretrained({directory!r}).eval()\n"
    "print(type(model.model.layers[0].mlp.up_proj).__name__)\n"
    "print(model(torch.arange(6)[None]).logits.double().sum().item())\n"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a low-rank Llama, and what its logits add up to."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=100,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    compress(model, 0.2, align=4, progress=False)
    directory = tmp_path_factory.mktemp("saved") / "model"
    hf.save_pretrained(model, directory)
    with torch.no_grad():
        return directory, model(torch.arange(6)[None]).logits.double().sum().item()


def python(code, *options, executable=sys.executable):
    """Run code where this package cannot be imported unless the code says so."""
    start = f"import sys; sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]\n"
    hidden = (
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)"
        " and 'LowRank' not in repr(f)]\n"
        "sys.modules.pop('_nmm_compiler_startup', None)  # an install of this checkout ran it\n"
    )
    return subprocess.run(
        [executable, *options, "-c", start + hidden + code],
        cwd="/", env={"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_startup_file_makes_from_pretrained_know_the_model(saved):
    directory, total = saved
    result = python(
        f"import site; site.addsitedir({str(STARTUP)!r}); sys.path.append({str(ROOT)!r})\n"
        "assert not {'torch', 'transformers', 'nmm_compiler'} & set(sys.modules)\n"
        + LOAD.format(directory=str(directory))
        + "assert 'LowRank' not in repr(sys.meta_path), 'the finder left'\n"
    )
    assert result.returncode == 0, result.stderr
    name, found = result.stdout.split()[-2:]
    assert name == "LowRankLinear"
    # Other kernels may be chosen in another process: 64 additions of 100 logits in float32.
    assert float(found) == pytest.approx(total, abs=600 * 64 * torch.finfo(torch.float32).eps)


def test_without_this_package_transformers_refuses_the_model(saved):
    result = python(LOAD.format(directory=str(saved[0])))
    assert result.returncode != 0
    assert "MISMATCH" in result.stderr + result.stdout
    assert "nmm_lowrank" in result.stderr + result.stdout


@pytest.mark.parametrize("left", ["pth", "pth and finder"])
def test_python_and_transformers_start_when_the_package_is_half_removed(left, tmp_path):
    for file in STARTUP.glob("*.pth" if left == "pth" else "*startup.p*"):
        (tmp_path / file.name).write_text(file.read_text())
    stub = tmp_path / "transformers" / "quantizers"
    stub.mkdir(parents=True)
    for package in (stub, stub.parent):
        (package / "__init__.py").touch()
    (stub / "auto.py").write_text("FOUND = 1\n")
    result = python(
        f"import site; site.addsitedir({str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path)!r})\n"
        "import transformers.quantizers.auto as auto; print(auto.FOUND)\n"
    )
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "1\n")


def test_a_transformers_that_does_not_fit_is_a_warning(monkeypatch):
    def register():
        raise TypeError("other signature")

    monkeypatch.setattr(hf, "register", register)
    with pytest.warns(UserWarning, match=r"low-rank models \(other signature\)"):
        hf_hook._tell("transformers.quantizers.auto")


@pytest.mark.long
@pytest.mark.parametrize("editable", [False, True])
def test_wheels_and_editable_installs_bring_the_startup_files(editable, saved, tmp_path):
    """Built by the setuptools of this environment and installed into one made for the test."""
    source = tmp_path / "source"
    ignored = (".git", ".venv", "build", ".*_cache", "*.egg-info", "tests", "docs", "benchmarks")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored), symlinks=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    run = str(tmp_path / "venv" / "bin" / "python")
    site = Path(
        subprocess.check_output(
            [run, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
        ).strip()
    )
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    # Python 3.11 brings an old setuptools, which would hide the one of this environment.
    subprocess.run([run, "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True)
    pip = [run, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *(["-e"] if editable else []), str(source)], check=True)
    assert (site / "nmm_compiler_startup.pth").is_file()
    assert (site / "nmm_compiler").is_dir() != editable
    load = [run, "-c", LOAD.format(directory=str(saved[0]))]
    result = subprocess.run(load, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout.split()[0] == "LowRankLinear", result.stderr
