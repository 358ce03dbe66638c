"""Plain ops for weights in blocks, for devices without a kernel, and for weights that only a call knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...encoding.block_formats import BlockFormat, block_format, numbers_of_rows, parts_of_rows
from ...encoding.block_weights import middle_of
from ..ir.blocks import Emitter, shape_of, tensor_type
from ..ir.rewriting import is_tensor_constant

_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def write_plain(emitter: Emitter, call: relax.Call, var: relax.Var) -> None:
    """Bind a variable to the numbers of a call of dequantize_blocks."""
    if not call.attrs.format:
        _write_integers(emitter, call, var)
        return
    form, depth = block_format(str(call.attrs.format)), int(call.attrs.depth)
    raw = call.args[0]
    if is_tensor_constant(raw):
        value = tvm.runtime.tensor(numbers_of_rows(raw.value.numpy(), form, depth))
        emitter.bind(var, tvm.ir.GenericConst(value, var.ty))
        return
    _write_rows(emitter, raw, form, depth, var)


@dataclass
class _RelaxArrays:
    """`encoding.block_formats.Arrays` of Relax ops: uint8, or float32 where numbers are made."""

    emitter: Emitter
    var: relax.Var

    def emit(self, value: relax.Expr, shape: Sequence[Any], dtype: str = "uint8") -> relax.Var:
        """Bind a value of a type."""
        return self.emitter.emit(value, tensor_type(shape, dtype, self.var.ty), f"{self.var.name}_part")

    def number(self, value: float, dtype: str) -> relax.Expr:
        """A scalar."""
        return self.array(np.array(value, dtype))

    def array(self, value: np.ndarray) -> relax.Expr:
        """A constant."""
        ty = relax.TensorType(list(value.shape), str(value.dtype), self.var.ty.vdevice)
        return tvm.ir.GenericConst(tvm.runtime.tensor(value), ty)

    def part(self, x: relax.Expr, begin: int, end: int) -> relax.Expr:
        """See `Arrays`."""
        shape = shape_of(x) or []
        value = relax.op.strided_slice(x, [len(shape) - 1], [begin], [end])
        return self.emit(value, [*shape[:-1], end - begin])

    def reshape(self, x: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """See `Arrays`."""
        old, new = shape_of(x) or [], list(shape)
        if -1 in new:
            # The first extent, which may be symbolic, stays.
            new[new.index(-1)] = prod(int(e) for e in old[1:]) // prod(e for e in new[1:] if e != -1)
        return self.emit(relax.op.reshape(x, new), new, str(x.ty.dtype))

    def stack(self, parts: Sequence[relax.Expr], axis: int) -> relax.Expr:
        """See `Arrays`."""
        shape = shape_of(parts[0]) or []
        one = [*shape[:axis], 1, *shape[axis:]]
        wide = [self.emit(relax.op.reshape(part, one), one) for part in parts]
        return self.emit(relax.op.concat(wide, axis), [*shape[:axis], len(parts), *shape[axis:]])

    def bits(self, x: relax.Expr, first: int, count: int) -> relax.Expr:
        """See `Arrays`."""
        shape = shape_of(x) or []
        if first:
            x = self.emit(relax.op.right_shift(x, self.number(first, "uint8")), shape)
        if first + count < 8:
            x = self.emit(relax.op.bitwise_and(x, self.number((1 << count) - 1, "uint8")), shape)
        return x

    def join(self, x: relax.Expr, above: relax.Expr, first: int) -> relax.Expr:
        """See `Arrays`."""
        shape = shape_of(x) or []
        moved = self.emit(relax.op.left_shift(above, self.number(first, "uint8")), shape)
        return self.emit(relax.op.bitwise_or(x, moved), shape)

    def flip(self, x: relax.Expr, bit: int) -> relax.Expr:
        """See `Arrays`."""
        return self.emit(relax.op.bitwise_xor(x, self.number(1 << bit, "uint8")), shape_of(x) or [])

    def half(self, x: relax.Expr) -> relax.Expr:
        """See `Arrays`."""
        return self._of_pairs(x, _HALVES.astype(np.float32))

    def bf16(self, x: relax.Expr) -> relax.Expr:
        """See `Arrays`."""
        return self._of_pairs(x, (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32))

    def _of_pairs(self, x: relax.Expr, table: np.ndarray) -> relax.Expr:
        """The number of each pair of bytes, looked up: no Relax op reads bytes as another type."""
        shape = shape_of(x) or []
        low, high = (
            self.emit(relax.op.astype(self.part(x, at, at + 1), "int32"), [*shape[:-1], 1], "int32") for at in (0, 1)
        )
        moved = self.emit(relax.op.left_shift(high, self.number(8, "int32")), [*shape[:-1], 1], "int32")
        both = self.emit(relax.op.bitwise_or(low, moved), [*shape[:-1], 1], "int32")
        index = self.emit(relax.op.reshape(both, shape[:-1]), shape[:-1], "int32")
        return self.emit(relax.op.take(self.array(table), index, axis=0), shape[:-1], "float32")

    def widened(self, x: relax.Expr, is_signed: bool) -> relax.Expr:
        """Bytes as float32."""
        shape = shape_of(x) or []
        if not is_signed or str(x.ty.dtype) == "float32":
            return self.emit(relax.op.astype(x, "float32"), shape, "float32")
        turned = self.emit(relax.op.astype(self.flip(x, 7), "float32"), shape, "float32")
        return self.emit(relax.op.subtract(turned, self.number(128, "float32")), shape, "float32")

    def repeated(self, x: relax.Expr, count: int) -> relax.Expr:
        """Each number of a row `count` times."""
        rows, columns = shape_of(x) or []
        return self.emit(relax.op.repeat(x, count, 1), [rows, columns * count], "float32")

    def times(self, x: relax.Expr, y: relax.Expr) -> relax.Expr:
        """Products of numbers."""
        return self.emit(relax.op.multiply(x, y), shape_of(x) or [], "float32")


def _write_rows(emitter: Emitter, raw: relax.Expr, form: BlockFormat, depth: int, var: relax.Var) -> None:
    """Rows of a file's bytes as numbers, by the operations of `parts_of_rows`."""
    arrays, rows = _RelaxArrays(emitter, var), (shape_of(raw) or [])[0]
    parts = parts_of_rows(raw, form, depth, arrays, rows)
    if form.is_plain:
        value = relax.op.reshape(parts.fields, [rows, depth])
        emitter.bind(var, relax.Call(value.op, list(value.args), value.attrs, ret_ty=var.ty))
        return

    def by_weight(inner: relax.Expr, outer: relax.Expr | None) -> relax.Expr:
        if outer is not None:
            per_record = arrays.repeated(outer, form.span // form.block)
            inner = arrays.times(arrays.widened(inner, is_signed=True), per_record)
        return arrays.repeated(inner, form.block)

    fields = arrays.widened(parts.fields, is_signed=False)
    if form.low:
        shape = shape_of(fields) or []
        fields = arrays.emit(relax.op.add(fields, arrays.number(form.low, "float32")), shape, "float32")
    scales = by_weight(parts.scales, parts.superblock_scales)
    value = relax.op.multiply(fields, scales)
    if parts.minimums is not None:
        scaled = arrays.times(fields, scales)
        apply = relax.op.add if parts.outer_minimums is None else relax.op.subtract
        value = apply(scaled, by_weight(parts.minimums, parts.outer_minimums))
    emitter.bind(var, relax.Call(value.op, list(value.args), value.attrs, ret_ty=var.ty))


def _write_integers(emitter: Emitter, call: relax.Call, var: relax.Var) -> None:
    """Weights, less their zero points, times their scales."""
    arrays = _RelaxArrays(emitter, var)
    data, scales = call.args[0], call.args[1]
    rows, size = shape_of(data) or []
    depth, block, bits = int(call.attrs.depth), int(call.attrs.block), int(call.attrs.bits)

    def first(value: relax.Expr, dtype: str) -> relax.Expr:
        return arrays.emit(relax.op.strided_slice(value, [1], [0], [depth]), [rows, depth], dtype)

    def by_block(value: relax.Expr) -> relax.Expr:
        return first(arrays.repeated(arrays.widened(value, is_signed=False), block), "float32")

    flat = data
    if bits < 8:
        fields = [arrays.bits(data, at, bits) for at in range(0, 8, bits)]
        flat = arrays.reshape(arrays.stack(fields, 2), [rows, int(size) * (8 // bits)])
    numbers = arrays.widened(first(flat, "uint8"), is_signed=False)
    points = by_block(call.args[2]) if len(call.args) > 2 else arrays.number(middle_of(bits), "float32")
    shifted = arrays.emit(relax.op.subtract(numbers, points), [rows, depth], "float32")
    value = relax.op.multiply(shifted, by_block(scales))
    emitter.bind(var, relax.Call(value.op, list(value.args), value.attrs, ret_ty=var.ty))
