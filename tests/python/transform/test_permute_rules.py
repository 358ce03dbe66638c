"""Every op with a rule computes the same on permuted values, and no permutation is left between two such ops.

One module with a function per case, compiled once by stock TVM as it is and once with its permutations moved.
"""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from modules import ops_of
from relax_hetero.op.traits import ELEMENTWISE
from relax_hetero.transform import MovePermutes
from relax_hetero.transform.ir.rewriting import relax_functions
from relax_hetero.transform.move_permutes import RULES
from seeds import fresh_rng

_SHAPE = (2, 6, 5, 7)
_TO, _FROM = [0, 2, 3, 1], [0, 3, 1, 2]


def constant(*shape, low=-1.0):
    return relax.const(fresh_rng().uniform(low, 1.0, shape).astype("float32"))


def vectors(count):
    return [constant(6, low=0.1) for _ in range(count)]


def field(builder, call, index=0):
    return builder.emit(relax.TupleGetItem(builder.emit(call), index))


# Ops on x of (2, 6, 5, 7), channels first; the result has four dimensions and is permuted back.
SAME_RANK = {
    "relu": lambda b, x: op.nn.relu(x),
    "clip": lambda b, x: op.clip(x, -0.5, 0.5),
    "astype": lambda b, x: op.astype(x, "int32"),
    "add_bias": lambda b, x: op.add(x, constant(6, 1, 1)),
    "add_scalar": lambda b, x: op.add(x, relax.const(2.0, "float32")),
    "add_row": lambda b, x: op.add(x, constant(7)),
    "multiply_gate": lambda b, x: op.multiply(x, b.emit(op.mean(x, [2, 3], keepdims=True))),
    "where": lambda b, x: op.where(b.emit(op.greater(x, relax.const(0.0, "float32"))), x, constant(6, 1, 1)),
    "max_pool": lambda b, x: op.nn.max_pool2d(x, [3, 2], [2, 1], [1, 0, 1, 1]),
    "avg_pool": lambda b, x: op.nn.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive_avg_pool": lambda b, x: op.nn.adaptive_avg_pool2d(x, [1, 7]),
    "mean": lambda b, x: op.mean(x, [2, 3], keepdims=True),
    "max": lambda b, x: op.max(x, [1], keepdims=True),
    "softmax": lambda b, x: op.nn.softmax(x, 1),
    "log_softmax": lambda b, x: op.nn.log_softmax(x, 1),
    "concat": lambda b, x: op.concat([x, b.emit(op.exp(x)), constant(2, 3, 5, 7)], 1),
    "split": lambda b, x: op.add(
        *(lambda s: [b.emit(relax.TupleGetItem(s, i)) for i in (0, 1)])(b.emit(op.split(x, 2, 1)))
    ),
    "dropout": lambda b, x: field(b, op.nn.dropout(x, 0.5)),
    "pad": lambda b, x: op.nn.pad(x, [0, 0, 1, 0, 2, 1, 0, 3]),
    "pad_reflect": lambda b, x: op.nn.pad(x, [0, 0, 0, 0, 2, 1, 1, 3], "reflect"),
    "strided_slice": lambda b, x: op.strided_slice(x, [1, -1], [1, 0], [5, 6], [1, 2]),
    "flip": lambda b, x: op.flip(x, 1),
    "repeat": lambda b, x: op.repeat(x, 2, 1),
    "tile": lambda b, x: op.tile(x, (2, 1, 3)),
    "take": lambda b, x: op.take(x, relax.const(np.array([3, 1, 0]), "int64"), 1),
    "cumsum": lambda b, x: op.cumsum(x, 2),
    "prelu": lambda b, x: op.nn.prelu(x, constant(6), 1),
    "resize": lambda b, x: op.image.resize2d(x, (9, 14), layout="NCHW"),
    "batch_norm": lambda b, x: field(b, op.nn.batch_norm(x, *vectors(4), axis=1, training=False)),
    "layer_norm": lambda b, x: op.nn.layer_norm(x, *vectors(2), axes=[1]),
    "group_norm": lambda b, x: op.nn.group_norm(x, *vectors(2), num_groups=3, channel_axis=1, axes=[2, 3]),
    "instance_norm": lambda b, x: op.nn.instance_norm(x, *vectors(2), channel_axis=1, axes=[2, 3]),
    "broadcast_to": lambda b, x: op.broadcast_to(b.emit(op.mean(x, [2, 3], keepdims=True)), (2, 6, 4, 3)),
    "zeros_like": lambda b, x: op.add(x, b.emit(op.ones_like(x))),
    "quantize": lambda b, x: op.dequantize(
        b.emit(op.quantize(x, constant(6, low=0.5), relax.const(np.zeros(6), "int8"), 1, "int8")),
        constant(6, low=0.5),
        relax.const(np.zeros(6), "int8"),
        1,
    ),
    "reshape_within": lambda b, x: op.reshape(b.emit(op.nn.relu(b.emit(op.reshape(x, (2, 2, 3, 5, 7))))), _SHAPE),
    "reshape_ones": lambda b, x: op.squeeze(b.emit(op.nn.relu(b.emit(op.expand_dims(x, [0, 3])))), [0, 3]),
}

# Other results, which stay in the program's order.
OTHER_RANK = {
    "mean_without": lambda b, x: op.mean(x, [2, 3]),
    "sum_channels": lambda b, x: op.sum(x, [1]),
    "argmax": lambda b, x: op.argmax(x, 1),
    "all": lambda b, x: op.max(x),
    "squeeze": lambda b, x: op.squeeze(b.emit(op.mean(x, [2, 3], keepdims=True)), [2, 3]),
}

CASES = {**SAME_RANK, **OTHER_RANK}


def module():
    builder = relax.BlockBuilder()
    for name, compute in CASES.items():
        x = relax.Var("x", relax.TensorType([_SHAPE[axis] for axis in _TO], "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                result = builder.emit(compute(builder, builder.emit(op.permute_dims(x, _FROM))))
                if name in SAME_RANK:
                    result = builder.emit(op.permute_dims(result, _TO))
                output = builder.emit_output(result)
            builder.emit_func_output(output)
    return builder.get()


@pytest.fixture(scope="module")
def modules():
    before = module()
    return before, MovePermutes()(before)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_permuted_and_all_is_the_same(name, modules):
    assert "relax.permute_dims" in ops_of(modules[0][name]) and "relax.permute_dims" not in ops_of(modules[1][name])
    x = fresh_rng().uniform(-1, 1, [_SHAPE[axis] for axis in _TO]).astype("float32")
    single = [tvm.IRModule({mod.get_global_var(name): mod[name]}) for mod in modules]  # most cases are left out here
    machines = [relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu()) for mod in single]
    expected, actual = (vm[name](tvm.runtime.tensor(x)).numpy() for vm in machines)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_second_run_changes_nothing(modules):
    assert MovePermutes()(modules[1]).same_as(modules[1])


def test_every_rule_has_a_case(modules):
    used = {name for _, func in relax_functions(modules[0]) for name in ops_of(func)}
    elsewhere = {
        f"relax.{name}"
        for name in "to_vdevice flatten nn.batch_flatten full_like zeros_like argmin nn.rms_norm".split()
    }
    alike = {name for name in RULES if name.rstrip("123d").endswith("_pool") or name in ELEMENTWISE}
    reductions = {f"relax.{name}" for name in "min prod std variance cumprod image.resize3d".split()}
    assert set(RULES) - used - elsewhere - alike - reductions == set()


@pytest.mark.parametrize("pool", ["max_pool1d", "avg_pool1d", "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d"])
def test_pools_of_other_ranks(pool):
    rank = 1 if "1d" in pool else 3
    first, last = [0, *range(2, 2 + rank), 1], [0, 1 + rank, *range(1, 1 + rank)]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([1, *[6] * rank, 2], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            pooled = builder.emit(getattr(op.nn, pool)(builder.emit(op.permute_dims(x, last)), [2] * rank))
            output = builder.emit_output(op.permute_dims(pooled, first))
        builder.emit_func_output(output)
    before = builder.get()
    after = MovePermutes()(before)
    assert "relax.permute_dims" not in ops_of(after["main"])
    array = fresh_rng().uniform(-1, 1, [1, *[6] * rank, 2]).astype("float32")
    results = [
        relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](tvm.runtime.tensor(array))
        for mod in (before, after)
    ]
    np.testing.assert_allclose(results[1].numpy(), results[0].numpy(), rtol=1e-6)


def rows(name):
    """(b, h, s, d), permuted from (b, s, h, d), through an op along the last axis."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([2, 5, 7, 6], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            heads = builder.emit(op.permute_dims(x, [0, 3, 2, 1]))
            result = (
                op.nn.softmax(heads, -1)
                if name == "softmax"
                else op.nn.layer_norm(heads, constant(5), constant(5), [-1])
            )
            output = builder.emit_output(op.permute_dims(builder.emit(result), [0, 3, 2, 1]))
        builder.emit_func_output(output)
    return builder.get()


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_ops_along_the_innermost_axis_keep_it(name):
    mod = rows(name)
    assert MovePermutes()(mod).same_as(mod)
