"""PropagateEncodings: fuse ops before and after products and convolutions, so that tensors stay encoded between them.

Before::

    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    y = R.hetero.unset_encoding(out, "matmul[2]<...>")
    z = R.nn.relu(R.add(y, bias))

After::

    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    z_encoded = R.hetero.elementwise(out, bias, expression="relu(add(x0, x1))", encoding="matmul[2]<...>")
    z = R.hetero.unset_encoding(z_encoded, "matmul[2]<...>")

The pass does the following:

- Permutations of operands and results of a matrix product become index maps (`absorb_permutes`), with which the
  device's kernel reads operands and writes the result in any order. (TVM's FuseTransposeMatmul instead makes a plain
  loop nest of a product with a transposed right operand.)
- Elementwise ops on the result of a product or convolution become one expression (`absorb_elementwise`).
- `unset_encoding` moves after a transfer if all users of the transferred tensor set the same encoding again. No op
  changes its device.
- ``set_encoding(unset_encoding(x))`` and ``unset_encoding(set_encoding(x))`` with one encoding become ``x``.

Runs after SetEncoding. The result is the same for all devices: SpecializeEncodings undoes it for a device that has no
layout for an encoding. Linear in the number of bindings; a second run changes nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...encoding.encoding import Encoding
from ...encoding.expression import Expression, Term
from ...encoding.requantization import numbers_as_operands, simplify_requantization
from ...encoding.row_program import operands_of
from ...op import encoded as op
from ...op.encoded import encoded_op
from ...target.element_types import HALF_TYPES
from ...target.vdevice import same_object
from ..ir.axes import permutation
from ..ir.blocks import (
    Block,
    Emitter,
    Rewrite,
    broadcast,
    is_one,
    renamed,
    rewrite_blocks,
    same_extent,
    same_shape,
    shape_of,
    tensor_type,
    with_regions,
    without_unused,
)
from ..ir.constant_values import constant_on_device_of
from ..ir.declare import declare_pass
from ..ir.op_names import CAST, PERMUTE, RESHAPE, TRANSFER
from ..ir.relax_expressions import scalar_of, to_expression
from ..ir.rewriting import is_on_gpu, op_name, typed, with_args
from ..quantize.quantized_operands import is_absorbable, match_dequantize
from .absorb_permutes import absorb_permutes
from .encoded_products import ONE

# Regions: elementwise ops on the result of a product or convolution, as one expression on the encoded result.
#
# A region starts at an `unset_encoding`, whose result is its root, and grows over elementwise users. It ends at the
# last value that post-dominates the root: in ``x * sigmoid(x)`` that is the product, not the sigmoid. Values before the
# end have no users outside, so nothing is computed or stored twice. An op on the results of two matrix products belongs
# to the region of the later one, and the result of the earlier one is an operand of that region.
#
# A region may contain reshapes or permutations. The expression is computed before them, in the root's shape; so
# operands of ops after them are reshaped or permuted back (`_aligned_to_root`). The region ends where that would be
# impossible or cost a copy (`_RegionBuilder._operand`).


def absorb_elementwise(block: Block) -> list[relax.Binding] | None:
    """The block's bindings with every region replaced by one `R.hetero.elementwise`; None without regions."""
    regions: dict[int, Region] = {}
    bindings_in_regions: set[int] = set()
    readers: dict[relax.Var, list[int]] = {}  # ends of regions that read a value, perhaps one before a cast
    for binding in reversed(block.bindings):
        if not is_root(binding, block):
            continue
        region = _RegionBuilder(block, binding.var, bindings_in_regions, readers).region()
        if region is not None:
            regions[region.end] = region
            bindings_in_regions.update([*region.inside, region.end])
            for operand in region.operands:
                if isinstance(operand.value, relax.Var):
                    readers.setdefault(operand.value, []).append(region.end)
    return with_regions(block, regions, lambda emitter, region, var: _emit_region(emitter, region, var, block))


def is_root(binding: relax.Binding, block: Block) -> bool:
    """Return whether a region may start here: at the `unset_encoding` of an encoded op's result in this block."""
    value = binding.value
    if op_name(value) != op.UNSET or value.attrs.layout or shape_of(binding.var) is None:
        return False
    return op_name(block.definition(value.args[0])) in (*op.PRODUCTS, op.ELEMENTWISE)


def _emit_region(emitter: Emitter, region: Region, var: relax.Var, block: Block) -> None:
    """Emit the region's `elementwise` op, and bind its result, without encoding, to `var`."""
    unset = block.definitions[region.root]
    encoding = Encoding.parse(unset.attrs.encoding)
    expression, region_operands = _simplify_region(region)
    operands = [unset.args[0]]
    for index, operand in enumerate(region_operands, 1):
        value = _aligned_to_root(emitter, operand, f"{var.name}_x{index}")
        if operand.is_full:
            value = emitter.emit(op.set_encoding(value, encoding), value.ty, f"{var.name}_x{index}")
        operands.append(value)
    shape = shape_of(region.root) or []
    ty = tensor_type(shape, str(var.ty.dtype), region.root.ty)
    call = op.elementwise(*operands, expression=expression, encoding=encoding)
    result = emitter.emit(call, ty, f"{var.name}_encoded")
    if region.order is None and same_shape(shape, shape_of(var) or []):
        emitter.emit_as(var, with_args(unset, [result]))
        return
    row_major = emitter.emit(op.unset_encoding(result, encoding), ty, f"{var.name}_plain")
    if region.order is None:
        emitter.emit_as(var, relax.op.reshape(row_major, shape_of(var)))
    else:
        emitter.emit_as(var, relax.op.permute_dims(row_major, list(region.order)))


def _simplify_region(region: Region) -> tuple[Expression, list[RegionOperand]]:
    """Simplify requantization in a region; returns its expression, and the operands ``x1``, ``x2``, ... of that."""
    values: list[relax.Expr] = [region.root, *(operand.value for operand in region.operands)]
    arrays_by_operand = ((index, _constant_array(operand)) for index, operand in enumerate(region.operands, 1))
    constants = {index: array for index, array in arrays_by_operand if array is not None}
    dtypes = [str(value.ty.dtype) for value in values]
    expression, new_constants = simplify_requantization(region.expression, dtypes, constants)
    arrays = list(new_constants.values())
    if expression != region.expression:
        expression, numbers = numbers_as_operands(expression, [*dtypes, *["float32"] * len(arrays)])
        arrays += numbers
    operands = [
        *region.operands,
        *(RegionOperand(constant_on_device_of(array, region.root), None, False) for array in arrays),
    ]
    used = [index for index in operands_of(expression) if index]
    new_numbers = [Expression.operand(used.index(i) + 1 if i in used else 0) for i in range(len(operands) + 1)]
    return expression.substitute(new_numbers), [operands[index - 1] for index in used]


def _constant_array(operand: RegionOperand) -> np.ndarray | None:
    """The elements of a float32 constant operand, aligned to the root; None for other operands."""
    if not isinstance(operand.value, tvm.ir.GenericConst) or str(operand.value.ty.dtype) != "float32":
        return None
    if operand.is_full:
        return None
    array = operand.value.value.numpy()
    if operand.axes is not None:
        return array.transpose(operand.axes)
    return array if operand.shape is None else array.reshape([int(extent) for extent in operand.shape])


def _aligned_to_root(emitter: Emitter, operand: RegionOperand, name: str) -> relax.Expr:
    """The operand, reshaped or permuted to the root's dimensions if its op is after a reshape or permutation."""
    if operand.axes is not None:
        return emitter.permuted(operand.value, operand.axes, f"{name}_permuted")
    if operand.shape is not None and not same_shape(operand.shape, shape_of(operand.value) or []):
        return emitter.reshape(operand.value, operand.shape, f"{name}_reshaped")
    return operand.value


# Maximum number of terms of an expression. The text of an expression repeats a value that is used several times.
_MAX_TERMS = 128

# Ops at which no region ends: views, which gain nothing, and comparisons, whose result is not an expression.
_NOT_LAST_OPS = (RESHAPE, PERMUTE, "relax.less")


@dataclass
class RegionOperand:
    """An operand of a region besides the root."""

    value: relax.Expr  # tensor without encoding
    shape: list[Any] | None  # shape to reshape it to, so that it broadcasts to the root
    # Whether it has as many elements as the root, and so gets its encoding; other operands broadcast and get none.
    is_full: bool
    axes: tuple[int, ...] | None = None  # permutation to apply to it, so that its dimensions are in the root's order


@dataclass
class Region:
    """Ops that become one `elementwise`."""

    root: relax.Var  # result of the `unset_encoding` at its start
    end: int  # index of its last binding
    inside: list[int]  # indices of its bindings before the end, which are removed
    expression: Expression  # function of the root, ``x0``, and the operands
    operands: list[RegionOperand]  # operands ``x1``, ``x2``, ..
    order: tuple[int, ...] | None = None  # permutation of the root's dimensions at the end; None without one


class _RegionBuilder:
    """Builder of the region of a root."""

    def __init__(
        self,
        block: Block,
        root: relax.Var,  # result of an `unset_encoding`
        bindings_in_regions: set[int],  # indices of the bindings that belong to other regions
        # Indices of the ends of other regions by their operands, which need not be operands of the block's ops.
        readers: dict[relax.Var, list[int]],
    ) -> None:
        self.block, self.root, self.bindings_in_regions, self.readers = block, root, bindings_in_regions, readers
        self.shape = shape_of(root) or []
        # Variable of the region -> expression over the root and the operands.
        self.expressions = {root: Expression.operand(0)}
        # Variable -> number of terms of the expression that the kernel of the product computes for it.
        self.num_terms = {root: _num_fused_terms(block, block.definition(root))}
        # shapes, orders: variable -> its shape, and the permutation of the root's dimensions that gives its own; None
        # without one.
        self.shapes = {root: self.shape}
        self.orders: dict[relax.Var, tuple[int, ...] | None] = {root: None}
        self.negative_tests: dict[relax.Var, Expression] = {}  # variable of a comparison ``x < 0`` -> expression of x
        self.operands: list[RegionOperand] = []  # operands so far

    def region(self) -> Region | None:
        """The largest region; None if it would be empty."""
        block = self.block
        best: Region | None = None
        inside: list[int] = []
        pending = self._users(self.root) if block.is_local(self.root) else []
        heapq.heapify(pending)
        while pending:
            index = heapq.heappop(pending)
            if inside and inside[-1] == index:
                continue
            binding = block.bindings[index]
            if index in self.bindings_in_regions or not self._add(binding):
                break
            if best is not None and self._is_cast_of_16_bits(best, binding):
                source = binding.value.args[0]
                if not self.block.bindings[best.end].var.same_as(source):  # a view of the region's result
                    best = replace(best, end=inside[-1], inside=inside[:-1], order=self.orders[source])
            elif (
                set(pending) <= {index}
                and op_name(binding.value) not in _NOT_LAST_OPS
                and not self._is_dequantization(best, binding)
            ):
                expression, order = self.expressions[binding.var], self.orders[binding.var]
                best = Region(self.root, index, list(inside), expression, list(self.operands), order)
            inside.append(index)
            if not block.is_local(binding.var):
                break
            for user in self._users(binding.var):
                heapq.heappush(pending, user)
        return best

    def _users(self, var: relax.Var) -> list[int]:
        """Indices of the bindings that read a value, and of the ends of regions that do."""
        return [*self.block.users.get(var, []), *self.readers.get(var, [])]

    def _is_dequantization(self, best: Region | None, binding: relax.Binding) -> bool:
        """Return whether a value only dequantizes the 8-bit result of a region.

        The region then ends before it, which stores fewer bytes: readers of the value dequantize them.
        """
        if best is None or str(binding.var.ty.dtype) in ("int8", "uint8"):
            return False
        match = match_dequantize(binding.var, self.block)
        return match is not None and match[1].same_as(self.block.bindings[best.end].var)

    def _is_cast_of_16_bits(self, best: Region, binding: relax.Binding) -> bool:
        """Return whether a value only widens the 16-bit result of a region, and its reader fuses the cast.

        The region then ends before it on GPUs, where the time of most kernels is that of their bytes. TVM fuses
        nothing into the operand of a pooling.
        """
        value, reader = binding.value, self._reader(binding.var)
        if op_name(value) != CAST or reader is None or not is_on_gpu(binding.var.ty):
            return False
        source = value.args[0]
        is_result = source in self.expressions and self.expressions[source] == best.expression
        is_widened = str(source.ty.dtype) in HALF_TYPES and str(binding.var.ty.dtype) == "float32"
        return is_result and is_widened and "pool" not in reader

    def _reader(self, var: relax.Var) -> str | None:
        """Name of the only op that reads a value, directly or through views; None if several do."""
        while (user := self.block.sole_user(var)) is not None:
            var, name = self.block.bindings[user].var, op_name(self.block.bindings[user].value)
            if name not in (RESHAPE, PERMUTE):
                return name
        return None

    def _add(self, binding: relax.Binding) -> bool:
        """Add a binding to the region; returns False if it cannot be part of it."""
        var, value = binding.var, binding.value
        if not isinstance(binding, relax.VarBinding) or shape_of(var) is None:
            return False
        if op_name(value) in (RESHAPE, PERMUTE):
            return self._add_view(var, value)
        if op_name(value) == "relax.less":
            return self._add_comparison(var, value)
        if op_name(value) == "relax.where":
            return self._add_leaky_relu(var, value)
        parsed = to_expression(value)
        if parsed is None:
            return False
        expression, tensors = parsed
        region_tensor = next(tensor for tensor in tensors if tensor in self.expressions)
        shape, order = self.shapes[region_tensor], self.orders[region_tensor]
        if not same_shape(shape_of(var) or [], shape):
            return False
        old_num_operands = len(self.operands)
        arguments = [self._argument(tensor, shape, order) for tensor in tensors]
        num_terms = _num_terms(expression, [self.num_terms.get(tensor, 1) for tensor in tensors])
        if any(argument is None for argument in arguments) or num_terms > _MAX_TERMS:
            del self.operands[old_num_operands:]
            return False
        self.expressions[var] = expression.substitute([argument for argument in arguments if argument is not None])
        self.num_terms[var], self.shapes[var], self.orders[var] = num_terms, shape, order
        return True

    def _add_view(self, var: relax.Var, value: relax.Call) -> bool:
        """Add a reshape, or a permutation of the root's shape; a region has only one of the two."""
        source, shape = value.args[0], shape_of(var) or []
        order = self.orders[source]
        if op_name(value) == PERMUTE:
            if order is None and not same_shape(self.shapes[source], self.shape):
                return False
            identity = tuple(range(len(shape)))
            order = tuple((order or identity)[axis] for axis in permutation(value))
            order = None if order == identity else order
        elif order is not None:
            return False
        self.expressions[var], self.num_terms[var] = self.expressions[source], self.num_terms[source]
        self.shapes[var], self.orders[var] = shape, order
        return True

    def _add_comparison(self, var: relax.Var, value: relax.Call) -> bool:
        """Add ``x < 0``, the condition of a LeakyRelu."""
        source = value.args[0]
        if source not in self.expressions or scalar_of(value.args[1]) != 0:
            return False
        self.negative_tests[var] = self.expressions[source]
        return True

    def _add_leaky_relu(self, var: relax.Var, value: relax.Call) -> bool:
        """Add ``where(x < 0, x * alpha, x)``, the imported form of ONNX's LeakyRelu."""
        condition, scaled, source = value.args
        product, x = self.expressions.get(scaled), self.expressions.get(source)
        if product is None or x is None or self.negative_tests.get(condition) != x or product.term.op != "multiply":
            return False
        factors = [arg for arg in product.term.args if arg != x.term]
        if len(factors) != 1 or factors[0].op != "number":
            return False
        self.expressions[var] = Expression(Term("leaky_relu", (x.term,), (float(factors[0].params[0]),)))
        self.num_terms[var], self.shapes[var] = self.num_terms[source] + 1, self.shapes[source]
        self.orders[var] = self.orders[source]
        return same_shape(shape_of(var) or [], self.shapes[source])

    def _argument(self, tensor: relax.Expr, shape: list[Any], order: tuple[int, ...] | None) -> Expression | None:
        """Expression of an argument of an op with this shape and order; None if the op cannot be in the region."""
        if tensor in self.expressions:
            is_aligned = same_shape(self.shapes[tensor], shape) and self.orders[tensor] == order
            return self.expressions[tensor] if is_aligned else None
        match = match_dequantize(tensor, self.block)
        if match is not None and match[1] not in self.expressions:
            dequantization, data = match[0], self._argument(match[1], shape, order)
            return None if data is None else dequantization.substitute([data])
        source, dtype = self._before_widening(tensor)
        operand = self._operand(source, shape, order)
        if operand is None:
            return None
        for index, existing in enumerate(self.operands):
            if existing.value.same_as(source):
                is_equal = existing.shape == operand.shape and existing.axes == operand.axes
                return _cast(Expression.operand(index + 1), dtype) if is_equal else None
        self.operands.append(operand)
        return _cast(Expression.operand(len(self.operands)), dtype)

    def _before_widening(self, tensor: relax.Expr) -> tuple[relax.Expr, str | None]:
        """The operand and result type of a cast to a wider type; the tensor itself and None for any other value."""
        call = self.block.definition(tensor)
        if op_name(call) != CAST or to_expression(call) is None:
            return tensor, None
        source = call.args[0]
        bits = [tvm.DataType(str(x.ty.dtype)).bits for x in (source, tensor)]
        return (source, str(tensor.ty.dtype)) if bits[0] < bits[1] else (tensor, None)

    def _operand(self, tensor: relax.Expr, view: list[Any], order: tuple[int, ...] | None) -> RegionOperand | None:
        """Operand for an op whose result has shape `view` and this order; None if aligning it is impossible or costly.

        After a reshape, a tensor of as many elements can be reshaped back, and so can one of a single number or one
        along the last dimension, if that is the root's too.
        """
        shape = shape_of(tensor)
        device, root_device = tensor.ty.vdevice, self.root.ty.vdevice
        if device is not None and root_device is not None and not same_object(device, root_device):
            return None
        broadcast_shape = None if shape is None else broadcast(shape, view)
        if shape is None or broadcast_shape is None or not same_shape(broadcast_shape, view):
            return None
        is_full = same_shape(shape, view)
        if order is not None:
            return self._permuted_operand(tensor, shape, is_full, order)
        if same_shape(view, self.shape):
            return RegionOperand(tensor, None, is_full)
        if is_full:
            return RegionOperand(tensor, self.shape, True)
        axes = [axis for axis, extent in enumerate(shape) if not is_one(extent)]
        if not axes:
            return RegionOperand(tensor, [], False)
        if axes == [len(shape) - 1] and same_extent(view[-1], self.shape[-1]):
            return RegionOperand(tensor, [shape[-1]], False)
        return None

    def _permuted_operand(
        self, tensor: relax.Expr, shape: list[Any], is_full: bool, order: tuple[int, ...]
    ) -> RegionOperand | None:
        """Operand after a permutation, if permuting it back costs nothing: it cancels a permutation, or is a vector."""
        inverse = tuple(order.index(axis) for axis in range(len(order)))
        if is_full:
            return RegionOperand(tensor, None, True, inverse) if _is_permuted(self.block, tensor, order) else None
        if sum(not is_one(extent) for extent in shape) > 1:
            return None
        aligned = [ONE] * (len(order) - len(shape)) + shape
        return RegionOperand(tensor, [aligned[axis] for axis in inverse], False)


def _cast(operand: Expression, dtype: str | None) -> Expression:
    return operand if dtype is None else Expression(Term("cast", (operand.term,), (dtype,)))


def _is_permuted(block: Block, tensor: relax.Expr, order: tuple[int, ...], depth: int = 3) -> bool:
    """Return whether a tensor is the result of the permutation `order`, or elementwise ops on such a result.

    The inverse permutation then costs nothing: the two cancel, directly or after MovePermutes. The result of a
    convolution counts as permuted to channels-first, since it is stored channels-last.
    """
    value = block.definition(tensor)
    if op_name(value) == PERMUTE:
        return tuple(permutation(value)) == order
    if op_name(value) == op.UNSET:
        is_convolution = Encoding.parse(value.attrs.encoding).conv is not None
        return is_convolution and order == (0, len(order) - 1, *range(1, len(order) - 1))
    parsed = to_expression(value) if depth else None
    return parsed is not None and any(_is_permuted(block, operand, order, depth - 1) for operand in parsed[1])


def _num_fused_terms(block: Block, value: relax.Expr) -> int:
    """Number of terms that the chain of `elementwise` ops between a product and `value` has as one expression."""
    elementwise_calls: list[relax.Call] = []
    while op_name(value) in (op.UNSET, op.ELEMENTWISE):
        if op_name(value) == op.ELEMENTWISE:
            elementwise_calls.append(value)
        value = block.definition(value.args[0])
    count = 1
    for call in reversed(elementwise_calls):
        count = _num_terms(Expression.parse(call.attrs.expression), [count] + [1] * (len(call.args) - 1))
    return count


def _num_terms(expression: Expression, operands: list[int]) -> int:
    """Number of terms of an expression whose operands have these numbers of terms; repeated ones count each time."""
    return expression.fold(operands, lambda _op, args, _params: 1 + sum(args))


def propagate_encodings(mod: tvm.IRModule) -> tvm.IRModule:
    """Propagate encodings (see the module's docstring); returns the same module if nothing changes."""
    return rewrite_blocks(mod, _propagate)


PropagateEncodings = declare_pass("PropagateEncodings", propagate_encodings)


def _propagate(block: Block) -> list[relax.Binding] | None:
    if not any(encoded_op(binding.value) for binding in block.bindings):
        return None
    changed = False
    for rewrite in _REWRITES:
        bindings = rewrite(block)
        if bindings is not None:
            bindings = without_unused(bindings, block, _is_droppable)
            block, changed = Block(bindings, block.is_dataflow, block.used_later), True
    return block.bindings if changed else None


def drop_unused(block: Block) -> list[relax.Binding] | None:
    """The block's bindings without unused ones, which would count as users of their operands; None if all are used."""
    bindings = without_unused(block.bindings, block, _is_droppable)
    return bindings if len(bindings) < len(block.bindings) else None


def _is_droppable(value: relax.Expr) -> bool:
    return op_name(value) in (op.SET, op.UNSET) or is_absorbable(value)


def unset_below_transfers(block: Block) -> list[relax.Binding] | None:
    """Turn ``to_vdevice(unset(x))`` into ``unset(to_vdevice(x))`` if only `set_encoding` of that encoding uses it."""
    emitter, changed = Emitter(block.is_dataflow), False
    definitions = dict(block.definitions)
    for binding in block.bindings:
        var, value = binding.var, binding.value
        source = definitions.get(value.args[0]) if op_name(value) == TRANSFER else None
        users = [block.bindings[index].value for index in block.users.get(var, [])]
        if source is None or op_name(source) != op.UNSET or not _all_set(users, source) or not block.is_local(var):
            emitter.bindings.append(binding)
            continue
        encoded = source.args[0]
        shape = encoded.ty.shape
        ty = relax.TensorType(shape, encoded.ty.dtype, var.ty.vdevice, -1 if shape is not None else encoded.ty.ndim)
        transfer = emitter.emit(with_args(value, [encoded]), ty, f"{var.name}_encoded")
        unset = typed(with_args(source, [transfer]), var.ty)
        emitter.bind(var, unset)
        definitions[var] = unset
        changed = True
    return emitter.bindings if changed else None


def _all_set(users: list[relax.Expr], source: relax.Call) -> bool:
    """Return whether there are users and all set the encoding that `source` unsets."""
    return bool(users) and all(op_name(user) == op.SET and _same_attrs(user, source) for user in users)


def cancel_pairs(block: Block) -> list[relax.Binding] | None:
    """Replace ``set(unset(x))`` and ``unset(set(x))`` of one encoding and layout by ``x``."""
    bindings: list[relax.Binding] = []
    replacements: dict[relax.Var, relax.Expr] = {}
    for binding in block.bindings:
        value = binding.value
        inverse_op = {op.SET: op.UNSET, op.UNSET: op.SET}.get(op_name(value) or "")
        source = block.definition(value.args[0]) if inverse_op else None
        if source is None or op_name(source) != inverse_op or not _same_attrs(value, source):
            bindings.append(binding)
            continue
        original = source.args[0]
        replacements[binding.var] = (
            replacements.get(original, original) if isinstance(original, relax.Var) else original
        )
        if not block.is_local(binding.var):
            bindings.append(relax.VarBinding(binding.var, original))
    return [renamed(binding, replacements) for binding in bindings] if replacements else None


def _same_attrs(first: relax.Call, second: relax.Call) -> bool:
    return (first.attrs.encoding, first.attrs.layout) == (second.attrs.encoding, second.attrs.layout)


# Absorbing permutations exposes elementwise ops after them, and absorbing these exposes permutations after them.
_REWRITES: tuple[Rewrite, ...] = (
    drop_unused,
    cancel_pairs,
    absorb_permutes,
    absorb_elementwise,
    absorb_permutes,
    unset_below_transfers,
    cancel_pairs,
)
