"""A small Llama whose MLP and attention projections are factor pairs."""

import torch
from torch import nn
from toy_models import llama


class FactorPair(nn.Sequential):
    """A linear layer as two, with the attributes that model code reads of a linear layer."""

    def __init__(self, linear, rank):
        u, s, v = torch.linalg.svd(linear.weight.detach().double(), full_matrices=False)
        root = s[:rank].sqrt()
        down = nn.Linear(linear.in_features, rank, bias=False)
        up = nn.Linear(rank, linear.out_features, bias=linear.bias is not None)
        down.weight = nn.Parameter((root[:, None] * v[:rank]).to(linear.weight.dtype))
        up.weight = nn.Parameter((u[:, :rank] * root).to(linear.weight.dtype))
        if linear.bias is not None:
            up.bias = linear.bias
        super().__init__(down, up)


def factorize(model, rank=8, skip=("lm_head",)):
    """Replace each linear layer by a factor pair; return how many."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, FactorPair)
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and name not in skip
    ]
    for parent, name, child in found:
        setattr(parent, name, FactorPair(child, rank))
    return len(found)


def small_llama(layers=2, rank=8, **more):
    model = llama(64, 160, layers, 128, tie_word_embeddings=False, **more)
    chains = factorize(model, rank)
    assert chains == 7 * layers
    return model
