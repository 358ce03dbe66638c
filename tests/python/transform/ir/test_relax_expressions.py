"""Elementwise ops as expressions, and the very ops back."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I

from relax_hetero.encoding.expression import Expression
from relax_hetero.errors import EncodingError
from relax_hetero.target.vdevice import same_object
from relax_hetero.transform.ir.relax_expressions import from_expression, scalar_of, to_expression

x = relax.Var("x", relax.TensorType([2, 3], "float32"))
b = relax.Var("b", relax.TensorType([3], "float32"))
d = relax.Var("d", relax.TensorType([2, 3], "float64"))
q = relax.Var("q", relax.TensorType([2, 3], "int32"))
HALF = relax.const(0.5, "float32")


def typed(call):
    builder = relax.BlockBuilder()
    with builder.function("main", [arg for arg in call.args if isinstance(arg, relax.Var)]):
        var = builder.emit(call)
        value = builder.lookup_binding(var)
        builder.emit_func_output(var)
    return value


@pytest.mark.parametrize(
    ("call", "text", "operands"),
    [
        (relax.op.add(x, b), "add(x0, x1)", [x, b]),
        (relax.op.add(b, x), "add(x0, x1)", [b, x]),
        (relax.op.subtract(HALF, x), "subtract(0.5, x0)", [x]),
        (relax.op.multiply(x, x), "multiply(x0, x0)", [x]),
        (relax.op.divide(x, b), "divide(x0, x1)", [x, b]),
        (relax.op.minimum(x, HALF), "minimum(x0, 0.5)", [x]),
        (relax.op.nn.relu(x), "relu(x0)", [x]),
        (relax.op.nn.gelu(x), "gelu(x0)", [x]),
        (relax.op.nn.gelu_tanh(x), "gelu_tanh(x0)", [x]),
        (relax.op.nn.silu(x), "silu(x0)", [x]),
        (relax.op.nn.leakyrelu(x, 0.25), "leaky_relu(x0, 0.25)", [x]),
        (relax.op.erf(x), "erf(x0)", [x]),
        (relax.op.rsqrt(x), "rsqrt(x0)", [x]),
        (relax.op.negative(x), "negative(x0)", [x]),
        (relax.op.round(x), "round(x0)", [x]),
        (relax.op.astype(x, "int8"), "cast(x0, 'int8')", [x]),
        (relax.op.add(q, relax.const(3, "int32")), "add(x0, 3)", [q]),
        (relax.op.astype(q, "float32"), "cast(x0, 'float32')", [q]),
    ],
)
def test_there_and_back(call, text, operands):
    value = typed(call)
    expression, leaves = to_expression(value)
    assert str(expression) == text
    assert all(one.same_as(other) for one, other in zip(leaves, operands, strict=True))
    emitted = []

    def emit(value, ty):
        emitted.append(value)
        return relax.Var("v", ty)

    result = from_expression(expression, leaves, emit)
    assert_structural_equal(result.ty, value.ty)
    assert len(emitted) == 1
    assert_structural_equal(typed(emitted[0]), value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (relax.op.clip(x, 0, 6), "clip(x0, 0.0, 6.0)"),
        (relax.op.clip(q, 0, 6), "clip(x0, 0, 6)"),
        (relax.op.clip(q, -(2**40), 6), "clip(x0, -2147483648, 6)"),
        (relax.op.add(d, relax.const(0.1, "float64")), "add(x0, 0.1)"),
        (relax.op.minimum(x, relax.const(float("inf"), "float32")), "minimum(x0, x1)"),
        (relax.op.add(x, relax.const(float("nan"), "float32")), "add(x0, x1)"),
        (
            relax.op.multiply(relax.Var("h", relax.TensorType([2], "bfloat16")), relax.const(0.5, "bfloat16")),
            "multiply(x0, 0.5)",
        ),
        (relax.op.power(x, relax.const(2.0, "float32")), "multiply(x0, x0)"),
        (relax.op.add(x, relax.const([[1.5]], "float32")), "add(x0, 1.5)"),
    ],
)
def test_other_spellings(call, text):
    expression, _ = to_expression(typed(call))
    assert str(expression) == text


@pytest.mark.parametrize(
    "call",
    [
        relax.op.nn.softmax(x),
        relax.op.greater(x, b),
        relax.op.sum(x),
        relax.op.power(x, HALF),
        relax.op.power(x, b),
        relax.op.divide(q, q),
        relax.op.tanh(d),
        relax.op.clip(x, 0, float("nan")),
        relax.op.astype(x, "bool"),
        relax.op.astype(x, "int64"),
    ],
)
def test_ops_that_are_not_expressions(call):
    assert to_expression(typed(call)) is None


def test_numbers_take_the_type_and_the_device_they_meet():
    mod = tvm.IRModule({}, global_infos={"vdevice": [I.vdevice("llvm"), I.vdevice("c")]})
    vdevice = mod.global_infos["vdevice"][1]
    half = relax.Var("h", relax.TensorType([4, 1], "float16", vdevice))
    wide = relax.Var("w", relax.TensorType([5], "float16", vdevice))
    bound = []

    def emit(value, ty):
        bound.append((value, ty))
        return relax.Var("v", ty)

    result = from_expression(Expression.parse("cast(add(multiply(x0, 0.5), x1), 'float32')"), [half, wide], emit)
    constant = bound[0][0].args[1]
    assert str(constant.ty.dtype) == "float16"
    assert constant.value.numpy() == np.float16(0.5)
    assert same_object(constant.ty.vdevice, vdevice)
    assert_structural_equal(bound[1][1], relax.TensorType([4, 5], "float16", vdevice))
    assert_structural_equal(result.ty, relax.TensorType([4, 5], "float32", vdevice))


def test_shapes_that_do_not_broadcast():
    other = relax.Var("o", relax.TensorType([2], "float32"))
    with pytest.raises(EncodingError, match="broadcast"):
        from_expression(Expression.parse("add(x0, x1)"), [x, other], lambda value, ty: relax.Var("v", ty))


def test_scalars():
    assert scalar_of(relax.const(2, "int8")) == 2
    assert scalar_of(relax.const([[0.1]], "float32")) == float(np.float32(0.1))
    assert scalar_of(relax.const([1.0, 2.0], "float32")) is None
    assert scalar_of(relax.const(True, "bool")) is None
    assert scalar_of(x) is None
