"""Small models with low-rank chains, and IREE as an independent way to run what was exported."""

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_models import Model

import nmm_compiler.ops.registration  # noqa: F401  (defines torch.ops.nmm)
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.mlir.export import export_mlir
from nmm_compiler.mlir.module import MLIRModule

Inputs = dict[str, Tensor]


def low_rank(k: int, r: int, n: int, bias: bool = True) -> nn.Module:
    """Return two linears with the rank between them."""
    return nn.Sequential(nn.Linear(k, r, bias=False), nn.Linear(r, n, bias=bias))


def one(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    """Return the smallest module with a kernel and an op around it."""
    torch.manual_seed(0)
    low = low_rank(16, 2, 8, bias=False)
    model = Model(lambda m, x: torch.cat([m.low(x), x], dim=1), low=low)
    return model.to(dtype).eval(), {"x": torch.randn(4, 16, dtype=dtype)}


def lora(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    """Return a frozen linear with a LoRA branch, as peft writes it."""
    torch.manual_seed(0)
    base, low = nn.Linear(32, 48), low_rank(32, 4, 48, bias=False)
    model = Model(lambda m, x: m.base(x) + 2.0 * m.low(x), base=base, low=low)
    return model.to(dtype).eval(), {"x": torch.randn(6, 32, dtype=dtype)}


def lora_call() -> tuple[nn.Module, Inputs]:
    """Return one op with all its operands; the NKI function takes them in another order."""

    def call(m: Any, x: Tensor) -> Tensor:
        layouts = {"u_layout": "col", "v_layout": "col"}
        return torch.ops.nmm.lowrank_matmul(x, m.u, m.v, m.bias, m.w, scale=2.0, **layouts)

    model = Model(call, u=(4, 32), v=(48, 4), bias=(48,), w=(32, 48))
    return model, {"x": torch.randn(6, 32)}


def llama_mlp(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=64, intermediate_size=96)
    torch.manual_seed(0)
    mlp = llama.LlamaMLP(config).eval()
    compress(mlp, rank=8, align=8, allow_slower=True)
    return mlp.to(dtype), {"x": torch.randn(2, 8, 64, dtype=dtype)}


def bert_layer(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    config = bert.BertConfig(hidden_size=32, num_attention_heads=2, intermediate_size=64)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer = bert.BertLayer(config).eval()
    compress(layer, rank=4, align=4, allow_slower=True)
    return layer.to(dtype), {"hidden_states": torch.randn(1, 8, 32, dtype=dtype)}


MODELS = {"one": one, "lora": lora, "llama_mlp": llama_mlp, "bert_layer": bert_layer}


@functools.cache
def exported(name: str, dialect: str, mode: str, dtype: torch.dtype = torch.float32) -> MLIRModule:
    """Export a model of MODELS once per test run, without NKI sources."""
    model, inputs = MODELS[name](dtype)
    return export_mlir(model, inputs, dialect=dialect, kernels=mode, sources=False)


def eager(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the first output of the model."""
    with torch.no_grad():
        made = model(**inputs)
    return made if isinstance(made, Tensor) else made[0]


def run_in_iree(module: Any, model: nn.Module, inputs: Inputs) -> np.ndarray:
    """Compile an inline module with IREE for the CPU, run it, return the first output."""
    loaded = _compiled(module.text)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = [state[a.name] if a.kind == "weight" else inputs[a.name] for a in module.arguments]
    made = loaded.main(*(_array(value) for value in values))
    first = made[0] if isinstance(made, (tuple, list)) else made
    return np.asarray(first.to_host()).astype(np.float64)


@functools.lru_cache(maxsize=1)
def _compiled(text: str) -> Any:
    compiler = pytest.importorskip("iree.compiler")
    runtime = pytest.importorskip("iree.runtime")
    binary = compiler.compile_str(
        text,
        target_backends=["llvm-cpu"],
        input_type="auto",
        extra_args=["--iree-llvmcpu-target-cpu=generic"],
    )
    return runtime.load_vm_flatbuffer(binary, driver="local-sync")


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
