"""Reshapes on GPUs are views; results that would share memory, and kernels of CPUs, are left as they are."""

import numpy as np
import onnx.parser
import onnxruntime
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from modules import ir_module
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform.dispatch.reshaped_views import with_merged_reshapes, with_views
from relax_hetero.transform.ir.rewriting import relax_functions, walk_bindings

CUDA = {"kind": "cuda", "arch": "sm_90a"}


@ir_module(CUDA, "llvm")
class Before:
    @T.prim_func(private=True, s_tir=True)
    def flat(A: T.Buffer((4, 6), "float32"), B: T.Buffer((24,), "float32")):
        T.func_attr({"target": T.target(CUDA)})
        for i in range(24):
            with T.sblock("flat"):
                vi = T.axis.remap("S", [i])
                B[vi] = A[vi // 6, vi % 6]

    @T.prim_func(private=True, s_tir=True)
    def turned(A: T.Buffer((4, 6), "float32"), B: T.Buffer((24,), "float32")):
        T.func_attr({"target": T.target(CUDA)})
        for i in range(24):
            with T.sblock("turned"):
                vi = T.axis.remap("S", [i])
                B[vi] = A[vi % 4, vi // 4]

    @T.prim_func(private=True, s_tir=True)
    def twice(A: T.Buffer((4, 6), "float32"), B: T.Buffer((4, 6), "float32")):
        T.func_attr({"target": T.target(CUDA)})
        for i, j in T.grid(4, 6):
            with T.sblock("twice"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4, 6), "float32", "cuda:0")):
        cls = Before
        with R.dataflow():
            a = R.call_tir(cls.flat, (x,), out_ty=R.Tensor((24,), "float32", "cuda:0"))
            b = R.call_tir(cls.turned, (x,), out_ty=R.Tensor((24,), "float32", "cuda:0"))
            c = R.call_tir(cls.flat, (x,), out_ty=R.Tensor((24,), "float32", "cuda:0"))
            d = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((4, 6), "float32", "cuda:0"))
            e = R.call_tir(cls.flat, (d,), out_ty=R.Tensor((24,), "float32", "cuda:0"))
            f = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((4, 6), "float32", "cuda:0"))
            g = R.call_tir(cls.flat, (f,), out_ty=R.Tensor((24,), "float32", "cuda:0"))
            R.output(c, e, f, g)
        return (c, e, f, g)


@ir_module(CUDA, "llvm")
class Expected:
    @T.prim_func(private=True, s_tir=True)
    def flat(A: T.Buffer((4, 6), "float32"), B: T.Buffer((24,), "float32")):
        T.func_attr({"target": T.target(CUDA)})
        for i in range(24):
            with T.sblock("flat"):
                vi = T.axis.remap("S", [i])
                B[vi] = A[vi // 6, vi % 6]

    @T.prim_func(private=True, s_tir=True)
    def turned(A: T.Buffer((4, 6), "float32"), B: T.Buffer((24,), "float32")):
        T.func_attr({"target": T.target(CUDA)})
        for i in range(24):
            with T.sblock("turned"):
                vi = T.axis.remap("S", [i])
                B[vi] = A[vi % 4, vi // 4]

    @T.prim_func(private=True, s_tir=True)
    def twice(A: T.Buffer((4, 6), "float32"), B: T.Buffer((4, 6), "float32")):
        T.func_attr({"target": T.target(CUDA)})
        for i, j in T.grid(4, 6):
            with T.sblock("twice"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4, 6), "float32", "cuda:0")):
        cls = Expected
        with R.dataflow():
            a: R.Tensor((24,), "float32", "cuda:0") = R.reshape(x, (24,))
            b = R.call_tir(cls.turned, (x,), out_ty=R.Tensor((24,), "float32", "cuda:0"))
            c = R.call_tir(cls.flat, (x,), out_ty=R.Tensor((24,), "float32", "cuda:0"))
            d = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((4, 6), "float32", "cuda:0"))
            e: R.Tensor((24,), "float32", "cuda:0") = R.reshape(d, (24,))
            f = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((4, 6), "float32", "cuda:0"))
            g = R.call_tir(cls.flat, (f,), out_ty=R.Tensor((24,), "float32", "cuda:0"))
            R.output(c, e, f, g)
        return (c, e, f, g)


def test_a_kernel_that_reshapes_is_a_view_unless_two_tensors_would_leave_the_block_in_one_memory():
    assert_structural_equal(with_views(Before), Expected)
    assert_structural_equal(with_views(Expected), Expected)


def test_a_slice_is_not_a_view():
    """Its elements stand at the places that a reshape gives them, but it has fewer."""

    @ir_module(CUDA)
    def Slice(x: R.Tensor((4, 6), "float32", "cuda:0")):
        with R.dataflow():
            a: R.Tensor((1, 6), "float32", "cuda:0") = R.strided_slice(x, [0], [0], [1])
            y: R.Tensor((6,), "float32", "cuda:0") = R.nn.softmax(R.reshape(a, (6,)))
            z: R.Tensor((1, 6), "float32", "cuda:0") = R.nn.softmax(a)
            R.output(y, z)
        return (y, z)

    x = np.arange(24, dtype="float32").reshape(4, 6) / 7
    y, z = InterpretedModel(relax.transform.Normalize()(Slice))(x)
    powers = np.exp(x[0])
    np.testing.assert_allclose(y, powers / powers.sum(), rtol=1e-5)
    np.testing.assert_allclose(z[0], powers / powers.sum(), rtol=1e-5)


def _model(device: str):
    @ir_module(CUDA, "llvm")
    def Model(x: R.Tensor((4, 6), "float32", device)):
        with R.dataflow():
            negative: R.Tensor((4, 6), "float32", device) = R.negative(x)
            a: R.Tensor((24,), "float32", device) = R.reshape(negative, (24,))
            b: R.Tensor((24, 1), "float32", device) = R.expand_dims(a, [1])
            c: R.Tensor((2, 12), "float32", device) = R.reshape(b, (2, 12))
            d: R.Tensor((2, 12), "float32", device) = R.nn.softmax(c)
            e: R.Tensor((2, 12), "float32", device) = R.add(d, c)
            R.output(b, e)
        f: R.Tensor((3, 8), "float32", device) = R.reshape(b, (3, 8))
        g: R.Tensor((8, 3), "float32", device) = R.reshape(f, (8, 3))
        return (e, g)

    return Model


def test_a_reshape_of_a_reshape_reads_the_source_within_its_block():
    values = {
        b.var.name: b.value
        for _, f in relax_functions(with_merged_reshapes(_model("cuda:0")))
        for b in walk_bindings(f)
    }
    assert values["b"].args[0].name == "negative"
    assert values["f"].args[0].name == "b", "the variable that this one shows exists in the block alone"
    assert values["g"].args[0].name == "b"


def test_on_cpus_nothing_changes():
    mod = _model("llvm:0")
    assert with_merged_reshapes(mod).same_as(mod)


def test_numbers_of_a_model_with_views():
    x = np.arange(24, dtype="float32").reshape(4, 6) / 7
    model = InterpretedModel(_model("cuda:0"))
    e, g = model(x)
    c = -x.reshape(2, 12)
    powers = np.exp(c - c.max(1, keepdims=True))
    np.testing.assert_allclose(e, powers / powers.sum(1, keepdims=True) + c, rtol=1e-5)
    np.testing.assert_array_equal(g, -x.reshape(8, 3))


def test_a_slice_of_the_first_elements_is_not_a_view():
    builder, device = relax.BlockBuilder(), rh.VDevice({"kind": "cuda", "arch": "sm_90a"})
    x = relax.Var("x", relax.TensorType((1, 16, 16), "float32", device))
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit(relax.op.strided_slice(x, [1], [0], [1]))
            y = builder.emit_output(relax.op.nn.softmax(builder.emit(relax.op.reshape(first, (1, 16)))))
        builder.emit_func_output(y)
    model = InterpretedModel(with_vdevices(builder.get(), [device]))
    x = np.arange(256, dtype="float32").reshape(1, 16, 16) / 99
    powers = np.exp(x[:, 0] - x[:, 0].max())
    np.testing.assert_allclose(model(x), powers / powers.sum(), rtol=1e-5)


def test_reshapes_of_quotients_are_views():
    """Sizes of a strided convolution, whose products nothing proves to be equal."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 3, h, w] x, float[4, 3, 3, 3] k, float[4, 2, 2, 2] q) => (float[n, 2, a, b] y) {
            c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, k)
            t = ConvTranspose<strides = [2, 2]>(c, q)
            y = Relu(t)
        }""")
    random = np.random.default_rng(0)
    shapes = {"x": (2, 3, 7, 10), "k": (4, 3, 3, 3), "q": (4, 2, 2, 2)}
    arrays = {name: random.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(vm["main"](**arrays).numpy(), session.run(None, arrays)[0], rtol=1e-5, atol=1e-5)
    assert not [row.symbol for row in vm.profile("main", **arrays).rows if "reshape" in row.symbol]
