"""Factors to disk and back, public checkpoints, and disks that refuse."""

import copy
import json

import pytest
import torch
from compress_models import stack, unchanged
from safetensors.torch import save_file
from toy_models import llama

from nmm_compiler.errors import FileError
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.modules import lowrank_layers
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


@pytest.mark.parametrize(
    "names", [(".down.", ".up."), ("_v_proj.", "_u_proj."), (".V.", ".U.")], ids=str
)
def test_public_checkpoints_load(names, compressed, tmp_path):
    state, (down, up) = {}, names
    for key, tensor in compressed.state_dict().items():
        for name in lowrank_layers(compressed):
            key = key.replace(f"{name}.down.", name + down).replace(f"{name}.up.", name + up)
        state[key] = tensor
    first = dict(list(state.items())[:5])
    save_file(first, tmp_path / "a.safetensors")
    rest = {key: tensor for key, tensor in state.items() if key not in first}
    save_file(rest, tmp_path / "b.safetensors")
    for indexed in (False, True):
        if indexed:
            files = {key: f"{'a' if key in first else 'b'}.safetensors" for key in state}
            index = tmp_path / "model.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": files}))
        for source in (state, tmp_path):
            model = stack(seed=9)
            assert set(load_factors(model, source)) == set(lowrank_layers(compressed))
            assert torch.equal(model(X), compressed(X))


def test_a_bias_that_the_file_lacks_stays(compressed):
    state = {key: t for key, t in compressed.state_dict().items() if not key.endswith(".up.bias")}
    assert len(state) < len(compressed.state_dict())
    model = stack()
    load_factors(model, state)
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


UP, DOWN = torch.zeros(32, 4), torch.zeros(4, 32)
PAIR = {"layers.0.q_u_proj.weight": UP, "layers.0.q_v_proj.weight": DOWN}


def factors(up, down, end=""):
    return {f"layers.0.q.up{end}": up, f"layers.0.q.down{end}": down}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"x": X}, "no factors of layers of Stack"),
        ({"layers.0.q.weight": torch.zeros(32, 32)}, "no factors of layers of Stack"),
        ({"layers.0.q_u_proj.weight": UP}, r"layers\.0\.q has up;"),
        ({**PAIR, "foreign.weight": X}, r"'foreign\.weight'.*no place"),
        ({**PAIR, "layers.0.q_v_proj.bias": torch.zeros(4)}, "has down, inner bias, up"),
        (factors(UP, DOWN[:3]), "do not chain"),
        (factors(UP, DOWN[:3], ".weight"), "do not chain"),
        (factors(UP.int(), DOWN.int()), "floating-point"),
        (factors(torch.zeros(48, 4), torch.zeros(4, 48)), r"'layers\.0\..*\[48, .*\[32, "),
    ],
)
def test_factors_that_do_not_fit_are_refused_and_change_nothing(tensors, reason, tmp_path):
    model = stack()
    save_file(tensors, tmp_path / "f.safetensors")
    for source in (tmp_path / "f.safetensors", tensors):
        with unchanged(model), pytest.raises(FileError, match=reason):
            load_factors(model, source)


def test_what_is_no_file_of_factors_is_refused(compressed, tmp_path):
    path = save_factors(compressed, tmp_path / "f.safetensors")
    data, absent = path.read_bytes(), tmp_path / "absent.safetensors"
    with pytest.raises(FileError, match="no factors of layers of Sequential"):
        load_factors(torch.nn.Sequential(torch.nn.ReLU()), path)
    with pytest.raises(FileError, match="no low-rank layer"):
        save_factors(stack(), path)
    for damaged in (data[: len(data) // 2], b"junk"):
        path.write_bytes(damaged)
        for source in (path, tmp_path, absent):
            with pytest.raises(FileError, match="cannot be read"):
                load_factors(stack(), source)
    path.unlink()
    with pytest.raises(FileError, match=r"no \.safetensors file"):
        load_factors(stack(), tmp_path)
    for text in ("[", "3", '{"weight_map": {"x": "/etc/passwd"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(FileError, match=r"model\.safetensors\.index\.json"):
            load_factors(stack(), tmp_path)
