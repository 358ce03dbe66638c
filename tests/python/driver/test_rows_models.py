"""Models with work on rows: numbers on every kind of CPU and on two devices, and which dispatches they have."""

import ml_dtypes
import numpy as np
import pytest
from tvm import relax, tirx
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.target.vdevice import with_vdevices
from seeds import fresh_rng

pytestmark = pytest.mark.sampled(4)

V4 = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}
V3 = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
TARGETS = {"avx512": V4, "avx2": V3, "sse": {"kind": "llvm", "mcpu": "x86-64-v2"}, "c": "c"}


def arrays(*shapes):
    return [fresh_rng().standard_normal(shape).astype("float32") for shape in shapes]


def compiled(mod, target):
    return rh.compile(with_vdevices(mod, [rh.VDevice(target)]))


def run(exe, *args):
    result = rh.vm.VirtualMachine(exe)["main"](*args)
    return [tensor.numpy() for tensor in (result if isinstance(result, tuple) else (result,))]


def ops_of(exe):
    """Ops of each dispatch; shape functions left out."""
    return [dispatch.ops for dispatch in exe.metadata.dispatches.values() if dispatch.ops]


def norm(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# A product with bias and residual before a norm, the only user of its result.
@ir_module()
def Layer(
    x: R.Tensor((1, "s", 40), "float32"),
    w: R.Tensor((40, 70), "float32"),
    bias: R.Tensor((70,), "float32"),
    r: R.Tensor((1, "s", 70), "float32"),
    scale: R.Tensor((70,), "float32"),
    shift: R.Tensor((70,), "float32"),
):
    with R.dataflow():
        y = R.add(R.add(R.matmul(x, w), bias), r)
        z = R.nn.layer_norm(y, scale, shift, axes=[-1], epsilon=1e-5)
        R.output(z)
    return z


@pytest.mark.parametrize("target", ["avx512", "avx2", "c"])
@pytest.mark.parametrize("rows", [1, 19])
def test_a_norm_joins_the_product_before_it(target, rows):
    exe = compiled(Layer, TARGETS[target])
    operands = arrays((1, rows, 40), (40, 70), (70,), (1, rows, 70), (70,), (70,))
    x, w, bias, r, scale, shift = (a.astype("float64") for a in operands)
    np.testing.assert_allclose(run(exe, *operands)[0], norm(x @ w + bias + r, scale, shift), rtol=1e-4, atol=1e-4)
    joined = [ops for ops in ops_of(exe) if any("matmul" in op for op in ops) and any("norm" in op for op in ops)]
    assert bool(joined) == (target != "c")


# The product is also added after the norm, and is a result: it is stored, and later work reads it.
@ir_module()
def Twice(x: R.Tensor((6, 40), "float32"), w: R.Tensor((40, 70), "float32"), scale: R.Tensor((70,), "float32")):
    with R.dataflow():
        y = R.matmul(x, w)
        z = R.nn.rms_norm(y, scale, axes=[-1], epsilon=1e-5)
        s = R.nn.softmax(R.multiply(R.add(z, y), R.const(0.5, "float32")), axis=-1)
        R.output(y, s)
    return (y, s)


@pytest.mark.parametrize("target", ["avx512", "sse", "c"])
def test_a_product_with_another_user_is_stored(target):
    exe = compiled(Twice, TARGETS[target])
    operands = arrays((6, 40), (40, 70), (70,))
    x, w, scale = (a.astype("float64") for a in operands)
    y = x @ w
    z = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(run(exe, *operands)[1], softmax((z + y) * 0.5), rtol=1e-4, atol=1e-5)
    if target != "c":
        # The sum, the factor and the softmax are one dispatch with the norm.
        assert len([ops for ops in ops_of(exe) if ops != ("pack",)]) == 2


@ir_module({"kind": "llvm", "mcpu": "x86-64-v3"}, ({"kind": "llvm", "mcpu": "x86-64-v2"}, 1))
def TwoDevices(
    x: R.Tensor((6, 40), "float32", "llvm:0"),
    w: R.Tensor((40, 70), "float32", "llvm:0"),
    scale: R.Tensor((70,), "float32", "llvm:1"),
):
    with R.dataflow():
        y = R.matmul(x, w)
        a = R.nn.log_softmax(y, axis=-1)
        there = R.to_vdevice(a, "llvm:1")
        t = R.sum(R.abs(R.multiply(there, scale)), axis=[-1], keepdims=True)
        z = R.divide(there, t)
        R.output(z)
    return z


def test_two_devices():
    exe = rh.compile(TwoDevices)
    operands = arrays((6, 40), (40, 70), (70,))
    x, w, scale = (a.astype("float64") for a in operands)
    a = np.log(softmax(x @ w))
    want = a / np.abs(a * scale).sum(-1, keepdims=True)
    np.testing.assert_allclose(run(exe, *operands)[0], want, rtol=1e-4, atol=1e-5)


# A group norm as exporters write it, and statistics of rows as results of their own.
@ir_module()
def Groups(x: R.Tensor((2, 8, 5, 7), "float32"), scale: R.Tensor((8, 1, 1), "float32")):
    with R.dataflow():
        g = R.reshape(x, (2, 4, 70))
        m = R.mean(g, axis=[2], keepdims=True)
        c = R.subtract(g, m)
        v = R.variance(g, axis=[2], keepdims=True)
        n = R.divide(c, R.sqrt(R.add(v, R.const(0.1, "float32"))))
        y = R.multiply(R.reshape(n, (2, 8, 5, 7)), scale)
        top = R.max(g, axis=[2])
        R.output(y, top)
    return (y, top)


@pytest.mark.parametrize("target", ["avx512", "avx2"])
def test_groups_and_statistics(target):
    operands = arrays((2, 8, 5, 7), (8, 1, 1))
    y, top = run(compiled(Groups, TARGETS[target]), *operands)
    x, scale = (a.astype("float64") for a in operands)
    g = x.reshape(2, 4, 70)
    n = (g - g.mean(-1, keepdims=True)) / np.sqrt(g.var(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(y, n.reshape(x.shape) * scale, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(top, g.max(-1).astype("float32"))


# Masked in two ways, rows of -inf among them, in half precision too.
@ir_module()
def Softmaxes(
    x: R.Tensor((2, 3, 9, 50), "float32"),
    mask: R.Tensor((2, 1, 1, 50), "float32"),
    keep: R.Tensor((9, 50), "bool"),
    h: R.Tensor((9, 50), "float16"),
):
    with R.dataflow():
        a = R.nn.softmax(R.add(R.multiply(x, R.const(0.25, "float32")), mask), axis=-1)
        low = R.const(float("-inf"), "float32")
        b = R.nn.softmax(R.where(keep, x, low), axis=3)
        c = R.nn.softmax(h, axis=1)
        R.output(a, b, c)
    return (a, b, c)


@pytest.mark.parametrize("target", ["avx512", "avx2", "sse"])
def test_masks(target):
    x, mask = arrays((2, 3, 9, 50), (2, 1, 1, 50))
    mask[..., 20:] = -np.inf
    keep = fresh_rng().random((9, 50)) < 0.5
    keep[4] = False
    h = fresh_rng().standard_normal((9, 50)).astype("float16")
    a, b, c = run(compiled(Softmaxes, TARGETS[target]), x, mask, keep, h)
    wide = x.astype("float64")
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(a, softmax(wide * 0.25 + mask), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(b, softmax(np.where(keep, wide, -np.inf)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(c.astype("float64"), softmax(h.astype("float64")), rtol=2e-3, atol=1e-4)
    assert np.isnan(b[:, :, 4]).all() and not np.isnan(np.delete(b, 4, axis=2)).any()


def rounded_softmax(dtype, large, small, product):
    """A softmax op by op, with sums that lose digits in half precision; of a product, or of the input."""

    def const(value):
        return relax.const(value, dtype)

    builder = relax.BlockBuilder()
    m, n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((m, 24) if product else (m, n), dtype))
    w = relax.Var("w", relax.TensorType((24, 70) if product else (1, n), dtype))
    op = relax.op
    with builder.function("main", [x, w]):
        with builder.dataflow():
            scores = builder.emit((op.matmul if product else op.multiply)(x, w))
            h = builder.emit(op.subtract(builder.emit(op.add(scores, const(large))), const(large)))
            low = builder.emit(op.subtract(h, builder.emit(op.max(h, axis=[-1], keepdims=True))))
            e = builder.emit(op.add(builder.emit(op.exp(low)), const(small)))
            e = builder.emit(op.subtract(e, const(small)))
            total = builder.emit(op.reshape(builder.emit(op.sum(e, axis=[-1])), (m, 1)))
            p = builder.emit(op.divide(e, total))
            out = builder.emit_output(op.add(p, const(1.0)))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("target", ["avx512", "avx2", "sse"])
@pytest.mark.parametrize("product", [False, True], ids=["rows", "product"])
@pytest.mark.parametrize(("dtype", "large", "small"), [("float16", 1024.0, 16.0), ("bfloat16", 128.0, 2.0)])
def test_half_precision_is_rounded_by_every_op(target, product, dtype, large, small):
    """Equal to numpy's to the last bit: the exponential and the sum take few distinct numbers."""
    half = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    exe = compiled(rounded_softmax(dtype, large, small, product), TARGETS[target])
    assert any({"max", "exp", "sum", "divide"} <= set(ops) for ops in ops_of(exe))
    vm = rh.vm.VirtualMachine(exe)
    for rows, columns in [(1, 1), (3, 37), (5, 64), (2, 1001)]:
        x, w = fresh_rng().uniform(0, 2, (rows, columns)), fresh_rng().uniform(0, 2, (1, columns))
        if product:
            # Scores are whole numbers: what a product's epilogue adds to them is not rounded in between.
            x, w = fresh_rng().integers(0, 2, (rows, 24)), fresh_rng().integers(0, 2, (24, 70))
        x, w = x.astype(half), w.astype(half)
        single = (np.matmul if product else np.multiply)(x.astype("float32"), w.astype("float32"))
        h = (single.astype(half) + half(large)) - half(large)
        e = (np.exp(h - h.max(-1, keepdims=True)) + half(small)) - half(small)
        want = e / e.astype("float32").sum(-1, keepdims=True).astype(half) + half(1)
        np.testing.assert_array_equal(vm["main"](x, w).numpy().astype("float32"), want.astype("float32"))
