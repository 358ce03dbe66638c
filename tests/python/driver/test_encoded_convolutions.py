"""Models whose convolutions are encoded: numbers on every kind of CPU and with a third party's layouts."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.encoding import PackedLayout
from relax_hetero.target.vdevice import with_vdevices
from seeds import fresh_rng
from tir.kernel_runs import runs_here
from tir.products_of import numpy_type, random_array
from transform.numpy_convolution import convolve
from transform.reference_convolution import NHWC, reference_resolver

pytestmark = pytest.mark.sampled(4)

V4 = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}
V3 = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
TARGETS = {"avx512": V4, "avx2": V3, "sse": {"kind": "llvm", "mcpu": "x86-64-v2"}, "c": "c"}
ONES = (1, 1)


# A residual block: two convolutions, a bias, an addition and an activation.
@ir_module()
def Block(
    x: R.Tensor((1, 20, 9, 7), "float32"),
    w: R.Tensor((24, 20, 3, 3), "float32"),
    v: R.Tensor((20, 24, 1, 1), "float32"),
    bias: R.Tensor((1, 24, 1, 1), "float32"),
):
    with R.dataflow():
        a = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
        b = R.nn.relu(R.add(a, bias))
        c = R.nn.conv2d(b, v)
        d = R.nn.relu(R.add(x, c))
        R.output(d)
    return d


def inputs_of(mod, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [[int(extent) for extent in param.ty.shape.values] for param in mod["main"].params]
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def block_of(x, w, v, bias):
    a = np.maximum(convolve(x, w, ONES, (1, 1, 1, 1), ONES) + bias, 0)
    return np.maximum(convolve(a, v, ONES, (0,) * 4, ONES) + x, 0)


def run(exe, *args):
    return rh.vm.VirtualMachine(exe)["main"](*args).numpy()


def on(mod, *targets):
    return with_vdevices(mod, [rh.VDevice(target) for target in targets])


def ops_of(exe):
    """Ops of each dispatch, sorted; shape functions left out."""
    return sorted(dispatch.ops for dispatch in exe.metadata.dispatches.values() if dispatch.ops)


def check(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_a_residual_block(name):
    inputs = inputs_of(Block)
    exe = rh.compile(on(Block, TARGETS[name]), params=dict(zip("wv", inputs[1:3], strict=True)))
    check(run(exe, inputs[0], inputs[3]), block_of(*inputs))


LAYOUTS = {
    "NCHW16c": {},
    "NHWC": {"data": NHWC, "result": NHWC},
    "to NCHW": {"data": NHWC, "result": PackedLayout.identity(4)},
    "all plain": {side: PackedLayout.identity(4) for side in ("data", "weight", "result")},
}


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_another_resolver(name, bound):
    inputs = inputs_of(Block)
    params = dict(zip("wv", inputs[1:3], strict=True)) if bound else None
    with reference_resolver(**LAYOUTS[name]) as resolver:
        exe = rh.compile(on(Block, V4), params=params)
    check(run(exe, *(inputs[::3] if bound else inputs)), block_of(*inputs))
    assert len({problem.weight for problem in resolver._solved}) == 2
    assert ("conv2d", "add", "relu") in ops_of(exe)


# A feature map that crosses to another device between two convolutions, and comes back.
@ir_module(V4, (V3, 1))
def Crossing(
    x: R.Tensor((1, 20, 9, 7), "float32", "llvm:0"),
    w: R.Tensor((20, 20, 3, 3), "float32", "llvm:0"),
    v: R.Tensor((20, 20, 1, 1), "float32", "llvm:1"),
):
    with R.dataflow():
        a = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
        there = R.to_vdevice(a, "llvm:1")
        b = R.nn.conv2d(there, v)
        c = R.nn.relu(R.add(b, there))
        back = R.to_vdevice(c, "llvm:0")
        y = R.add(a, back)
        R.output(y)
    return y


@pytest.mark.parametrize("tiled", [True, False])
def test_two_devices(tiled):
    """With equal layouts on both sides, and with tiles on the first."""
    inputs = inputs_of(Crossing)
    with reference_resolver(features=["avx512f"] if tiled else ["none"]):
        exe = rh.compile(Crossing)
    x, w, v = inputs
    a = convolve(x, w, ONES, ONES + ONES, ONES)
    want = a + np.maximum(convolve(a, v, ONES, (0,) * 4, ONES) + a, 0)
    got = rh.vm.VirtualMachine(exe, [tvm.cpu(0), tvm.cpu(1)])["main"](*inputs).numpy()
    check(got, want)


def low_precision(data, weight, channels=40):
    """A residual block of low precision: sums are scaled, added to the data and stored in its type."""
    floats = data in ("bfloat16", "float16")
    x = relax.Var("x", relax.TensorType([1, channels, 9, 7], data))
    w = relax.Var("w", relax.TensorType([channels, channels, 3, 3], weight))
    v = relax.Var("v", relax.TensorType([channels, 1, 3, 3], weight))
    builder = relax.BlockBuilder()

    def rounded(sums, scale):
        scaled = builder.emit(relax.op.multiply(relax.op.astype(sums, "float32"), relax.const(scale, "float32")))
        if floats:
            return builder.emit(relax.op.astype(scaled, data))
        low, high = (0, 255) if data == "uint8" else (-128, 127)
        return builder.emit(relax.op.astype(relax.op.clip(relax.op.round(scaled), low, high), data))

    with builder.function("main", [x, w, v]):
        with builder.dataflow():
            out_dtype = "float32" if floats else "int32"
            a = builder.emit(relax.op.nn.conv2d(x, w, padding=1, out_dtype=out_dtype))
            b = rounded(a, 0.001)
            c = builder.emit(relax.op.nn.conv2d(b, v, padding=1, groups=channels, out_dtype=out_dtype))
            d = builder.emit_output(builder.emit(relax.op.add(relax.op.astype(x, out_dtype), c)))
        builder.emit_func_output(d)
    return builder.get()


@pytest.mark.parametrize("types", [("uint8", "int8"), ("int8", "int8"), ("bfloat16",) * 2, ("float16",) * 2])
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "c"])
def test_low_precision(name, types):
    rng = fresh_rng()
    mod = low_precision(*types)
    shapes = [[int(extent) for extent in param.ty.shape.values] for param in mod["main"].params]
    x, w, v = (random_array(rng, shape, dtype) for shape, dtype in zip(shapes, (types[0], *types[1:] * 2), strict=True))
    pads = (1, 1, 1, 1)
    exe = rh.compile(on(mod, TARGETS[name]), params={"w": w, "v": v})
    got = run(exe, x).astype("float64")
    wide = [array.astype("float64") for array in (x, w, v)]
    scaled = (convolve(wide[0], wide[1], ONES, pads, ONES).astype("float32") * np.float32(0.001)).astype("float64")
    if "int" in types[0]:
        limits = np.iinfo(types[0])
        middle = np.clip(np.round(scaled), limits.min, limits.max)
    else:
        middle = scaled.astype(numpy_type(types[0])).astype("float64")
    want = depthwise(middle, wide[2]) + wide[0]
    atol = 0 if "int" in types[0] else 2e-3
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    assert exe.metadata.encodings["cancelled"] == []


# Only the instructions that the test needs: a CPU model has some that others lack.
VNNI = {"kind": "llvm", "mcpu": "x86-64-v4", "mattr": ["+avx512vnni"], "num-cores": 2}


# One weight on two devices: with compensation for flipped signs where bytes are multiplied, without elsewhere.
@ir_module(VNNI, (V3, 1))
def Bytes(x: R.Tensor((1, 3, 9, 7), "int8", "llvm:0"), w: R.Tensor((20, 3, 3, 3), "int8", "llvm:0")):
    with R.dataflow():
        a = R.nn.conv2d(x, w, padding=[1, 1, 1, 1], out_dtype="int32")
        there = R.to_vdevice(x, "llvm:1")
        weight = R.to_vdevice(w, "llvm:1")
        b = R.nn.conv2d(there, weight, padding=[2, 2, 2, 2], dilation=[2, 2], out_dtype="int32")
        back = R.to_vdevice(b, "llvm:0")
        y = R.add(a, back)
        R.output(y)
    return y


@pytest.mark.skipif(not runs_here("vnni"), reason="needs AVX-512 with VNNI")
@pytest.mark.parametrize("bound", [True, False])
def test_bytes_on_two_devices(bound):
    rng = fresh_rng()
    x, w = (rng.integers(-128, 128, shape).astype("int8") for shape in ((1, 3, 9, 7), (20, 3, 3, 3)))
    exe = rh.compile(Bytes, params={"w": w} if bound else None)
    vm = rh.vm.VirtualMachine(exe, [tvm.cpu(0), tvm.cpu(1)])
    wide = [array.astype("float64") for array in (x, w)]
    want = convolve(*wide, ONES, (1,) * 4, ONES) + convolve(*wide, ONES, (2,) * 4, (2, 2))
    np.testing.assert_array_equal(vm["main"](*([x] if bound else [x, w])).numpy(), want)
    assert exe.metadata.encodings["cancelled"] == []


def depthwise(x, w):
    """Every channel with its own window."""
    each = [convolve(x[:, i : i + 1], w[i : i + 1], ONES, (1, 1, 1, 1), ONES) for i in range(len(w))]
    return np.concatenate(each, axis=1)


FORMS = {
    "one dimension": ((2, 8, 19), (24, 4, 3), {"strides": 2, "padding": [2, 1], "groups": 2}, "float32"),
    "three dimensions": ((1, 5, 4, 6, 7), (8, 5, 3, 1, 2), {"padding": [1, 0, 1, 1, 0, 0]}, "float32"),
    "an image": ((1, 3, 15, 13), (20, 3, 3, 5), {"strides": [2, 1], "padding": [1, 2, 0, 1]}, "float32"),
    "depthwise": ((1, 20, 9, 8), (40, 1, 3, 3), {"groups": 20, "padding": 1}, "float32"),
    "dilation": ((1, 20, 9, 8), (33, 20, 3, 3), {"dilation": [2, 1], "padding": [2, 1, 2, 1]}, "float32"),
    "double precision": ((1, 20, 9, 8), (33, 20, 3, 3), {"padding": 1}, "float64"),
    "a symbolic batch": (("b", 20, 9, 8), (33, 20, 3, 3), {"padding": 1}, "float32"),
    "a symbolic image": ((1, 20, "h", 8), (33, 20, 3, 3), {"padding": 1}, "float32"),
    "a symbolic image, strides": ((1, 20, "h", 8), (33, 20, 3, 3), {"padding": 1, "strides": 2}, "float32"),
}
SIZES = {"b": 3, "h": 6}


def convolution(data, weight, attrs, dtype):
    """A module with one convolution, and its operands."""
    extents = [tvm.tirx.Var(extent, "int64") if isinstance(extent, str) else extent for extent in data]
    params = [relax.Var(name, relax.TensorType(list(s), dtype)) for name, s in (("x", extents), ("w", weight))]
    builder = relax.BlockBuilder()
    make = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)[len(data) - 3]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(relax.op.nn.relu(builder.emit(make(*params, **attrs)))))
        builder.emit_func_output(out)
    rng = np.random.default_rng(0)
    shapes = [[SIZES.get(extent, extent) for extent in data], weight]
    return builder.get(), [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    mod, (x, w) = convolution(*FORMS[form])
    call = next(iter(mod["main"].body.blocks[0].bindings)).value
    numbers = [[int(n) for n in field] for field in (call.attrs.strides, call.attrs.padding, call.attrs.dilation)]
    exe = rh.compile(on(mod, V4))
    vm = rh.vm.VirtualMachine(exe)
    check(vm["main"](x, w).numpy(), np.maximum(convolve(x, w, *numbers, int(call.attrs.groups)), 0))
    assert not exe.metadata.encodings["cancelled"]
