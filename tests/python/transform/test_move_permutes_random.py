"""MovePermutes on random graphs: the same values, no more bytes permuted, and nothing left to do."""

import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from modules import calls_of
from relax_hetero.transform import MovePermutes
from transform.interpreting import run

_EXTENTS = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=4).map(tuple)
_UNARY = (op.nn.relu, op.tanh, op.negative, op.abs)


class Growing:
    """A graph that grows by one random op at a time."""

    def __init__(self, seed, builder, x):
        self.random, self.builder, self.values = random.Random(seed), builder, [x]

    def pick(self):
        """A value, one of the last few."""
        return self.random.choice(self.values[-4:])

    def grow(self):
        x = self.pick()
        shape = [int(extent) for extent in x.ty.shape.values]
        kind = self.random.choice(["permute", "permute", "unary", "binary", "constant", "reshape", "sum"])
        if kind == "permute":
            result = op.permute_dims(x, self.random.sample(range(len(shape)), len(shape)))
        elif kind == "binary":
            alike = [y for y in self.values if [int(extent) for extent in y.ty.shape.values] == shape]
            result = op.add(x, self.random.choice(alike))
        elif kind == "constant":
            suffix = shape[self.random.randrange(len(shape)) :]
            extents = [self.random.choice([1, extent]) for extent in suffix]
            result = op.multiply(
                x, relax.const(np.linspace(0.5, 1.5, math.prod(extents)).astype("float32").reshape(extents))
            )
        elif kind == "reshape":
            result = op.reshape(x, self.other_shape(shape))
        elif kind == "sum" and len(shape) > 2:
            result = op.sum(x, [self.random.randrange(len(shape))], keepdims=self.random.random() < 0.5)
        else:
            result = self.random.choice(_UNARY)(x)
        self.values.append(self.builder.emit(result))

    def other_shape(self, shape):
        """Neighbours merged, or an even extent split."""
        position = self.random.randrange(len(shape))
        if shape[position] % 2 == 0 and len(shape) < 6:
            return [*shape[:position], 2, shape[position] // 2, *shape[position + 1 :]]
        if len(shape) > 2 and position + 1 < len(shape):
            return [*shape[:position], shape[position] * shape[position + 1], *shape[position + 2 :]]
        return shape


def graph(shape, count, seed):
    """A function of one tensor, of `count` ops and one or two results."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            growing = Growing(seed, builder, x)
            for _ in range(count):
                growing.grow()
            results = [builder.emit_output(growing.pick()) for _ in range(growing.random.randint(1, 2))]
        builder.emit_func_output(relax.Tuple(results))
    return builder.get()


def bytes_permuted(mod):
    values = calls_of("relax.permute_dims", mod["main"])
    return sum(4 * math.prod(int(extent) for extent in value.ty.shape.values) for value in values)


@settings(max_examples=200, deadline=None)
@given(_EXTENTS, st.integers(1, 14), st.integers(0, 2**32))
def test_values_stay_and_permutations_do_not_grow(shape, count, seed):
    mod = relax.transform.DeadCodeElimination()(graph(shape, count, seed))
    after = MovePermutes()(mod)
    x = np.random.default_rng(0).uniform(-1, 1, shape).astype("float32")
    for actual, expected in zip(run(after, x), run(mod, x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert MovePermutes()(after).same_as(after), after
    assert bytes_permuted(after) <= bytes_permuted(mod), after
