"""From a transformers model to a compiled low-rank one; the README shows these lines."""

import torch
import transformers

import nmm_compiler as nmm

config = transformers.LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=2)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
print(nmm.compress(model, ratio=0.2, include=["*mlp*"]))
compiled = torch.compile(model, backend="nmm", options={"report": True})
tokens = torch.arange(64)[None]
with torch.no_grad():
    expected, got = model(tokens).logits, compiled(tokens).logits
print("largest difference to eager:", (expected - got).abs().max().item())
