"""Dimensions of different names broadcast as ONNX Runtime's do, or are refused where it refuses them."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import relax_hetero as rh
from relax_hetero.errors import HeteroError
from seeds import fresh_rng

ort = pytest.importorskip("onnxruntime")

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
CASES = {
    "Add": ([["n", "a"], [3]], [FLOAT, FLOAT], FLOAT, (0, 1, 2, 3)),
    "Where": ([["n", "c"], ["a"], ["m", 1]], [BOOL, FLOAT, FLOAT], FLOAT, (1, 2)),
    "Max": ([["a"], ["b"], ["a"]], [FLOAT] * 3, FLOAT, (0, 1, 3)),
    "Mean": ([["a"], ["b"], [3]], [FLOAT] * 3, FLOAT, (1, 2, 3)),
    "Equal": ([["a", 2], ["b", 1]], [INT64, INT64], BOOL, (0, 1, 2)),
    "PRelu": ([["n", "a"], ["b"]], [FLOAT, FLOAT], FLOAT, (1, 2)),
    "MatMul": ([["h", "a", 2, 2], ["b", 2, 2]], [FLOAT, FLOAT], FLOAT, (1, 3)),
    "Gemm": ([["m", 2], [2, "n"], ["c"]], [FLOAT] * 3, FLOAT, (1, 2)),
}


def one_node(op: str, shapes: list, types: list[int], result: int) -> onnx.ModelProto:
    names = [f"x{index}" for index in range(len(shapes))]
    inputs = [helper.make_tensor_value_info(*each) for each in zip(names, types, shapes, strict=True)]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"])], "g", inputs, [helper.make_tensor_value_info("y", result, None)]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("op", CASES)
def test_sizes_broadcast_as_in_onnxruntime(op):
    shapes, types, result, values = CASES[op]
    model = one_node(op, shapes, types, result)
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = sorted({dim for shape in shapes for dim in shape if isinstance(dim, str)})
    rng = fresh_rng()
    for sizes in itertools.product(values, repeat=len(names)):
        size_of = dict(zip(names, sizes, strict=True))
        arrays = [
            rng.integers(0, 9, [size_of.get(dim, dim) for dim in shape]).astype(helper.tensor_dtype_to_np_dtype(ty))
            for shape, ty in zip(shapes, types, strict=True)
        ]
        try:
            expected = session.run(None, {f"x{index}": array for index, array in enumerate(arrays)})[0]
        except Exception:  # onnxruntime's own kinds, all of them refusals
            with pytest.raises(HeteroError, match="does not broadcast"):
                machine["main"](*arrays)
            continue
        actual = machine["main"](*arrays).numpy()
        assert actual.shape == expected.shape, size_of
        np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=str(size_of))


def test_a_mask_of_other_dimensions_joins_scores_and_softmax():
    """The result's sizes are known well enough for the ops after it."""
    nodes = [
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"]),
        helper.make_node("Mul", ["weights", "masked"], ["scaled"]),
        helper.make_node("Add", ["scaled", "mask"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("scores", FLOAT, ["b", "h", "s", "t"]),
        helper.make_tensor_value_info("mask", FLOAT, ["b2", 1, 1, "t2"]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    rng = fresh_rng()
    for b, t, b2, t2 in ((2, 5, 2, 5), (2, 5, 1, 5), (1, 5, 3, 5), (2, 1, 2, 4), (2, 5, 1, 1)):
        scores, mask = rng.random((b, 3, 4, t), "float32"), rng.random((b2, 1, 1, t2), "float32")
        masked = scores + mask
        weights = np.exp(masked) / np.exp(masked).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(machine["main"](scores, mask).numpy(), weights * masked + mask, rtol=1e-5)


def test_sizes_that_are_equal_as_none_is_negative():
    """A slice and its rest have as many elements as the whole; a kernel reads one expression of both."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        f (bool[b,t] x) => (bool[b,u] y, bool[b,t] z)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] end = {9223372036854775807}> {
            first = Slice(x, zero, one, one)
            others = Slice(x, one, end, one)
            whole = Concat<axis = 1>(first, others)
            y = And(whole, x)
            z = Xor(x, whole)
        }""")
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    for length in (5, 1, 0):
        x = np.arange(2 * length).reshape(2, length) % 3 == 0
        y, z = main(x)
        np.testing.assert_array_equal(y.numpy(), x)
        np.testing.assert_array_equal(z.numpy(), np.zeros_like(x))
