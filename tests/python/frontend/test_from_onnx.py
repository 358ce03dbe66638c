"""Modules imported from ONNX graphs: names, structure, constants, functions, branches."""

import warnings

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper, parser
from tvm import relax

import relax_hetero as rh


def imported(text, **options):
    mod = rh.from_onnx(parser.parse_model(text), **options)
    relax.analysis.well_formed(mod)
    return mod


def bindings(mod):
    """Names and op names of all bindings of main, branches included."""
    pairs = []

    def visit(expr):
        for block in expr.blocks:
            for binding in block.bindings:
                value = binding.value
                pairs.append((binding.var.name, value.op.name if isinstance(value, relax.Call) else None))
                if isinstance(value, relax.If):
                    visit(value.true_branch)
                    visit(value.false_branch)

    visit(mod["main"].body)
    return pairs


def test_bindings_carry_the_names_of_their_nodes():
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[2, 3] x) => (float[2, 3] y) { a = Relu(x) b = Neg(a) y = Softplus(b) }""")
    model.graph.node[0].name = "/encoder/layer.0/Relu"
    model.graph.node[2].name = "/encoder/layer.0/Softplus"
    names = [name for name, _ in bindings(rh.from_onnx(model))]
    assert names[:2] == ["/encoder/layer.0/Relu", "Neg_1"]
    assert names[-1] == "/encoder/layer.0/Softplus"
    # Further bindings of a node have its name and a number.
    assert all(name.startswith("/encoder/layer.0/Softplus_") for name in names[2:-1])
    assert len(set(names)) == len(names)


def test_text_of_the_module_parses_again():
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["in.put/0:1"], ["t"], name="a/b"),
            helper.make_node("Neg", ["t"], ["y"], name="a.b"),
        ],
        "g",
        [helper.make_tensor_value_info("in.put/0:1", TensorProto.FLOAT, [2, "seq-len"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, "seq-len"])],
    )
    mod = rh.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert [name for name, _ in bindings(mod)] == ["a/b", "a.b"]
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)


def test_names_that_text_cannot_have_get_an_underscore():
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["0"], ["1"], name="1"),
            helper.make_node("Neg", ["1"], ["2"], name="if"),
            helper.make_node("Abs", ["2"], ["3"], name="main"),
        ],
        "g",
        [helper.make_tensor_value_info("0", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("3", TensorProto.FLOAT, [2])],
    )
    mod = rh.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert [name for name, _ in bindings(mod)] == ["_1", "_if", "_main"]
    assert list(mod["main"].attrs["input_names"]) == ["0"]
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)


def test_nodes_of_one_name_and_names_of_inputs_stay_distinct():
    mod = imported("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[2] x, float[2] Relu_1) => (float[2] y) {
            [n] a = Relu(x)
            b = Relu(a)
            [n] c = Add(b, Relu_1)
            [x] y = Neg(c)
        }""")
    assert [name for name, _ in bindings(mod)] == ["n", "Relu_1_1", "n_1", "x_1"]


def test_onnx_names_are_attributes_of_main():
    graph = helper.make_graph(
        [helper.make_node("Relu", ["in.put/0:1"], ["out:0"], name="1")],
        "g",
        [
            helper.make_tensor_value_info("in.put/0:1", TensorProto.FLOAT, [2]),
            helper.make_tensor_value_info("unused", TensorProto.INT64, ["n"]),
        ],
        [helper.make_tensor_value_info("out:0", TensorProto.FLOAT, [2])],
    )
    main = rh.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))["main"]
    assert list(main.attrs["input_names"]) == ["in.put/0:1", "unused"]
    assert list(main.attrs["output_names"]) == ["out:0"]
    assert int(main.attrs["num_input"]) == 2
    assert [str(param.ty.dtype) for param in main.params] == ["float32", "int64"]


def test_outputs_may_be_inputs_weights_and_repeated():
    mod = imported("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] y, float[2] x, float[2] w, float[2] y) <float[2] w = {1, 2}> {
            y = Add(x, w)
            unread = Neg(y)
        }""")
    fields = mod["main"].body.body.fields
    assert fields[0].same_as(fields[3])
    assert fields[1].same_as(mod["main"].params[0])
    np.testing.assert_array_equal(fields[2].value.numpy(), [1, 2])


def test_initializers_listed_as_inputs_are_parameters_with_defaults():
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("w", "x")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.ones(2, "float32"), "w")],
    )
    mod = rh.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert [param.name for param in mod["main"].params] == ["x", "w"]
    assert int(mod["main"].attrs["num_input"]) == 1


def test_weights_made_by_nodes_become_constants():
    mod = imported("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[4, 300] x) => (float[4, 500] y) <int64[2] shape = {500, 300}> {
            raw = ConstantOfShape<value = float[1] {0.5}>(shape)
            w = Transpose<perm = [1, 0]>(raw)
            [product] y = MatMul(x, w)
        }""")
    assert bindings(mod) == [("product", "relax.matmul")]
    weight = mod["main"].body.blocks[0].bindings[0].value.args[1]
    assert weight.value.shape == (300, 500)


def test_sparse_weights_become_dense():
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [3.0, 4.0])
    for indices in (
        helper.make_tensor("i", TensorProto.INT64, [2], [1, 5]),
        helper.make_tensor("i", TensorProto.INT64, [2, 2], [0, 1, 1, 2]),
    ):
        graph = helper.make_graph(
            [helper.make_node("Add", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
            sparse_initializer=[helper.make_sparse_tensor(values, indices, [2, 3])],
        )
        mod = rh.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
        weight = mod["main"].body.blocks[0].bindings[0].value.args[1]
        np.testing.assert_array_equal(weight.value.numpy(), [[0, 3, 0], [0, 0, 4]])


IF = """
    <ir_version: 9, opset_import: ["" : 17]>
    g (float[N] x, bool c) => (float[N] y) {
        [outer] h = Relu(x)
        [choice] y = If(c) <
            then_branch = t () => (float[N] p) { [inner] q = Neg(h) p = Add(q, x) },
            else_branch = e () => (float[N] r) { r = Identity(h) }
        >
        [after] unread = Abs(y)
    }"""


def test_branches_hold_their_own_nodes():
    mod = imported(IF)
    assert bindings(mod) == [
        ("outer", "relax.nn.relu"),
        ("choice", None),
        ("inner", "relax.negative"),
        ("choice/then_branch/Add_1", "relax.add"),
        ("after", "relax.abs"),
    ]
    branch = mod["main"].body.blocks[1].bindings[0].value.true_branch
    assert [binding.var.name for binding in branch.blocks[0].bindings] == ["inner", "choice/then_branch/Add_1"]


def test_an_if_on_a_known_condition_is_its_branch():
    text = IF.replace("bool c)", "float[1] unused)").replace("[outer]", "c = Constant<value = bool {0}>()\n[outer]")
    assert bindings(imported(text)) == [("outer", "relax.nn.relu"), ("after", "relax.abs")]


def test_a_condition_of_one_element_becomes_a_scalar():
    mod = imported(IF.replace("bool c", "bool[1] c"))
    value = mod["main"].body.blocks[-2].bindings[0].value
    assert value.cond.ty.ndim == 0


def test_a_sequence_is_one_output():
    mod = imported("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x, bool c) => (seq(float[2]) y) {
            y = If(c) <then_branch = t () => (seq(float[2]) p) { a = Neg(x) p = SequenceConstruct(a, x) },
                       else_branch = e () => (seq(float[2]) q) { q = SequenceConstruct(x, x) }>
        }""")
    (sequence,) = mod["main"].ret_ty.fields
    assert [list(map(int, field.shape)) for field in sequence.fields] == [[2], [2]]


FUNCTION = """
    <ir_version: 9, opset_import: ["" : 17, "my": 1]>
    g (float[2] x) => (float[2] y) {
        a = my.Scaled<k = 2.0>(x)
        [second] y = my.Scaled(a)
    }
    <opset_import: ["" : 17], domain: "my">
    Scaled <k: float = 3.0> (v) => (w) {
        factor = Constant<value_float: float = @k>()
        [act] t = Relu(v)
        w = Mul(t, factor)
    }"""


def test_functions_of_the_model_are_expanded_under_the_name_of_their_call():
    mod = imported(FUNCTION)
    assert [name for name, _ in bindings(mod)] == [
        "Scaled_0/act",
        "Scaled_0/Mul_2",
        "second/act",
        "second/Mul_2",
    ]
    factors = [float(b.value.args[1].value.numpy()) for b in mod["main"].body.blocks[0].bindings[1::2]]
    assert factors == [2.0, 3.0]


def test_everything_but_an_if_is_dataflow():
    blocks = imported(IF)["main"].body.blocks
    assert [isinstance(block, relax.DataflowBlock) for block in blocks] == [True, False, True]


def test_models_come_as_path_bytes_and_proto(tmp_path):
    model = parser.parse_model(FUNCTION)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    expected = rh.from_onnx(model)
    for source in (path, str(path), path.read_bytes()):
        tvm.ir.assert_structural_equal(rh.from_onnx(source), expected)


def test_the_users_model_is_not_changed():
    model = parser.parse_model(FUNCTION)
    before = model.SerializeToString(deterministic=True)
    rh.from_onnx(model)
    assert model.SerializeToString(deterministic=True) == before


def test_external_data_lies_beside_the_file(tmp_path, monkeypatch):
    weight = np.arange(600, dtype="float32").reshape(2, 300)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 300])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 300])],
        [numpy_helper.from_array(weight, "w")],
    )
    folder = tmp_path / "deep"
    folder.mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    monkeypatch.chdir(tmp_path)
    mod = rh.from_onnx("deep/model.onnx")
    np.testing.assert_array_equal(mod["main"].body.blocks[0].bindings[0].value.args[1].value.numpy(), weight)


def test_nothing_is_printed_or_warned(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        imported("""
            <ir_version: 9, opset_import: ["" : 11]>
            g (float[N, M] x) => (float[N, M] y) { t = Softmax(x) y = Neg(t) }""")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("opset", range(13, 23))
def test_opsets(opset):
    text = """
        <ir_version: 8, opset_import: ["" : OPSET]>
        g (float[2, 6] x) => (float[3, 4] y) <int64[2] shape = {3, 4}, int64[1] axes = {1}> {
            a = ReduceSum<keepdims = 1>(x, axes)
            b = Sub(x, a)
            c = Softmax<axis = -1>(b)
            y = Reshape(c, shape)
        }""".replace("OPSET", str(opset))
    assert [op for _, op in bindings(imported(text))][-1] == "relax.reshape"
