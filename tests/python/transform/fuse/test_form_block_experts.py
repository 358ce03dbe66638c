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
from relax_hetero.transform import FormQuantizedMatmuls, RealizeVDevice
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
