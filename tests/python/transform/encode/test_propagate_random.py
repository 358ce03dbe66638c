"""PropagateEncodings on random programs: numbers stay, encodings are sound, and once is enough."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from relax_hetero.transform import PropagateEncodings, SetEncoding, VerifyEncodings
from relax_hetero.transform.encode.propagate_encodings import propagate_encodings
from transform.interpreting import run

SIZE = 4
SHAPES = ([SIZE, SIZE], [2, 2, SIZE], [2, SIZE, 2], [SIZE * SIZE], [SIZE])


class _Program:
    """A function under construction; every value has at most SIZE * SIZE elements between -1 and 1 or so."""

    def __init__(self, draw):
        self.draw = draw
        self.builder = relax.BlockBuilder()
        self.params = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(SHAPES)]
        self.values = list(self.params)

    def pick(self, fits=lambda shape: True):
        fitting = [v for v in self.values if fits([int(extent) for extent in v.ty.shape.values])]
        return self.draw(st.sampled_from(fitting[-6:])) if fitting else None  # late ones, so that chains grow

    def step(self):
        kind = self.draw(st.sampled_from(["matmul", "matmul", "unary", "binary", "binary", "permute", "reshape"]))
        call = getattr(self, kind)()
        if call is not None:
            self.values.append(self.builder.emit(call))

    def matmul(self):
        a = self.pick()
        last = int(a.ty.shape.values[-1])
        rank = len(a.ty.shape)
        b = self.pick(lambda shape: shape[-2 if len(shape) > 1 else 0] == last and 2 < len(shape) + rank < 6)
        shapes = [[int(e) for e in v.ty.shape.values] for v in (a, b) if v is not None]
        if b is None or np.prod(shapes[0]) * np.prod(shapes[1][-1:]) > 64 * SIZE:
            return None
        if len(a.ty.shape) > 2 and len(b.ty.shape) > 2 and shapes[0][:-2] != shapes[1][:-2]:
            return None
        return relax.op.multiply(self.builder.emit(relax.op.matmul(a, b)), relax.const(0.25, "float32"))

    def unary(self):
        op = self.draw(st.sampled_from([relax.op.nn.relu, relax.op.tanh, relax.op.sigmoid, relax.op.negative]))
        return op(self.pick())

    def binary(self):
        a = self.pick()
        shape = [int(extent) for extent in a.ty.shape.values]
        b = self.pick(lambda other: other in (shape, shape[-1:]))
        op = self.draw(st.sampled_from([relax.op.add, relax.op.subtract, relax.op.multiply, relax.op.maximum]))
        number = relax.const(self.draw(st.sampled_from([0.5, -1.0])), "float32")
        other = number if b is None or self.draw(st.booleans()) else b
        return op(*((a, other) if self.draw(st.booleans()) else (other, a)))

    def permute(self):
        a = self.pick()
        return relax.op.permute_dims(a, self.draw(st.permutations(range(len(a.ty.shape)))))

    def reshape(self):
        a = self.pick()
        count = int(np.prod([int(extent) for extent in a.ty.shape.values]))
        fitting = [shape for shape in SHAPES if int(np.prod(shape)) == count]
        return relax.op.reshape(a, self.draw(st.sampled_from(fitting))) if fitting else None


@st.composite
def programs(draw):
    program = _Program(draw)
    with program.builder.function("main", program.params):
        with program.builder.dataflow():
            for _ in range(draw(st.integers(2, 14))):
                program.step()
            results = program.values[-1:] + draw(st.lists(st.sampled_from(program.values), max_size=2))
            out = program.builder.emit_output(relax.Tuple(results))
        program.builder.emit_func_output(out)
    return program.builder.get()


@settings(max_examples=80)
@given(programs(), st.integers(0, 2**32))
def test_random_programs(before, seed):
    random = np.random.default_rng(seed)
    inputs = [random.uniform(-1, 1, shape).astype("float32") for shape in SHAPES]
    after = PropagateEncodings()(SetEncoding()(before))
    VerifyEncodings()(after)
    assert relax.analysis.check_well_formed(after)
    assert propagate_encodings(after) is after
    for got, expected in zip(run(after, *inputs), run(before, *inputs), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
