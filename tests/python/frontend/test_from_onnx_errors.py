"""Errors for models that cannot be imported."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import relax_hetero as rh


def refused(model, *words, **options):
    with pytest.raises(rh.FrontendError) as caught:
        rh.from_onnx(model, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def simple(nodes, inputs=(("x", [2, 3]),), opset=17, **options):
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", infos, outputs, **options)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def test_missing_file(tmp_path):
    refused(tmp_path / "absent.onnx", "absent.onnx", "No such file")


def test_a_folder(tmp_path):
    refused(tmp_path, str(tmp_path))


@pytest.mark.parametrize("data", [b"", b"not a model at all", b"\x08\x07"])
def test_a_file_that_is_not_a_model(tmp_path, data):
    path = tmp_path / "broken.onnx"
    path.write_bytes(data)
    refused(path, "broken.onnx", "not an ONNX model")
    refused(data, "the model's bytes", "not an ONNX model")


def test_a_truncated_file(tmp_path):
    path = tmp_path / "half.onnx"
    data = simple([helper.make_node("Relu", ["x"], ["y"])]).SerializeToString()
    path.write_bytes(data[: len(data) // 2])
    refused(path, "half.onnx")


def test_something_else():
    refused(42, "int")


def test_no_opset_import():
    model = simple([helper.make_node("Relu", ["x"], ["y"])])
    del model.opset_import[:]
    refused(model, "imports no operator set")


def test_missing_external_data(tmp_path):
    path = tmp_path / "model.onnx"
    model = simple([helper.make_node("Add", ["x", "w"], ["y"])],
                   initializer=[numpy_helper.from_array(np.ones((2, 3), "float32"), "w")])  # fmt: skip
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    refused(path.read_bytes(), "'w'", "weights.bin", "give the model's path")
    (tmp_path / "weights.bin").write_bytes(b"1234")
    refused(path, "model.onnx", "'w'")
    (tmp_path / "weights.bin").unlink()
    refused(path, "weights.bin", "'w'", "missing")


def test_all_unsupported_ops_are_listed():
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17, "acme": 3]>
        g (float[2] x, bool c) => (float[2] y) {
            [first] a = acme.Frobnicate(x)
            [choice] b = If(c) <then_branch = t () => (float[2] p) { p = acme.Relu(x) },
                                else_branch = e () => (float[2] q) { q = Relu(x) }>
            y = StringNormalizer(b)
        }""")
    refused(
        model,
        "'first': Frobnicate of domain 'acme', opset 3",
        "'choice/then_branch/Relu_0': Relu of domain 'acme', opset 3",
        "'StringNormalizer_2': StringNormalizer of domain 'ai.onnx', opset 17",
    )


def test_a_node_that_cannot_be_converted_is_named():
    model = simple([helper.make_node("MatMul", ["x", "x"], ["y"], name="/layer/product")])
    error = refused(model, "/layer/product", "MatMul")
    assert error.__cause__ is not None


def test_a_node_in_a_function_is_named():
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17, "my": 1]>
        g (float[2, 3] x) => (float[2, 2] y) { [call] y = my.Square(x) }
        <opset_import: ["" : 17], domain: "my">
        Square (v) => (w) { [product] w = MatMul(v, v) }""")
    refused(model, "call/product", "MatMul")


def test_a_function_that_calls_itself():
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17, "my": 1]>
        g (float[2, 3] x) => (float[2, 3] y) { [call] y = my.Again(x) }
        <opset_import: ["" : 17, "my": 1], domain: "my">
        Again (v) => (w) { w = my.Again(v) }""")
    refused(model)


def test_an_opset_of_the_future():
    newest = onnx.defs.onnx_opset_version()
    model = simple([helper.make_node("Relu", ["x"], ["y"])])
    model.opset_import[0].version = newest + 1
    refused(model, f"is of opset {newest + 1}; the installed onnx knows those up to {newest}")


def test_weights_of_negative_size():
    model = simple(
        [helper.make_node("Relu", ["x"], ["y"])],
        initializer=[helper.make_tensor("w", TensorProto.FLOAT, [2], [1, 2])],
    )
    model.graph.initializer[0].dims[0] = -2
    refused(model, "initializer 'w'", "sizes >= 0")


def test_messages_name_ops_without_their_fields():
    model = simple([helper.make_node("Softmax", ["x"], ["y"], axis=7)])
    error = refused(model, "relax.nn.softmax")
    assert "ir.Op(" not in str(error)


def test_options_that_do_not_fit_together():
    model = simple([helper.make_node("Relu", ["x"], ["y"])])
    refused(model, "vdevices", placement={"*": "llvm"})
    refused(model, "'automatic'", "'auto'", placement="automatic", vdevices=["llvm"])
    refused(model, "cost_model", cost_model=rh.frontend.CostModel([]), vdevices=["llvm"])
    refused(model, "objective is 'throughput', which only placement='auto' reads", objective="throughput")


def test_weights_of_types_without_tensors():
    numbers = helper.make_tensor("w", TensorProto.COMPLEX64, [2], [1j, 2j])
    model = simple([helper.make_node("Relu", ["x"], ["y"])], initializer=[numbers])
    refused(model, "which TVM has no tensors of")


def test_a_wrong_concat_names_its_inputs_shapes():
    for second, sizes in (([3, 4], {"dims": [2, 3]}), (["k", "l"], {"dims": ["n", "m"]})):
        node = helper.make_node("Concat", ["x", "z"], ["y"], "join", axis=0)
        infos = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in (("x", sizes["dims"]), ("z", second))
        ]
        graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
        with pytest.raises(rh.HeteroError, match="Concat node 'join': its inputs have the shapes .*, expected shapes"):
            mod = rh.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
            rh.vm.VirtualMachine(rh.compile(mod))["main"](np.ones((2, 3), "float32"), np.ones((3, 4), "float32"))
