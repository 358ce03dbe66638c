"""Convolutions from SetEncoding to a kernel call: each pass on a residual block, and what stays a stock op."""

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from modules import calls_of, ir_module
from relax_hetero.encoding import PackedLayout
from relax_hetero.op.encoded import CONV, SET
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform import (
    HoistEncodings,
    MaterializeEncodings,
    PropagateEncodings,
    SetEncoding,
    SpecializeEncodings,
    collect_encodings,
    collect_fusions,
)
from relax_hetero.transform.encode.set_encoding import set_encoding
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from transform.interpreting import run
from transform.reference_convolution import NHWC, reference_resolver

WIDE = (
    "<float32 * float32 -> float32; (b, c, x0, x1) * (n, k, w0, w1) -> (b, n, y0, y1); b=1, c=8, x0=5, x1=7, n=8, "
    "k=8, w0=3, w1=3, y0=5, y1=7; strides=1x1, padding=1x1x1x1, dilation=1x1, groups=1>"
)
STEEP = (
    "<float32 * float32 -> float32; (b, c, x0, x1) * (n, k, w0, w1) -> (b, n, y0, y1); b=1, c=8, x0=5, x1=7, n=8, "
    "k=4, w0=3, w1=1, y0=2, y1=4; strides=2x2, padding=1x0x0x0, dilation=1x1, groups=2>"
)
LAST = "pack<outer=[0, 2, 3, 1] inner=[]>"
PANELS = "pack<outer=[0, 2, 3, 1] inner=[0:4]>"
FOUR = PackedLayout((0, 2, 3, 1), (0,), (4,))


@ir_module("llvm")
def Residual(
    x: R.Tensor((1, 8, 5, 7), "float32", "llvm"),
    w: R.Tensor((8, 8, 3, 3), "float32", "llvm"),
    bias: R.Tensor((1, 8, 1, 1), "float32", "llvm"),
):
    with R.dataflow():
        y: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
        z: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.add(y, bias)
        s: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.add(z, x)
        r: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.nn.relu(s)
        R.output(r)
    return r


@ir_module("llvm")
def Set(
    x: R.Tensor((1, 8, 5, 7), "float32", "llvm"),
    w: R.Tensor((8, 8, 3, 3), "float32", "llvm"),
    bias: R.Tensor((1, 8, 1, 1), "float32", "llvm"),
):
    with R.dataflow():
        data: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.set_encoding(x, "conv2d[0]" + WIDE)
        weight: R.Tensor((8, 8, 3, 3), "float32", "llvm") = R.hetero.set_encoding(w, "conv2d[1]" + WIDE)
        out: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.conv(data, weight, encoding="conv2d[2]" + WIDE)
        y: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.unset_encoding(out, "conv2d[2]" + WIDE)
        z: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.add(y, bias)
        s: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.add(z, x)
        r: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.nn.relu(s)
        R.output(r)
    return r


@ir_module("llvm")
def Propagated(
    x: R.Tensor((1, 8, 5, 7), "float32", "llvm"),
    w: R.Tensor((8, 8, 3, 3), "float32", "llvm"),
    bias: R.Tensor((1, 8, 1, 1), "float32", "llvm"),
):
    with R.dataflow():
        data: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.set_encoding(x, "conv2d[0]" + WIDE)
        weight: R.Tensor((8, 8, 3, 3), "float32", "llvm") = R.hetero.set_encoding(w, "conv2d[1]" + WIDE)
        out: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.conv(data, weight, encoding="conv2d[2]" + WIDE)
        x2: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.set_encoding(x, "conv2d[2]" + WIDE)
        e: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.elementwise(
            out, bias, x2, expression="relu(add(add(x0, x1), x2))", encoding="conv2d[2]" + WIDE
        )
        r: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.unset_encoding(e, "conv2d[2]" + WIDE)
        R.output(r)
    return r


@ir_module("llvm")
def Specialized(
    x: R.Tensor((1, 8, 5, 7), "float32", "llvm"),
    w: R.Tensor((8, 8, 3, 3), "float32", "llvm"),
    bias: R.Tensor((1, 8, 1, 1), "float32", "llvm"),
):
    with R.dataflow():
        data: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.set_encoding(x, "conv2d[0]" + WIDE, LAST)
        weight: R.Tensor((8, 8, 3, 3), "float32", "llvm") = R.hetero.set_encoding(w, "conv2d[1]" + WIDE, PANELS)
        out: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.conv(
            data, weight, encoding="conv2d[2]" + WIDE, layout=LAST, kernel="conv2d_1x8x5x7_8x3x3_llvm_0"
        )
        x2: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.set_encoding(x, "conv2d[2]" + WIDE, LAST)
        e: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.elementwise(
            out, bias, x2, expression="relu(add(add(x0, x1), x2))", encoding="conv2d[2]" + WIDE, layout=LAST
        )
        r: R.Tensor((1, 8, 5, 7), "float32", "llvm") = R.hetero.unset_encoding(e, "conv2d[2]" + WIDE, LAST)
        R.output(r)
    return r


def test_each_pass_on_a_residual_block():
    assert_structural_equal(SetEncoding()(Residual), Set)
    assert set_encoding(Set) is Set
    assert_structural_equal(PropagateEncodings()(Set), Propagated)
    with reference_resolver(NHWC, FOUR, NHWC):
        assert_structural_equal(SpecializeEncodings()(Propagated), Specialized)


def test_permutations_are_plain_ops_and_the_rest_one_kernel():
    with reference_resolver(NHWC, FOUR, NHWC) as resolver:
        mod = MaterializeEncodings()(Specialized)
    values = [binding.value for binding in walk_bindings(mod["main"])]
    names = [op_name(value) for value in values]
    assert names == [
        "relax.permute_dims",
        "relax.call_tir",
        "relax.permute_dims",
        "relax.call_tir",
        "relax.permute_dims",
    ]
    data, pack, residual, call, result = values
    assert data.attrs.axes == residual.attrs.axes == [0, 2, 3, 1] and result.attrs.axes == [0, 3, 1, 2]
    last = relax.TensorType([1, 5, 7, 8], "float32", mod.global_infos["vdevice"][0])
    assert_structural_equal(call.ty, last)
    assert_structural_equal(data.ty, last)
    assert pack.args[0].name_hint == "pack_8x8x3x3_llvm_0"
    assert call.args[0].name_hint == "conv2d_1x8x5x7_8x3x3_llvm_0_add_relu"
    assert list(mod[call.args[0]].attrs["relax_hetero.ops"]) == ["conv2d", "add", "relu"]
    (problem,) = resolver._solved
    assert [operand.index_map for operand in problem.epilogue.operands] == [
        ("b", "n", "1", "1"),
        ("b", "n", "y0", "y1"),
    ]
    assert problem.windows[0].before == problem.windows[1].after == 1


def test_a_constant_weight_is_packed_at_compile_time():
    weight = np.arange(8 * 8 * 9, dtype="float32").reshape(8, 8, 3, 3)
    mod = relax.transform.BindParams("main", {"w": weight})(Residual)
    mod = rh.transform.RealizeVDevice()(mod)
    with reference_resolver(NHWC, FOUR, NHWC):
        mod = SpecializeEncodings()(PropagateEncodings()(SetEncoding()(mod)))
        mod = MaterializeEncodings()(HoistEncodings()(mod))
    calls = calls_of("relax.call_tir", mod["main"])
    assert len(calls) == 1
    np.testing.assert_array_equal(calls[0].args[1].fields[1].value.numpy(), FOUR.pack(weight))


def convolution(data, weight, dtype="float32", **attrs):
    """A module that convolves tensors of two shapes."""
    names = {extent for extent in (*data, *weight) if isinstance(extent, str)}
    symbols = {name: tvm.tirx.Var(name, "int64") for name in names}
    params = [
        relax.Var(name, relax.TensorType([symbols.get(e, e) for e in shape], dtype))
        for name, shape in (("x", data), ("w", weight))
    ]
    builder = relax.BlockBuilder()
    make = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)[len(weight) - 3]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(make(*params, **attrs)))
        builder.emit_func_output(out)
    return builder.get()


def is_encoded(mod):
    return any(op_name(binding.value) == CONV for binding in walk_bindings(mod["main"]))


@pytest.mark.parametrize(
    "data, weight, attrs",
    [
        ((2, 3, 9), (4, 3, 3), {"strides": 2, "padding": [0, 1]}),
        ((2, 4, 9, 8), (6, 2, 3, 2), {"groups": 2, "dilation": 2}),
        ((1, 2, 4, 5, 6), (3, 2, 2, 1, 3), {"strides": [1, 2, 3], "padding": [0, 1, 2, 2, 1, 0]}),
        ((2, 9, 8, 4), (3, 2, 4, 6), {"data_layout": "NHWC", "kernel_layout": "HWIO"}),
        ((2, 4, 9, 8), (3, 2, 6, 4), {"kernel_layout": "HWOI", "out_layout": "NHWC"}),
        ((2, 9, 4), (3, 4, 6), {"data_layout": "NWC", "kernel_layout": "WIO", "out_layout": "NCW"}),
    ],
)
def test_every_form_is_the_same_convolution(data, weight, attrs):
    mod = convolution(data, weight, **attrs)
    after = SetEncoding()(mod)
    assert is_encoded(after)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype("float32") for shape in (data, weight)]
    np.testing.assert_allclose(run(after, *inputs), run(mod, *inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "data, weight, attrs, reason",
    [
        ((1, 4, 9, 8), (6, 4, 3, 3), {"dtype": "int32"}, "found element types"),
        ((1, 4, 9, 8), (6, 4, 3, 3), {"dtype": "int8"}, "found element types ('int8', 'int8', 'int8'), expected"),
        ((1, 4, 9, 8), (6, 4, 3, 3), {"out_dtype": "float16"}, "found element types"),
        ((1, "c", 9, 8), (6, "c", 3, 3), {}, "found channels (-1, -1, 6)"),
        ((0, 4, 9, 8), (6, 4, 3, 3), {}, "found an empty tensor"),
        ((1, 1, 9, 8, 4), (6, 4, 3, 3), {"data_layout": "NCHW4c"}, "found layouts ['NCHW4c', 'OIHW', 'NCHW4c']"),
    ],
)
def test_convolutions_that_stay_stock_ops(data, weight, attrs, reason):
    mod = convolution(data, weight, **attrs)
    with collect_fusions() as report:
        assert set_encoding(mod) is mod
    (declined,) = report.missed
    assert (declined.function, declined.op) == ("main", "conv2d") and declined.reason.startswith(reason)


@pytest.mark.parametrize("target, image", [({"kind": "cuda", "arch": "sm_90"}, "h"), ("c", "h"), ("c", 9)])
def test_without_a_layout_it_is_the_stock_op_again(target, image):
    mod = convolution((1, 4, image, 8), (6, 4, 3, 3), padding=[1, 0, 1, 2])
    mod = rh.transform.RealizeVDevice()(with_vdevices(mod, [rh.VDevice(target)]))
    with collect_encodings() as reports:
        after = SpecializeEncodings()(SetEncoding()(mod))
    assert_structural_equal(after, mod)
    assert [entry.op for entry in reports[0].cancelled] == ["conv2d"]


def test_images_of_unknown_size_have_a_layout_where_vectors_multiply_floats():
    mod = convolution((1, 4, "h", 8), (6, 4, 3, 3), padding=[1, 0, 1, 2])
    mod = rh.transform.RealizeVDevice()(with_vdevices(mod, [rh.VDevice("llvm")]))
    with collect_encodings() as reports:
        SpecializeEncodings()(SetEncoding()(mod))
    assert not reports[0].cancelled


# A convolution of halves that is rounded, and one of bytes.
@ir_module("c")
def Low(
    x: R.Tensor((1, 8, 5, 7), "bfloat16", "c"),
    w: R.Tensor((8, 8, 3, 3), "bfloat16", "c"),
    a: R.Tensor((1, 8, 5, 7), "uint8", "c"),
    b: R.Tensor((8, 8, 3, 3), "int8", "c"),
):
    with R.dataflow():
        y: R.Tensor((1, 8, 5, 7), "bfloat16", "c") = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
        s: R.Tensor((1, 8, 5, 7), "int32", "c") = R.nn.conv2d(a, b, padding=[1, 1, 1, 1], out_dtype="int32")
        R.output(y, s)
    return (y, s)


HALF, BYTE = (
    WIDE.replace("float32 * float32 -> float32", types)
    for types in ("bfloat16 * bfloat16 -> float32", "uint8 * int8 -> int32")
)


@ir_module("c")
def LowSet(
    x: R.Tensor((1, 8, 5, 7), "bfloat16", "c"),
    w: R.Tensor((8, 8, 3, 3), "bfloat16", "c"),
    a: R.Tensor((1, 8, 5, 7), "uint8", "c"),
    b: R.Tensor((8, 8, 3, 3), "int8", "c"),
):
    with R.dataflow():
        x0: R.Tensor((1, 8, 5, 7), "bfloat16", "c") = R.hetero.set_encoding(x, "conv2d[0]" + HALF)
        w0: R.Tensor((8, 8, 3, 3), "bfloat16", "c") = R.hetero.set_encoding(w, "conv2d[1]" + HALF)
        y0: R.Tensor((1, 8, 5, 7), "float32", "c") = R.hetero.conv(x0, w0, encoding="conv2d[2]" + HALF)
        y1: R.Tensor((1, 8, 5, 7), "float32", "c") = R.hetero.unset_encoding(y0, "conv2d[2]" + HALF)
        y: R.Tensor((1, 8, 5, 7), "bfloat16", "c") = R.astype(y1, "bfloat16")
        a0: R.Tensor((1, 8, 5, 7), "uint8", "c") = R.hetero.set_encoding(a, "conv2d[0]" + BYTE)
        b0: R.Tensor((8, 8, 3, 3), "int8", "c") = R.hetero.set_encoding(b, "conv2d[1]" + BYTE)
        s0: R.Tensor((1, 8, 5, 7), "int32", "c") = R.hetero.conv(a0, b0, encoding="conv2d[2]" + BYTE)
        s: R.Tensor((1, 8, 5, 7), "int32", "c") = R.hetero.unset_encoding(s0, "conv2d[2]" + BYTE)
        R.output(y, s)
    return (y, s)


@ir_module("c")
def LowStock(
    x: R.Tensor((1, 8, 5, 7), "bfloat16", "c"),
    w: R.Tensor((8, 8, 3, 3), "bfloat16", "c"),
    a: R.Tensor((1, 8, 5, 7), "uint8", "c"),
    b: R.Tensor((8, 8, 3, 3), "int8", "c"),
):
    with R.dataflow():
        y1: R.Tensor((1, 8, 5, 7), "float32", "c") = R.nn.conv2d(x, w, padding=[1, 1, 1, 1], out_dtype="float32")
        y: R.Tensor((1, 8, 5, 7), "bfloat16", "c") = R.astype(y1, "bfloat16")
        a0: R.Tensor((1, 8, 5, 7), "int32", "c") = R.astype(a, "int32")
        b0: R.Tensor((8, 8, 3, 3), "int32", "c") = R.astype(b, "int32")
        s: R.Tensor((1, 8, 5, 7), "int32", "c") = R.nn.conv2d(a0, b0, padding=[1, 1, 1, 1])
        R.output(y, s)
    return (y, s)


def test_low_precision_adds_up_in_more_bits():
    assert_structural_equal(SetEncoding()(Low), LowSet)
    assert_structural_equal(SpecializeEncodings()(LowSet), LowStock)


def test_the_report_names_convolutions():
    with reference_resolver(NHWC, FOUR, NHWC), collect_encodings() as reports:
        SpecializeEncodings()(Propagated)
    (entry,) = reports[0].ops
    assert (entry.op, entry.kernel, entry.epilogue) == (
        "conv2d", "conv2d_1x8x5x7_8x3x3_llvm_0", "relu(add(add(x0, x1), x2))"
    )  # fmt: skip
    assert [(operand.role, operand.packed) for operand in entry.operands] == [
        ("data", "as a permutation"), ("weight", "at run time"), ("x2", "as a permutation"), ("result", "by op")
    ]  # fmt: skip


@given(st.data())
def test_names_contain_unusual_attributes(data):
    strides = data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=2))
    mod = SetEncoding()(convolution((1, 4, 9, 9), (4, 2, 3, 3), strides=strides, dilation=2, groups=2))
    with reference_resolver(NHWC, FOUR, NHWC):
        mod = SpecializeEncodings()(mod)
    (kernel,) = (str(b.value.attrs.kernel) for b in walk_bindings(mod["main"]) if op_name(b.value) == CONV)
    stride = {(1, 1): "", (2, 2): "_s2"}.get(tuple(strides), f"_s{strides[0]}x{strides[1]}")
    assert kernel == f"conv2d_1x4x9x9_4x3x3{stride}_d2_g2_llvm"


def test_two_convolutions_of_one_tensor_lay_it_out_once():
    @ir_module()
    def Before(x: R.Tensor((1, 8, 5, 7), "float32"), w: R.Tensor((8, 4, 3, 1), "float32")):
        with R.dataflow():
            a = R.nn.conv2d(x, w, strides=2, padding=[1, 0, 0, 0], groups=2)
            b = R.nn.conv2d(x, w, strides=2, padding=[1, 0, 0, 0], groups=2)
            y = R.add(a, b)
            R.output(y)
        return y

    values = [binding.value for binding in walk_bindings(SetEncoding()(Before)["main"])]
    sets = [value for value in values if op_name(value) == SET]
    assert [value.attrs.encoding for value in sets] == [f"conv2d[{side}]{STEEP}" for side in (0, 1)]
