"""A compressed Llama on four processes: the same logits as in one process.

    python examples/tensor_parallel.py [row|rank] [processes]

The processes talk through gloo on this machine, as devices would through their links. Needs
transformers: pip install 'nmm-compiler[hf]'.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import nmm_compiler as nmm
from nmm_compiler.lowrank_models.tensor_parallel import tensor_parallel_plan

CONFIGS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}


def low_rank(kind: str = "llama", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a small model of random weights, compressed: the same one in every process."""
    torch.manual_seed(0)
    config = CONFIGS[kind](
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, vocab_size=512,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    nmm.compress(model, 0.2)
    return model


def worker(rank: int, processes: int, port: int, split: str, kind: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        want = low_rank(kind)(tokens, use_cache=False).logits
        model = low_rank(kind)
        mesh = init_device_mesh("cpu", (processes,))
        parallelize_module(model, mesh, tensor_parallel_plan(model, mesh, split=split))
        got = model(tokens, use_cache=False).logits
    held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    error = float((got - want).abs().max() / want.abs().max())
    # Sums of at most 512 terms in another order, in some twenty linears one after the other.
    assert error < 20 * 512 * 2.0**-24, f"rank {rank}: {error}"
    if rank == 0:
        print(f"{kind}, {split} split, {processes} processes: largest error {error:.1e} of the "
              f"largest logit; {held:,} parameters on each")  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def main(split: str = "row", processes: int = 4) -> None:
    for kind in CONFIGS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(worker, (processes, port, split, kind), nprocs=processes)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
