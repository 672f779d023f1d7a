"""What runs the programs of a model on a device: launch gaps and host time, as published.

Every stack is priced with our kernels: `kernels` says which ones it calls itself, and the error of
its runs holds that difference; norms and sums are inside of ours alone. What is priced apart is how
many programs compute a token, how long the next one waits, and what the host adds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nmm_compiler.kernels.base import check_name
from nmm_compiler.records import Record

# One call from the host, with its result read back: published for trn2; about 94 us on trn1.
HOST_CALL_US = 133.0


@dataclass(frozen=True, kw_only=True)
class Stack(Record):
    """A stack: host time a token, gap between programs. Launches have the same gap in all.

    kernels: what multiplies in it. host_from: where the host's time comes from, one of the sources
    of `prices`. program_gap_us: the wait between two programs of a stack that runs one for each
    layer and two for embedding and head; 0 of one that runs one for the whole pass. judged: the
    published decodes that this stack ran, for ours those with its gaps, and that nothing was chosen
    on, and the mean and largest error of their predictions as `make bench-models` prints them; None
    where there are none.
    """

    name: str
    source: str
    kernels: str = "ours"
    host_us: float = HOST_CALL_US
    host_from: str = "published law"
    program_gap_us: float = 0.0
    judged: tuple[int, float, float] | None = None

    def __str__(self) -> str:
        said = f"stack {self.name}: {self.source}; kernels: {self.kernels}"
        if self.judged is None:
            return f"{said}; no run of it that could judge it"
        runs, mean, worst = self.judged
        return (
            f"{said}; {runs} published decodes of it predicted within {mean:.0%} in the mean, "
            f"{worst:.0%} at worst"
        )


_PRODUCTS = "the Neuron compiler's own products"
_NXDI_KERNELS = "nki-library for attention, q/k/v and MLP, and the compiler's products"

# Decodes of one program a token, none of which chose anything.
_COMPILED = (19, 0.11, 0.35)

STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            name="own",
            source="one program a token, its gaps those of neuronx-cc",
            judged=_COMPILED,
        ),
        Stack(
            name="neuronx-cc",
            source="one program a token; the gap between launches was chosen on published decodes "
            "of Transformers-NeuronX and NxD Inference",
            kernels=_PRODUCTS,
            judged=_COMPILED,
        ),
        Stack(
            name="nxdi",
            source="NxD Inference decodes with one program a token (aws-neuron-sdk, nxd-inference)",
            kernels=_NXDI_KERNELS,
            judged=(7, 0.18, 0.38),
        ),
        Stack(
            name="vllm-neuron",
            source="NxD Inference under vLLM: 22.1 ms where it takes 20.5 alone "
            "(neuronx-distributed-inference, contrib/models/DeepSeek-V3)",
            kernels=_NXDI_KERNELS,
            # DeepSeek-V3 on 64 cores: 20.5 ms a token as NxD Inference runs it, 22.1 ms served.
            host_us=HOST_CALL_US + 1600.0,
        ),
        Stack(
            name="vllm-optimum",
            source="optimum-neuron under vLLM, each step computed for the compiled batch; the time "
            "of the host was chosen on two of its decodes (optimum-neuron, benchmark/vllm)",
            kernels=_PRODUCTS,
            host_from="fitted",
            # Llama-3.1-8B, 32 sequences of 4,096 tokens: 22.1 ms on a trn2 of four logical cores
            # and 24.5 ms on eight cores of inf2, without a server predicted as 16.2 and 19.5.
            host_us=HOST_CALL_US + 5500.0,
            judged=(5, 0.15, 0.43),
        ),
        Stack(
            name="torchneuron",
            source='torch.compile(model, backend="neuron"): a graph a token, no latency published '
            "(aws-neuron-sdk, pytorch-native-overview)",
            kernels=_PRODUCTS,
        ),
        Stack(
            name="pjrt-2.30",
            source="a program a layer through PJRT, 10 to 13 us between two (aws-neuron-sdk#1370)",
            program_gap_us=11.5,
        ),
        Stack(
            name="pjrt-2.31",
            source="a program a layer through PJRT, 170 to 190 us between two "
            "(aws-neuron-sdk#1370)",
            program_gap_us=180.0,
        ),
    )
}


def stack_named(name: str) -> Stack:
    """Return a stack. Figures do not tell the versions of one apart: nxdi-2.27 is nxdi.

    Raises:
        UnknownNameError: no stack is called so.
    """
    known = name if name in STACKS else re.sub(r"-\d[\d.]*$", "", name)
    check_name("stack", known, tuple(STACKS))
    return STACKS[known]
