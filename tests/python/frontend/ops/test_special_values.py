"""NaN, infinities, denormals and limits go through every op as in numpy and ONNX Runtime, fused or not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh
from relax_hetero.errors import HeteroError

ort = pytest.importorskip("onnxruntime")

NAN, INF = np.nan, np.inf
TYPES = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
PLAIN = (
    "Relu LeakyRelu Elu Selu Celu Sign Abs Neg Exp Log Sqrt Reciprocal Sigmoid Tanh Erf Softplus Softsign HardSigmoid "
    "HardSwish ThresholdedRelu Floor Ceil Round Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Gelu Mish IsNaN "
    "IsInf"
).split()
INTEGERS = [getattr(TensorProto, name) for name in "INT8 INT16 INT32 INT64 UINT8 UINT16 UINT64 BOOL".split()]
OPS = [
    *((op, {}) for op in PLAIN),
    ("Gelu", {"approximate": "tanh"}),
    ("Celu", {"alpha": 2.0}),
    *(("Cast", {"to": target}) for target in INTEGERS),
]
# For all values, not only NaN: ONNX Runtime computes in other orders, or other precision.
ROUGH = {"float16": 4e-3, "float32": 5e-6, "float64": 1e-6}
# ONNX Runtime 1.32 computes those of float64 in float32, where 1 + eps is 1 and no longer beyond a limit; its Sign of
# float16, unlike that of float32, makes NaN a 0.
DEFINITIONS = {
    ("Sign", "float16"): np.sign,
    ("ThresholdedRelu", "float64"): lambda x: np.where(x > 1, x, 0),
    ("Asin", "float64"): np.arcsin,
    ("Acos", "float64"): np.arccos,
    ("Acosh", "float64"): np.arccosh,
    ("Atanh", "float64"): np.arctanh,
}


def special_values(dtype: str) -> np.ndarray:
    """Special values that fill vectors, and a rest."""
    limits = np.finfo(dtype)
    numbers = [
        NAN,
        INF,
        -INF,
        0.0,
        -0.0,
        1,
        -1,
        0.5,
        -0.5,
        2.5,
        -2.5,
        3,
        -3,
        6,
        7,
        20,
        -20,
        100,
        -100,
        88.5,
        -87.5,
        -104,
    ]
    edges = [limits.max, limits.tiny, limits.smallest_subnormal]
    with np.errstate(all="ignore"):
        return np.array([*numbers, 1e4, -1e4, *edges, *np.negative(edges), limits.eps, 1 + limits.eps, 0.92]).astype(
            dtype
        )


def result_type(op: str, attributes: dict, dtype: str) -> int:
    return attributes["to"] if op == "Cast" else TensorProto.BOOL if op.startswith("Is") else TYPES[dtype]


def model_of(nodes: list, inputs: list, outputs: list[int], constants: dict) -> onnx.ModelProto:
    results = [helper.make_tensor_value_info(f"y{index}", kind, None) for index, kind in enumerate(outputs)]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, results, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def reference(op: str, attributes: dict, x: np.ndarray) -> np.ndarray:
    """ONNX Runtime's result, of an element type that it has the op for, or numpy's."""
    if (op, str(x.dtype)) in DEFINITIONS:
        with np.errstate(all="ignore"):
            return DEFINITIONS[op, str(x.dtype)](x)
    for dtype in (str(x.dtype), "float32"):
        node = helper.make_node(op, ["x"], ["y0"], **attributes)
        inputs = [helper.make_tensor_value_info("x", TYPES[dtype], [x.size])]
        model = model_of([node], inputs, [result_type(op, attributes, dtype)], {})
        options = ort.SessionOptions()
        options.log_severity_level = 4
        try:
            session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception:  # not implemented for this type
            continue
        with np.errstate(all="ignore"):
            return session.run(None, {"x": x.astype(dtype)})[0]
    raise AssertionError(f"ONNX Runtime lacks {op}")


# Preceding op, its weight, and the input's shape.
CONTEXTS = {
    "alone": (None, None, lambda x: x),
    "fused": ("Mul", np.ones(1), lambda x: x),
    "product": ("MatMul", np.ones((1, 19)), lambda x: x[:, None]),
    "convolution": ("Conv", np.ones((19, 1, 1, 1)), lambda x: x[None, None, :, None]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "context"),
    [
        ("float32", "fused"),
        ("float32", "product"),
        *(
            pytest.param(dtype, context, marks=pytest.mark.slow)
            for dtype in TYPES
            for context in CONTEXTS
            if (dtype, context) not in (("float32", "fused"), ("float32", "product"))
        ),
    ],
)
def test_elementwise_ops(dtype, context):
    x = special_values(dtype)
    if context in ("product", "convolution"):  # a sum that begins with 0 ends with 0, not with -0
        x = np.where(x == 0, np.zeros_like(x), x)
    before, constant, shaped = CONTEXTS[context]
    nodes, data = [], shaped(x)
    for index, (op, attributes) in enumerate(OPS):
        source = "x"
        if before is not None:
            source = f"before{index}"
            nodes.append(helper.make_node(before, ["x", "c"], [source]))
        nodes.append(helper.make_node(op, [source], [f"y{index}"], **attributes))
    inputs = [helper.make_tensor_value_info("x", TYPES[dtype], data.shape)]
    constants = {} if constant is None else {"c": constant.astype(dtype)}
    model = model_of(nodes, inputs, [result_type(*each, dtype) for each in OPS], constants)
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](data)
    for (op, attributes), result in zip(OPS, actual, strict=True):
        array, expected = result.numpy(), shaped(reference(op, attributes, x))
        numbers = np.broadcast_to(data, array.shape)
        if array.dtype.kind != "f":
            wrong = array != expected
        else:
            with np.errstate(all="ignore"):
                wide, want = array.astype("float64"), expected.astype("float64")
                limit = np.finfo(dtype).max
                # Beyond half of the largest number: of float16, ONNX Runtime computes in float32.
                beyond = (np.abs(want) > limit / 2) | (np.abs(numbers.astype("float64")) > limit / 2)
                close = np.isclose(wide, want, rtol=ROUGH[dtype], atol=ROUGH[dtype], equal_nan=True)
                wrong = ~(close | (beyond & ~np.isnan(numbers) & (dtype != "float32")))
        assert not wrong.any(), (op, attributes, numbers[wrong][:5], array[wrong][:5])


VALUES = np.array([NAN, INF, -INF, 0, 1, -1, 2.5], "float32")
PAIRS = [grid.ravel().copy() for grid in np.meshgrid(VALUES, VALUES)]
ROWS = np.array(
    [
        [1, NAN, 2, 3, 4, 5, 6, 7, 8],
        [NAN, *[1] * 8],
        [*[1] * 8, NAN],
        [-INF] * 9,
        [INF, *[1] * 8],
        [NAN] * 9,
        [*[-INF] * 8, 1],
    ],
    "float32",
)


def several(cases: list[tuple[str, list[np.ndarray], dict, int]]) -> list[list[np.ndarray]]:
    """The results of nodes (op, inputs, attributes, number of results) by one executable."""
    nodes, inputs, outputs, arrays, constants = [], [], [], [], {}
    for case, (op, operands, attributes, results) in enumerate(cases):
        names = [f"x{case}_{index}" for index in range(len(operands))]
        for name, array in zip(names, operands, strict=True):
            if array.dtype == np.int64:
                constants[name] = array
            else:
                inputs.append(helper.make_tensor_value_info(name, TYPES[str(array.dtype)], array.shape))
                arrays.append(array)
        first = len(outputs)
        outputs += [TensorProto.INT64 if op.startswith("Arg") or index else TYPES[str(operands[0].dtype)]
                    for index in range(results)]  # fmt: skip
        nodes.append(helper.make_node(op, names, [f"y{i}" for i in range(first, len(outputs))], **attributes))
    model = model_of(nodes, inputs, outputs, constants)
    columns = iter(rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](*arrays))
    return [[next(columns).numpy() for _ in range(results)] for *_, results in cases]


def check(cases: list[tuple[str, list[np.ndarray], dict, list[np.ndarray]]]) -> None:
    rows = several([(op, operands, attributes, len(expected)) for op, operands, attributes, expected in cases])
    for (op, _, attributes, expected), results in zip(cases, rows, strict=True):
        for one, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=f"{op} {attributes}")


def axes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@np.errstate(all="ignore")
def test_two_operands():
    a, b = PAIRS
    halves = [array.astype("float16") for array in PAIRS]
    check(
        [
            ("Max", [a, b], {}, [np.maximum(a, b)]),
            ("Min", [a, b], {}, [np.minimum(a, b)]),
            ("Max", halves, {}, [np.maximum(*halves)]),
            ("Max", [a[:13], b[:13], a[20:33]], {}, [np.maximum(np.maximum(a[:13], b[:13]), a[20:33])]),
            ("Mod", [a, b], {"fmod": 1}, [np.fmod(a, b)]),
            ("Pow", [a, b], {}, [np.power(a, b)]),
            ("Div", [a, b], {}, [a / b]),
            ("PRelu", [a, b], {}, [np.where(a < 0, a * b, a)]),
            ("Clip", [a, np.float32(0).reshape(()), np.float32(1).reshape(())], {}, [np.clip(a, 0, 1)]),
        ]
    )


@np.errstate(all="ignore")
def test_quotients_by_the_constant_0():
    """TVM's arithmetic refuses to divide by a number that is 0."""
    nodes = [helper.make_node("Div", ["x", name], [f"by_{name}"]) for name in ("plus", "minus")]
    numbers = [numpy_helper.from_array(np.float32(value), name) for name, value in (("plus", 0.0), ("minus", -0.0))]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "quotients",
        [info("x", TensorProto.FLOAT, ["n"])],
        [info(f"by_{name}", TensorProto.FLOAT, ["n"]) for name in ("plus", "minus")],
        numbers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    x = special_values("float32")
    with np.errstate(divide="ignore", invalid="ignore"):
        for got, zero in zip(main(x), (np.float32(0.0), np.float32(-0.0)), strict=True):
            np.testing.assert_array_equal(got.numpy(), x / zero)


def test_reductions():
    columns = np.repeat(ROWS.T[:, :, None], 3, axis=2)
    cases = []
    for x, axis in ((ROWS, 1), (ROWS, 0), (columns, 0)):
        for op, function in (("ReduceMax", np.max), ("ReduceMin", np.min), ("ReduceMean", np.mean)):
            cases.append((op, [x, axes(axis)], {"keepdims": 0}, [function(x, axis=axis)]))
        for op, function in (("ArgMax", np.argmax), ("ArgMin", np.argmin)):
            last = x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis)
            cases.append((op, [x], {"axis": axis, "keepdims": 0}, [function(x, axis=axis)]))
            cases.append((op, [x], {"axis": axis, "keepdims": 0, "select_last_index": 1}, [last]))
        powers = np.exp(x - x.max(axis, keepdims=True))
        cases.append(("Softmax", [x], {"axis": axis}, [powers / powers.sum(axis, keepdims=True)]))
    cases.append(("ReduceMax", [columns.astype("float16"), axes(1)], {"keepdims": 0}, [columns.max(axis=1)]))
    check(cases)


def test_order_and_windows():
    """TopK takes NaN for the largest; MaxPool leaves it out wherever it stands in a window, as ONNX Runtime does."""
    x = np.array([1, NAN, 3, 2, NAN, INF, -INF, -0.0], "float32")
    signal = np.array([[[1, NAN, 2, 0, NAN, NAN, NAN, -1, 5]]], "float32")
    lowest = np.finfo("float32").min
    data = np.array([NAN, 2, 3, 4], "float32")
    updates = np.array([1, NAN, 0, 9], "float32")
    check(
        [
            ("TopK", [x, axes(4)], {}, [np.array([NAN, NAN, INF, 3], "float32"), axes(1, 4, 5, 2)]),
            ("TopK", [x, axes(3)], {"largest": 0}, [np.array([-INF, 0, 1], "float32"), axes(6, 7, 0)]),
            ("MaxPool", [signal], {"kernel_shape": [3]}, [np.array([[[2, 2, 2, 0, lowest, -1, 5]]], "float32")]),
            ("ScatterElements", [data, axes(0, 1, 2, 3), updates], {"reduction": "max"}, [np.maximum(data, updates)]),
            ("ScatterElements", [data, axes(0, 1, 2, 3), updates], {"reduction": "min"}, [np.minimum(data, updates)]),
        ]
    )


def test_nothing():
    """Reductions of no elements give what ONNX Runtime gives."""
    x = np.zeros((2, 0), "float32")
    expected = {"ReduceMax": -INF, "ReduceMin": INF, "ReduceMean": 0, "ReduceProd": 1, "ReduceLogSumExp": -INF}
    check(
        [
            (op, [x, axes(1)], {"keepdims": 0}, [np.full(2, value, "float32")])
            for op, value in [*expected.items(), ("ReduceL2", 0), ("ReduceLogSum", -INF)]
        ]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", ["ArgMax", "ReduceMean"])
def test_nothing_where_only_a_call_knows(op):
    kind = TensorProto.INT64 if op == "ArgMax" else TensorProto.FLOAT
    attributes = {"axis": 1} if op == "ArgMax" else {"axes": [1]}
    node = helper.make_node(op, ["x"], ["y0"], **attributes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])]
    model = model_of([node], inputs, [kind], {})
    model.opset_import[0].version = 13
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    assert machine["main"](np.ones((0, 0), "float32")).numpy().shape == (0, 1)
    assert machine["main"](np.ones((2, 3), "float32")).numpy().shape == (2, 1)
    nothing = np.ones((2, 0), "float32")
    if op == "ReduceMean":
        assert machine["main"](nothing).numpy().tolist() == [[0], [0]]
    else:
        with pytest.raises(HeteroError, match="empty"):
            machine["main"](nothing)


def test_an_index_of_nothing_is_refused():
    node = helper.make_node("ArgMax", ["x"], ["y0"], axis=1)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 0])]
    with pytest.raises(HeteroError, match="ArgMax.*empty"):
        rh.from_onnx(model_of([node], inputs, [TensorProto.INT64], {}))
