"""Which nodes of the model's graph each kernel computes, after all passes."""

import numpy as np
import onnx.parser
import tvm
from tvm import relax

import relax_hetero as rh
from relax_hetero.transform.ir.remarks import remarks_of
from relax_hetero.transform.pipeline import pipeline_steps


def kernels_of(mod):
    """Ops of each kernel by what it computed, and the names of the graph's nodes in it."""
    for step in pipeline_steps():
        mod = step.run(mod)
        if step.name == "FormDispatches":
            break
    remarks = remarks_of(mod)
    texts = remarks.graph.texts
    nodes = {function.name: function.nodes for function in remarks.graph.functions}
    return [
        (entry.ops, [texts[nodes[entry.function][node].name] for node in entry.nodes])
        for entry in remarks.fusions.dispatches
    ]


def from_text(text):
    return rh.from_onnx(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> ' + text))


def test_equal_kernels_compute_each_its_own_ops():
    mod = from_text("""
        repeated (float[4, 8] x, float[8, 8] w) => (float[4, 8] y) {
            [first] a = MatMul(x, w)
            [first_relu] b = Relu(a)
            [second] c = MatMul(b, w)
            [second_relu] y = Relu(c)
        }""")
    products = [names for ops, names in kernels_of(mod) if "matmul" in ops]
    assert products == [["first", "first_relu"], ["second", "second_relu"]]


def test_kernels_that_tvm_fused_have_their_ops():
    mod = from_text("""
        fused (float[4, 8] x) => (float[4, 8] y, float[4, 8] z) {
            [exp] a = Exp(x)
            [neg] b = Neg(a)
            [tanh] y = Tanh(b)
            [sin] c = Sin(x)
            [cos] z = Cos(c)
        }""")
    assert sorted(names for _, names in kernels_of(mod)) == [["exp", "neg", "tanh"], ["sin", "cos"]]


def test_work_around_an_op_is_the_ops_own():
    mod = from_text("""
        gather (float[8, 4] table, int64[3] index) => (float[3, 4] y) {
            [rows] y = Gather(table, index)
        }""")
    *_, last = kernels_of(mod)
    assert last == (("from_front", "take"), ["rows"])


def test_products_that_were_merged_are_all_in_one_kernel():
    generator = np.random.default_rng(0)
    text = """
        attention (float[1, 32, 64] x, float[64, 64] wq, float[64, 64] wk, float[64, 64] wv) => (float[1, 32, 64] y)
        <int64[4] split = {1, 32, 2, 32}, int64[3] merge = {1, 32, 64}, float scale = {0.17}> {
            [q] q = MatMul(x, wq)
            [k] k = MatMul(x, wk)
            [v] v = MatMul(x, wv)
            [q_split] q1 = Reshape(q, split)
            [k_split] k1 = Reshape(k, split)
            [v_split] v1 = Reshape(v, split)
            [q_turned] q2 = Transpose<perm = [0, 2, 1, 3]>(q1)
            [k_turned] k2 = Transpose<perm = [0, 2, 3, 1]>(k1)
            [v_turned] v2 = Transpose<perm = [0, 2, 1, 3]>(v1)
            [scores] s = MatMul(q2, k2)
            [scaled] t = Mul(s, scale)
            [softmax] p = Softmax(t)
            [mixed] m = MatMul(p, v2)
            [turned_back] n = Transpose<perm = [0, 2, 1, 3]>(m)
            [merged] y = Reshape(n, merge)
        }"""
    weights = {name: generator.standard_normal((64, 64), "float32") for name in ("wq", "wk", "wv")}
    mod = from_text(text)
    mod = relax.transform.BindParams("main", {k: tvm.runtime.tensor(v) for k, v in weights.items()})(mod)
    merged, attention = [names for _, names in kernels_of(mod)]
    assert merged == ["q", "k", "v"]
    assert {"scores", "scaled", "softmax", "mixed", "merged", "v_turned"} <= set(attention)
    assert not {"q", "k", "v"} & set(attention)


def test_folded_nodes_lack_a_kernel():
    x, w = (relax.Var(name, relax.TensorType((8, 8), "float32")) for name in "xw")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            turned = builder.emit(relax.op.permute_dims(w), name_hint="turned")
            result = builder.emit_output(relax.op.matmul(x, turned), name_hint="y")
        builder.emit_func_output(result)
    mod = relax.transform.BindParams("main", {"w": tvm.runtime.tensor(np.ones((8, 8), "float32"))})(builder.get())
    mod.update_global_info("vdevice", [relax.VDevice("llvm")])
    assert [names for ops, names in kernels_of(mod) if "matmul" in ops] == [["y"]]


def test_names_as_passes_give_them_stay_those_of_the_model():
    x = relax.Var("x", relax.TensorType((8, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            values = [x]
            for _ in range(3):
                values.append(builder.emit(relax.op.permute_dims(values[-1])))
                values.append(builder.emit(relax.op.nn.softmax(values[-1])))
            result = builder.emit_output(values[-1])  # another name for the last
        builder.emit_func_output(result)
    mod = builder.get()
    mod.update_global_info("vdevice", [relax.VDevice("llvm")])
    softmaxes = [found for ops, found in kernels_of(mod) if "softmax" in ops]
    assert [found[-1] for found in softmaxes] == ["lv1", "lv3", "lv5"]
