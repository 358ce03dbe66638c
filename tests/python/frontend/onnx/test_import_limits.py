"""Small models that ask for more nodes, constants or dimensions than any machine has are refused before the work."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh

node = helper.make_node


def ints(values, name):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def floats(values, name):
    return numpy_helper.from_array(np.array(values, np.float32), name)


def model(nodes, *weights, x=(2, 3), functions=(), sparse=(), opset=18):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights), sparse_initializer=list(sparse))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)


def function(name, nodes):
    return helper.make_function(
        "my", name, ["a"], ["c"], nodes, [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    )


def refused(proto, *words, limits=None):
    with pytest.raises(rh.FrontendError) as caught:
        rh.from_onnx(proto, limits=limits)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def doubling_functions(levels):
    functions = [function(f"f{levels}", [node("Relu", ["a"], ["c"])])]
    for level in range(levels):
        called = f"f{level + 1}"
        body = [node(called, ["a"], ["b"], domain="my"), node(called, ["b"], ["c"], domain="my")]
        functions.append(function(f"f{level}", body))
    return model([node("f0", ["x"], ["y"], domain="my")], functions=functions)


def test_functions_that_fan_out():
    refused(doubling_functions(40), "becomes 3,298,534,883,327 nodes, expected at most 200,000", "ImportLimits(nodes=")
    small = doubling_functions(3)
    refused(small, "becomes 23 nodes, expected at most 22", limits=rh.ImportLimits(nodes=22))
    rh.from_onnx(small, limits=rh.ImportLimits(nodes=23))


def test_functions_that_call_each_other():
    chain = [function(f"f{i}", [node(f"f{i + 1}", ["a"], ["c"], domain="my")]) for i in range(100)]
    chain.append(function("f100", [node("Relu", ["a"], ["c"])]))
    refused(model([node("f0", ["x"], ["y"], domain="my")], functions=chain), "more than 64 deep")


def test_graphs_nested_in_memory():
    proto = model([node("Relu", ["x"], ["y"])])
    graph = proto.graph
    for _ in range(2000):
        branch = graph.node.add(op_type="If", output=["o"]).attribute.add(name="then_branch", type=5)
        graph = branch.g
    refused(proto, "more than 64 deep")


def test_one_name_for_many_nodes():
    nodes = [node("Relu", ["x" if i == 0 else f"v{i - 1}"], [f"v{i}"], name="same") for i in range(3000)]
    refused(model([*nodes, node("StringNormalizer", ["v2999"], ["y"])]), "StringNormalizer")


def test_a_constant_of_a_node_without_a_name_is_named_by_its_result():
    fill = node("ConstantOfShape", ["s"], ["filled"])
    refused(model([fill, node("Identity", ["filled"], ["y"])], ints([1 << 32, 1 << 32], "s")), "node 'filled'")


HUGE = {
    "fill": model([node("ConstantOfShape", ["s"], ["y"])], ints([1 << 32, 1 << 32], "s")),
    "fills": model(
        [*(node("ConstantOfShape", ["s"], [c]) for c in "abcdefgh"), node("Sum", list("abcdefgh"), ["y"])],
        ints([1 << 28], "s"),
    ),
    "expand": model([node("Expand", ["w", "s"], ["y"])], floats([1], "w"), ints([1 << 20, 1 << 20], "s")),
    "tile": model([node("Tile", ["w", "s"], ["y"])], floats([1] * 70000, "w"), ints([1 << 40], "s")),
    "range": model([node("Range", ["a", "b", "c"], ["y"])], ints(0, "a"), ints(1 << 40, "b"), ints(1, "c")),
    "broadcast": model(
        [node("BitwiseXor", ["a", "b"], ["y"])], ints(np.ones((1 << 16, 1)), "a"), ints(np.ones((1, 1 << 16)), "b")
    ),
    "product": model(
        [node("MatMul", ["a", "b"], ["y"])], floats(np.ones((1 << 16, 1)), "a"), floats(np.ones((1, 1 << 16)), "b")
    ),
    "one-hot": model([node("OneHot", ["i", "d", "v"], ["y"])], ints([1], "i"), ints(1 << 40, "d"), floats([0, 1], "v")),
    "eye": model([node("EyeLike", ["x"], ["y"])], x=(1 << 20, 1 << 20)),
    "pad": model([node("Pad", ["w", "p"], ["y"], mode="edge")], floats([1], "w"), ints([1 << 40, 1 << 40], "p")),
    "resize": model([node("Resize", ["x", "", "s"], ["y"])], floats([1, 1, 1e9, 1e9], "s"), x=(1, 1, 4, 4)),
    "blur": model(
        [node("Resize", ["x", "", "s"], ["y"], antialias=1, mode="linear")],
        floats([1, 1, 1, 1e-9], "s"),
        x=(1, 1, 4, 1 << 31),
    ),
    "dropout": model(
        [node("Dropout", ["x", "r", "t"], ["y"], seed=1)],
        floats(0.5, "r"),
        numpy_helper.from_array(np.array(True), "t"),
        x=(1 << 20, 1 << 20),
    ),
    "sparse": model(
        [node("Relu", ["w"], ["y"])], sparse=[helper.make_sparse_tensor(floats([1], "w"), ints([0], "i"), [1 << 33])]
    ),
    "window": model([node("HannWindow", ["n"], ["y"])], ints(1 << 40, "n")),
    "concat": model(
        [node("Concat", [f"c{i}", f"c{i}"], [f"c{i + 1}"], axis=0) for i in range(40)] + [node("Relu", ["c40"], ["y"])],
        floats([1] * 9, "c0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_constants_that_fill_the_memory(name):
    refused(HUGE[name].SerializeToString(), "computes a constant of", "rh.ImportLimits(computed_bytes=")


def test_the_limit_of_constants_is_raised():
    proto = model([node("ConstantOfShape", ["s"], ["c"]), node("Add", ["x", "c"], ["y"])], ints([2, 3], "s"))
    spare = 8 * proto.ByteSize()
    large = model([node("ConstantOfShape", ["s"], ["c"]), node("Add", ["x", "c"], ["y"])], ints([spare, 2, 3], "s"))
    rh.from_onnx(proto, limits=rh.ImportLimits(computed_bytes=0))  # within what every model may take
    refused(large, "computes a constant", limits=rh.ImportLimits(computed_bytes=0))
    rh.from_onnx(large, limits=rh.ImportLimits(computed_bytes=1 << 20))


@pytest.mark.parametrize("wrong", [{"nodes": -1}, {"nodes": 1.5}, {"computed_bytes": "1G"}, {"nodes": True}])
def test_limits_that_are_not_numbers(wrong):
    with pytest.raises(rh.FrontendError, match="expected a whole number"):
        rh.ImportLimits(**wrong)
    with pytest.raises(rh.FrontendError, match="expected an ImportLimits"):
        rh.from_onnx(model([node("Relu", ["x"], ["y"])]), limits=wrong)


def test_more_dimensions_than_a_tensor_can_have():
    many = ints([1] * 1000, "s")
    for op_type in ("Reshape", "Tile", "Expand", "Unsqueeze"):
        refused(model([node(op_type, ["x", "s"], ["y"])], many), op_type, "1,000 entries")
    refused(model([node("Relu", ["x"], ["y"])], x=[1] * 1000), "1,000 dimensions, expected at most 64")
    weight = TensorProto(name="w", data_type=1, dims=[1] * 1000, raw_data=b"\0" * 4)
    refused(model([node("Relu", ["w"], ["y"])], weight), "1,000 dimensions, expected at most 64")
    refused(model([node("MaxPool", ["x"], ["y"], kernel_shape=[1] * 100_000)]), "a list of 100,000 entries")
    steps = [node("Unsqueeze", ["x" if i == 0 else f"v{i - 1}", "a"], [f"v{i}"]) for i in range(70)]
    refused(model([*steps, node("Relu", ["v69"], ["y"])], ints([0], "a")), "65 dimensions, expected at most 64")


@pytest.mark.parametrize(
    ("dims", "data", "words"),
    [
        ([1 << 31, 1 << 31], b"\0" * 24, "cannot be read"),
        ([1 << 32, 1 << 32], b"", "of more elements than 64 bits can count"),
        ([0, 1 << 62, 1 << 62], b"", "of more elements than 64 bits can count"),
        ([-2, -3], b"\0" * 24, "sizes >= 0"),
        ([2, 3], b"\0" * 23, "cannot be read"),
        ([2, 3], b"\0" * 28, "cannot be read"),
    ],
)
def test_weights_whose_data_does_not_fit(dims, data, words):
    weight = TensorProto(name="w", data_type=1, dims=dims, raw_data=data)
    refused(model([node("Relu", ["w"], ["y"])], weight), "'w'", words)


@pytest.mark.parametrize("indices", [[-1], [4], [[0, 0]], [[[0]]], [0, 1]])
def test_sparse_indices_that_do_not_fit(indices):
    sparse = helper.make_sparse_tensor(floats([1], "w"), ints(indices, "i"), [4])
    refused(model([node("Relu", ["w"], ["y"])], sparse=[sparse]), "sparse tensor 'w' has")


@pytest.mark.parametrize("text", ["+".join(["n"] * 1000), "(" * 2000 + "n" + ")" * 2000, "n" * 4096])
def test_long_names_of_dimensions_are_names(text):
    (x,) = rh.from_onnx(model([node("Relu", ["x"], ["y"])], x=[text]))["main"].params
    assert x.ty.ndim == 1


def test_malformed_names_of_dimensions():
    refused(model([node("Relu", ["x"], ["y"])], x=["n" * 5000]), "5,000 letters")
    refused(model([node("Relu", ["x"], ["y"])], x=[f"{2**62}*{2**62}"]), "no 64-bit size")


@pytest.mark.parametrize("field", ["node", "value", "dimension", "operator"])
def test_names_that_are_not_text(field):
    proto = model([node("Relu", ["x"], ["y"], name="nodename")], x=["dimension"])
    proto.graph.node.append(node("Oper_ator", ["valuename"], ["z"]))
    place = {"node": b"nodename", "value": b"valuename", "dimension": b"dimension", "operator": b"Oper_ator"}[field]
    data = proto.SerializeToString()
    refused(data.replace(place, b"\xff\xfe\xc3" + place[3:]), "which is not UTF-8 text")
    refused(data.replace(place, b"\0" + place[1:]), "which is not UTF-8 text")


def test_the_rest_of_a_model_is_checked_where_an_output_has_no_shape():
    refused(model([node("Relu", ["x"], ["y"], slope=1.0)]), "not a valid ONNX model", "slope")
    refused(model([node("Relu", ["x"], ["y"]), node("Neg", ["x"], ["y"])]), "not a valid ONNX model", "'y'")
