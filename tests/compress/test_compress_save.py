"""Factors to disk and back, public checkpoints, and disks that refuse."""

import copy
import json
import os

import pytest
import torch
from compress_models import full_disk, stack
from safetensors.torch import save_file
from toy_models import llama

from nmm_compiler.errors import FileError
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.modules import LowRankLinear
from nmm_compiler.lowrank_models.save import load_factors, save_factors

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def compressed():
    model = stack()
    compress(model, 0.3, align=4, exclude="k")
    return model


def test_factors_round_trip_into_a_dense_model(compressed, tmp_path):
    path = save_factors(compressed, tmp_path / "f.safetensors")
    model = stack()
    names = load_factors(model, path)
    assert len(names) == 6
    assert torch.equal(model(X), compressed(X))
    assert load_factors(model, path) == names  # into a low-rank model, too
    assert torch.equal(model(X), compressed(X))
    assert [p.name for p in tmp_path.iterdir()] == ["f.safetensors"]


def test_what_does_not_fit_is_refused_and_changes_nothing(compressed, tmp_path):
    path = save_factors(compressed, tmp_path / "f.safetensors")
    other = stack(width=48)
    before = copy.deepcopy(other)
    with pytest.raises(FileError, match=r"'layers\.0\..*' as \[32, .*\[48, "):
        load_factors(other, path)
    assert torch.equal(other(torch.ones(48)), before(torch.ones(48)))
    with pytest.raises(FileError, match="no factors of layers of Sequential"):
        load_factors(torch.nn.Sequential(torch.nn.ReLU()), path)
    with pytest.raises(FileError, match="no low-rank layer"):
        save_factors(stack(), path)
    save_file({"x": X}, tmp_path / "foreign.safetensors")
    with pytest.raises(FileError, match="no factors of layers"):
        load_factors(stack(), tmp_path / "foreign.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(FileError, match="cannot be read"):
        load_factors(stack(), path)
    with pytest.raises(FileError, match="cannot be read"):
        load_factors(stack(), tmp_path / "absent.safetensors")


def test_a_full_disk_leaves_the_old_file(compressed, tmp_path):
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(OSError, match=r"f\.safetensors"):
        save_factors(compressed, path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f.safetensors"]


def test_public_checkpoints_load(compressed, tmp_path):
    names = {n for n, m in compressed.named_modules() if isinstance(m, LowRankLinear)}
    state = {}
    for key, tensor in compressed.state_dict().items():
        for name in names:
            key = key.replace(f"{name}.down.", f"{name}_v_proj.")
            key = key.replace(f"{name}.up.", f"{name}_u_proj.")
        state[key] = tensor
    model = stack(seed=9)
    assert set(load_factors(model, state)) == names
    assert torch.equal(model(X), compressed(X))
    keys = list(state)
    (tmp_path / "two").mkdir()
    save_file({k: state[k] for k in keys[:5]}, tmp_path / "two" / "a.safetensors")
    save_file({k: state[k] for k in keys[5:]}, tmp_path / "two" / "b.safetensors")
    index = {"weight_map": {k: "a.safetensors" if k in keys[:5] else "b.safetensors" for k in keys}}
    (tmp_path / "two" / "model.safetensors.index.json").write_text(json.dumps(index))
    model = stack(seed=9)
    load_factors(model, tmp_path / "two")
    assert torch.equal(model(X), compressed(X))
    for down, up in ((".down.", ".up."), (".V.", ".U.")):
        renamed = {k.replace("_v_proj.", down).replace("_u_proj.", up): t for k, t in state.items()}
        model = stack(seed=9)
        load_factors(model, renamed)
        assert torch.equal(model(X), compressed(X))


def test_llama_names_where_up_and_v_are_layers_too():
    """`up_u_proj`, `v_v_proj`: the factor's letter is the last but one part of the name."""
    model = llama(32, 64, vocabulary=20)
    dense = copy.deepcopy(model)
    compress(model, 0.3, align=2)
    state = {}
    for key, tensor in model.state_dict().items():
        stem = key.replace("_proj.down.weight", "_v_proj.weight")
        state[stem.replace("_proj.up.weight", "_u_proj.weight").removeprefix("model.")] = tensor
    assert "layers.0.mlp.up_u_proj.weight" in state
    assert "layers.0.self_attn.v_v_proj.weight" in state
    assert len(load_factors(dense, state)) == 7
    ids = torch.arange(6)[None]
    assert torch.equal(dense(ids).logits, model(ids).logits)


def test_bad_checkpoints_are_refused(compressed, tmp_path):
    model = stack()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FileError, match="no factors of layers of Stack"):
        load_factors(model, {"layers.0.q.weight": torch.zeros(32, 32)})
    pair = {"layers.0.q_u_proj.weight": torch.zeros(32, 4)}
    with pytest.raises(FileError, match=r"layers\.0\.q has only up"):
        load_factors(model, pair)
    pair["layers.0.q_v_proj.weight"] = torch.zeros(4, 32)
    with pytest.raises(FileError, match=r"'foreign\.weight'.*no place"):
        load_factors(model, {**pair, "foreign.weight": torch.zeros(1)})
    with pytest.raises(FileError, match="bias between"):
        load_factors(model, {**pair, "layers.0.q_v_proj.bias": torch.zeros(4)})
    with pytest.raises(FileError, match=r"no \.safetensors file"):
        load_factors(model, tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"junk")
    with pytest.raises(FileError, match="cannot be read"):
        load_factors(model, tmp_path)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
