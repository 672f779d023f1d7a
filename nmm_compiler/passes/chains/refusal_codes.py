"""Every code of a refusal, with its meaning, the nearest miss first.

The order is the rank: first chains that only their surroundings prevent, last places that are
hardly a chain. `RewriteResult.nearest` shows, per rule, the refusal that stands first here.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    "other_user": "an inner value has another reader",
    "mutation": "memory of the chain is written in between",
    "region": "the chain crosses the edge of an autocast or grad-mode region",
    "dtype": "dtypes differ within the chain",
    "dtype_unsupported": "no kernel computes in this dtype",
    "device": "operands are on different devices",
    "subclass": "an operand is a tensor subclass",
    "rank_too_large": "one dense product is cheaper",
    "scaled_gate": "a scale stands behind a dense gate or up projection",
    "scaled_inner": "a factor stands before the activation between the products",
    "other_x": "projections do not read the same x",
    "inner_reshaped": "the inner dimension is rearranged between the products",
    "factor_shape": "a constant between the products varies along tokens",
    "factors_multiplied": "two factors are multiplied back into a dense weight at each call",
    "weight_computed": "a weight is computed in the graph",
    "symbolic_weight": "a weight has symbolic dimensions",
    "dropout": "training dropout stands between the products",
    "norm": "a norm stands between the products",
    "activation": "an activation function stands between the products",
    "activation_factor": "an activation multiplies between the products",
    "activation_addend": "an activation is added between the products",
}
"""Codes with a rank of their own."""

FURTHER: dict[str, str] = {
    "activations": "both operands of the product are activations",
    "adapted_gate": "gate or up is a dense product with adapters",
    "attention_heads": "heads of queries and keys differ, and the call does not group them",
    "attention_length": "causal queries are counted from the first key, and there are more keys",
    "attention_mask": "the mask of an attention depends on inputs, or is not causal or a window",
    "attention_shape": "operands of an attention are not [batch, heads, tokens, d], or symbolic",
    "attention_spelled": "attention is spelled out, with scores that no kernel computes",
    "attention_spec": "no attention kernel takes these sizes",
    "concatenated": "inner values are joined before the second product",
    "convolution": "a factor is a convolution that is no product of matrices",
    "embedding": "the first factor is an embedding table",
    "constant": "a parameter of a pattern is no stored weight",
    "batched_weight": "there is one weight per head or batch entry",
    "features": "the down projection returns other than x's features",
    "features_mixed": "the second product contracts tokens",
    "functorch": "the chain stands inside a functorch transform",
    "gate_activation": "no kernel computes a gate with this activation",
    "internal": "a fault in nmm_compiler met this place",
    "merged_gate": "gate and up are halves of one projection",
    "norm_features": "a norm is over other dimensions than the features of x",
    "residual_shape": "a residual has another shape, dtype or order than the result",
    "one_rank": "the devices sum between the products, and the executor runs one process",
    "rank_gradients": "the devices sum between the products, and the model trains on kernels",
    "opaque": "an unknown operation stands between the products",
    "pattern": "a pattern of two functions differs there",
    "part_of_one": "the products are a part of one operation of more",
    "sbuf": "the whole MLP does not fit the target's memory",
    "sharded": "data moves between devices inside, or one call is cut otherwise",
    "slower": "separate kernels are predicted to be faster than one",
    "two_graphs": "the two products stand in two graphs of the model",
    "unsummed": "a second factor multiplies element by element, and nothing is summed",
    "unknown_sizes": "two sizes of a reshape stand nowhere in the graph",
    "weight_layout": "a weight is no plain matrix of its parameter",
    "where": "the condition of a rule of two functions does not hold",
}
"""Codes without a rank of their own: they and those of users' rules rank last."""

_RANK = {code: rank for rank, code in enumerate(CODES)}


def distance(code: str) -> int:
    """Return how far a refusal is from a match, as a rank."""
    return _RANK.get(code, len(_RANK))
