"""Calibration block by block gives what calibration at once gives, in less memory and time."""

import copy

import pytest
import torch
from compress_models import stack, tokens
from torch import nn

from nmm_compiler.compress import memory, parts
from nmm_compiler.compress.apply import compress
from nmm_compiler.compress.blocks import find_blocks
from nmm_compiler.compress.calibrate import collect, readers, trace
from nmm_compiler.compress.moments import moment_bytes
from nmm_compiler.compress.parts import Calibration
from nmm_compiler.compress.select import find_sites
from nmm_compiler.errors import MemoryBudgetError, NotInBlocksError, OptionTypeError

QUIET = {"progress": False}
_ROOM = 80_000  # for what goes through the blocks of these models


def llama(layers=3):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(shape).eval()


def ids(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return [
        {"input_ids": torch.randint(64, (2, 12), generator=generator), "attention_mask": mask}
        for _ in range(count)
    ]


def calibration(model, sites, batches, limit, sequential=False):
    return Calibration(
        model, sites, batches, gradients=True, output=None, sequential=sequential, limit=limit,
        progress=False,
    )  # fmt: skip


def smallest(model, sites):
    """The least memory that a model can be calibrated in, block by block."""
    blocks, rest = find_blocks(model, sites)
    need = max(
        memory.moments_need(b.sites, True) + memory.work_needs(b.sites, False) for b in blocks
    )
    return need + memory.moments_need(rest, True) + _ROOM


def test_blocks_are_the_members_of_the_outermost_list():
    model = llama()
    sites, _ = find_sites(model, include=["mlp", "self_attn", "lm_head"])
    blocks, rest = find_blocks(model, sites)
    assert [block.name for block in blocks] == [f"model.layers.{i}" for i in range(3)]
    assert all(len(block.sites) == 7 for block in blocks)
    assert [site.name for site in rest] == ["lm_head"]


def test_a_blocks_moments_are_those_of_a_pass_of_the_whole_model():
    """The same gradients too: the labels are drawn once for all blocks, from the same seed."""
    model, batches = llama(), ids()
    sites, _ = find_sites(model)
    whole = collect(model, sites, batches, gradients=True)
    blocks, _ = find_blocks(model, sites)
    tracer = trace(model, blocks, batches, gradients=True)
    assert tracer.chained
    assert model.config.use_cache
    for block in blocks:
        found = collect(
            model.get_submodule(block.name), block.sites, tracer.passages[block.name],
            gradients=True,
        )  # fmt: skip
        for kind in ("inputs", "gradients"):
            for name, moment in getattr(found, kind).items():
                other = getattr(whole, kind)[name]
                assert moment.tokens == other.tokens
                # float32 activations, recomputed in the same order
                bound = 1e-5 * other.total.norm()
                assert (moment.total - other.total).norm() <= bound


def test_memory_gives_the_same_model_as_calibration_at_once(monkeypatch):
    batches, original = ids(), llama()
    sites, _ = find_sites(original, include=["mlp", "self_attn", "lm_head"])
    selection = {"include": ["mlp", "self_attn", "lm_head"], "align": 4, **QUIET}
    models, reports, seen = {}, {}, []
    real = parts.collect
    monkeypatch.setattr(
        parts, "collect", lambda m, s, *a, **k: seen.append(len(s)) or real(m, s, *a, **k)
    )
    for limit in (None, smallest(original, sites)):
        seen.clear()
        models[limit] = copy.deepcopy(original)
        reports[limit] = compress(
            models[limit], 0.3, calibration=batches, memory=limit, **selection
        )
    assert sorted(seen) == [1, 7, 7, 7, 7, 7, 7]  # never all 22 at once; blocks twice
    once, by_block = reports.values()
    assert once.ranks() == by_block.ranks()
    assert once.calibration_tokens == by_block.calibration_tokens
    a, b = (m(**batches[0]).logits for m in models.values())
    assert (a - b).norm() <= 1e-4 * a.norm()


def test_what_does_not_fit_is_refused_before_anything_is_changed(monkeypatch):
    model, batches = stack(), tokens()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(memory, "available_bytes", lambda: 50_000)
    with pytest.raises(MemoryBudgetError, match=r"8 layers at once.*memory="):
        compress(model, 0.2, calibration=batches, **QUIET)
    with pytest.raises(MemoryBudgetError, match=r"one block at a time.*pass memory="):
        compress(model, 0.2, calibration=batches, memory=60_000, **QUIET)
    sites, _ = find_sites(model)
    reads = readers(model, sites, batches[0])
    fits = memory.moments_need(sites, True, reads) + memory.work_needs(sites, False)
    assert not calibration(model, sites, batches, fits).limited
    with pytest.raises(MemoryBudgetError, match="what goes through 2 blocks in 4 batches"):
        calibration(model, sites, batches, smallest(model, sites) - _ROOM)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    with pytest.raises(OptionTypeError, match="8GiB"):
        compress(model, 0.2, calibration=batches, memory="much", **QUIET)


def test_a_model_that_is_no_list_of_blocks_says_so():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

        def forward(self, x):
            return self.parts[1](self.parts[0](self.parts[0](x)))

    model, batches = Twice(), [torch.randn(5, 64)]
    sites, _ = find_sites(model)
    limit = smallest(model, sites) - _ROOM + 1000
    with pytest.raises(MemoryBudgetError, match=r"parts\.0 was called twice"):
        compress(model, 0.2, calibration=batches, memory=limit, align=4, **QUIET)
    with pytest.raises(NotInBlocksError):
        trace(model, find_blocks(model, sites)[0], batches)
    compress(model, 0.2, calibration=batches, sequential=True, align=4, **QUIET)  # whole passes


def test_the_estimate_is_what_the_moments_take():
    for model, batches in ((stack(), tokens()), (llama(), ids())):
        sites, _ = find_sites(model)
        for gradients in (False, True):
            statistics = collect(model, sites, batches, gradients=gradients)
            assert readers(model, sites, batches[0]) == statistics.reads
            need = memory.moments_need(sites, gradients, statistics.reads)
            assert need == statistics.bytes()
            assert need < memory.moments_need(sites, gradients)


def test_one_llama_layer_needs_at_most_350_mib():
    """Llama-3.2-1B: hidden 2048, inner 8192, 512 for keys and values; shapes suffice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=128, hidden_size=2048, intermediate_size=8192, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    sites, _ = find_sites(model)
    layer = "model.layers.0"
    reads = {site.name: site.name for site in sites}
    reads |= {f"{layer}.self_attn.{n}_proj": f"{layer}.self_attn.q_proj" for n in "qkv"}
    reads[f"{layer}.mlp.up_proj"] = f"{layer}.mlp.gate_proj"
    assert memory.moments_need(sites, True, reads) <= 350 << 20
    assert moment_bytes(8192, 2048) < moment_bytes(8192, None) / 10


@pytest.mark.parametrize("layers", [2, 4])
def test_sequential_calibration_is_linear_in_depth(layers):
    """Each block runs as often in a deep model as in a shallow one."""
    model, batches = llama(layers), ids(2)
    calls = dict.fromkeys(range(layers), 0)
    for i, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    compress(model, 0.2, calibration=batches, align=4, sequential=True, **QUIET)
    # Once to trace, once for moments; per stage (q k v; o; gate up; down) twice, and once on.
    # The first block's entry is traced once more in the whole model.
    assert max(calls.values()) <= len(batches) * (1 + 1 + 4 * 2 + 1 + 1) + 1


def test_blocks_give_the_same_sequential_fit_as_passes_of_the_whole_model(monkeypatch):
    batches, models = ids(4), []
    for whole in (False, True):
        model = llama()
        if whole:
            monkeypatch.setattr(parts, "find_blocks", lambda *_: ([], ()))
        compress(model, 0.3, calibration=batches, align=4, sequential=True, **QUIET)
        models.append(model)
    a, b = (m(**batches[0]).logits for m in models)
    assert (a - b).norm() <= 1e-4 * a.norm()
