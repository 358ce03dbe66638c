"""Products of bytes on OpenCL devices: words of four bytes along k, and dot products of them."""

import numpy as np
import pytest
from tvm import relax

import relax_hetero as rh
from relax_hetero.backends.opencl import devices as opencl
from relax_hetero.backends.opencl import text
from relax_hetero.target.backend import backend_of

cl = pytest.importorskip("pyopencl")
pytestmark = pytest.mark.skipif(
    backend_of("opencl").count() == 0, reason=f"no OpenCL: {backend_of('opencl').why_absent()}"
)

TYPES = [("int8", "int8"), ("uint8", "int8"), ("int8", "uint8"), ("uint8", "uint8")]


def machine_of(emit, *types):
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, (shape, dtype) in enumerate(types)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(emit(*params))
        builder.emit_func_output(result)
    return rh.vm.VirtualMachine(rh.compile(rh.transform.UpdateVDevice([rh.VDevice("opencl")])(builder.get())))


def arrays(*types):
    generator = np.random.default_rng(0)
    return [generator.integers(*((-128, 128) if dtype == "int8" else (0, 256)), shape).astype(dtype)
            for shape, dtype in types]  # fmt: skip


def calls_dots(machine):
    return "byte_dot_" in machine.executable.metadata.device_code[0].text.rpartition("#endif")[2]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("m, n, k, transposed", [(33, 20, 36, False), (17, 48, 100, True), (40, 33, 37, False)])
def test_products(types, m, n, k, transposed):
    """By vectors along k and across it, with rests in every dimension; the bytes reach both ends of their ranges."""
    shapes = (m, k), ((n, k) if transposed else (k, n))

    def product(x, w):
        return relax.op.matmul(x, relax.op.permute_dims(w) if transposed else w, "int32")

    operands = list(zip(shapes, types, strict=True))
    machine, (x, w) = machine_of(product, *operands), arrays(*operands)
    assert calls_dots(machine) == (k % 4 == 0)
    expected = x.astype("int64") @ (w.T if transposed else w).astype("int64")
    assert (machine["main"](x, w).numpy() == expected).all()


def test_convolutions():
    operands = [((2, 8, 9, 11), "uint8"), ((12, 8, 3, 3), "int8")]
    machine = machine_of(lambda x, w: relax.op.nn.conv2d(x, w, padding=1, out_dtype="int32"), *operands)
    x, w = arrays(*operands)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
    expected = np.einsum("bcyxij,ncij->bnyx", windows.astype("int64"), w.astype("int64"))
    assert (machine["main"](x, w).numpy() == expected).all()


@pytest.mark.parametrize("defined, call", [
    ("cl_khr_integer_dot_product\n#define __opencl_c_integer_dot_product_input_4x8bit_packed", "dot_4x8packed_us_int"),
    ("cl_arm_integer_dot_product_int8", "arm_dot"),
])  # fmt: skip
def test_the_devices_extension_is_used(defined, call):
    """Of two extensions, which this device need not have: their functions are defined here, and give sums plus 1000."""
    pairs = [("ss_int", "char4", "char4"), ("uu_uint", "uchar4", "uchar4"), ("su_int", "char4", "uchar4"),
             ("us_int", "uchar4", "char4")]  # fmt: skip
    prelude = f"#define {defined}\n" + "".join(
        f"int dot_4x8packed_{name}(uint a, uint b) {{ {left} x = as_{left}(a); {right} y = as_{right}(b);"
        " return (int)x.x * y.x + (int)x.y * y.y + (int)x.z * y.z + (int)x.w * y.w + 1000; }\n"
        for name, left, right in pairs
    )
    prelude += "".join(
        f"int __attribute__((overloadable)) arm_dot({kind} x, {kind} y)"
        " { return (int)x.x * y.x + (int)x.y * y.y + (int)x.z * y.z + (int)x.w * y.w + 1000; }\n"
        for kind in ("char4", "uchar4")
    )
    names = [f"byte_dot_{left[0]}{right[0]}" for left, right in TYPES]
    body = "".join(f"  sums[{i}] = {name}(a, b, 1);\n" for i, name in enumerate(names))
    kernel = f"__kernel void test(__global int* sums, int a, int b) {{\n{body}}}\n"
    device = opencl.opencl_memory().opened(0)
    undefined = "".join(f"#undef {name}\n" for name in opencl._BYTE_DOT_EXTENSIONS)
    code = undefined + prelude + text._BYTE_DOTS.replace("#pragma", "//") + kernel
    program = cl.Program(device.context, code).build()
    sums = np.zeros(4, "int32")
    buffer = cl.Buffer(device.context, cl.mem_flags.WRITE_ONLY, sums.nbytes)
    words = np.array([[1, -2, 3, -128], [127, 255, -1, 2]]).astype("int8")
    cl.Kernel(program, "test")(device.queue, (1,), None, buffer, *words.view("int32").ravel())
    cl.enqueue_copy(device.queue, sums, buffer)
    one, other = words
    has_all = call != "arm_dot"  # of both signs
    assert sums.tolist() == [
        one.view(left).astype(int) @ other.view(right).astype(int) + 1 + 1000 * (has_all or left == right)
        for left, right in TYPES
    ]


def test_devices_with_dot_products_compile_them():
    device = opencl.opencl_memory().opened(0)
    if opencl._BYTE_DOT_EXTENSIONS[0] not in device._device.extensions.split():
        pytest.skip("the device lacks the extension")
    device.program(f"#ifndef __opencl_c_integer_dot_product_input_4x8bit_packed\n#error // {opencl.BYTE_DOT}\n#endif")


def test_quantized_models_multiply_bytes():
    import onnx.parser

    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (uint8[24, 32] x, int8[32, 40] w) => (uint8[24, 40] y)
        <float xs = {0.02}, uint8 xz = {120}, float ws = {0.03}, int8 wz = {3}, float ys = {0.5}, uint8 yz = {100}>
        { y = QLinearMatMul(x, xs, xz, w, ws, wz, ys, yz) }
    """)
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, ["opencl"])))
    x, w = arrays(((24, 32), "uint8"), ((32, 40), "int8"))
    sums = (x.astype("int64") - 120) @ (w.astype("int64") - 3)
    expected = np.clip(np.rint(sums * (0.02 * 0.03 / 0.5)) + 100, 0, 255)
    assert calls_dots(machine)
    assert np.abs(machine["main"](x, w).numpy() - expected).max() <= 1  # halves
