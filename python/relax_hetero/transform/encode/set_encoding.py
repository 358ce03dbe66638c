"""SetEncoding: encode the operands of every matrix product and convolution.

Before::

    y: R.Tensor((8, 4), "float32") = R.matmul(x, w)

After::

    lhs = R.hetero.set_encoding(x, "matmul[0]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=8, n=4, k=6>")
    rhs = R.hetero.set_encoding(w, "matmul[1]<...>")
    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    y: R.Tensor((8, 4), "float32") = R.hetero.unset_encoding(out, "matmul[2]<...>")

`R.nn.conv1d`, `conv2d` and `conv3d` of floats and bytes become `R.hetero.conv` (`encoded_convolutions`), whose encoding
also says the `accuracy` given to `rh.compile`, unless that is the default. `R.matmul` in every form becomes
`R.hetero.matmul`: batched and broadcast, of vectors (reshaped to matrices), of half precision (accumulated in float32),
of 8-bit integers. Products and convolutions of 8-bit integers that are written with wider types become integer ones
(`quantized_products`, and the first section below). Products of other integers, of unknown rank or shape, and of shapes
that do not provably fit are not changed.

Assumes nothing, and does not depend on devices: SpecializeEncodings cancels encodings that a device lacks a layout for.
A second run changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from ...encoding.encoding import LHS, RHS
from ...target.element_types import TF32
from ..ir.blocks import Block, rewrite_function, shape_of, tensor_type, without_unused
from ..ir.constant_values import constant_on_device_of
from ..ir.declare import declare_pass
from ..ir.module_attrs import WITHOUT_TF32
from ..ir.rewriting import op_name, relax_functions, typed, with_args, with_functions
from ..quantize.quantized_operands import (
    Parameter,
    Quantized,
    is_absorbable,
    read_along,
    signed_constant,
)
from .accuracies import Accuracies
from .encoded_convolutions import CONV_OPS, emit_convolution
from .encoded_products import ProductWriter, as_matrix, product_encoding, with_one_k
from .quantized_products import emit_quantized_product, emitted_parameter, fits_int32, widened

# Quantized convolutions: convolutions of 8-bit integers that models write with wider types.
#
# ONNX's ConvInteger and QLinearConv arrive as ``conv(astype(x, i32) - zx, astype(w, i32) - zw)``, quantize-dequantize
# models as ``conv((astype(x, i32) - zx) * sx, (astype(w, i32) - zw) * sw)`` in float32, with zero points zx, zw and
# scales sx, sw. Both equal the convolution of the 8-bit tensors with corrections, summed over the taps of a window::
#
#     sum((x - zx)(w - zw)) = sum(x w) - zx * sum(w - zw) - zw * sum(x)
#
# Before::
#
#     wide = R.astype(R.subtract(R.astype(x, "int32"), R.const(7)), "float32")
#     y = R.nn.conv2d(R.multiply(wide, sx), R.multiply(R.astype(w, "float32"), sw), padding=1)
#
# After::
#
#     padded = R.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=7)
#     sums = R.nn.conv2d(padded, w, out_dtype="int32")                # in its encoded form
#     y = R.multiply(R.astype(R.subtract(sums, 7 * w.sum()), "float32"), sx * sw)
#
# The encoded op pads with the byte 0, which does not represent the number 0 if the data have a zero point: then a
# separate op pads them first, with the zero point. Weights become signed as in products (`signed_constant`).

_INT_ACCUMULATOR = "int32"
_OUTPUT_CHANNEL_AXIS = 0  # axis of a weight along which its zero points and scales may vary


def emit_quantized_convolution(
    writer: ProductWriter,
    binding: relax.VarBinding,  # any binding
    block: Block,  # block that contains the binding
    constants: dict[Any, relax.Expr],  # cache of signed constants, so that shared constants stay shared
    function: str,  # name of the function, for missed-optimization remarks
) -> bool:
    """Write an integer convolution in place of one with wider types, if its operands are 8-bit integers.

    Returns False, with nothing written, unless it is a convolution of 8-bit integers with channels first, weights that
    are constant or signed, and data with one zero point and one scale.
    """
    if op_name(binding.value) not in CONV_OPS:
        return False
    operands = _quantized_operands(binding, block, constants)
    if operands is None:
        return False
    num_bindings = len(writer.bindings)
    if _QuantizedConvolution(writer, binding, *operands, function).write():
        return True
    del writer.bindings[num_bindings:]
    return False


def _quantized_operands(
    binding: relax.VarBinding, block: Block, constants: dict[Any, relax.Expr]
) -> tuple[Quantized, Quantized] | None:
    call, num_spatial = binding.value, CONV_OPS[op_name(binding.value) or ""]
    spatial_axes = "DHW"[-num_spatial:]
    layouts = [str(call.attrs.data_layout), str(call.attrs.kernel_layout)]
    if layouts != [f"NC{spatial_axes}", f"OI{spatial_axes}"] or str(call.attrs.out_layout) not in ("", layouts[0]):
        return None
    data, weight = read_along(call.args[LHS], None, block), read_along(call.args[RHS], _OUTPUT_CHANNEL_AXIS, block)
    shapes = [shape_of(x) for x in (*call.args, binding.var)]
    if data is None or weight is None or None in shapes or data.is_float != weight.is_float:
        return None
    if str(binding.var.ty.dtype) != ("float32" if data.is_float else _INT_ACCUMULATOR):
        return None
    if data.scale is not None and not data.scale.is_scalar:
        return None
    num_terms = 1  # of the sum in one element of the result
    for extent in (shapes[RHS] or [])[1:]:
        if not isinstance(extent, tirx.IntImm):
            return None
        num_terms *= int(extent)
    # Sums in int32 wrap by definition, sums in float32 do not.
    if data.is_float and not fits_int32(num_terms, data, weight):
        return None
    if weight.data_value is not None:
        weight = signed_constant(weight, constants, _OUTPUT_CHANNEL_AXIS) or weight
    return (data, weight) if str(weight.data.ty.dtype) == "int8" else None


class _QuantizedConvolution:
    """Writer of the bindings of one quantized convolution."""

    def __init__(
        self, writer: ProductWriter, binding: relax.VarBinding, data: Quantized, weight: Quantized, function: str
    ) -> None:
        self.writer, self.binding, self.data, self.weight, self.function = writer, binding, data, weight, function
        self.name = binding.var.name
        self.attrs = binding.value.attrs
        self.padding = [int(width) for width in self.attrs.padding]
        self.num_spatial = CONV_OPS[op_name(binding.value) or ""]

    def write(self) -> bool:
        """Write the bindings, and return whether they can be encoded; if not, the caller removes them."""
        writer, var = self.writer, self.binding.var
        data, weight = self._permuted(self.data, "data"), self._permuted(self.weight, "weight")
        if any(self.padding) and self.data.zero is not None:
            data = self._padded(data)
        total = self._convolve(data, weight, int(self.attrs.groups), self.name)
        if total is None:
            return False
        if self.data.zero is not None:
            filter_sums = self._filter_sums(weight)
            zero = emitted_parameter(writer, self.data.zero, f"{self.name}_zero")
            total = self._subtract(total, self._multiply(filter_sums, zero, "columns_times_zero"), "less_columns")
        if self.weight.zero is not None:
            windows = self._window_sums(data)
            if windows is None:
                return False
            zero = self._channel_parameter(self.weight.zero, "weight_zero")
            total = self._subtract(total, self._multiply(windows, zero, "windows_times_zero"), "less_windows")
        writer.end_as(self._scaled(total) if self.data.is_float else total, var)
        return True

    def _permuted(self, operand: Quantized, suffix: str) -> relax.Expr:
        return self.writer.permuted(operand.data, operand.perm, f"{self.name}_{suffix}_permuted")

    def _padded(self, data: relax.Expr) -> relax.Expr:
        """Pad the data with their zero point, and leave the convolution without padding."""
        pairs = [(0, 0), (0, 0), *zip(self.padding[: self.num_spatial], self.padding[self.num_spatial :], strict=True)]
        zero = self.data.zero
        shape = [extent + sum(pair) for extent, pair in zip(shape_of(data) or [], pairs, strict=True)]
        dtype = str(data.ty.dtype)
        ty = tensor_type(shape, dtype, data.ty)
        self.padding = [0] * len(self.padding)
        widths = [width for pair in pairs for width in pair]
        if zero is None or zero.value is not None:
            value = 0 if zero is None or zero.value is None else int(zero.value)
            return self.writer.emit(relax.op.nn.pad(data, widths, pad_value=value), ty, f"{self.name}_padded")
        # Bytes wrap, so that padding with 0 between a subtraction and an addition of the zero point pads with it.
        point = self.writer.cast(emitted_parameter(self.writer, zero, f"{self.name}_point"), dtype, f"{self.name}_fill")
        shifted = self.writer.binary(relax.op.subtract, data, point, f"{self.name}_shifted")
        zeros = self.writer.emit(relax.op.nn.pad(shifted, widths), ty, f"{self.name}_zeros")
        return self.writer.binary(relax.op.add, zeros, point, f"{self.name}_padded")

    def _convolve(self, data: relax.Expr, weight: relax.Expr, groups: int, name: str) -> relax.Var | None:
        """Write an encoded convolution of bytes and return its unpacked result; None if it cannot be encoded."""
        if int((shape_of(weight) or [])[1]) > 1:  # depthwise convolutions do not use dot products
            data = widened(self.writer, data, f"{name}_data_int16")
        attributes = {"padding": self.padding, "groups": groups, "out_dtype": _INT_ACCUMULATOR}
        call = with_args(self.binding.value, [data, weight], **attributes)
        shape = shape_of(self.binding.var) or []
        ty = tensor_type([shape[0], (shape_of(weight) or [])[0], *shape[2:]], _INT_ACCUMULATOR, data.ty)
        var = self.writer.new_var(f"{name}_sums", ty)
        is_encoded = emit_convolution(self.writer, relax.VarBinding(var, typed(call, ty)), self.function)
        return var if is_encoded else None

    def _filter_sums(self, weight: relax.Expr) -> relax.Expr:
        """The sums ``sum(w - zw)`` over each filter, of shape (n, 1, ...), aligned with the result's channels."""
        zero, value = self.weight.zero, self.weight.data_value
        shape = [*(shape_of(weight) or [])[:1], *[1] * self.num_spatial]
        axes = list(range(1, 2 + self.num_spatial))
        if value is not None and (zero is None or zero.value is not None):
            array = value.transpose(self.weight.perm)
            sums = array.sum(axis=tuple(axes), dtype=_INT_ACCUMULATOR)
            if zero is not None and zero.value is not None:
                sums = sums - np.int32(array[0].size) * zero.value
            return constant_on_device_of(sums.reshape([int(extent) for extent in shape]), weight)
        weight_int32 = self.writer.cast(weight, _INT_ACCUMULATOR, f"{self.name}_weight_wide")
        if zero is not None:
            ones = [1] * (1 + self.num_spatial)
            zeros = emitted_parameter(self.writer, zero, f"{self.name}_weight_zero")
            zeros = zeros if zero.is_scalar else self.writer.reshape(zeros, [*zero.shape, *ones], f"{self.name}_points")
            weight_int32 = self.writer.binary(relax.op.subtract, weight_int32, zeros, f"{self.name}_weight_shifted")
        ty = tensor_type(shape[:1], _INT_ACCUMULATOR, weight.ty)
        sums = self.writer.emit(relax.op.sum(weight_int32, axes), ty, f"{self.name}_columns")
        return self.writer.reshape(sums, shape, f"{self.name}_columns_along")

    def _window_sums(self, data: relax.Expr) -> relax.Expr | None:
        """The sums ``sum(x)`` over every window, of shape (b, 1, ...); with several groups, one for each channel."""
        groups, shape = int(self.attrs.groups), [int(extent) for extent in shape_of(self.binding.value.args[RHS]) or []]
        ones = constant_on_device_of(np.ones((groups, *shape[1:]), "int8"), data)
        windows = self._convolve(data, ones, groups, f"{self.name}_windows")
        if windows is None or groups in (1, shape[0]):
            return windows
        result = tensor_type(shape_of(self.binding.var) or [], _INT_ACCUMULATOR, data.ty)
        repeated = relax.op.repeat(windows, shape[0] // groups, 1)
        return self.writer.emit(repeated, result, f"{self.name}_windows_repeated")

    def _channel_parameter(self, parameter: Parameter, suffix: str) -> relax.Expr:
        """A zero point or scale, reshaped to broadcast along the result's channels."""
        expr = emitted_parameter(self.writer, parameter, f"{self.name}_{suffix}")
        if parameter.is_scalar:
            return expr
        shape = [*parameter.shape, *[1] * self.num_spatial]
        if parameter.value is not None:
            return constant_on_device_of(parameter.value.reshape([int(extent) for extent in shape]), expr)
        return self.writer.reshape(expr, shape, f"{self.name}_{suffix}_along")

    def _multiply(self, a: relax.Expr, b: relax.Expr, suffix: str) -> relax.Expr:
        if isinstance(a, relax.Var) or isinstance(b, relax.Var):
            return self.writer.binary(relax.op.multiply, a, b, f"{self.name}_{suffix}")
        return constant_on_device_of(a.value.numpy() * b.value.numpy(), a)

    def _subtract(self, total: relax.Var, correction: relax.Expr, suffix: str) -> relax.Var:
        return self.writer.binary(relax.op.subtract, total, correction, f"{self.name}_{suffix}")

    def _scaled(self, total: relax.Var) -> relax.Var:
        """The sums as float32, times the scales of data and weight."""
        value = self.writer.cast(total, "float32", f"{self.name}_float")
        scale: relax.Expr | None = None
        for index, parameter in ((LHS, self.data.scale), (RHS, self.weight.scale)):
            if parameter is not None:
                factor = self._channel_parameter(parameter, f"scale_{index}")
                scale = factor if scale is None else self._multiply(scale, factor, "scale")
        if scale is not None:
            value = self.writer.binary(relax.op.multiply, value, scale, self.name)
        assert isinstance(value, relax.Var)
        return value


# Accumulator type by floating-point operand type: narrow ones are accumulated in float32 and rounded once, at the end.
_FLOAT_ACCUMULATORS = {
    "float32": "float32",
    "float64": "float64",
    **dict.fromkeys(("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"), "float32"),
}


def set_encoding(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the same module is returned if nothing changes."""
    constants: dict[Any, relax.Expr] = {}
    functions = {}
    accuracies = Accuracies(mod)
    for gv, func in relax_functions(mod):
        exact = frozenset(map(str, func.attrs[WITHOUT_TF32])) if WITHOUT_TF32 in func.attrs else None
        rewrite = partial(_encode_block, function=gv.name_hint, constants=constants, exact=exact, accuracies=accuracies)
        functions[gv] = rewrite_function(func, rewrite)
    return with_functions(mod, functions)


SetEncoding = declare_pass("SetEncoding", set_encoding)


def _encode_block(
    block: Block,
    function: str,
    constants: dict[Any, relax.Expr],
    exact: frozenset[str] | None,
    accuracies: Accuracies,
) -> list[relax.Binding] | None:
    """The block with its products encoded; `exact` names the float32 products that stay exact (None: all of them)."""
    writer = ProductWriter(block.is_dataflow)
    changed = has_quantized = False
    for binding in block.bindings:
        if isinstance(binding, relax.VarBinding) and emit_quantized_convolution(
            writer, binding, block, constants, function
        ):
            changed = has_quantized = True
            continue
        tf32 = exact is not None and binding.var.name not in exact
        if isinstance(binding, relax.VarBinding) and emit_convolution(
            writer, binding, function, tf32, accuracies.of(binding.var.name)
        ):
            changed = True
            continue
        if isinstance(binding, relax.VarBinding) and op_name(binding.value) == "relax.matmul":
            if emit_quantized_product(writer, binding, block, constants):
                changed = has_quantized = True
                continue
            if _emit_float_product(writer, binding, tf32):
                changed = True
                continue
        writer.bindings.append(binding)
    if not changed:
        return None
    return without_unused(writer.bindings, block, is_absorbable) if has_quantized else writer.bindings


def _emit_float_product(writer: ProductWriter, binding: relax.VarBinding, tf32: bool) -> bool:
    var = binding.var
    lhs, rhs = binding.value.args
    lhs_shape, rhs_shape = shape_of(lhs), shape_of(rhs)
    dtype, result_dtype = str(lhs.ty.dtype), str(var.ty.dtype)
    if not lhs_shape or not rhs_shape or str(rhs.ty.dtype) != dtype or dtype not in _FLOAT_ACCUMULATORS:
        return False
    if result_dtype not in _FLOAT_ACCUMULATORS:
        return False
    if result_dtype == "float64":
        dtype = result_dtype
    shapes = with_one_k(as_matrix(lhs_shape, LHS), as_matrix(rhs_shape, RHS))
    element_type = TF32 if tf32 and dtype == "float32" else dtype
    encoding = product_encoding(*shapes, (element_type, element_type, _FLOAT_ACCUMULATORS[dtype]))
    if encoding is None or shape_of(var) is None:
        return False
    name = var.name
    operands = []
    for index, operand_name, x in ((LHS, "lhs", lhs), (RHS, "rhs", rhs)):
        matrix = writer.matrix(writer.cast(x, dtype, f"{name}_{operand_name}_{dtype}"), index, f"{name}_{operand_name}")
        operands.append(writer.matched(matrix, shapes[index], f"{name}_{operand_name}_matched"))
    out = writer.product(operands[LHS], operands[RHS], encoding, name)
    plain = writer.plain(out, encoding, f"{name}_plain")
    writer.end_as(writer.cast(plain, result_dtype, f"{name}_{result_dtype}"), var)
    return True
