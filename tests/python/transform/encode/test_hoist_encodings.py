"""HoistEncodings: constants are packed at compile time, once each, and their sources go."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm_ffi import structural_walk

from modules import ir_module
from relax_hetero.encoding import PackedLayout
from relax_hetero.target.vdevice import device_name, vdevices_of
from relax_hetero.transform import HoistEncodings, RealizeVDevice, SpecializeEncodings
from relax_hetero.transform.ir.rewriting import walk_bindings
from transform.toy_resolvers import PANELS, TILES, toy_resolvers

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}
_SIZES = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=5, n=7, k=3>"
LHS, RHS, OUT = (f"matmul[{i}]{_SIZES}" for i in range(3))
ROWS = "identity<2>"
W = np.random.default_rng(1).standard_normal((3, 7)).astype("float32")


@pytest.fixture(autouse=True)
def toys():
    with toy_resolvers() as resolvers:
        yield resolvers


def bound(mod, **weights):
    """`mod` placed and specialized, with weights as constants."""
    return SpecializeEncodings()(RealizeVDevice()(relax.transform.BindParams("main", weights)(mod)))


def constants(mod):
    """Every tensor constant with its device, in order."""
    pairs = []
    vdevices = vdevices_of(mod)

    def add(constant):
        pairs.append((constant.value, device_name(constant.ty.vdevice, vdevices)))

    for gv in sorted(mod.functions, key=lambda gv: gv.name_hint):
        structural_walk(mod.functions[gv], (tvm.ir.GenericConst, add))
    return pairs


def test_a_weight_is_packed_and_its_source_goes():
    @ir_module(V4)
    def Before(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((3, 7), "float32", "llvm:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            w1 = R.hetero.set_encoding(w, RHS)
            c = R.hetero.matmul(x1, w1, encoding=OUT)
            y = R.hetero.unset_encoding(c, OUT)
            R.output(y)
        return y

    @ir_module(V4)
    def Expected(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((2, 3, 4), "float32", "llvm:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            w1 = R.hetero.prepacked(w, "3x7", RHS, layout=str(PANELS))
            c = R.hetero.matmul(x1, w1, encoding=OUT, layout=ROWS, kernel="matmul_5x7x3_llvm_0")
            y = R.hetero.unset_encoding(c, OUT, layout=ROWS)
            R.output(y)
        return y

    after = HoistEncodings()(bound(Before, w=W))
    assert_structural_equal(
        after, RealizeVDevice()(relax.transform.BindParams("main", {"w": PANELS.pack(W)})(Expected))
    )
    assert HoistEncodings()(after).same_as(after)
    ((packed, device),) = constants(after)
    assert device == "llvm:0"
    np.testing.assert_array_equal(PANELS.unpack(packed.numpy(), (3, 7)), W)


def test_one_copy_per_constant_device_and_layout():
    """Three users of one weight: two on devices of equal layouts share the bytes, the third has its own."""

    @ir_module(V4, (V2, 1), "c:2")
    def Mod(
        x: R.Tensor((5, 3), "float32", "llvm:0"),
        y: R.Tensor((5, 3), "float32", "llvm:1"),
        z: R.Tensor((5, 3), "float32", "c:0"),
        w: R.Tensor((3, 7), "float32"),
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            xw = R.hetero.set_encoding(w, RHS)
            x2 = R.hetero.unset_encoding(R.hetero.matmul(x1, xw, encoding=OUT), OUT)
            xv = R.hetero.set_encoding(w, RHS)
            x3 = R.hetero.unset_encoding(R.hetero.matmul(x1, xv, encoding=OUT), OUT)
            y1 = R.hetero.set_encoding(y, LHS)
            yw = R.hetero.set_encoding(w, RHS)
            y2 = R.hetero.unset_encoding(R.hetero.matmul(y1, yw, encoding=OUT), OUT)
            z1 = R.hetero.set_encoding(z, LHS)
            zw = R.hetero.set_encoding(w, RHS)
            z2 = R.hetero.unset_encoding(R.hetero.matmul(z1, zw, encoding=OUT), OUT)
            R.output(x2, x3, y2, z2)
        return (x2, x3, y2, z2)

    after = HoistEncodings()(bound(Mod, w=W))
    copies = constants(after)
    assert [device for _, device in copies] == ["llvm:0", "llvm:0", "llvm:1", "c:0"]
    tensors = [tensor for tensor, _ in copies]
    assert tensors[1].same_as(tensors[0]) and tensors[2].same_as(tensors[0])
    np.testing.assert_array_equal(tensors[0].numpy(), PANELS.pack(W))
    np.testing.assert_array_equal(tensors[3].numpy(), TILES[1].pack(W))


def test_functions_share_what_is_packed():
    @ir_module("c")
    def Mod(x: R.Tensor((5, 3), "float32", "c:0"), w: R.Tensor((3, 7), "float32", "c:0")):
        x1 = R.hetero.set_encoding(x, LHS)
        w1 = R.hetero.set_encoding(w, RHS)
        y = R.hetero.unset_encoding(R.hetero.matmul(x1, w1, encoding=OUT), OUT)
        return y

    mod = bound(Mod, w=W)
    mod["other"] = mod["main"].with_attr("global_symbol", "other")
    tensors = [tensor for tensor, _ in constants(HoistEncodings()(mod))]
    assert len(tensors) == 2 and tensors[0].same_as(tensors[1])


def test_a_source_with_another_use_stays():
    @ir_module("c")
    def Mod(x: R.Tensor((5, 3), "float32", "c:0"), w: R.Tensor((3, 7), "float32", "c:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            w1 = R.hetero.set_encoding(w, RHS)
            c = R.hetero.unset_encoding(R.hetero.matmul(x1, w1, encoding=OUT), OUT)
            e: R.Tensor((3, 7), "float32", "c:0") = R.exp(w)
            R.output(c, e)
        return (c, e)

    shapes = [tuple(tensor.shape) for tensor, _ in constants(HoistEncodings()(bound(Mod, w=W)))]
    assert shapes == [(4, 3, 2), (3, 7)]


def test_ops_between_a_constant_and_its_encoding_are_folded():
    """A transpose and a cast before the encoding, and a transfer and a relayout after it, happen at compile time."""

    @ir_module(V4, "c:1")
    def Mod(x: R.Tensor((5, 3), "float32", "c:0"), w: R.Tensor((7, 3), "float16", "llvm:0")):
        with R.dataflow():
            wt: R.Tensor((3, 7), "float16", "llvm:0") = R.permute_dims(w)
            wf: R.Tensor((3, 7), "float32", "llvm:0") = R.astype(wt, "float32")
            w1 = R.hetero.set_encoding(wf, RHS)
            w2 = R.to_vdevice(w1, "c:0")
            x1 = R.hetero.set_encoding(x, LHS)
            c = R.hetero.matmul(x1, w2, encoding=OUT)
            y = R.hetero.unset_encoding(c, OUT)
            R.output(y)
        return y

    half = W.T.astype("float16")
    after = HoistEncodings()(bound(Mod, w=half))
    ((packed, device),) = constants(after)
    assert device == "c:0"
    np.testing.assert_array_equal(packed.numpy(), TILES[1].pack(half.T.astype("float32")))
    assert [b.var.name for b in walk_bindings(after["main"])] == ["w2", "x1", "c", "y"]


def test_row_major_constants_are_left_alone():
    @ir_module(V4)
    def Mod(w: R.Tensor((5, 3), "float32", "llvm:0"), x: R.Tensor((3, 7), "float32", "llvm:0")):
        with R.dataflow():
            w1 = R.hetero.set_encoding(w, LHS)
            x1 = R.hetero.set_encoding(x, RHS)
            y = R.hetero.unset_encoding(R.hetero.matmul(w1, x1, encoding=OUT), OUT)
            R.output(y)
        return y

    mod = bound(Mod, w=np.zeros((5, 3), "float32"))
    assert HoistEncodings()(mod).same_as(mod)


_TYPED = """
@I.ir_module
class Mod:
    I.module_global_infos({{"vdevice": [I.vdevice("c", 0)]}})

    @R.function
    def main(x: R.Tensor((5, 3), "{dtype}", "c:0"), w: R.Tensor((3, 7), "{dtype}", "c:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, "matmul[0]{sizes}")
            w1 = R.hetero.set_encoding(w, "matmul[1]{sizes}")
            y = R.hetero.unset_encoding(R.hetero.matmul(x1, w1, encoding="matmul[2]{sizes}"), "matmul[2]{sizes}")
            R.output(y)
        return y
"""


@pytest.mark.parametrize(("dtype", "accumulator"), [("int8", "int32"), ("bfloat16", "float32"), ("float64", "float64")])
def test_element_types(toys, dtype, accumulator):
    layout = PackedLayout((1, 0), (1, 0), (4, 4), compensation=dtype == "int8")
    toys["c"]._layouts = (PackedLayout.identity(2), layout, PackedLayout.identity(2))
    sizes = _SIZES.replace("float32 * float32 -> float32", f"{dtype} * {dtype} -> {accumulator}")
    mod = tvm.script.from_source(_TYPED.format(dtype=dtype, sizes=sizes))
    weight = np.arange(-10, 11).reshape(3, 7).astype(getattr(ml_dtypes, dtype, dtype))
    ((packed, _),) = constants(HoistEncodings()(bound(mod, w=weight)))
    assert packed.dtype == dtype
    np.testing.assert_array_equal(packed.numpy(), layout.pack(weight))
