"""SetEncoding on products of 8-bit integers, as ONNX's front end writes them: found, exact, and nothing left over."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from frontend.ops.checking import node_model
from modules import calls_of, ir_module, ops_of
from relax_hetero.op.encoded import MATMUL
from relax_hetero.transform import PropagateEncodings, SetEncoding, VerifyEncodings
from relax_hetero.transform.encode.set_encoding import set_encoding
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from seeds import fresh_rng
from transform.interpreting import run

U8S8 = "<uint8 * int8 -> int32; (m, k) * (k, n) -> (m, n); m=4, n=2, k=3>"


def encoded(model):
    """The imported model's main before and after SetEncoding, and the ops of the latter."""
    before = rh.from_onnx(model)
    after = SetEncoding()(before)
    VerifyEncodings()(after)
    assert set_encoding(after) is after
    return before, after, ops_of(after["main"])


def random_bytes(random, dtype, *shape):
    return random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape).astype(dtype)


def test_symmetric_weight():
    @ir_module()
    def Before(x: R.Tensor((4, 3), "uint8"), w: R.Tensor((3, 2), "int8"), z: R.Tensor((), "uint8")):
        with R.dataflow():
            wide = R.astype(x, "int32")
            zero = R.astype(z, "int32")
            shifted = R.subtract(wide, zero)
            weight = R.astype(w, "int32")
            y = R.matmul(shifted, weight, out_dtype="int32")
            R.output(y)
        return y

    @ir_module()
    def Expected(x: R.Tensor((4, 3), "uint8"), w: R.Tensor((3, 2), "int8"), z: R.Tensor((), "uint8")):
        with R.dataflow():
            zero = R.astype(z, "int32")
            weight = R.astype(w, "int32")
            columns = R.sum(weight, axis=[-2], keepdims=True)
            negated = R.negative(zero)
            init = R.multiply(columns, negated)
            lhs = R.hetero.set_encoding(x, "matmul[0]" + U8S8)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + U8S8)
            out = R.hetero.matmul(lhs, rhs, init, encoding="matmul[2]" + U8S8)
            y = R.hetero.unset_encoding(out, "matmul[2]" + U8S8)
            R.output(y)
        return y

    assert_structural_equal(SetEncoding()(Before), Expected)


ZEROS = ("none", "scalar", "vector")


@pytest.mark.parametrize("lhs_type", ["uint8", "int8"])
@pytest.mark.parametrize("rhs_type", ["uint8", "int8"])
@pytest.mark.parametrize("is_constant", [False, True])
def test_matmul_integer_is_exact(lhs_type, rhs_type, is_constant):
    random = fresh_rng()
    for (lhs_zero, rhs_zero), points_constant in product(product(ZEROS, ZEROS), (False, True)):
        a, b = random_bytes(random, lhs_type, 4, 300), random_bytes(random, rhs_type, 300, 5)
        shapes = {"none": None, "scalar": ()}
        points = [
            None if kind == "none" else random_bytes(random, dtype, *shapes.get(kind, (size,)))
            for kind, dtype, size in ((lhs_zero, lhs_type, 4), (rhs_zero, rhs_type, 5))
        ]
        constant = [1] if is_constant else []
        constant += [i for i, point in enumerate(points, 2) if points_constant and point is not None]
        model, feeds = node_model("MatMulInteger", [a, b, *points], 18, constant=constant)
        _, after, ops = encoded(model)
        assert ops.count(MATMUL) == 1
        assert "relax.matmul" not in ops
        wide = [x.astype("int64") for x in (a, b)]
        if points[0] is not None:
            wide[0] -= points[0].reshape(-1, 1) if points[0].ndim else points[0]
        if points[1] is not None:
            wide[1] -= points[1]
        expected = (wide[0] @ wide[1]).astype("int32")
        np.testing.assert_array_equal(run(after, *feeds.values()), expected)
        np.testing.assert_array_equal(run(PropagateEncodings()(after), *feeds.values()), expected)


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [((2, 4, 6), (6, 5)), ((2, 4, 6), (2, 6, 5)), ((6,), (6, 5)), ((4, 6), (6,)), ((3, 1, 4, 6), (2, 6, 5))],
)
@pytest.mark.parametrize("is_constant", [False, True])
def test_matmul_integer_of_other_ranks(lhs, rhs, is_constant):
    random = fresh_rng()
    a, b = random_bytes(random, "uint8", *lhs), random_bytes(random, "uint8", *rhs)
    points = [np.array(7, "uint8"), np.array(200, "uint8")]
    model, feeds = node_model("MatMulInteger", [a, b, *points], 18, constant=[1] if is_constant else [])
    _, after, ops = encoded(model)
    assert ops.count(MATMUL) == 1
    expected = np.matmul(a.astype("int32") - 7, b.astype("int32") - 200)
    np.testing.assert_array_equal(run(after, *feeds.values()), expected)


def test_a_constant_takes_its_zero_point_in_where_it_fits():
    random = fresh_rng()
    a = random_bytes(random, "uint8", 4, 6)
    b = random.integers(90, 210, (6, 5)).astype("uint8")
    model, feeds = node_model("MatMulInteger", [a, b, None, np.array(128, "uint8")], 18, constant=[1, 3])
    _, after, ops = encoded(model)
    assert ops == [
        "relax.hetero.set_encoding", "relax.hetero.set_encoding", "relax.hetero.matmul", "relax.hetero.unset_encoding"
    ]  # fmt: skip
    expected = a.astype("int32") @ (b.astype("int32") - 128)
    np.testing.assert_array_equal(run(after, *feeds.values()), expected)


def test_shared_constants_stay_shared():
    w = R.const(np.array([[200, 1], [2, 3]], "uint8"))

    @ir_module()
    def Before(x: R.Tensor((4, 2), "uint8"), y: R.Tensor((5, 2), "uint8")):
        with R.dataflow():
            weight = R.astype(w, "int32")
            a = R.matmul(R.astype(x, "int32"), weight)
            b = R.matmul(R.astype(y, "int32"), weight)
            R.output(a, b)
        return (a, b)

    after = SetEncoding()(Before)
    rhs = [b.value.args[0] for b in walk_bindings(after["main"]) if b.var.name.endswith("_rhs")]
    assert len(rhs) == 2
    assert rhs[0].same_as(rhs[1])


def quantized_model(random, transpose_b, per_column, is_constant, lhs_type):
    """DequantizeLinear of both operands, MatMul or Gemm, QuantizeLinear."""
    a, b = random_bytes(random, lhs_type, 4, 40), random_bytes(random, "int8", *((5, 40) if transpose_b else (40, 5)))
    axis = 0 if transpose_b else 1
    b_scale = random.uniform(0.01, 0.1, 5 if per_column else ()).astype("float32")
    values = {
        "b": b, "a_scale": np.array(0.05, "float32"), "a_zero": np.array(3, lhs_type),
        "b_scale": b_scale, "b_zero": np.zeros(b_scale.shape, "int8"),
        "y_scale": np.array(0.7, "float32"), "y_zero": np.array(11, "uint8"),
    }  # fmt: skip
    nodes = [
        helper.make_node("DequantizeLinear", ["a", "a_scale", "a_zero"], ["af"]),
        helper.make_node("DequantizeLinear", ["b", "b_scale", "b_zero"], ["bf"], axis=axis),
        helper.make_node("Gemm", ["af", "bf"], ["y"], transB=1)
        if transpose_b
        else helper.make_node("MatMul", ["af", "bf"], ["y"]),
        helper.make_node("QuantizeLinear", ["y", "y_scale", "y_zero"], ["q"]),
    ]
    inputs = [helper.make_tensor_value_info("a", helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)]
    feeds = [a]
    if not is_constant:
        inputs.append(helper.make_tensor_value_info("b", TensorProto.INT8, b.shape))
        feeds.append(values.pop("b"))
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 5]),
        helper.make_tensor_value_info("q", TensorProto.UINT8, [4, 5]),
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "quantized", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), feeds


@given(st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["uint8", "int8"]), st.integers(0, 2**32))
def test_dequantized_operands(transpose_b, per_column, is_constant, lhs_type, seed):
    model, feeds = quantized_model(np.random.default_rng(seed), transpose_b, per_column, is_constant, lhs_type)
    before, after, ops = encoded(model)
    encodings = [b.value.attrs.encoding for b in walk_bindings(after["main"]) if op_name(b.value) == MATMUL]
    assert [text.split(";")[0] for text in encodings] == [f"matmul[2]<{lhs_type} * int8 -> int32"]
    assert "relax.matmul" not in ops
    propagated = PropagateEncodings()(after)
    VerifyEncodings()(propagated)
    expected, wanted_q = run(before, *feeds)
    for mod in (after, propagated):
        y, q = run(mod, *feeds)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)
        assert np.abs(q.astype("int32") - wanted_q).max() <= 1


def test_qlinear_matmul():
    random = fresh_rng()
    a, b = random_bytes(random, "uint8", 4, 60), random_bytes(random, "uint8", 60, 5)
    scale, point = np.array(0.05, "float32"), np.array(9, "uint8")
    operands = [a, scale, point, b, scale, point, np.array(1.1, "float32"), np.array(30, "uint8")]
    model, feeds = node_model("QLinearMatMul", operands, 18, constant=[1, 2, 3, 4, 5, 6, 7])
    before, after, ops = encoded(model)
    assert ops.count(MATMUL) == 1
    propagated = PropagateEncodings()(after)
    of_results_shape = [b.value for b in walk_bindings(propagated["main"]) if list(b.var.ty.shape) == [4, 5]]
    assert {op_name(value).rpartition(".")[0] for value in of_results_shape} == {"relax.hetero"}
    for mod in (after, propagated):
        np.testing.assert_array_equal(run(mod, *feeds.values()), run(before, *feeds.values()))


@pytest.mark.parametrize(("size", "types"), [(33025, "uint8 * int8 -> int32"), (33026, "float32 * float32 -> float32")])
def test_sums_that_int32_might_not_hold_stay_float(size, types):
    x, w = (
        relax.Var(name, relax.TensorType(s, t)) for name, s, t in (("x", [1, size], "uint8"), ("w", [size, 1], "int8"))
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        wide = [builder.emit(relax.op.astype(value, "float32")) for value in (x, w)]
        builder.emit_func_output(builder.emit(relax.op.matmul(*wide)))
    after = SetEncoding()(builder.get())
    products = calls_of(MATMUL, after["main"])
    assert [call.attrs.encoding.split(";")[0] for call in products] == [f"matmul[2]<{types}"]


@pytest.mark.parametrize(
    ("dtype", "op"), [("int32", "float32 * float32 -> float32"), ("uint8", "uint8 * int8 -> int32")]
)
def test_zero_points_that_may_be_large_stay_float(dtype, op):
    builder = relax.BlockBuilder()
    types = {"x": ([4, 3], "uint8"), "z": ([], dtype), "w": ([3, 2], "int8")}
    x, z, w = params = [relax.Var(name, relax.TensorType(*ty)) for name, ty in types.items()]
    with builder.function("main", params):
        zero = builder.emit(relax.op.astype(z, "int32"))
        shifted = builder.emit(relax.op.subtract(builder.emit(relax.op.astype(x, "int32")), zero))
        wide = [builder.emit(relax.op.astype(value, "float32")) for value in (shifted, w)]
        builder.emit_func_output(builder.emit(relax.op.matmul(*wide)))
    products = calls_of(MATMUL, SetEncoding()(builder.get())["main"])
    assert [call.attrs.encoding.split(";")[0] for call in products] == [f"matmul[2]<{op}"]


def test_parameters_that_broadcast_the_data_are_not_seen_through():
    @ir_module()
    def Before(
        x: R.Tensor((1, 3), "uint8"), s: R.Tensor((4, 1), "float32"), z: R.Tensor((4, 1), "int32"),
        w: R.Tensor((3, 2), "int8")
    ):  # fmt: skip
        with R.dataflow():
            scaled = R.multiply(R.astype(x, "float32"), s)
            y = R.matmul(scaled, R.astype(w, "float32"))
            shifted = R.subtract(R.astype(x, "int32"), z)
            total = R.matmul(shifted, R.astype(w, "int32"), out_dtype="int32")
            R.output(y, total)
        return y, total

    after = SetEncoding()(Before)
    products = [b.value for b in walk_bindings(after["main"]) if op_name(b.value) in (MATMUL, "relax.matmul")]
    assert [op_name(call) for call in products] == [MATMUL, "relax.matmul"]
    assert products[0].attrs.encoding.startswith("matmul[2]<float32 * float32 -> float32")


def test_parameters_along_the_reduced_dimension_stay_float():
    @ir_module()
    def Before(x: R.Tensor((4, 3), "uint8"), w: R.Tensor((3, 2), "int8"), s: R.Tensor((3,), "float32")):
        with R.dataflow():
            wide = R.astype(x, "float32")
            scaled = R.multiply(wide, s)
            weight = R.astype(w, "float32")
            y = R.matmul(scaled, weight)
            R.output(y)
        return y

    after = SetEncoding()(Before)
    products = calls_of(MATMUL, after["main"])
    assert [call.attrs.encoding.split(";")[0] for call in products] == ["matmul[2]<float32 * float32 -> float32"]


def test_layers_that_differ_in_scales_and_zero_points_share_a_kernel():
    random = fresh_rng()
    x = relax.Var("x", relax.TensorType((3, 16), "uint8"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for scale, zero in ((0.5, 3), (0.25, 131), (0.125, 7)):
                shifted = relax.op.subtract(relax.op.astype(value, "int32"), relax.const(np.int32(zero)))
                floats = relax.op.multiply(relax.op.astype(shifted, "float32"), relax.const(np.float32(scale)))
                weight = relax.op.astype(relax.const(random_bytes(random, "int8", 16, 16)), "float32")
                weight = relax.op.multiply(weight, relax.const(random.uniform(0, 1, 16).astype("float32")))
                y = relax.op.matmul(builder.emit(floats), builder.emit(weight))
                y = relax.op.round(builder.emit(relax.op.divide(builder.emit(y), relax.const(np.float32(900 * scale)))))
                y = relax.op.clip(builder.emit(relax.op.add(y, relax.const(np.float32(zero * 2)))), 0, 255)
                value = builder.emit(relax.op.astype(y, "uint8"))
            result = builder.emit_output(relax.op.permute_dims(value))
        builder.emit_func_output(result)
    dispatches = rh.compile(builder.get()).metadata.fusions["dispatches"]
    assert len({call["kernel"] for call in dispatches if "matmul" in call["ops"]}) == 1
    assert sum("matmul" in call["ops"] for call in dispatches) == 3
