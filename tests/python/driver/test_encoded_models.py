"""Models whose matrix products are encoded: numbers on every kind of CPU, and the products' kernels."""

import math

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.encoding.expression import Expression
from relax_hetero.op.functions import apply_function
from relax_hetero.target.vdevice import with_vdevices

pytestmark = pytest.mark.sampled(4)

V4 = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}
V3 = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
TARGETS = {"avx512": V4, "avx2": V3, "sse": {"kind": "llvm", "mcpu": "x86-64-v2"}, "c": "c"}


def on(mod, target):
    """`mod` for one device."""
    return with_vdevices(mod, [rh.VDevice(target)])


def run(exe, *args):
    return rh.vm.VirtualMachine(exe)["main"](*args).numpy()


def ops_of(exe):
    """Ops of each dispatch, sorted; shape functions left out."""
    return sorted(dispatch.ops for dispatch in exe.metadata.dispatches.values() if dispatch.ops)


def check(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes="d")(x / math.sqrt(2)))


@ir_module()
def Layer(
    x: R.Tensor(("b", "s", 20), "float32"),
    w: R.Tensor((33, 20), "float32"),
    bias: R.Tensor((33,), "float32"),
    r: R.Tensor(("b", "s", 33), "float32"),
):
    with R.dataflow():
        t = R.permute_dims(w)
        y = R.matmul(x, t)
        z = R.add(y, bias)
        g = R.nn.gelu(z)
        out = R.add(g, r)
        R.output(out)
    return out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bound", [True, False])
def test_a_linear_layer(target, bound):
    """Symbolic batch and length, a transposed weight; bias, GELU and residual in the kernel of the product."""
    rng = np.random.default_rng(7)
    w, bias = rng.standard_normal((33, 20), "float32"), rng.standard_normal(33, "float32")
    weights = {"w": w, "bias": bias} if bound else {}
    exe = rh.compile(on(Layer, TARGETS[target]), weights)
    products = [ops for ops in ops_of(exe) if "batch_matmul" in ops]
    assert products == [("batch_matmul", "add", "gelu")]
    if bound and target != "c":
        assert ops_of(exe) == products  # nothing is packed at run time
    vm = rh.vm.VirtualMachine(exe)
    for b, s in ((1, 1), (2, 3), (1, 17), (3, 0)):
        x, r = rng.standard_normal((b, s, 20), "float32"), rng.standard_normal((b, s, 33), "float32")
        y = gelu(x @ w.T + bias) + r
        got = vm["main"](x, r) if bound else vm["main"](x, w, bias, r)
        check(got.numpy(), y)


@pytest.mark.parametrize("name", ["mish", "softsign"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_function_with_a_formula(name, dtype):
    """Computed in the kernel of its product, or alone as the formula's ops in one kernel."""
    x = relax.Var("x", relax.TensorType((5, 40), dtype))
    w = relax.Var("w", relax.TensorType((40, 33), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            product = builder.emit(apply_function(name, relax.op.matmul(x, w)))
            result = builder.emit_output(relax.Tuple([product, builder.emit(apply_function(name, x))]))
        builder.emit_func_output(result)
    exe = rh.compile(on(builder.finalize(), V4))
    fused, unfused = sorted((ops for ops in ops_of(exe) if ops != ("pack",)), key=len)
    assert fused[0] == "matmul" and fused[-1] == name and name not in unfused
    rng = np.random.default_rng(5)
    arrays = [(rng.standard_normal(shape) * 4).astype(dtype) for shape in ((5, 40), (40, 33))]
    wide = [array.astype("float64") for array in arrays]
    for got, operand in zip(rh.vm.VirtualMachine(exe)["main"](*arrays), (wide[0] @ wide[1], wide[0]), strict=True):
        want = Expression.parse(f"{name}(x0)").evaluate([operand])
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-5)


@ir_module()
def Attention(
    q: R.Tensor((2, "s", 24), "float32"), k: R.Tensor((2, "s", 24), "float32"), v: R.Tensor((2, "s", 24), "float32")
):
    s = T.int64()
    with R.dataflow():
        q1 = R.permute_dims(R.reshape(q, R.shape([2, s, 3, 8])), [0, 2, 1, 3])
        k1 = R.permute_dims(R.reshape(k, R.shape([2, s, 3, 8])), [0, 2, 3, 1])
        v1 = R.permute_dims(R.reshape(v, R.shape([2, s, 3, 8])), [0, 2, 1, 3])
        scores = R.multiply(R.matmul(q1, k1), R.const(0.125, "float32"))
        weights = R.nn.softmax(scores, axis=-1)
        context = R.permute_dims(R.matmul(weights, v1), [0, 2, 1, 3])
        out = R.reshape(context, R.shape([2, s, 24]))
        R.output(out)
    return out


@pytest.mark.parametrize("target", TARGETS)
def test_attention(target):
    """Heads are split and merged by index maps: one kernel, and no transpose is left."""
    exe = rh.compile(on(Attention, TARGETS[target]))
    assert ops_of(exe) == [("matmul", "multiply", "softmax", "matmul")]
    vm = rh.vm.VirtualMachine(exe)
    rng = np.random.default_rng(3)
    for s in (1, 5, 18):
        q, k, v = (rng.standard_normal((2, s, 24), "float32") for _ in range(3))
        heads = [x.reshape(2, s, 3, 8).transpose(0, 2, 1, 3) for x in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(0, 1, 3, 2) * 0.125
        e = np.exp(scores - scores.max(-1, keepdims=True))
        want = (e / e.sum(-1, keepdims=True) @ heads[2]).transpose(0, 2, 1, 3).reshape(2, s, 24)
        check(vm["main"](q, k, v).numpy(), want)


@ir_module()
def Everything(x: R.Tensor(("m", "k"), "float32"), y: R.Tensor(("k", "n"), "float32"), v: R.Tensor(("k",), "float32")):
    with R.dataflow():
        p = R.matmul(x, y)
        q = R.matmul(x, v)
        r = R.matmul(v, y)
        s = R.matmul(v, v)
        t = R.matmul(p, R.permute_dims(y))
        u = R.nn.relu(R.subtract(t, x))
        R.output(p, q, r, s, u)
    return (p, q, r, s, u)


@pytest.mark.parametrize("target", TARGETS)
def test_all_symbolic(target):
    """Matrices and vectors of any size, empty ones too; a product of a product."""
    vm = rh.vm.VirtualMachine(rh.compile(on(Everything, TARGETS[target])))
    rng = np.random.default_rng(5)
    for m, k, n in ((1, 1, 1), (7, 33, 17), (33, 4, 1), (1, 70, 40), (3, 0, 2), (0, 3, 2)):
        x, y = rng.standard_normal((m, k), "float32"), rng.standard_normal((k, n), "float32")
        v = rng.standard_normal(k, "float32")
        expected = (x @ y, x @ v, v @ y, v @ v, np.maximum(x @ y @ y.T - x, 0))
        for got, want in zip(vm["main"](x, y, v), expected, strict=True):
            check(got.numpy(), want)


@ir_module()
def TwoLayers(x: R.Tensor((4, 6), "float32"), v: R.Tensor((6, 6), "float32"), w: R.Tensor((6, 6), "float32")):
    R.func_attr({"num_input": 1})
    with R.dataflow():
        a = R.nn.relu(R.matmul(x, v))
        b = R.nn.relu(R.matmul(a, w))
        R.output(b)
    return b


def test_equal_products_share_a_kernel():
    exe = rh.compile(on(TwoLayers, V4), {name: np.eye(6, dtype="float32") for name in "vw"})
    assert ops_of(exe) == [("matmul", "relu")]
    x = np.random.default_rng(1).standard_normal((4, 6), "float32")
    check(run(exe, x), np.maximum(x, 0))


def test_weights_given_later():
    """Parameters after `num_input` that are not bound are packed inside of the call."""
    vm = rh.vm.VirtualMachine(rh.compile(on(TwoLayers, V4)))
    rng = np.random.default_rng(2)
    x, v, w = (rng.standard_normal(shape, "float32") for shape in ((4, 6), (6, 6), (6, 6)))
    vm.set_params({"v": v, "w": w})
    check(vm["main"](x).numpy(), np.maximum(np.maximum(x @ v, 0) @ w, 0))


def test_a_product_of_constants():
    """Constant operands: the product may be folded, and must be right."""

    @ir_module()
    def Mod(x: R.Tensor((4, 6), "float32"), v: R.Tensor((4, 5), "float32"), w: R.Tensor((5, 6), "float32")):
        with R.dataflow():
            c = R.matmul(v, w)
            y = R.add(x, c)
            R.output(y)
        return y

    rng = np.random.default_rng(2)
    x, v, w = (rng.standard_normal(shape, "float32") for shape in ((4, 6), (4, 5), (5, 6)))
    check(run(rh.compile(on(Mod, V4), {"v": v, "w": w}), x), x + v @ w)


def test_inside_branches():
    @ir_module()
    def Mod(x: R.Tensor((4, 6), "float32"), w: R.Tensor((6, 6), "float32"), p: R.Tensor((), "bool")):
        if p:
            a = R.matmul(x, w)
            y = R.nn.relu(a)
        else:
            b = R.matmul(x, w)
            y = R.exp(b)
        return y

    exe = rh.compile(on(Mod, V4))
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((4, 6), "float32"), rng.standard_normal((6, 6), "float32")
    check(run(exe, x, w, np.array(True)), np.maximum(x @ w, 0))
    check(run(exe, x, w, np.array(False)), np.exp(x @ w))


def test_every_stage_compiles():
    """`rh.compile` takes a module between any two passes."""
    rng = np.random.default_rng(2)
    x, v, w = (rng.standard_normal(shape, "float32") for shape in ((4, 6), (6, 6), (6, 6)))
    mod = relax.transform.BindParams("main", {"v": v, "w": w})(on(TwoLayers, V4))
    for step in ("RealizeVDevice", "SetEncoding", "PropagateEncodings", "SpecializeEncodings", "HoistEncodings"):
        mod = getattr(rh.transform, step)()(mod)
        tvm.relax.analysis.well_formed(mod)
        check(run(rh.compile(mod), x), np.maximum(np.maximum(x @ v, 0) @ w, 0))
    mod = rh.transform.MaterializeEncodings()(mod)
    check(run(rh.compile(mod), x), np.maximum(np.maximum(x @ v, 0) @ w, 0))
