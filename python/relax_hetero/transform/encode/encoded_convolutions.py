"""Conversion of stock convolutions to convolutions on encoded operands, and back.

Before::

    y: R.Tensor((1, 128, 28, 28), "float32") = R.nn.conv2d(x, w, strides=[2, 2], padding=[1, 1, 1, 1])

After::

    data = R.hetero.set_encoding(x, "conv2d[0]<float32 * float32 -> float32; (b, c, x0, x1) * (n, k, w0, w1) -> ...>")
    weight = R.hetero.set_encoding(w, "conv2d[1]<...>")
    out = R.hetero.conv(data, weight, encoding="conv2d[2]<...>")
    y: R.Tensor((1, 128, 28, 28), "float32") = R.hetero.unset_encoding(out, "conv2d[2]<...>")

Encodings describe NCHW data and OIHW weights; other layouts of an op's attributes become permutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import relax, tirx

from ...encoding.encoding import CONVOLUTIONS, DEFAULT, DYNAMIC, LHS, RESULT, RHS, ConvAttrs, Encoding, conv_maps
from ...op import encoded as op
from ...target.element_types import TF32
from ..ir.blocks import shape_of, tensor_type
from ..ir.remarks import record_missed
from ..ir.rewriting import op_name
from .encoded_products import ProductWriter
from .replaced_bindings import Replacement

CONV_OPS = {f"relax.nn.{name}": spatial for spatial, name in enumerate(CONVOLUTIONS, 1)}
"""Number of spatial dimensions of each stock convolution."""

_SPATIAL = "DHW"
_ACCUMULATORS = {
    ("float32", "float32"): "float32",
    ("float64", "float64"): "float64",
    ("float16", "float16"): "float32",
    ("bfloat16", "bfloat16"): "float32",
    ("uint8", "int8"): "int32",
    ("int8", "int8"): "int32",
    ("int16", "int8"): "int32",
}
"""Type of the sums by types of data and weight. Halves are summed in float32, and rounded once at the end."""


class _Refused(Exception):
    """The reason why a convolution stays a stock op."""


def emit_convolution(
    writer: ProductWriter,  # collector of the bindings
    binding: relax.VarBinding,  # any binding
    function: str,  # name of the function, for missed-optimization remarks
    tf32: bool = False,  # whether operands of float32 may be rounded to 10 bits of fraction
    accuracy: str = DEFAULT,  # one of `ACCURACIES`
) -> bool:
    """Write a stock convolution on encoded operands.

    Returns whether it was written: the binding is a convolution of floats, of halves into float32, or of bytes and int8
    into int32, without tiles in its layouts, whose sizes provably fit.
    """
    spatial = CONV_OPS.get(op_name(binding.value) or "")
    if spatial is None:
        return False
    try:
        _emit(writer, binding, spatial, tf32, accuracy)
    except _Refused as refused:
        record_missed(function, binding.var.name, CONVOLUTIONS[spatial - 1], str(refused))
        return False
    return True


def _emit(writer: ProductWriter, binding: relax.VarBinding, spatial: int, tf32: bool, accuracy: str) -> None:
    var, call = binding.var, binding.value
    attrs, (data, weight) = call.attrs, call.args
    letters = _SPATIAL[-spatial:]
    layouts = [str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout or attrs.data_layout)]
    canonical = [f"NC{letters}", f"OI{letters}", f"NC{letters}"]
    if any(sorted(layout) != sorted(order) for layout, order in zip(layouts, canonical, strict=True)):
        raise _Refused(f"found layouts {layouts}, expected permutations of {canonical}")
    orders = [[layout.index(letter) for letter in order] for layout, order in zip(layouts, canonical, strict=True)]
    tensor_shapes = [shape for shape in map(shape_of, (data, weight, var)) if shape is not None]
    if len(tensor_shapes) < len(orders):
        raise _Refused("found no shape of an operand or of the result")
    shapes = [[shape[axis] for axis in order] for shape, order in zip(tensor_shapes, orders, strict=True)]
    dtypes = (str(data.ty.dtype), str(weight.ty.dtype), str(var.ty.dtype))
    accumulator = _ACCUMULATORS.get(dtypes[:2])
    result_dtype = dtypes[LHS] if "float" in dtypes[LHS] else accumulator
    if accumulator is None or dtypes[RESULT] not in (accumulator, result_dtype):
        expected = ", ".join(f"{a} * {b} -> {c}" for (a, b), c in _ACCUMULATORS.items())
        raise _Refused(f"found element types {dtypes}, expected one of {expected}")
    operand_dtypes = (TF32, TF32) if tf32 and dtypes[:2] == ("float32", "float32") else dtypes[:2]
    encoding = replace(_encoding(shapes, attrs, (*operand_dtypes, accumulator)), accuracy=accuracy)
    name = var.name
    encoded = []
    for index, x in ((LHS, data), (RHS, weight)):
        operand = encoding.of(index)
        x = writer.permuted(x, orders[index], f"{name}_{operand.operand_name}_permuted")
        encoded.append(writer.encode(x, operand, name))
    result_type = tensor_type(shapes[RESULT], encoding.element_type, data.ty)
    out = writer.emit(op.conv(*encoded, encoding=encoding), result_type, f"{name}_encoded")
    plain = writer.cast(writer.plain(out, encoding, f"{name}_plain"), dtypes[RESULT], f"{name}_{dtypes[RESULT]}")
    result_axes = [canonical[RESULT].index(letter) for letter in layouts[RESULT]]
    writer.permuted(plain, result_axes, name)
    writer.bind(var, writer.bindings.pop().value)


def _encoding(shapes: Sequence[Sequence[Any]], attrs: Any, dtypes: tuple[str, str, str]) -> Encoding:
    """The encoding of the result."""
    maps = conv_maps(len(shapes[0]) - 2)
    sizes: dict[str, int] = {}
    for names, shape in zip(maps, shapes, strict=True):
        for name, extent in zip(names, shape, strict=True):
            size = int(extent) if isinstance(extent, tirx.IntImm) else DYNAMIC
            if sizes.setdefault(name, size) != size:
                raise _Refused(f"found {name}={size} and {name}={sizes[name]}")
    strides, padding, dilation = (tuple(map(int, t)) for t in (attrs.strides, attrs.padding, attrs.dilation))
    groups = int(attrs.groups)
    channels = sizes["c"], sizes["k"], sizes["n"]
    fits = DYNAMIC not in channels and channels[0] == groups * channels[1] and channels[2] % groups == 0
    if not fits:
        raise _Refused(f"found channels {channels} of data, weight and result (-1: symbolic) in {groups} groups")
    if 0 in sizes.values() or any(pad < 0 for pad in padding):
        raise _Refused(f"found an empty tensor or negative padding: {sizes}, padding {padding}")
    conv = ConvAttrs(strides, padding, dilation, groups)
    return Encoding(CONVOLUTIONS[len(strides) - 1], RESULT, dtypes, maps, tuple(sizes.items()), conv)


def stock_convolution(encoding: Encoding, operands: Sequence[relax.Expr], out: Replacement) -> list[relax.Binding]:
    """Bindings that compute `out.var` as the convolution of plain operands; any operand's `encoding` will do."""
    conv = encoding.conv
    assert conv is not None
    vdevice, accumulator = out.var.ty.vdevice, encoding.element_types[RESULT]
    if accumulator == "int32":
        operands = [out.stock(relax.op.astype(x, accumulator), vdevice, "wide") for x in operands]
    stock_conv = getattr(relax.op.nn, encoding.op_type)
    call = stock_conv(
        *operands,
        strides=list(conv.strides),
        padding=list(conv.padding),
        dilation=list(conv.dilation),
        groups=conv.groups,
        out_dtype=accumulator if accumulator != str(operands[LHS].ty.dtype) else None,
    )
    return out.finish(out.stock(call, vdevice, encoding.op_type))
