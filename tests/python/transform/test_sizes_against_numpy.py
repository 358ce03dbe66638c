"""Ops at random sizes: numpy's result where numpy has one, and an error where it raises one."""

import numpy as np
import pytest
from tvm import relax, tirx

import relax_hetero as rh
from seeds import fresh_rng

SIZES = {name: tirx.Var(name, "int64") for name in "abcdmnpq"}
m, n = SIZES["m"], SIZES["n"]


def build(make, shapes):
    """A machine of one op on tensors whose extents are symbols, or numbers."""
    types = [relax.TensorType([SIZES.get(extent, extent) for extent in shape], "float32") for shape in shapes]
    params = [relax.Var(f"x{index}", ty) for index, ty in enumerate(types)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(make(*params)))
        builder.emit_func_output(result)
    return rh.vm.VirtualMachine(rh.compile(builder.get(), cache=False))["main"]


def same_rank_broadcast(x, y):
    if len(x) != len(y):  # a symbol of another name is another size, which is not repeated
        raise ValueError
    return np.broadcast_to(x, (len(y), 5))


def windows(x):
    if len(x) < 2:  # two results of x[:-2] are one too few
        raise ValueError
    return x[: len(x) - 2]


def reflected(x):
    if len(x) < 3:  # numpy reflects the reflection
        raise ValueError
    return np.pad(x, (1, 2), mode="reflect")


# An op, the shapes of its operands, and the same in numpy, which raises ValueError where sizes contradict each other.
OPS = {
    "matmul": (relax.op.matmul, [("n", "a"), ("b", 2)], np.matmul),
    "three products": (
        lambda x, y, z: relax.op.matmul(relax.op.matmul(x, y), z), [("n", "a"), ("b", "c"), ("d", "m")],
        lambda x, y, z: x @ y @ z,
    ),
    "reshape": (lambda x: relax.op.reshape(x, (2, 6)), [("n", "a")], lambda x: x.reshape(2, 6)),
    "reshape by a quotient": (
        lambda x, y: relax.op.reshape(x, (m, -1)), [("n", 4), ("m",)], lambda x, y: x.reshape(len(y), -1),
    ),
    "reshape to other sizes": (
        lambda x, y: relax.op.reshape(x, (m, n)), [("n", "a"), ("m",)], lambda x, y: x.reshape(len(y), len(x)),
    ),
    "broadcast_to": (
        lambda x, y: relax.op.broadcast_to(x, (m, 5)), [("n", 1), ("m",)], same_rank_broadcast,
    ),
    "pad less than nothing": (lambda x: relax.op.nn.pad(x, [0, -2]), [("n",)], windows),
    "pad by reflection": (
        lambda x: relax.op.nn.pad(x, [1, 2], pad_mode="reflect"), [("n",)],
        reflected,
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_random_sizes(op):
    make, shapes, in_numpy = OPS[op]
    main = build(make, shapes)
    random = fresh_rng()
    outcomes = set()
    for _ in range(80):
        extents = {name: int(random.choice([0, 1, 2, 3, 4, 6, 12])) for name in SIZES}
        for name, other in ("ab", "cd"):  # sizes that often agree
            extents[other] = extents[name] if random.random() < 0.6 else extents[other]
        arrays = [random.random([extents.get(e, e) for e in shape], "float32") for shape in shapes]
        try:
            expected = in_numpy(*arrays)
        except ValueError:
            with pytest.raises(rh.HeteroError, match="^function 'main': .* expected "):
                main(*arrays)
            outcomes.add("refused")
        else:
            np.testing.assert_allclose(main(*arrays).numpy(), expected, rtol=1e-4, atol=1e-5)
            outcomes.add("computed")
    assert outcomes == {"refused", "computed"}
