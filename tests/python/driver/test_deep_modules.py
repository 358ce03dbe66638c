"""Deep or wide modules compile to the right numbers, and too deep nesting is refused by name."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.op import nn

import relax_hetero as rh
from relax_hetero import BuildError
from relax_hetero.transform.dispatch.form_dispatches import MAX_FUSED
from relax_hetero.transform.record import command_regions, form_command_buffers

TYPE = relax.TensorType((4, 8), "float32")


def chain(step, count, ty=TYPE):
    """A value through repeated ``step(builder, value, number)``."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", ty)
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for number in range(count):
                value = builder.emit(step(builder, value, number))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def run(mod, *arrays):
    exe = rh.compile(mod, cache=False)
    return exe, rh.vm.VirtualMachine(exe)["main"](*arrays)


def numbers():
    return np.random.default_rng(0).integers(-40, 40, (4, 8)).astype("float32")


def test_long_chains_are_kernels_of_bounded_length():
    ops = [(nn.relu, lambda x: np.maximum(x, 0)), (relax.op.negative, np.negative), (relax.op.abs, np.abs)]
    x = numbers()
    exe, result = run(chain(lambda _b, value, i: ops[i % 3][0](value), 3 * MAX_FUSED), x)
    for number in range(3 * MAX_FUSED):
        x = ops[number % 3][1](x)
    np.testing.assert_array_equal(result.numpy(), x)
    assert max(len(dispatch.ops) for dispatch in exe.metadata.dispatches.values()) <= MAX_FUSED


def test_values_read_twice_do_not_double_a_kernel():
    """Each is half of the sum of the one before and itself: written out, 2 ** 60 terms."""
    half = relax.const(0.5, "float32")
    x = numbers()
    _, result = run(chain(lambda b, v, _i: relax.op.multiply(b.emit(relax.op.add(v, v)), half), 60), x)
    np.testing.assert_array_equal(result.numpy(), x)


def test_truth_values_read_twice_do_not_double_a_kernel():
    x = numbers() > 0

    def step(builder, value, _number):
        return relax.op.logical_xor(builder.emit(relax.op.logical_and(value, value)), relax.const(True))

    for count in (1, 30, 31):
        _, result = run(chain(step, count, relax.TensorType((4, 8), "bool")), x)
        np.testing.assert_array_equal(result.numpy(), ~x if count % 2 else x)


def test_quantizations_in_a_row():
    """Nested maxima of minima: the time of TVM's simplifier doubles with each."""
    scale, zero = relax.const(0.5, "float32"), relax.const(3, "int8")

    def step(builder, value, _number):
        return relax.op.dequantize(builder.emit(relax.op.quantize(value, scale, zero, -1, "int8")), scale, zero, -1)

    x = numbers()
    _, result = run(chain(step, 40), x)
    np.testing.assert_array_equal(result.numpy(), (np.clip(x / 0.5 + 3, -128, 127) - 3) * 0.5)


def test_reshapes_and_transposes_in_a_row():
    steps = (lambda v: relax.op.permute_dims(v, [1, 0]), lambda v: relax.op.reshape(v, (4, 8)))
    x = numbers()
    _, result = run(chain(lambda _b, value, i: steps[i % 2](value), 60), x)
    for _ in range(30):
        x = x.T.reshape(4, 8)
    np.testing.assert_array_equal(result.numpy(), x)


@pytest.mark.parametrize(("count", "axis"), [(33, 0), pytest.param(1100, -1, marks=pytest.mark.slow)])
def test_a_concatenation_of_many(count, axis):
    """TVM's kernel of it nests a choice for each operand, and crashes on a thousand."""
    builder = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            constants = [relax.const(np.full(8, i, "float32")) for i in range(count)]  # of tensors, not of kernels
            parts = [builder.emit(relax.op.add(x, constant)) for constant in constants]
            value = builder.emit_output(relax.op.concat(parts, axis))
        builder.emit_func_output(value)
    x = numbers()
    _, result = run(builder.get(), x)
    np.testing.assert_array_equal(result.numpy(), np.concatenate([x + i for i in range(count)], axis))


def test_command_buffers_are_of_bounded_length(monkeypatch):
    for module in (command_regions, form_command_buffers):
        monkeypatch.setattr(module, "MAX_CALLS", 3)
    weight = relax.const(np.eye(8, dtype="float32")[::-1].copy())
    x = numbers()
    exe, result = run(chain(lambda _b, value, _i: relax.op.matmul(value, weight), 7), x)
    np.testing.assert_array_equal(result.numpy(), x[:, ::-1])
    assert [len(region.commands) for region in exe.metadata.regions] == [3, 3]
    assert exe.metadata.regions[0].ended_by == "length (3 kernels)"


def nested_branches(depth):
    builder = relax.BlockBuilder()
    x, flag = relax.Var("x", TYPE), relax.Var("flag", relax.TensorType((), "bool"))
    with builder.function("main", [flag, x]):
        value = nn.relu(x)
        for _ in range(depth):
            value = relax.If(flag, value, relax.op.negative(x))
        builder.emit_func_output(builder.emit(value))
    return builder.get()


def test_nested_branches_are_refused_by_name():
    x = numbers()
    _, result = run(nested_branches(20), np.array(False), x)
    np.testing.assert_array_equal(result.numpy(), -x)
    with pytest.raises(BuildError, match=r"function 'main'.*nests branches.*deeper than 64 levels"):
        rh.compile(nested_branches(70))


def nested_tuples(depth):
    return chain(lambda _b, v, number: relax.Tuple([v]) if number < depth else relax.TupleGetItem(v, 0), 2 * depth)


def test_nested_tuples_are_refused_by_name():
    x = numbers()
    _, result = run(nested_tuples(30), x)
    np.testing.assert_array_equal(result.numpy(), x)
    with pytest.raises(BuildError, match=r"variable 'lv\d+' is of tuples in each other, deeper than 64 levels"):
        rh.compile(nested_tuples(500))


def test_an_extent_of_very_many_sums_is_refused_by_name():
    extent = tirx.Var("n", "int64")
    for _ in range(3000):
        extent = tirx.Add(extent, tirx.IntImm("int64", 1))
    x = relax.Var("x", relax.TensorType((extent,), "float32"))
    body = relax.SeqExpr([], x)
    relax.expr._update_type(body, x.ty)
    main = relax.Function([x], body, x.ty).with_attr("global_symbol", "main")
    with pytest.raises(BuildError, match=r"extent of variable 'x' has more than 1000 sums"):
        rh.compile(tvm.IRModule({"main": main}))
