"""FormQuantizedMatmuls: rows that choose their matrices keep these in blocks; other forms use unpacked numbers."""

import numpy as np
import pytest
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from encoding.random_blocks import random_rows
from modules import check_pass, ir_module, ops_of
from relax_hetero.encoding.block_formats import block_format, dequantize_rows
from relax_hetero.encoding.block_panels import BlockSource, Panels
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.op.quantized_matmul import BLOCK_MATMUL
from relax_hetero.transform import FormQuantizedMatmuls, RealizeVDevice
from relax_hetero.transform.fuse import block_products
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from seeds import fresh_rng

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
EXPERTS, N, K = 3, 40, 64
RAW = random_rows("q5_0", EXPERTS * N, K)
NUMBERS = dequantize_rows(RAW, block_format("q5_0"), K).astype("float64").reshape(EXPERTS, N, K)


def bound(mod, **values):
    return relax.transform.BindParams("main", values)(mod)


@ir_module(V4)
def Chosen(
    x: R.Tensor(("m", 1, 1, 64), "float32"),
    index: R.Tensor(("m", 2), "int32"),
    factor: R.Tensor(("m", 2, 1, 40), "float32"),
    raw: R.Tensor((120, 44), "uint8"),
):
    with R.dataflow():
        w = R.hetero.dequantize_blocks(raw, depth=64, format="q5_0")
        table = R.reshape(w, R.shape([3, 40, 64]))
        taken = R.take(table, index, axis=0)
        turned = R.permute_dims(taken, axes=[0, 1, 3, 2])
        product = R.matmul(x, turned)
        active = R.nn.silu(product)
        y = R.multiply(active, factor)
        R.output(y)
    return y


@ir_module(V4)
def MayBeOutside(
    x: R.Tensor(("m", 1, 1, 64), "float32"), index: R.Tensor(("m", 2), "int32"), raw: R.Tensor((120, 44), "uint8")
):
    with R.dataflow():
        table = R.reshape(R.hetero.dequantize_blocks(raw, depth=64, format="q5_0"), R.shape([3, 40, 64]))
        y = R.matmul(x, R.permute_dims(R.take(table, index, axis=0, mode="nan"), axes=[0, 1, 3, 2]))
        z = R.matmul(x, R.permute_dims(R.take(table, index, axis=0, mode="clip"), axes=[0, 1, 3, 2]))
        R.output(y, z)
    return y, z


def test_rows_without_a_matrix_are_left_out():
    """Rows of negative indices, if they are NaN, may have any numbers; clamped indices are not those of the op."""
    mod = RealizeVDevice()(bound(MayBeOutside, raw=RAW))
    assert ops_of(FormQuantizedMatmuls()(mod)).count("relax.hetero.block_matmul") == 1
    x, index = fresh_rng().standard_normal((2, 1, 1, K), "float32"), np.array([[2, -1], [0, 1]], "int32")
    left_out, clamped = rh.vm.VirtualMachine(rh.compile(mod))["main"](x, index)
    sums = np.einsum("tk,tunk->tun", x[:, 0, 0].astype("float64"), NUMBERS[np.maximum(index, 0)])[:, :, None]
    np.testing.assert_allclose(clamped.numpy(), sums, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(left_out.numpy()[index >= 0], sums[index >= 0], rtol=1e-4, atol=1e-4)


def test_rows_by_the_matrices_that_they_choose():
    @ir_module(V4)
    def Expected(
        x: R.Tensor(("m", 1, 1, 64), "float32"),
        index: R.Tensor(("m", 2), "int32"),
        factor: R.Tensor(("m", 2, 1, 40), "float32"),
        weight: R.Tensor((6, 1408), "uint8"),
    ):
        with R.dataflow():
            y = R.hetero.block_matmul(
                x,
                weight,
                index,
                factor,
                columns=40,
                expression="multiply(silu(x0), x1)",
                format="q5_0",
                experts=3,
            )
            R.output(y)
        return y

    packed = Panels(32).pack(BlockSource((RAW,), block_format("q5_0"), K), EXPERTS)[0]
    placed = RealizeVDevice()(bound(Chosen, raw=RAW))
    check_pass(FormQuantizedMatmuls(), placed, RealizeVDevice()(bound(Expected, weight=packed)), map_free_vars=True)


GPU = {"kind": "cuda", "arch": "sm_90a"}


@ir_module(GPU)
def Whole(x: R.Tensor((4, 1, 1, 64), "float32"), index: R.Tensor((4, 2), "int32"), raw: R.Tensor((144, 68), "uint8")):
    with R.dataflow():
        table = R.reshape(R.hetero.dequantize_blocks(raw, depth=64, format="q8_0"), R.shape([3, 48, 64]))
        y = R.matmul(x, R.permute_dims(R.take(table, index, axis=0), axes=[0, 1, 3, 2]))
        R.output(y)
    return y


@ir_module(GPU)
def Ragged(x: R.Tensor((4, 1, 1, 64), "float32"), index: R.Tensor((4, 2), "int32"), raw: R.Tensor((120, 68), "uint8")):
    with R.dataflow():
        table = R.reshape(R.hetero.dequantize_blocks(raw, depth=64, format="q8_0"), R.shape([3, 40, 64]))
        y = R.matmul(x, R.permute_dims(R.take(table, index, axis=0), axes=[0, 1, 3, 2]))
        R.output(y)
    return y


@pytest.mark.parametrize(("module", "rows", "is_formed"), [(Whole, 144, True), (Ragged, 120, False)])
def test_matrices_of_whole_fragments_stay_in_bits_on_gpus(module, rows, is_formed):
    after = FormQuantizedMatmuls()(RealizeVDevice()(bound(module, raw=random_rows("q8_0", rows, K))))
    assert ("relax.hetero.block_matmul" in ops_of(after)) == is_formed


GATE, UP, DOWN = (random_rows("q8_0", 3 * 64, K, seed) for seed in (3, 4, 5))


@ir_module(GPU)
def Layer(
    x: R.Tensor((2, 64), "float32"),
    index: R.Tensor((2, 2), "int32"),
    shares: R.Tensor((2, 2), "float32"),
    residual: R.Tensor((2, 64), "float32"),
    gate: R.Tensor((192, 68), "uint8"),
    up: R.Tensor((192, 68), "uint8"),
    down: R.Tensor((192, 68), "uint8"),
):
    with R.dataflow():
        wide = R.astype(R.reshape(R.astype(x, "float16"), R.shape([2, 1, 1, 64])), "float32")
        gates = R.reshape(R.hetero.dequantize_blocks(gate, depth=64, format="q8_0"), R.shape([3, 64, 64]))
        gate_rows = R.matmul(wide, R.permute_dims(R.take(gates, index, axis=0), axes=[0, 1, 3, 2]))
        active = R.nn.silu(gate_rows)
        ups = R.reshape(R.hetero.dequantize_blocks(up, depth=64, format="q8_0"), R.shape([3, 64, 64]))
        up_rows = R.matmul(wide, R.permute_dims(R.take(ups, index, axis=0), axes=[0, 1, 3, 2]))
        gated = R.multiply(active, up_rows)
        narrow = R.astype(gated, "float16")
        again = R.astype(narrow, "float32")
        downs = R.reshape(R.hetero.dequantize_blocks(down, depth=64, format="q8_0"), R.shape([3, 64, 64]))
        down_rows = R.matmul(again, R.permute_dims(R.take(downs, index, axis=0), axes=[0, 1, 3, 2]))
        flat = R.reshape(down_rows, R.shape([2, 2, 64]))
        weighted = R.multiply(flat, R.reshape(shares, R.shape([2, 2, 1])))
        total = R.sum(weighted, axis=[1])
        y = R.add(residual, total)
        R.output(y)
    return y


WEIGHTS_OF_LAYER = {"gate": GATE, "up": UP, "down": DOWN}


def test_a_layer_of_few_rows_is_two_products_on_gpus():
    @ir_module(GPU)
    def Expected(
        x: R.Tensor((2, 64), "float32"),
        index: R.Tensor((2, 2), "int32"),
        shares: R.Tensor((2, 2), "float32"),
        residual: R.Tensor((2, 64), "float32"),
        gate: R.Tensor((12, 2, 32, 4), "int32"),
        gate_scales: R.Tensor((12, 2, 8, 2), "float16"),
        up: R.Tensor((12, 2, 32, 4), "int32"),
        up_scales: R.Tensor((12, 2, 8, 2), "float16"),
        down: R.Tensor((12, 2, 32, 4), "int32"),
        down_scales: R.Tensor((12, 2, 8, 2), "float16"),
    ):
        with R.dataflow():
            rows = R.reshape(x, R.shape([2, 1, 1, 64]))
            narrow = R.hetero.block_matmul(
                rows,
                gate,
                gate_scales,
                up,
                up_scales,
                index,
                columns=64,
                expression='cast(multiply(silu(x0), x1), "float16")',
                format="q8_0",
                experts=3,
                products=2,
                rounded="float16",
            )
            y = R.hetero.block_matmul(
                narrow,
                down,
                down_scales,
                index,
                shares,
                residual,
                columns=64,
                expression="add(x1, x0)",
                format="q8_0",
                experts=3,
                shares=True,
            )
            R.output(y)
        return y

    packed = {}
    for name, raw in WEIGHTS_OF_LAYER.items():
        arrays = Fragments().pack(BlockSource((raw,), block_format("q8_0"), K), 3)
        packed |= {name: arrays[0], f"{name}_scales": arrays[1]}
    placed = RealizeVDevice()(bound(Layer, **WEIGHTS_OF_LAYER))
    after = FormQuantizedMatmuls()(placed)
    check_pass(FormQuantizedMatmuls(), placed, RealizeVDevice()(bound(Expected, **packed)), map_free_vars=True)
    assert FormQuantizedMatmuls()(after).same_as(after)


@ir_module(GPU)
def Clamped(
    x: R.Tensor((2, 1, 1, 64), "float16"),
    index: R.Tensor((2, 2), "int32"),
    bias: R.Tensor((3, 64), "float32"),
    gate: R.Tensor((192, 68), "uint8"),
):
    with R.dataflow():
        gates = R.reshape(R.hetero.dequantize_blocks(gate, depth=64, format="q8_0"), R.shape([3, 64, 64]))
        rows = R.matmul(R.astype(x, "float32"), R.permute_dims(R.take(gates, index, axis=0), axes=[0, 1, 3, 2]))
        biased = R.add(rows, R.reshape(R.take(bias, index, axis=0), R.shape([2, 2, 1, 64])))
        clamped = R.minimum(biased, R.const(7.0, "float32"))
        sigmoid = R.sigmoid(R.multiply(clamped, R.const(2.0, "float32")))
        y = R.multiply(clamped, sigmoid)
        R.output(y)
    return y


def test_biases_of_experts_and_values_that_join():
    @ir_module(GPU)
    def Expected(
        x: R.Tensor((2, 1, 1, 64), "float16"),
        index: R.Tensor((2, 2), "int32"),
        bias: R.Tensor((3, 64), "float32"),
        gate: R.Tensor((12, 2, 32, 4), "int32"),
        scales: R.Tensor((12, 2, 8, 2), "float16"),
    ):
        with R.dataflow():
            y = R.hetero.block_matmul(
                x,
                gate,
                scales,
                index,
                bias,
                columns=64,
                expression="multiply(minimum(x0, 7.0), sigmoid(multiply(minimum(x0, 7.0), 2.0)))",
                format="q8_0",
                experts=3,
                biases=True,
            )
            R.output(y)
        return y

    gate, scales = Fragments().pack(BlockSource((GATE,), block_format("q8_0"), K), 3)
    placed = RealizeVDevice()(bound(Clamped, gate=GATE))
    expected = RealizeVDevice()(bound(Expected, gate=gate, scales=scales))
    check_pass(FormQuantizedMatmuls(), placed, expected, map_free_vars=True)


def counts_of(mod):
    """Products and shares of a module's calls of block_matmul."""
    calls = (binding.value for binding in walk_bindings(FormQuantizedMatmuls()(mod)["main"]))
    attributes = [call.attrs for call in calls if op_name(call) == BLOCK_MATMUL]
    return [(int(attrs.products), bool(attrs.shares)) for attrs in attributes]


def test_products_of_many_rows_stay_apart(monkeypatch):
    placed = RealizeVDevice()(bound(Layer, **WEIGHTS_OF_LAYER))
    assert counts_of(placed) == [(2, False), (1, True)]
    monkeypatch.setattr(block_products, "MAX_SUMMED_EXPERTS", 1)
    assert counts_of(placed) == [(1, False)] * 3
    monkeypatch.setattr(block_products, "MAX_FUSED_PAIRS", 3)
    assert counts_of(placed) == [(1, False)] * 3


@ir_module(GPU)
def Apart(
    x: R.Tensor((2, 1, 1, 64), "float16"),
    z: R.Tensor((2, 1, 1, 64), "float16"),
    index: R.Tensor((2, 2), "int32"),
    shares: R.Tensor((2, 2), "float32"),
    gate: R.Tensor((192, 68), "uint8"),
    up: R.Tensor((192, 68), "uint8"),
):
    with R.dataflow():
        gates = R.reshape(R.hetero.dequantize_blocks(gate, depth=64, format="q8_0"), R.shape([3, 64, 64]))
        of_x = R.matmul(R.astype(x, "float32"), R.permute_dims(R.take(gates, index, axis=0), axes=[0, 1, 3, 2]))
        ups = R.reshape(R.hetero.dequantize_blocks(up, depth=64, format="q8_0"), R.shape([3, 64, 64]))
        of_z = R.matmul(R.astype(z, "float32"), R.permute_dims(R.take(ups, index, axis=0), axes=[0, 1, 3, 2]))
        product = R.multiply(of_x, of_z)
        of_columns = R.sum(R.multiply(R.reshape(product, R.shape([2, 2, 64])), R.reshape(shares, (2, 2, 1))), axis=[2])
        y = (of_columns, product)
        R.output(y)
    return y


def test_products_of_other_rows_and_other_sums_stay_apart():
    assert counts_of(RealizeVDevice()(bound(Apart, gate=GATE, up=UP))) == [(1, False)] * 2


@ir_module(GPU)
def LeftOut(
    x: R.Tensor((2, 2, 1, 64), "float16"),
    index: R.Tensor((2, 2), "int32"),
    shares: R.Tensor((2, 2), "float32"),
    gate: R.Tensor((192, 68), "uint8"),
):
    with R.dataflow():
        table = R.reshape(R.hetero.dequantize_blocks(gate, depth=64, format="q8_0"), R.shape([3, 64, 64]))
        taken = R.take(table, index, axis=0, mode="nan")
        product = R.matmul(R.astype(x, "float32"), R.permute_dims(taken, axes=[0, 1, 3, 2]))
        weighted = R.multiply(R.reshape(product, R.shape([2, 2, 64])), R.reshape(shares, R.shape([2, 2, 1])))
        is_own = R.expand_dims(R.greater_equal(index, R.const(0, "int32")), axis=2)
        y = R.sum(R.where(is_own, weighted, R.const(0, "float32")), axis=[1])
        R.output(y)
    return y


@ir_module(GPU)
def Replaced(
    x: R.Tensor((2, 2, 1, 64), "float16"),
    index: R.Tensor((2, 2), "int32"),
    shares: R.Tensor((2, 2), "float32"),
    gate: R.Tensor((192, 68), "uint8"),
):
    with R.dataflow():
        table = R.reshape(R.hetero.dequantize_blocks(gate, depth=64, format="q8_0"), R.shape([3, 64, 64]))
        taken = R.take(table, index, axis=0, mode="nan")
        product = R.matmul(R.astype(x, "float32"), R.permute_dims(taken, axes=[0, 1, 3, 2]))
        weighted = R.multiply(R.reshape(product, R.shape([2, 2, 64])), R.reshape(shares, R.shape([2, 2, 1])))
        is_own = R.expand_dims(R.greater_equal(index, R.const(0, "int32")), axis=2)
        y = R.sum(R.where(is_own, weighted, R.const(1, "float32")), axis=[1])
        R.output(y)
    return y


def test_weighted_sums_leave_out_rows_of_negative_indices():
    """As a sum does that puts 0 for them, but no other number."""

    @ir_module(GPU)
    def Expected(
        x: R.Tensor((2, 2, 1, 64), "float16"),
        index: R.Tensor((2, 2), "int32"),
        shares: R.Tensor((2, 2), "float32"),
        gate: R.Tensor((12, 2, 32, 4), "int32"),
        scales: R.Tensor((12, 2, 8, 2), "float16"),
    ):
        with R.dataflow():
            mask = R.greater_equal(index, R.const(0, "int32"))  # unused from here on
            is_own = R.expand_dims(mask, axis=2)  # noqa: F841
            y = R.hetero.block_matmul(x, gate, scales, index, shares, columns=64, format="q8_0", experts=3, shares=True)
            R.output(y)
        return y

    gate, scales = Fragments().pack(BlockSource((GATE,), block_format("q8_0"), K), 3)
    placed = RealizeVDevice()(bound(LeftOut, gate=GATE))
    expected = RealizeVDevice()(bound(Expected, gate=gate, scales=scales))
    check_pass(FormQuantizedMatmuls(), placed, expected, map_free_vars=True)
    assert counts_of(RealizeVDevice()(bound(Replaced, gate=GATE))) == [(1, False)]


@pytest.mark.parametrize("is_constant", [True, False])
def test_numbers_of_both_forms(is_constant):
    """Constant weights get a kernel; weights that are a parameter get plain ops."""
    rng = fresh_rng()
    x, factor = rng.standard_normal((5, 1, 1, K), "float32"), rng.standard_normal((5, 2, 1, N), "float32")
    index = rng.integers(0, EXPERTS, (5, 2)).astype("int32")
    sums = np.einsum("tk,tunk->tun", x[:, 0, 0].astype("float64"), NUMBERS[index])[:, :, None]
    executable = rh.compile(bound(Chosen, raw=RAW) if is_constant else Chosen)
    precisions = {call["precision"] for call in executable.metadata.fusions["dispatches"]}
    assert ("q5_0*f32" in precisions) == is_constant
    arguments = (x, index, factor) if is_constant else (x, index, factor, RAW)
    actual = rh.vm.VirtualMachine(executable)["main"](*arguments).numpy()
    np.testing.assert_allclose(actual, sums / (1 + np.exp(-sums)) * factor, rtol=1e-4, atol=1e-4)


# Products that nearly match: matrices not transposed, tables cut otherwise, rows of another rank.
@ir_module(V4)
def Others(
    x: R.Tensor((5, 1, 1, 40), "float32"),
    z: R.Tensor((5, 1, 1, 128), "float32"),
    index: R.Tensor((5, 2), "int32"),
    raw: R.Tensor((120, 44), "uint8"),
):
    with R.dataflow():
        w = R.hetero.dequantize_blocks(raw, depth=64, format="q5_0")
        table = R.reshape(w, R.shape([3, 40, 64]))
        as_they_lie = R.matmul(x, R.take(table, index, axis=0))
        wide = R.reshape(w, R.shape([3, 20, 128]))
        cut = R.matmul(z, R.permute_dims(R.take(wide, index, axis=0), axes=[0, 1, 3, 2]))
        along = R.take(R.reshape(w, R.shape([40, 3, 64])), index, axis=1)
        y = (as_they_lie, cut, along)
        R.output(y)
    return y


def test_other_products_unpack_their_weights():
    after = FormQuantizedMatmuls()(RealizeVDevice()(bound(Others, raw=RAW)))
    ops = set(ops_of(after))
    assert not any(name and "hetero" in name for name in ops)
