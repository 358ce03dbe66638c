"""Imported models compute what ONNX Runtime computes, on one device and cut over two."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from relax_hetero.frontend.onnx.node_names import name_nodes, walk_nodes


def transformer(seq, heads=2, width=16, layers=2):
    """A small random encoder with a symbolic batch, as exporters write one: shapes read from the input."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []

    def weight(array, name):
        weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(kind, inputs, name, **attributes):
        nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def linear(x, out, name):
        matrix = rng.standard_normal((width if "down" not in name else 2 * width, out)).astype("float32") * 0.1
        product = op("MatMul", [x, weight(matrix, f"{name}.weight")], f"{name}/MatMul")
        return op("Add", [product, weight(rng.standard_normal(out).astype("float32"), f"{name}.bias")], f"{name}/Add")

    def norm(x, name):
        scale = weight(rng.uniform(0.5, 1.5, width).astype("float32"), f"{name}.scale")
        bias = weight(rng.standard_normal(width).astype("float32"), f"{name}.bias")
        return op("LayerNormalization", [x, scale, bias], name, axis=-1, epsilon=1e-5)

    table = weight(rng.standard_normal((50, width)).astype("float32"), "embedding")
    x = norm(op("Gather", [table, "ids"], "/embed/Gather"), "/embed/norm")
    shape = op("Shape", ["ids"], "/Shape")
    batch = op("Gather", [shape, weight(np.array([0], "int64"), "zero")], "/batch")
    split = op("Concat", [batch, weight(np.array([seq, heads, width // heads], "int64"), "tail")], "/split", axis=0)
    merge = op("Concat", [batch, weight(np.array([seq, width], "int64"), "tail2")], "/merge", axis=0)
    scale = weight(np.float32((width // heads) ** -0.5), "scale")
    for layer in range(layers):
        p = f"/layer.{layer}"
        q, k, v = (
            op("Transpose", [op("Reshape", [linear(x, width, f"{p}/{n}"), split], f"{p}/{n}/Reshape")],
               f"{p}/{n}/Transpose", perm=[0, 2, 3, 1] if n == "k" else [0, 2, 1, 3])
            for n in "qkv"
        )  # fmt: skip
        scores = op("Mul", [op("MatMul", [q, k], f"{p}/scores"), scale], f"{p}/scaled")
        mixed = op("MatMul", [op("Softmax", [scores], f"{p}/Softmax", axis=-1), v], f"{p}/mixed")
        merged = op("Reshape", [op("Transpose", [mixed], f"{p}/back", perm=[0, 2, 1, 3]), merge], f"{p}/merged")
        x = norm(op("Add", [linear(merged, width, f"{p}/out"), x], f"{p}/residual"), f"{p}/norm")
        hidden = linear(x, 2 * width, f"{p}/up")
        gelu = op("Mul", [hidden, op("Sigmoid", [hidden], f"{p}/Sigmoid")], f"{p}/act")
        x = norm(op("Add", [linear(gelu, width, f"{p}/down"), x], f"{p}/residual2"), f"{p}/norm2")
    nodes.append(helper.make_node("ReduceMean", [x], ["pooled"], name="/pool", axes=[1], keepdims=0))
    graph = helper.make_graph(
        nodes, "encoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", seq])],
        [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["batch", width])],
        weights,
    )  # fmt: skip
    return with_opset(graph, 17)


def with_opset(graph, opset):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    return model


def convolutions():
    return parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 3, 16, 16] image) => (float[1, 5] scores, float[1, 4, 8, 8] features)
        <int64[4] ks = {4, 3, 3, 3}, int64[2] ws = {5, 4}, float[4] bias = {0.1, -0.2, 0.3, 0.5}> {
            kernel = ConstantOfShape<value = float[1] {0.125}>(ks)
            weight = ConstantOfShape<value = float[1] {0.5}>(ws)
            c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(image, kernel, bias)
            features = Relu(c)
            pooled = GlobalAveragePool(features)
            flat = Flatten(pooled)
            logits = Gemm<transB = 1>(flat, weight)
            scores = Softmax(logits)
        }""")


def branches():
    return parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4] x, bool c) => (float[N, 4] y, float[N, 4] z) {
            h = Relu(x)
            y, z = If(c) <
                then_branch = t () => (float[N, 4] p, float[N, 4] q) { r = Neg(h) p = Add(r, x) q = Identity(h) },
                else_branch = e () => (float[N, 4] s, float[N, 4] u) { s = Exp(h) u = Mul(s, x) }>
        }""")


def several():
    return parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "my": 1]>
        g (float[2, 6] x, float[3] unused) => (float[2, 3] a, float[2, 3] b, float[2, 6] x, int64[2] s) {
            a, m = Split<axis = 1>(x)
            b = my.Scaled<k = 2.0>(m)
            s = Shape(x)
        }
        <opset_import: ["" : 17], domain: "my">
        Scaled <k: float = 3.0> (v) => (w) { f = Constant<value_float: float = @k>() t = Tanh(v) w = Mul(t, f) }""")


def shape_arithmetic():
    return parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, M] x) => (float[K] y, int64[2] s, int64 n)
        <int64 first = {0}, int64[1] minus = {-1}, int64[1] axes = {0}> {
            s = Shape(x)
            n = Gather(s, first)
            v = Unsqueeze(n, axes)
            t = Concat<axis = 0>(v, minus)
            r = Reshape(x, t)
            u = Exp(r)
            y = Reshape(u, minus)
        }""")


def feeds_of(model, symbols):
    rng = np.random.default_rng(1)
    feeds = {}
    for info in model.graph.input:
        shape = [dim.dim_value or symbols[dim.dim_param] for dim in info.type.tensor_type.shape.dim]
        elem_type = info.type.tensor_type.elem_type
        if elem_type == TensorProto.INT64:
            feeds[info.name] = rng.integers(0, 50, shape)
        elif elem_type == TensorProto.BOOL:
            feeds[info.name] = np.asarray(rng.standard_normal(shape) > 0)
        else:
            feeds[info.name] = rng.standard_normal(shape).astype("float32")
    return feeds


MODELS = {
    "transformer": (lambda: transformer(5), [{"batch": 1}, {"batch": 3}]),
    "convolutions": (convolutions, [{}]),
    "branches": (branches, [{"N": 2}]),
    "several": (several, [{}]),
    "shape_arithmetic": (shape_arithmetic, [{"N": 3, "M": 4}, {"N": 1, "M": 2}]),
}


def alternating(model):
    """Every second node on the second device."""
    names = [node.name for node in walk_nodes(name_nodes(model))]
    return {name: "vdevice:1" for name in names[1::2]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("two_devices", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_onnx_runtimes(name, two_devices):
    build, sizes = MODELS[name]
    model = build()
    where = {"vdevices": TWO_DEVICES, "placement": alternating(model)} if two_devices else {}
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, **where)))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for symbols in sizes:
        feeds = feeds_of(model, symbols)
        for condition in (True, False) if "c" in feeds else (None,):
            if condition is not None:
                feeds["c"] = np.array(condition)
            expected = session.run(None, feeds)
            actual = vm["main"](**feeds)
            actual = actual if isinstance(actual, tuple) else (actual,)
            assert len(actual) == len(expected)
            for ours, theirs in zip(actual, expected, strict=True):
                np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5)
                assert ours.numpy().dtype == theirs.dtype


@pytest.fixture(scope="module")
def branches():
    """A model whose branches need different sizes, and its function."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (bool c, float[n] x, float[k] w) => (float[q] y) {
            y = If(c) <then_branch = t () => (float[q] p) { a = Add(x, w) p = Exp(a) },
                       else_branch = e () => (float[q] r) { r = Mul(x, x) }>
        }""")
    return model, rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]


@pytest.mark.parametrize(("flag", "sizes"), [(True, (3, 3)), (True, (3, 1)), (False, (3, 2)), (True, (3, 2))])
def test_sizes_are_checked_in_the_branch_that_needs_them(branches, flag, sizes):
    model, main = branches
    feeds = {"c": np.array(flag), "x": np.ones(sizes[0], "float32"), "w": np.ones(sizes[1], "float32")}
    if flag and sizes[1] == 2:
        with pytest.raises(rh.HeteroError, match="Add_0"):
            main(**feeds)
        return
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_allclose(main(**feeds).numpy(), want, rtol=1e-6)
