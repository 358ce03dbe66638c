"""FormQuantizedMatmuls: products that keep weights of 4 bits, ops that they absorb, and the form of other products."""

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, assert_structural_equal
from tvm.script import relax as R
from tvm_ffi import structural_map

import relax_hetero as rh
from encoding.random_blocks import random_rows
from modules import calls_of, ir_module, ops_of
from relax_hetero.encoding.block_formats import block_format, dequantize_rows, integer_format
from relax_hetero.encoding.block_panels import BlockSource, Panels
from relax_hetero.encoding.block_weights import pack_fragment_blocks, pack_fragments
from relax_hetero.op.quantized_matmul import BLOCK_MATMUL, DEQUANTIZE_BLOCKS
from relax_hetero.transform import FormQuantizedMatmuls, RealizeVDevice
from relax_hetero.transform.ir.rewriting import op_name, relax_functions, walk_bindings
from seeds import fresh_rng

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
N, K, BLOCK = 40, 64, 32
RNG = np.random.default_rng(7)
DATA = RNG.integers(0, 256, (N, K // 2), dtype=np.uint8)
SCALES = RNG.standard_normal((N, K // BLOCK), "float32")
ZEROS = RNG.integers(0, 16, (N, K // BLOCK), dtype=np.uint8)
CODES = np.stack([DATA & 15, DATA >> 4], -1).reshape(N, K).astype("float64")
NUMBERS = (CODES - np.repeat(ZEROS, BLOCK, 1)) * np.repeat(SCALES, BLOCK, 1)
WEIGHTS = {"data": DATA, "scales": SCALES, "zeros": ZEROS}


def formed(mod, **constants):
    values = {**WEIGHTS, **constants}
    names = {param.name for param in mod["main"].params} & set(values)
    placed = RealizeVDevice()(relax.transform.BindParams("main", {name: values[name] for name in names})(mod))
    after = FormQuantizedMatmuls()(placed)
    assert FormQuantizedMatmuls()(after).same_as(after)
    return after


def expressions(mod):
    return [
        str(binding.value.attrs.expression)
        for _, func in relax_functions(mod)
        for binding in walk_bindings(func)
        if op_name(binding.value) == BLOCK_MATMUL
    ]


@ir_module(V4)
def Layer(
    x: R.Tensor(("m", 64), "float32"),
    residual: R.Tensor(("m", 40), "float32"),
    bias: R.Tensor((1, 40), "float32"),
    data: R.Tensor((40, 32), "uint8"),
    scales: R.Tensor((40, 2), "float32"),
    zeros: R.Tensor((40, 2), "uint8"),
):
    with R.dataflow():
        w = R.hetero.dequantize_blocks(data, scales, zeros, depth=64, block=32)
        t = R.permute_dims(w)
        y = R.matmul(x, t)
        b = R.add(y, bias)
        g = R.nn.gelu(b)
        r = R.add(residual, g)
        R.output(r)
    return r


def test_a_layer_with_bias_activation_and_residual():
    @ir_module(V4)
    def Expected(
        x: R.Tensor(("m", 64), "float32"),
        residual: R.Tensor(("m", 40), "float32"),
        bias: R.Tensor((1, 40), "float32"),
        weight: R.Tensor((2, 1536), "uint8"),
    ):
        with R.dataflow():
            r_x1 = R.reshape(bias, R.shape([40]))
            r = R.hetero.block_matmul(
                x,
                weight,
                r_x1,
                residual,
                columns=40,
                block=32,
                zeros=True,
                expression="add(x2, gelu(add(x0, x1)))",
            )
            R.output(r)
        return r

    packed = {
        "weight": Panels(32).pack(BlockSource((DATA, SCALES, ZEROS), integer_format(4, BLOCK, True), K))[0],
    }
    expected = RealizeVDevice()(relax.transform.BindParams("main", packed)(Expected))
    assert_structural_equal(formed(Layer), expected, map_free_vars=True)


@ir_module(V4)
def TwoUses(
    x: R.Tensor((3, 64), "float16"),
    v: R.Tensor((64,), "float32"),
    data: R.Tensor((40, 32), "uint8"),
    scales: R.Tensor((40, 2), "float32"),
    zeros: R.Tensor((40, 2), "uint8"),
):
    with R.dataflow():
        w = R.hetero.dequantize_blocks(data, scales, zeros, depth=64, block=32)
        h = R.astype(R.permute_dims(w), "float16")
        y = R.matmul(x, h, out_dtype="float32")
        a = R.sigmoid(y)
        b = R.multiply(y, a)
        z = R.matmul(w, v)
        R.output(b, z)
    return (b, z)


def test_products_with_several_readers_are_stored_and_vectors_unpack():
    """In half precision, a product runs in float32; plain ops compute the weights that other ops read."""
    after = formed(TwoUses)
    assert expressions(after) == ["x0"]
    ops = ops_of(after)
    assert DEQUANTIZE_BLOCKS not in ops
    assert ops.count("relax.matmul") == 1
    assert "relax.bitwise_and" in ops
    x, v = fresh_rng().standard_normal((3, K)).astype("float16"), fresh_rng().standard_normal(K, "float32")
    executable = rh.compile(relax.transform.BindParams("main", WEIGHTS)(TwoUses))
    got, product = rh.vm.VirtualMachine(executable)["main"](x, v)
    y = x.astype("float64") @ NUMBERS.T
    np.testing.assert_allclose(got.numpy(), y / (1 + np.exp(-y)), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(product.numpy(), NUMBERS @ v, rtol=1e-5, atol=1e-4)


def test_weights_that_are_parameters_are_unpacked_in_every_call():
    args = [fresh_rng().standard_normal(shape, "float32") for shape in ((5, K), (5, N), (1, N))]
    executable = rh.compile(Layer)
    got = rh.vm.VirtualMachine(executable)["main"](*args, DATA, SCALES, ZEROS).numpy()
    bound = rh.compile(relax.transform.BindParams("main", WEIGHTS)(Layer))
    want = rh.vm.VirtualMachine(bound)["main"](*args).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert not any("block_matmul" in call["ops"] for call in executable.metadata.fusions["dispatches"])


@ir_module(V4, "c:1")
def OnTwoDevices(
    x: R.Tensor(("m", 64), "float32", "llvm:0"),
    data: R.Tensor((40, 32), "uint8"),
    scales: R.Tensor((40, 2), "float32"),
    zeros: R.Tensor((40, 2), "uint8"),
):
    with R.dataflow():
        w = R.hetero.dequantize_blocks(data, scales, zeros, depth=64, block=32)
        y = R.matmul(x, R.permute_dims(w))
        there = R.to_vdevice(x, "c:0")
        w1 = R.hetero.dequantize_blocks(data, scales, zeros, depth=64, block=32)
        z = R.nn.relu(R.matmul(there, R.permute_dims(w1)))
        R.output(y, z)
    return (y, z)


def test_each_device_has_weights_of_its_own():
    executable = rh.compile(relax.transform.BindParams("main", WEIGHTS)(OnTwoDevices))
    dispatches = {(call["device"], *call["ops"]) for call in executable.metadata.fusions["dispatches"]}
    assert {("llvm:0", "block_matmul"), ("c:0", "block_matmul", "relu")} <= dispatches
    machine = rh.vm.VirtualMachine(executable)
    for rows in (1, 6):
        x = fresh_rng().standard_normal((rows, K), "float32")
        want = x.astype("float64") @ NUMBERS.T
        here, there = machine["main"](x)
        np.testing.assert_allclose(here.numpy(), want, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(there.numpy(), np.maximum(want, 0), rtol=1e-5, atol=1e-4)


def test_a_device_without_a_kernel_computes_numbers():
    @ir_module({"kind": "cuda", "arch": "sm_75"})
    def OnAGPU(
        x: R.Tensor(("m", 64), "float32"),
        data: R.Tensor((40, 32), "uint8"),
        scales: R.Tensor((40, 2), "float32"),
        zeros: R.Tensor((40, 2), "uint8"),
    ):
        with R.dataflow():
            w = R.hetero.dequantize_blocks(data, scales, zeros, depth=64, block=32)
            y = R.matmul(x, R.permute_dims(w))
            R.output(y)
        return y

    ops = ops_of(formed(OnAGPU))
    assert BLOCK_MATMUL not in ops and DEQUANTIZE_BLOCKS not in ops
    assert "relax.matmul" in ops


@ir_module({"kind": "cuda", "arch": "sm_90a"})
def OnTensorCores(
    x: R.Tensor(("m", 64), "float16"),
    data: R.Tensor((40, 32), "uint8"),
    scales: R.Tensor((40, 2), "float32"),
    zeros: R.Tensor((40, 2), "uint8"),
):
    with R.dataflow():
        wide = R.astype(x, "float32")
        w = R.hetero.dequantize_blocks(data, scales, zeros, depth=64, block=32)
        y = R.astype(R.matmul(wide, R.permute_dims(w)), "float16")
        R.output(y)
    return y


def test_tensor_cores_read_fragments_and_rows_of_half_precision():
    exact = SCALES.astype("float16")

    @ir_module({"kind": "cuda", "arch": "sm_90a"})
    def Expected(
        x: R.Tensor(("m", 64), "float16"),
        weight: R.Tensor((3, 1, 32, 4), "int32"),
        scales: R.Tensor((3, 2, 8, 2), "float16"),
        zeros: R.Tensor((3, 2, 8, 2), "uint8"),
    ):
        with R.dataflow():
            y = R.hetero.block_matmul(
                x, weight, scales, zeros, columns=40, block=32, zeros=True, expression="cast(x0, 'float16')"
            )
            R.output(y)
        return y

    packed = {
        "weight": pack_fragments(DATA, K, BLOCK),
        "scales": pack_fragment_blocks(exact),
        "zeros": pack_fragment_blocks(ZEROS),
    }
    expected = RealizeVDevice()(relax.transform.BindParams("main", packed)(Expected))
    after = formed(OnTensorCores, scales=exact.astype("float32"))
    assert_structural_equal(after, expected, map_free_vars=True)


def test_fragments_keep_scales_and_zero_points_that_need_it_in_float32():
    def dtypes(**constants):
        func = formed(OnTensorCores, **constants)["main"]
        call = calls_of(BLOCK_MATMUL, func)[0]
        return [str(arg.ty.dtype) for arg in call.args]

    assert dtypes(scales=SCALES) == ["float16", "int32", "float32", "uint8"]
    assert dtypes(scales=SCALES * np.float32(1e30), zeros=ZEROS + np.uint8(120))[2:] == ["float32", "float32"]


def test_sums_of_half_precision_and_quantized_results():
    @ir_module(V4)
    def Quantized(
        x: R.Tensor((3, 64), "float16"),
        data: R.Tensor((40, 32), "uint8"),
        scales: R.Tensor((40, 2), "float32"),
        zeros: R.Tensor((40, 2), "uint8"),
    ):
        with R.dataflow():
            w = R.hetero.dequantize_blocks(data, scales, zeros, depth=64, block=32)
            y = R.matmul(x, R.astype(R.permute_dims(w), "float16"))
            h = R.nn.relu(y)
            s = R.round(R.divide(R.astype(h, "float32"), R.const(0.5, "float32")))
            q = R.astype(R.clip(s, 0, 255), "uint8")
            R.output(h, q)
        return (h, q)

    assert expressions(formed(Quantized)) == ["relu(cast(x0, 'float16'))"]
    x = fresh_rng().standard_normal((3, K)).astype("float16")
    executable = rh.compile(relax.transform.BindParams("main", WEIGHTS)(Quantized))
    half, quantized = (value.numpy() for value in rh.vm.VirtualMachine(executable)["main"](x))
    np.testing.assert_allclose(half, np.maximum(x.astype("float64") @ NUMBERS.T, 0), rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(quantized, np.clip(np.round(half.astype("float32") / 0.5), 0, 255))


RAW = random_rows("q5_0", N, K)


@ir_module(V4)
def Tied(tokens: R.Tensor((3, 2), "int32"), raw: R.Tensor((40, 44), "uint8")):
    with R.dataflow():
        w = R.hetero.dequantize_blocks(raw, depth=64, format="q5_0")
        e = R.take(w, tokens, axis=0)
        h = R.nn.relu(e)
        w1 = R.hetero.dequantize_blocks(raw, depth=64, format="q5_0")
        y = R.matmul(h, R.permute_dims(w1))
        R.output(y)
    return y


def test_a_table_that_is_a_weight_too_is_one_constant():
    @ir_module(V4)
    def Expected(tokens: R.Tensor((3, 2), "int32"), weight: R.Tensor((2, 1408), "uint8")):
        with R.dataflow():
            e_index = R.reshape(tokens, R.shape([6]))
            e_rows = R.hetero.block_rows(weight, e_index, rows=40, depth=64, format="q5_0")
            e = R.reshape(e_rows, R.shape([3, 2, 64]))
            h = R.nn.relu(e)
            y = R.hetero.block_matmul(h, weight, columns=40, format="q5_0")
            R.output(y)
        return y

    packed = Panels(32).pack(BlockSource((RAW,), block_format("q5_0"), K))[0]
    expected = RealizeVDevice()(relax.transform.BindParams("main", {"weight": packed})(Expected))
    assert_structural_equal(formed(Tied, raw=RAW), expected, map_free_vars=True)


def test_rows_of_a_table_on_two_kinds_of_devices():
    """Constant weights get a kernel; plain ops compute rows from bytes where the weights are a parameter."""
    tokens = np.array([[0, 39], [17, 17], [32, 31]], "int32")
    numbers = dequantize_rows(RAW, block_format("q5_0"), K).astype("float64")
    want = np.maximum(numbers[tokens], 0) @ numbers.T
    bound = rh.compile(relax.transform.BindParams("main", {"raw": RAW})(Tied))
    dispatches = [(call["ops"][0], call["precision"]) for call in bound.metadata.fusions["dispatches"]]
    assert ("block_rows" in dict(dispatches)) and ("block_matmul", "q5_0*f32") in dispatches
    np.testing.assert_allclose(rh.vm.VirtualMachine(bound)["main"](tokens).numpy(), want, rtol=1e-5, atol=1e-4)
    got = rh.vm.VirtualMachine(rh.compile(Tied))["main"](tokens, RAW).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


GPU_AND_CPU = [V4, {"kind": "cuda", "arch": "sm_90a"}]


@ir_module(*GPU_AND_CPU)
def Streamed(
    x: R.Tensor((64, 1, 1, 256), "float32", "cuda"),
    ids: R.Tensor((64, 2), "int32", "cuda"),
    data: R.Tensor((96, 144), "uint8", "llvm"),
):
    with R.dataflow():
        w: R.Tensor((96, 256), "float32", "llvm") = R.hetero.dequantize_blocks(data, depth=256, format="q4_k")
        moved: R.Tensor((96, 256), "float32", "cuda") = R.to_vdevice(w, "cuda")
        copied: R.Tensor((96, 256), "float32", "cuda") = R.hetero.stream(moved, ids)
        table = R.reshape(copied, (3, 32, 256))
        taken = R.take(table, ids, axis=0)
        transposed = R.permute_dims(taken, [0, 1, 3, 2])
        y = R.matmul(x, transposed)
        R.output(y)
    return y


@ir_module(*GPU_AND_CPU)
def StreamedPanels(
    x: R.Tensor((64, 1, 1, 256), "float32", "cuda"),
    ids: R.Tensor((64, 2), "int32", "cuda"),
    panels: R.Tensor((3, 4736), "uint8", "llvm"),
):
    with R.dataflow():
        copied: R.Tensor((3, 4736), "uint8", "cuda") = R.hetero.stream(panels, ids)
        words: R.Tensor((6, 4, 32, 4), "int32", "cuda") = R.hetero.panel_fragments(
            copied, columns=32, depth=256, experts=3, format="q4_k"
        )
        scales: R.Tensor((6, 8, 8, 4), "int8", "cuda") = R.hetero.panel_fragments(
            copied, columns=32, depth=256, experts=3, format="q4_k", part=1
        )
        factors: R.Tensor((6, 1, 8, 4), "float16", "cuda") = R.hetero.panel_fragments(
            copied, columns=32, depth=256, experts=3, format="q4_k", part=2
        )
        y: R.Tensor((64, 2, 1, 32), "float32", "cuda") = R.hetero.block_matmul(
            x, words, scales, factors, ids, columns=32, experts=3, format="q4_k"
        )
        R.output(y)
    return y


def test_experts_of_a_cpu_on_a_gpu():
    """The CPU's own constant crosses in each call, and becomes fragments."""
    rows = random_rows("q4_k", 96, 256)
    after = formed(Streamed, data=rows)
    (packed,) = Panels(32).pack(BlockSource((rows,), block_format("q4_k"), 256), 3)
    func = StreamedPanels["main"]
    constant = GenericConst(tvm.runtime.tensor(packed), func.params[2].ty)  # which stays on the CPU
    body = structural_map(func.body, (relax.Var, lambda var: constant if var.same_as(func.params[2]) else var))
    expected = relax.Function(func.params[:2], body, func.ret_ty, attrs=after["main"].attrs)
    assert_structural_equal(after["main"], expected)
