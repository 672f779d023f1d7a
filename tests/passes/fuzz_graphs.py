"""Random graphs around low-rank chains, for the fuzzer and for whoever wants to replay a seed.

`build(seed)` returns a GraphModule over torch functions, methods and ATen overloads, and its input.
Weights have spectral norm at most 1, so that rounding errors are not amplified from product to
product.
"""

import operator
import random

import torch
import torch.nn.functional as F
from torch import fx, nn

aten = torch.ops.aten


class Builder:
    """Adds random operations; `values` holds what each node computes."""

    def __init__(self, seed, dtype):
        self.dtype = dtype
        self.rng = random.Random(seed)
        # Drawn apart, so that a seed's other choices stay what they were before these existed.
        self.third = random.Random(seed ^ 0x5EED)
        self.outputs: list[fx.Node] = []
        self.generator = torch.Generator().manual_seed(seed)
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.values: dict[fx.Node, torch.Tensor] = {}
        self.count = 0

    # -- parts --------------------------------------------------------------------------------

    def parameter(self, *shape):
        data = torch.randn(*shape, generator=self.generator)
        if len(shape) == 2:
            data = data / torch.linalg.matrix_norm(data, 2)
        data = data.to(self.dtype)
        name = f"p{self.count}"
        self.count += 1
        self.root.register_parameter(name, nn.Parameter(data, requires_grad=False))
        node = self.graph.get_attr(name)
        self.values[node] = getattr(self.root, name).detach()
        return node

    def add(self, kind, target, *args, **kwargs):
        real = fx.node.map_arg((args, kwargs), lambda n: self.values[n])
        if kind == "call_method":
            value = getattr(real[0][0], target)(*real[0][1:], **real[1])
        else:
            value = target(*real[0], **real[1])
        node = self.graph.create_node(kind, target, args, kwargs)
        self.values[node] = value
        return node

    def f(self, target, *args, **kwargs):
        return self.add("call_function", target, *args, **kwargs)

    def m(self, name, *args, **kwargs):
        return self.add("call_method", name, *args, **kwargs)

    def shape(self, node):
        return tuple(self.values[node].shape)

    # -- products -------------------------------------------------------------------------------

    def product(self, x, n):
        shape = self.shape(x)
        k = shape[-1]
        w, stored = self.parameter(k, n), self.parameter(n, k)
        ways = {
            0: lambda: self.f(operator.matmul, x, w),
            1: lambda: self.f(F.linear, x, stored),
            2: lambda: self.f(F.linear, x, stored, self.parameter(n)),
            3: lambda: self.f(aten.linear.default, x, stored),
            4: lambda: self.f(torch.matmul, x, self.m("t", stored)),
            6: lambda: self.f(torch.einsum, "...k,kn->...n", x, w),
        }
        if len(shape) == 2:
            ways[5] = lambda: self.f(torch.addmm, self.parameter(n), x, w, alpha=0.5)
            ways[7] = lambda: self.m("t", self.f(operator.matmul, stored, self.m("t", x)))
        if len(shape) == 3:
            ways[8] = lambda: self.f(
                torch.bmm, x, self.m("expand", self.m("unsqueeze", w, 0), shape[0], k, n)
            )
        chosen = ways.get(self.rng.randrange(10))
        return chosen() if chosen else self.m("matmul", x, self.f(getattr, stored, "T"))

    def width(self, x):
        return self.rng.randint(2, 4) if self.shape(x)[-1] > 6 else self.rng.randint(10, 20)

    def between(self, x):
        """Add something that a matcher may look through or fold, or must not."""
        shape = self.shape(x)
        n, rng = shape[-1], self.rng
        ways = {
            0: lambda: self.m("reshape", x, -1, n),
            3: lambda: self.m("contiguous", x),
            4: lambda: self.f(aten.clone.default, x),
            5: lambda: self.f(operator.mul, x, rng.choice([0.5, -2.0, 1.0])),
            6: lambda: self.f(torch.mul, self.parameter(n), x),
            7: lambda: self.f(operator.add, x, self.parameter(n)),
            8: lambda: self.f(operator.truediv, x, 4.0),
            9: lambda: self.f(F.dropout, x, 0.3, False),
            10: lambda: self.m("to", x, self.dtype),
            11: lambda: self.f(rng.choice([torch.relu, F.silu, torch.tanh]), x),
            14: lambda: self.m(rng.choice(["mul_", "add_"]), x, 0.5),
            15: lambda: self.written(x, self.f(operator.setitem, x, 0, 0.25)),
            16: lambda: self.written(x, self.m("mul_", self.m("view_as", x, x), 0.5)),
            17: lambda: self.f(operator.matmul, x, self.f(torch.diag, self.parameter(n))),
            18: lambda: self.f(operator.neg, x),
            19: lambda: self.m("squeeze", self.m("unsqueeze", x, 1), 1),
            20: lambda: self.f(operator.mul, x, self.m("sigmoid", x)),
            21: lambda: self.f(torch.sub, x, self.parameter(n), alpha=2),
        }
        if len(shape) == 2 and shape[0] % 2 == 0:
            ways[1] = lambda: self.m("reshape", x, 2, -1, n)
        if len(shape) == 3:
            ways[2] = lambda: self.m("transpose", x, 0, 1)
        if len(shape) == 2:
            ways[12] = lambda: self.m("t", self.m("contiguous", self.m("t", x)))
        if shape[0] > 1:
            ways[13] = lambda: self.f(operator.getitem, x, slice(1, None))
        chosen = ways.get(rng.randrange(24))
        return chosen() if chosen else x

    def written(self, x, write):
        """Return x behind a write to it."""
        return x

    def lora(self, x, n):
        base = self.product(x, n)
        y = self.product(self.product(x, 2), n)
        if self.rng.random() < 0.5:
            y = self.f(operator.mul, y, 0.5)
        if self.rng.random() < 0.3:
            return self.f(operator.iadd, base, y)
        pair = (base, y) if self.rng.random() < 0.5 else (y, base)
        return self.f(operator.add, *pair)

    def gated(self, x, n):
        gate = self.product(self.product(x, 3), n)
        up = self.product(self.product(x, 2), n)
        gate = self.f(self.rng.choice([F.silu, F.gelu, torch.relu]), gate)
        pair = (gate, up) if self.rng.random() < 0.5 else (up, gate)
        h = self.f(operator.mul, *pair)
        if self.rng.random() < 0.5:
            return h
        down = self.between(h) if self.rng.random() < 0.2 else h
        down = self.product(down, 2) if self.rng.random() < 0.7 else down
        return self.product(down, self.shape(x)[-1])

    def newer(self, x):
        """Add forms that commute, repeat or add up; drawn apart."""
        rng, shape = self.third, self.shape(x)
        k, n, r = shape[-1], rng.randint(10, 20), rng.choice([1, 2, 3])

        def linear(y, outputs):
            return self.f(F.linear, y, self.parameter(outputs, self.shape(y)[-1]))

        pick = rng.randrange(5)
        if pick == 0:  # a number for each token between the products
            token = self.f(torch.tanh, self.f(operator.getitem, x, (Ellipsis, slice(0, 1))))
            h = self.f(operator.mul, *((linear(x, r), token) if rng.random() < 0.5 else
                                       (token, linear(x, r))))  # fmt: skip
            y = linear(h, n)
            if rng.random() < 0.5:
                y = self.f(operator.add, y, self.parameter(n))
            return y
        if pick == 1:  # a sum of chains of one x
            y = linear(linear(x, r), n)
            for _ in range(rng.randint(1, 2)):
                other = self.f(operator.mul, linear(linear(x, 2), n), 0.5)
                y = self.f(operator.add, *((y, other) if rng.random() < 0.5 else (other, y)))
            return y
        if pick == 2:  # the same product twice
            u = self.parameter(r, k)
            ys = [linear(self.f(F.linear, x, u), n) for _ in range(2)]
            return self.join(ys)
        if pick == 3:  # weights that are made of constants
            u = self.f(operator.mul, self.parameter(r, k), self.parameter(r, 1))
            v = self.m("to", self.m("double", self.parameter(n, r)), self.dtype)
            return self.f(F.linear, self.f(F.linear, x, u), v)
        residual = linear(x, n)  # an addend that stays outside, and a reader of its transpose
        if len(shape) != 2:
            return residual
        y = self.f(torch.addmm, self.f(torch.sin, residual), linear(x, r), self.parameter(r, n))
        self.outputs.append(self.m("cumsum", self.m("t", y), 0))
        return self.m("t", linear(self.m("t", self.m("t", y)), 12)) if rng.random() < 0.5 else y

    # (the two below give several results of one x; they are joined again so that all count)
    def several(self, x, n):
        ys = []
        for _ in range(self.rng.randint(2, 3)):
            down, up = self.parameter(3, self.shape(x)[-1]), self.parameter(n, 3)
            y = self.f(F.linear, self.f(F.linear, x, down), up)
            ys.append(self.between(y) if self.rng.random() < 0.3 else y)
        return self.join(ys)

    def fan(self, x, n):
        h = self.f(F.linear, x, self.parameter(3, self.shape(x)[-1]))
        ys = [self.f(F.linear, h, self.parameter(n, 3)) for _ in range(2)]
        if self.rng.random() < 0.3:
            ys.append(self.between(h))
        return self.join(ys)

    def join(self, ys):
        same = [y for y in ys if self.shape(y) == self.shape(ys[0])]
        total = same[0]
        for y in same[1:]:
            total = self.f(self.rng.choice([operator.add, torch.sub]), total, y)
        return total


def build(seed, dtype=torch.float32):
    """Return the graph of a seed, and its input."""
    b = Builder(seed, dtype)
    rng = b.rng
    shape = rng.choice([(4, 12), (6, 16), (2, 3, 12), (2, 5, 16), (1, 4, 12), (1, 16)])
    x = torch.randn(*shape, generator=b.generator).to(dtype)
    node = b.graph.placeholder("x")
    b.values[node] = x.clone()
    pool = [node]
    for _ in range(rng.randint(2, 7)):
        source = pool[-1] if rng.random() < 0.8 else rng.choice(pool)
        kind = rng.random()
        try:
            if kind < 0.12:
                new = b.lora(source, rng.randint(10, 20))
            elif kind < 0.24:
                new = b.gated(source, rng.randint(10, 20))
            elif kind < 0.32:
                new = b.several(source, rng.randint(10, 20))
            elif kind < 0.38:
                new = b.fan(source, rng.randint(10, 20))
            else:
                new = b.product(source, b.width(source))
                for _ in range(rng.randint(0, 2)):
                    new = b.between(new)
                if rng.random() < 0.8:
                    new = b.product(new, b.width(new))
            for _ in range(rng.randint(0, 2)):
                new = b.between(new)
            same = [p for p in pool if b.shape(p) == b.shape(new) and p is not new]
            if same and rng.random() < 0.4:
                other = rng.choice(same)
                add = rng.choice([operator.add, torch.add, operator.iadd, operator.mul])
                new = b.f(add, new, other)
        except RuntimeError:
            continue  # shapes did not fit: the nodes so far stay, unused
        pool.append(new)
    for _ in range(b.third.randint(0, 2)):
        try:
            b.outputs.append(b.newer(b.third.choice(pool)))
        except RuntimeError:
            continue
    outputs = [pool[-1]] + [p for p in pool[:-1] if rng.random() < 0.2]
    b.graph.output((*outputs, *dict.fromkeys(b.outputs)))
    return fx.GraphModule(b.root, b.graph), x
