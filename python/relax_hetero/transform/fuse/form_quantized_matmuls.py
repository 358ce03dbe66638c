"""FormQuantizedMatmuls: turn products with block-quantized weights into one op where the device has a kernel for it.

Before::

    w = R.hetero.dequantize_blocks(data, scales, depth=4096, block=32)     # constants
    y = R.add(R.matmul(x, R.permute_dims(w, axes=[1, 0])), bias)

After::

    y = R.hetero.block_matmul(x, packed, bias, columns=4096, block=32, expression="add(x0, x1)")

(On a GPU, the scales are a separate operand.) A ``take`` of rows of weights becomes ``R.hetero.block_rows`` of the same
packed constant, so that token embeddings that are also the last product's weight are stored once.

A product of each row by matrices that an index selects, as in a mixture of experts, becomes one op as well, where the
device reads weights in panels::

    table = R.reshape(R.hetero.dequantize_blocks(data, depth=2048, format="q4_k"), (128, 768, 2048))
    y = R.matmul(x, R.permute_dims(R.take(table, index, axis=0), axes=[0, 1, 3, 2]))    # x: (m, 1, 1, 2048)

becomes ``R.hetero.block_matmul(x, packed, index, columns=768, experts=128, format="q4_k")``, without a copy of a
matrix. With ``mode="nan"``, whose indices may be outside, rows of negative indices are left out: what is NaN before is
undefined after. On GPUs, where each launch counts, two such products of a few rows, whose results are multiplied,
become one, as do a product and the weighted sum of a token's rows::

    z = R.sum(R.multiply(R.reshape(y, (m, 8, 2048)), shares), axis=[1])    # shares: (m, 8, 1)

and such a sum without the rows whose index is negative (``R.where(R.expand_dims(index >= 0, 2), ..., 0)``).

The constants are packed as the device's kernel reads them. Elementwise ops after the product, each the only user of the
one before, become part of the op. Without a kernel, or with weights that are not constant or have other users, plain
ops dequantize the weights: constants at compile time, parameters in every call.

Assumes a placed module (RealizeVDevice). A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...encoding.block_formats import SCALES_OF_BYTES, BlockFormat, block_format, dequantize_rows, split_rows
from ...encoding.block_panels import BlockSource, Panels
from ...encoding.block_weights import BlockLayout, Fragments, is_streamable, middle_of
from ...encoding.expression import Expression, Term
from ...encoding.problem import BlockRowsProblem
from ...encoding.resolver import resolver_or_default
from ...op.quantized_matmul import DEQUANTIZE_BLOCKS, block_matmul, block_rows, form_of
from ...op.streamed import STREAM, panel_fragments, stream
from ...target.vdevice import is_cpu
from ...vm.device.huge_pages import WeightMemory
from ...vm.device.tensor_arrays import host_array
from ...vm.device.tensors import share_or_copy
from ..ir.axes import permutation
from ..ir.blocks import (
    Block,
    Emitter,
    broadcast,
    is_one,
    rewrite_blocks,
    same_shape,
    shape_of,
    tensor_type,
    with_regions,
    without_unused,
)
from ..ir.callee_devices import target_of
from ..ir.declare import declare_pass
from ..ir.op_names import CAST, PERMUTE, RESHAPE, TRANSFER, TRANSFERS
from ..ir.relax_expressions import to_expression
from ..ir.rewriting import is_tensor_constant, op_name, typed, with_args
from .block_products import (
    Product,
    fuse_bias,
    fuse_factor,
    fuse_joined,
    fuse_rounding,
    fuse_shares,
    has_few_rows,
    has_writes,
)

# Plain ops that dequantize weights, for devices without a kernel, and for weights that are not constant.

_FLOAT16_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def write_plain(emitter: Emitter, call: relax.Call, var: relax.Var) -> None:
    """Bind a variable to the result of a call to dequantize_blocks, computed by plain ops."""
    if not call.attrs.format:
        _write_integers(emitter, call, var)
        return
    form, depth = block_format(str(call.attrs.format)), int(call.attrs.depth)
    raw = call.args[0]
    if is_tensor_constant(raw):
        value = tvm.runtime.tensor(dequantize_rows(raw.value.numpy(), form, depth))
        emitter.bind(var, tvm.ir.GenericConst(value, var.ty))
        return
    _write_plain_rows(emitter, raw, form, depth, var)


@dataclass
class _RelaxOps:
    """`encoding.block_formats.ArrayOps` of Relax ops, of uint8 or float32."""

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

    def slice(self, x: relax.Expr, begin: int, end: int) -> relax.Expr:
        shape = shape_of(x) or []
        value = relax.op.strided_slice(x, [len(shape) - 1], [begin], [end])
        return self.emit(value, [*shape[:-1], end - begin])

    def reshape(self, x: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        old, new = shape_of(x) or [], list(shape)
        if -1 in new:
            # The first extent, which may be symbolic, stays.
            new[new.index(-1)] = prod(int(e) for e in old[1:]) // prod(e for e in new[1:] if e != -1)
        return self.emit(relax.op.reshape(x, new), new, str(x.ty.dtype))

    def stack(self, parts: Sequence[relax.Expr], axis: int) -> relax.Expr:
        shape = shape_of(parts[0]) or []
        expanded_shape = [*shape[:axis], 1, *shape[axis:]]
        expanded = [self.emit(relax.op.reshape(part, expanded_shape), expanded_shape) for part in parts]
        return self.emit(relax.op.concat(expanded, axis), [*shape[:axis], len(parts), *shape[axis:]])

    def concat(self, parts: Sequence[relax.Expr], axis: int) -> relax.Expr:
        shape = list(shape_of(parts[0]) or [])
        shape[axis] = sum(int((shape_of(part) or [])[axis]) for part in parts)
        return self.emit(relax.op.concat(list(parts), axis), shape)

    def bits(self, x: relax.Expr, first: int, count: int) -> relax.Expr:
        shape = shape_of(x) or []
        if first:
            x = self.emit(relax.op.right_shift(x, self.number(first, "uint8")), shape)
        if first + count < 8:
            x = self.emit(relax.op.bitwise_and(x, self.number((1 << count) - 1, "uint8")), shape)
        return x

    def or_shifted(self, x: relax.Expr, high: relax.Expr, shift: int) -> relax.Expr:
        shape = shape_of(x) or []
        shifted = self.emit(relax.op.left_shift(high, self.number(shift, "uint8")), shape)
        return self.emit(relax.op.bitwise_or(x, shifted), shape)

    def flip_bit(self, x: relax.Expr, bit: int) -> relax.Expr:
        return self.emit(relax.op.bitwise_xor(x, self.number(1 << bit, "uint8")), shape_of(x) or [])

    def joined(self, low: relax.Expr, high: relax.Expr) -> relax.Expr:
        shape = shape_of(low) or []
        low, high = (self.emit(relax.op.astype(x, "int32"), shape, "int32") for x in (low, high))
        shifted = self.emit(relax.op.left_shift(high, self.number(8, "int32")), shape, "int32")
        return self.emit(relax.op.bitwise_or(low, shifted), shape, "int32")

    def f16(self, x: relax.Expr) -> relax.Expr:
        return self._look_up_pairs(x, _FLOAT16_VALUES.astype(np.float32))

    def bf16(self, x: relax.Expr) -> relax.Expr:
        return self._look_up_pairs(x, (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32))

    def _look_up_pairs(self, x: relax.Expr, table: np.ndarray) -> relax.Expr:
        """The number of each pair of bytes, from a table: Relax lacks an op that reinterprets bytes."""
        shape = (shape_of(x) or [])[:-1]
        pairs = self.joined(*(self.slice(x, i, i + 1) for i in (0, 1)))
        return self.look_up(self.emit(relax.op.reshape(pairs, shape), shape, "int32"), table)

    def look_up(self, x: relax.Expr, table: np.ndarray) -> relax.Expr:
        shape = shape_of(x) or []
        if str(x.ty.dtype) != "int32":
            x = self.emit(relax.op.astype(x, "int32"), shape, "int32")
        value = relax.op.take(self.array(table), x, axis=0)
        return self.emit(value, [*shape, *table.shape[1:]], str(table.dtype))

    def widened(self, x: relax.Expr, is_signed: bool) -> relax.Expr:
        """Bytes as float32."""
        shape = shape_of(x) or []
        if not is_signed or str(x.ty.dtype) == "float32":
            return self.emit(relax.op.astype(x, "float32"), shape, "float32")
        offset = self.emit(relax.op.astype(self.flip_bit(x, 7), "float32"), shape, "float32")
        return self.emit(relax.op.subtract(offset, self.number(128, "float32")), shape, "float32")

    def repeated(self, x: relax.Expr, count: int) -> relax.Expr:
        """Repeat each number of a row `count` times."""
        rows, columns = shape_of(x) or []
        return self.emit(relax.op.repeat(x, count, 1), [rows, columns * count], "float32")

    def times(self, x: relax.Expr, y: relax.Expr) -> relax.Expr:
        """Products of numbers."""
        return self.emit(relax.op.multiply(x, y), shape_of(x) or [], "float32")


def _write_plain_rows(emitter: Emitter, raw: relax.Expr, form: BlockFormat, depth: int, var: relax.Var) -> None:
    """Dequantize rows of a file's bytes, with the readers of `split_rows`."""
    arrays, rows = _RelaxOps(emitter, var), (shape_of(raw) or [])[0]
    parts = split_rows(raw, form, depth, arrays, rows)
    if form.is_plain:
        emitter.emit_as(var, relax.op.reshape(parts.quants, [rows, depth]))
        return

    if form.scale in SCALES_OF_BYTES:
        parts = replace(parts, scales=arrays.look_up(parts.scales, SCALES_OF_BYTES[form.scale]))

    def by_weight(inner: relax.Expr, outer: relax.Expr | None) -> relax.Expr:
        if outer is not None:
            if form.factor != 1:
                outer = arrays.times(outer, arrays.number(form.factor, "float32"))
            per_block = arrays.repeated(outer, form.superblock_size // form.block)
            inner = arrays.times(arrays.widened(inner, is_signed=True), per_block)
        return arrays.repeated(inner, form.block)

    if form.codes:
        fields = arrays.look_up(parts.quants, np.array(form.codes, "float32"))
    else:
        fields = arrays.widened(parts.quants, is_signed=False)
    if form.min_code and not form.codes:
        shape = shape_of(fields) or []
        fields = arrays.emit(relax.op.add(fields, arrays.number(form.min_code, "float32")), shape, "float32")
    scales = by_weight(parts.scales, parts.superblock_scales)
    value = relax.op.multiply(fields, scales)
    if parts.minimums is not None:
        scaled = arrays.times(fields, scales)
        apply = relax.op.add if parts.superblock_minimums is None else relax.op.subtract
        value = apply(scaled, by_weight(parts.minimums, parts.superblock_minimums))
    emitter.emit_as(var, value)


def _write_integers(emitter: Emitter, call: relax.Call, var: relax.Var) -> None:
    """Dequantize integers: ``(weight - zero) * scale``."""
    arrays = _RelaxOps(emitter, var)
    data, scales = call.args[0], call.args[1]
    rows, size = shape_of(data) or []
    depth, block, bits = int(call.attrs.depth), int(call.attrs.block), int(call.attrs.bits)

    def without_padding(value: relax.Expr, dtype: str) -> relax.Expr:
        return arrays.emit(relax.op.strided_slice(value, [1], [0], [depth]), [rows, depth], dtype)

    def by_block(value: relax.Expr) -> relax.Expr:
        return without_padding(arrays.repeated(arrays.widened(value, is_signed=False), block), "float32")

    quants = data
    if bits < 8:
        fields = [arrays.bits(data, bit, bits) for bit in range(0, 8, bits)]
        quants = arrays.reshape(arrays.stack(fields, 2), [rows, int(size) * (8 // bits)])
    numbers = arrays.widened(without_padding(quants, "uint8"), is_signed=False)
    points = by_block(call.args[2]) if len(call.args) > 2 else arrays.number(middle_of(bits), "float32")
    shifted = arrays.emit(relax.op.subtract(numbers, points), [rows, depth], "float32")
    emitter.emit_as(var, relax.op.multiply(shifted, by_block(scales)))


_MAX_OPS = 32  # maximum number of elementwise ops that are fused into a product


def form_quantized_matmuls(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; it returns the same module if nothing changes."""
    packer = _Packer()
    return rewrite_blocks(mod, lambda block: _form(block, packer))


FormQuantizedMatmuls = declare_pass("FormQuantizedMatmuls", form_quantized_matmuls)


def _form(block: Block, packer: _Packer) -> list[relax.Binding] | None:
    if not any(op_name(binding.value) == DEQUANTIZE_BLOCKS for binding in block.bindings):
        return None
    block = _with_block_rows(block, packer)
    products: dict[int, Product] = {}
    claimed: set[int] = set()
    for index in reversed(range(len(block.bindings))):
        product = _match_product(block, index)
        if product is not None and index not in claimed:
            needed = [later.lhs for later in products.values()]
            if has_few_rows(product):
                fuse_bias(block, product, claimed)
            _fuse_elementwise(block, product, claimed, needed)
            if has_few_rows(product) and fuse_shares(block, product, claimed):
                _fuse_elementwise(block, product, claimed, needed)
            products[product.end] = product
            claimed.update([*product.inside, product.end])
    for product in list(products.values()):
        fuse_factor(block, product, products)
    for product in products.values():
        fuse_rounding(block, product)
    bindings = with_regions(block, products, lambda emitter, product, var: _write(emitter, product, var, packer))
    emitter = Emitter(block.is_dataflow)
    for binding in without_unused(bindings or block.bindings, block, _is_weight):
        if op_name(binding.value) == DEQUANTIZE_BLOCKS:
            write_plain(emitter, _with_definitions(block, binding.value), binding.var)
        else:
            emitter.bindings.append(binding)
    return emitter.bindings


def _with_block_rows(block: Block, packer: _Packer) -> Block:
    """The block with each take of rows of weights replaced by a gather from the quantized weights."""
    emitter, changed = Emitter(block.is_dataflow), False
    for binding in block.bindings:
        value = binding.value
        is_take = op_name(value) == "relax.take" and value.attrs.axis is not None and int(value.attrs.axis) == 0
        weight = block.definition(value.args[0]) if is_take else None
        if weight is None or op_name(weight) != DEQUANTIZE_BLOCKS or shape_of(value.args[1]) is None:
            emitter.bindings.append(binding)
            continue
        changed = True
        _write_rows(emitter, _with_definitions(block, weight), binding, packer)
    return Block(emitter.bindings, block.is_dataflow, block.used_later) if changed else block


def _write_rows(emitter: Emitter, weight: relax.Call, binding: relax.Binding, packer: _Packer) -> None:
    """Write a gather of rows, by the device's kernel or by plain ops on these rows' bytes."""
    var, index = binding.var, binding.value.args[1]
    target, depth = target_of(var.ty.vdevice), int(weight.attrs.depth)
    layout, extents = resolver_or_default(target).block_layout(target), shape_of(index) or []
    is_constant = all(is_tensor_constant(arg) for arg in weight.args)
    rows = prod(extents) if len(extents) != 1 else extents[0]
    flat = index if len(extents) == 1 else emitter.reshape(index, [rows], f"{var.name}_index")
    ty = tensor_type([rows, depth], "float32", var.ty)
    numbers = type(var)(f"{var.name}_rows", ty) if len(extents) != 1 else var
    if (
        layout is not None
        and BlockRowsProblem in resolver_or_default(target).problems
        and is_constant
        and layout.fits(form_of(weight), depth)
    ):
        packed = packer.pack(weight, layout, var.ty.vdevice)
        count = int(weight.ty.shape.values[0])
        call = block_rows(*packed, flat, rows=count, depth=depth, format=form_of(weight).name)
        emitter.emit_as(numbers, call)
    else:
        operands = [_take_rows(emitter, arg, flat, rows, var) for arg in weight.args]
        write_plain(emitter, typed(with_args(weight, operands), ty), numbers)
    if numbers is not var:
        emitter.emit_as(var, relax.op.reshape(numbers, shape_of(var)))


def _take_rows(emitter: Emitter, data: relax.Expr, index: relax.Expr, rows: Any, var: relax.Var) -> relax.Expr:
    ty = tensor_type([rows, *(shape_of(data) or [])[1:]], str(data.ty.dtype), var.ty)
    return emitter.emit(relax.op.take(data, index, axis=0), ty, f"{var.name}_taken")


def _is_weight(value: relax.Expr) -> bool:
    return op_name(value) in (DEQUANTIZE_BLOCKS, PERMUTE, CAST, RESHAPE, *TRANSFERS, "relax.take")


def _match_product(block: Block, index: int) -> Product | None:
    """The product of a binding; None without block-quantized weights, or without a kernel of the device for them."""
    binding = block.bindings[index]
    if op_name(binding.value) != "relax.matmul" or shape_of(binding.var) is None:
        return None
    lhs, rhs = binding.value.args
    if len(shape_of(rhs) or []) == 4:
        return _match_expert_product(block, index)
    if len(shape_of(rhs) or []) != 2:  # a batched product
        return None
    weight = block.definition(rhs)
    order = [0, 1]
    while op_name(weight) in (PERMUTE, CAST):
        if op_name(weight) == PERMUTE:
            order = [order[axis] for axis in permutation(weight)]
        elif "float" not in str(weight.ty.dtype):
            return None
        weight = block.definition(weight.args[0])
    if op_name(weight) != DEQUANTIZE_BLOCKS or order != [1, 0] or len(shape_of(lhs) or []) < 2:
        return None
    is_constant = all(is_tensor_constant(block.definition(arg)) for arg in weight.args)
    dtypes = (str(lhs.ty.dtype), str(binding.var.ty.dtype))
    layout = _block_layout(binding.var)
    if not is_constant or "float64" in dtypes or layout is None or not _fits(layout, weight):
        return None
    if isinstance(layout, Fragments) and form_of(weight).is_plain:  # a product of tensor cores is faster
        return None
    lhs = _narrow(block, lhs, layout)
    weight = _with_definitions(block, weight)
    sums = Expression.operand(0)
    if dtypes[1] != "float32":
        sums = Expression(Term("cast", (sums.term,), (dtypes[1],)))
    return Product(lhs, weight, layout, [], index, sums)


def _narrow(block: Block, lhs: relax.Expr, layout: BlockLayout) -> relax.Expr:
    """A left operand before a cast to float32, which does not change its numbers, if kernels read its type."""
    cast = block.definition(lhs)
    is_wider = op_name(cast) == CAST and str(lhs.ty.dtype) == "float32"
    return cast.args[0] if is_wider and str(cast.args[0].ty.dtype) in layout.lhs_types else lhs


def _block_layout(result: relax.Var) -> BlockLayout | None:
    target = target_of(result.ty.vdevice)
    return resolver_or_default(target).block_layout(target)


def _match_expert_product(block: Block, index: int) -> Product | None:
    """The product of a binding of rows by matrices that are taken from a table of experts; None for any other."""
    var, (lhs, rhs) = block.bindings[index].var, block.bindings[index].value.args
    transposed = block.definition(rhs)
    if op_name(transposed) != PERMUTE or list(permutation(transposed)) != [0, 1, 3, 2]:
        return None
    experts = block.definition(transposed.args[0])
    if op_name(experts) != "relax.take" or experts.attrs.axis is None or int(experts.attrs.axis) != 0:
        return None
    if str(experts.attrs.mode) not in ("fast", "nan"):  # products leave out what is outside
        return None
    table, index_expr = block.definition(experts.args[0]), experts.args[1]
    weight = block.definition(table.args[0]) if op_name(table) == RESHAPE else table
    layout, sizes, source = _block_layout(var), shape_of(table) or [], None
    if op_name(weight) == STREAM:
        source, weight = _streamed(block, weight)
    if op_name(weight) != DEQUANTIZE_BLOCKS or layout is None or not _fits(layout, weight):
        return None
    if len(sizes) != 3 or int(sizes[2]) != int(weight.attrs.depth) or not layout.fits_matrices(int(sizes[1])):
        return None
    lhs_shape, index_shape = shape_of(lhs) or [], shape_of(index_expr) or []
    if (
        len(lhs_shape) != 4
        or len(index_shape) != 2
        or not is_one(lhs_shape[2])
        or not isinstance(index_shape[1], tvm.tirx.IntImm)
    ):
        return None
    fits = same_shape(lhs_shape[:1], index_shape[:1]) and (
        is_one(lhs_shape[1]) or same_shape(lhs_shape[1:2], index_shape[1:])
    )
    is_constant = all(is_tensor_constant(block.definition(arg)) for arg in weight.args)
    is_float = str(lhs.ty.dtype) == str(var.ty.dtype) == "float32" and str(index_expr.ty.dtype) in ("int32", "int64")
    if not (fits and is_constant and is_float):
        return None
    weight, sums, lhs = _with_definitions(block, weight), Expression.operand(0), _narrow(block, lhs, layout)
    if not layout.multiplies(form_of(weight), str(lhs.ty.dtype)):
        return None
    if source is not None and not is_streamable(form_of(weight), _block_layout(source), layout):
        return None
    experts_count = int(sizes[0])
    return Product(lhs, weight, layout, [], index, sums, experts=experts_count, index=index_expr, source=source)


def _streamed(block: Block, stream: relax.Call) -> tuple[relax.Expr | None, relax.Expr]:
    """Weight that is copied in each call (None if it is on the device of the product), and its value."""
    moved = block.definition(stream.args[0])
    return (moved.args[0], block.definition(moved.args[0])) if op_name(moved) == TRANSFER else (None, moved)


def _fits(layout: BlockLayout, weight: relax.Call) -> bool:
    return layout.fits(form_of(weight), int(weight.attrs.depth))


def _with_definitions(block: Block, weight: relax.Call) -> relax.Call:
    """A call to dequantize_blocks with constants instead of the variables that are bound to them."""
    return typed(with_args(weight, [block.definition(arg) for arg in weight.args]), weight.ty)


def _fuse_elementwise(block: Block, product: Product, claimed: set[int], needed: list[relax.Expr]) -> None:
    """Fuse elementwise ops after a product, as long as each is the only user of the one before.

    Values of `needed` are not fused: later products read them directly, instead of the cast that is their user.
    """
    for _ in range(_MAX_OPS):
        last = block.bindings[product.end].var
        if any(last.same_as(value) for value in needed):
            return
        index = block.sole_user(last)
        if index is None and has_few_rows(product) and fuse_joined(block, product, claimed):
            continue
        if index is None or index in claimed or has_writes(block, product.end, index):
            return
        binding = block.bindings[index]
        parsed = to_expression(binding.value) if isinstance(binding, relax.VarBinding) else None
        if parsed is None or not same_shape(shape_of(binding.var) or [], shape_of(last) or []):
            return
        expression, tensors = parsed
        operands = list(product.operands)
        terms = []
        for tensor in tensors:
            if tensor.same_as(last):
                terms.append(product.expression)
                continue
            if not _is_readable(tensor, last) or _arrives_later(block, tensor, product.end):
                return
            operand = next((i for i, x in enumerate(operands) if x.same_as(tensor)), len(operands))
            operands[operand:] = operands[operand:] or [tensor]
            terms.append(Expression.operand(1 + operand))
        product.expression, product.operands = expression.substitute(terms), operands
        product.inside.append(product.end)
        product.end = index


def _arrives_later(block: Block, tensor: relax.Expr, index: int) -> bool:
    """Return whether a tensor comes from another device after a binding, whose kernel would wait for it."""
    is_transfer = op_name(block.definition(tensor)) == TRANSFER
    return is_transfer and any(binding.var.same_as(tensor) for binding in block.bindings[index:])


def _is_readable(tensor: relax.Expr, result: relax.Var) -> bool:
    """Return whether an operand has the result's shape, or is a row of columns or a scalar."""
    shape, result_shape = shape_of(tensor), shape_of(result) or []
    if shape is None:
        return False
    return same_shape(shape, result_shape) or (
        all(map(is_one, shape[:-1])) and same_shape(broadcast(shape[-1:], result_shape[-1:]) or [], result_shape[-1:])
    )


def _write(emitter: Emitter, product: Product, var: relax.Var, packer: _Packer) -> None:
    lhs = product.lhs
    if product.rounded:
        shape = [(shape_of(lhs) or [])[0], 1, 1, int(product.weight.attrs.depth)]
        lhs = emitter.reshape(lhs, shape, f"{var.name}_lhs")
    if str(lhs.ty.dtype) not in product.layout.lhs_types:
        lhs = emitter.cast(lhs, "float32", f"{var.name}_lhs")
    operands = []
    for index, operand in enumerate(product.operands, 1):
        shape = shape_of(operand) or []
        if len(shape) > 1 and not same_shape(shape, shape_of(var) or []):
            operand = emitter.reshape(operand, shape[-1:], f"{var.name}_x{index}")
        operands.append(operand)
    weights: list[relax.Expr] = []
    for weight in (product.weight, product.second):
        if weight is not None:
            if product.source is None:
                weights += packer.pack(weight, product.layout, var.ty.vdevice, product.experts)
            else:
                weights += _write_streamed(emitter, product, weight, f"{var.name}_{len(weights)}", packer)
    routes = [route for route in (product.index, product.shares) if route is not None]
    call = block_matmul(
        lhs,
        *weights,
        *routes,
        *product.biases,
        *operands,
        columns=product.columns,
        block=int(product.weight.attrs.block),
        bits=int(product.weight.attrs.bits),
        zeros=len(product.weight.args) > 2,
        expression=product.expression,
        format=str(product.weight.attrs.format),
        experts=product.experts,
        activation_bits=int(product.weight.attrs.activation_bits),
        rows=str(product.weight.attrs.rows),
        products=1 if product.second is None else 2,
        shares=product.shares is not None,
        biases=bool(product.biases),
        rounded=product.rounded,
    )
    emitter.emit_as(var, call)


def _write_streamed(
    emitter: Emitter, product: Product, weight: relax.Call, name: str, packer: _Packer
) -> list[relax.Expr]:
    """Write copies of the CPU's packed weight, and their conversion to fragments."""
    assert product.source is not None and product.index is not None, "experts of another device"
    form, depth, vdevice = form_of(weight), int(weight.attrs.depth), product.source.ty.vdevice
    panels = _block_layout(product.source)
    assert isinstance(panels, Panels), "CPUs have panels"
    (packed,) = packer.pack(weight, panels, vdevice, product.experts)
    ty = tensor_type(shape_of(packed) or [], "uint8", product.index.ty)
    copied = emitter.emit(stream(packed, product.index), ty, f"{name}_panels")
    shapes = product.layout.shapes(product.columns, form, depth, product.experts)
    parts: list[relax.Expr] = []
    for part, (shape, dtype) in enumerate(zip(shapes, Fragments().part_types(form), strict=False)):
        call = panel_fragments(
            copied, columns=product.columns, depth=depth, experts=product.experts, format=form.name, part=part
        )
        parts.append(emitter.emit(call, tensor_type(shape, dtype, product.index.ty), f"{name}_part{part}"))
    return parts


class _Packer:
    """Cache of packed weights, by the operands of dequantize_blocks and the layout."""

    def __init__(self) -> None:
        self._packed: dict[tuple[Any, ...], list[tvm.runtime.Tensor]] = {}
        # The host frees what only other devices use.
        self._memory = {is_host: WeightMemory() for is_host in (False, True)}

    def pack(
        self, weight: relax.Call, layout: BlockLayout, vdevice: relax.VDevice | None, experts: int = 0
    ) -> list[relax.Expr]:
        """Pack the operands of a call to dequantize_blocks in the layout of the device's kernel."""
        form, depth = form_of(weight), int(weight.attrs.depth)
        # The module keeps the constants alive, so their identities are valid keys.
        key = (*(hash(arg.value) for arg in weight.args), form, depth, layout, experts)
        if key not in self._packed:
            source = BlockSource(tuple(host_array(arg.value) for arg in weight.args), form, depth)
            memory = self._memory[vdevice is None or is_cpu(vdevice)]
            arrays = layout.pack(source, experts or 1, memory.zeros)
            self._packed[key] = list(map(share_or_copy, arrays))
        return [
            tvm.ir.GenericConst(data, relax.TensorType(list(data.shape), str(data.dtype), vdevice))
            for data in self._packed[key]
        ]
