"""PropagateEncodings: move ops around products and convolutions to their encoded operands and results.

Before::

    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    y = R.hetero.unset_encoding(out, "matmul[2]<...>")
    z = R.nn.relu(R.add(y, bias))

After::

    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    z_encoded = R.hetero.elementwise(out, bias, expression="relu(add(x0, x1))", encoding="matmul[2]<...>")
    z = R.hetero.unset_encoding(z_encoded, "matmul[2]<...>")

Its steps:

- Permutations of operands and results of a matrix product become index maps (`absorb_permutes`). TVM's
  FuseTransposeMatmul makes a kernel of loops for a transposed right operand; with an index map, the device's own kernel
  reads either operand, and writes the result, in any order.
- Elementwise ops on the result of a product or convolution become one expression (`absorb_elementwise`), up to its last
  post-dominator: nothing is computed or stored twice.
- `unset_encoding` moves below a transfer if all users there set the same encoding again; ops never change devices.
- A pair of unset and set with one encoding cancels.

Assumes SetEncoding, and does not depend on devices: SpecializeEncodings undoes everything where a device lacks a
layout. Linear in the number of bindings; a second run changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
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
from ..ir.rewriting import is_on_gpu, op_name
from ..quantize.quantized_operands import is_absorbable, match_dequantize
from .absorb_permutes import absorb_permutes
from .encoded_products import ONE

# Regions: elementwise ops on the result of a product or convolution, as one expression on the encoded result.
#
# A region starts at an `unset_encoding` and grows over its elementwise users. It ends at the last value that
# post-dominates the start: in ``x * sigmoid(x)`` that is the product, not the sigmoid. Values before the end have no
# users outside, so nothing is computed or stored twice. Where two products meet, the region belongs to the later one,
# and the result of the earlier one is its operand.
#
# A region extends over reshapes and permutations if operands after them can be reshaped and permuted back to the result
# of the product: a tensor of one dimension always can; a full tensor can after a reshape, and after a permutation if it
# was itself permuted in the same way just before, so that the two cancel.


def absorb_elementwise(block: Block) -> list[relax.Binding] | None:
    """The block's bindings with every region replaced by one `R.hetero.elementwise`; None without regions."""
    regions: dict[int, Region] = {}
    claimed: set[int] = set()
    for binding in reversed(block.bindings):
        region = _RegionBuilder(block, binding.var, claimed).region() if is_root(binding, block) else None
        if region is not None:
            regions[region.end] = region
            claimed.update([*region.inside, region.end])
    return with_regions(block, regions, lambda emitter, region, var: _write(emitter, region, var, block))


def is_root(binding: relax.Binding, block: Block) -> bool:
    """Return whether a region may start here: at the unpacked result of an encoded op of this block."""
    value = binding.value
    if op_name(value) != op.UNSET or value.attrs.layout or shape_of(binding.var) is None:
        return False
    return op_name(block.definition(value.args[0])) in (*op.PRODUCTS, op.ELEMENTWISE)


def _write(emitter: Emitter, region: Region, var: relax.Var, block: Block) -> None:
    """Write the region's expression, and its plain result as `var`."""
    unset = block.definitions[region.root]
    encoding = Encoding.parse(unset.attrs.encoding)
    expression, region_operands = _simplified(region)
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
        emitter.bind(var, relax.Call(unset.op, [result], unset.attrs, ret_ty=var.ty))
        return
    plain = emitter.emit(op.unset_encoding(result, encoding), ty, f"{var.name}_plain")
    if region.order is None:
        view = relax.op.reshape(plain, shape_of(var))
    else:
        view = relax.op.permute_dims(plain, list(region.order))
    emitter.bind(var, relax.Call(view.op, list(view.args), view.attrs, ret_ty=var.ty))


def _simplified(region: Region) -> tuple[Expression, list[RegionOperand]]:
    """The region's expression with simplified requantization, and its remaining operands after ``x0``."""
    values: list[relax.Expr] = [region.root, *(operand.value for operand in region.operands)]
    constants = {
        index: array for index, operand in enumerate(region.operands, 1) if (array := _constant(operand)) is not None
    }
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
    replacements = [Expression.operand(used.index(i) + 1 if i in used else 0) for i in range(len(operands) + 1)]
    return expression.substitute(replacements), [operands[index - 1] for index in used]


def _constant(operand: RegionOperand) -> np.ndarray | None:
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
    """An operand of an op after a reshape or permutation, reshaped or permuted back to the root's dimensions."""
    value, dtype = operand.value, str(operand.value.ty.dtype)
    if operand.axes is not None:
        shape = shape_of(value) or []
        ty = tensor_type([shape[axis] for axis in operand.axes], dtype, value.ty)
        return emitter.emit(relax.op.permute_dims(value, list(operand.axes)), ty, f"{name}_permuted")
    if operand.shape is not None and not same_shape(operand.shape, shape_of(value) or []):
        ty = tensor_type(operand.shape, dtype, value.ty)
        return emitter.emit(relax.op.reshape(value, list(operand.shape)), ty, f"{name}_reshaped")
    return value


# Maximum number of terms of an expression, whose text repeats a value for each of its uses.
_MAX_TERMS = 128

# Ops that a region does not end at: that would gain nothing, or it lacks a value there.
_NOT_LAST_OPS = (RESHAPE, PERMUTE, "relax.less")


@dataclass
class RegionOperand:
    """A plain operand of a region.

    Attributes
    ----------
    value : relax.Expr
    shape : list, optional
        Shape that it is reshaped to first, if its op is after a reshape.
    is_full : bool
        Whether it has the result's shape, and so gets its encoding; other operands broadcast and stay plain.
    axes : tuple of int, optional
        Permutation that is applied to it first, if its op is after a permutation.
    """

    value: relax.Expr
    shape: list[Any] | None
    is_full: bool
    axes: tuple[int, ...] | None = None


@dataclass
class Region:
    """Ops that become one `elementwise`.

    Attributes
    ----------
    root : relax.Var
        Plain result of the `unset_encoding` at its start.
    end : int
        Index of its last binding.
    inside : list of int
        Bindings before the end, which are removed.
    expression : Expression
        Function of the root, ``x0``, and the operands.
    operands : list of RegionOperand
        Operands ``x1``, ``x2``, ...
    order : tuple of int, optional
        Permutation of the root's dimensions at the end; None without one.
    """

    root: relax.Var
    end: int
    inside: list[int]
    expression: Expression
    operands: list[RegionOperand]
    order: tuple[int, ...] | None = None


class _RegionBuilder:
    """Builder of the region of a root."""

    def __init__(self, block: Block, root: relax.Var, claimed: set[int]) -> None:
        self.block, self.root, self.claimed = block, root, claimed
        self.shape = shape_of(root) or []
        self.values = {root: Expression.operand(0)}
        self.sizes = {root: _terms(block, block.definition(root))}
        self.views = {root: self.shape}
        self.orders: dict[relax.Var, tuple[int, ...] | None] = {root: None}  # permutation of the root's dimensions
        self.negative: dict[relax.Var, Expression] = {}  # x by the condition of where(x < 0, ...)
        self.operands: list[RegionOperand] = []

    def region(self) -> Region | None:
        """The largest region; None without any op."""
        block = self.block
        best: Region | None = None
        inside: list[int] = []
        pending = list(block.users.get(self.root, [])) if block.is_local(self.root) else []
        heapq.heapify(pending)
        while pending:
            index = heapq.heappop(pending)
            if inside and inside[-1] == index:
                continue
            binding = block.bindings[index]
            if index in self.claimed or not self._add(binding):
                break
            if best is not None and self._is_stored_narrow(best, binding):
                if not self.block.bindings[best.end].var.same_as(binding.value.args[0]):  # permuted in between
                    best = replace(best, end=inside[-1], inside=inside[:-1], order=self.orders[binding.value.args[0]])
            elif (
                set(pending) <= {index}
                and op_name(binding.value) not in _NOT_LAST_OPS
                and not self._only_widens(best, binding)
            ):
                var = binding.var
                best = Region(self.root, index, list(inside), self.values[var], list(self.operands), self.orders[var])
            inside.append(index)
            if not block.is_local(binding.var):
                break
            for user in block.users.get(binding.var, []):
                heapq.heappush(pending, user)
        return best

    def _only_widens(self, best: Region | None, binding: relax.Binding) -> bool:
        """True if a value only dequantizes the bytes at a possible end of the region, which readers do themselves."""
        if best is None or str(binding.var.ty.dtype) in ("int8", "uint8"):
            return False
        source = match_dequantize(binding.var, self.block)
        return source is not None and source[1].same_as(self.block.bindings[best.end].var)

    def _is_stored_narrow(self, best: Region, binding: relax.Binding) -> bool:
        """True if a value only widens the 16-bit value at a possible end of the region, and its reader fuses the cast.

        This is for GPUs, whose kernels wait for memory. TVM fuses nothing into the operand of a pooling.
        """
        value, reader = binding.value, self._reader(binding.var)
        if op_name(value) != CAST or reader is None or not is_on_gpu(binding.var.ty):
            return False
        narrow = value.args[0]
        is_end = narrow in self.values and self.values[narrow] == best.expression
        is_wider = str(narrow.ty.dtype) in HALF_TYPES and str(binding.var.ty.dtype) == "float32"
        return is_end and is_wider and "pool" not in reader

    def _reader(self, var: relax.Var) -> str | None:
        """The only op that reads a value, directly or through views; None if several do."""
        while (user := self.block.sole_user(var)) is not None:
            var, name = self.block.bindings[user].var, op_name(self.block.bindings[user].value)
            if name not in (RESHAPE, PERMUTE):
                return name
        return None

    def _add(self, binding: relax.Binding) -> bool:
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
        inner = next(tensor for tensor in tensors if tensor in self.values)
        view, order = self.views[inner], self.orders[inner]
        if not same_shape(shape_of(var) or [], view):
            return False
        num_operands = len(self.operands)
        terms = [self._term(tensor, view, order) for tensor in tensors]
        size = _written_size(expression, [self.sizes.get(tensor, 1) for tensor in tensors])
        if any(term is None for term in terms) or size > _MAX_TERMS:
            del self.operands[num_operands:]
            return False
        self.values[var] = expression.substitute([term for term in terms if term is not None])
        self.sizes[var], self.views[var], self.orders[var] = size, view, order
        return True

    def _add_view(self, var: relax.Var, value: relax.Call) -> bool:
        """Add a reshape, or a permutation of the root's shape; a region does not mix both."""
        source, shape = value.args[0], shape_of(var) or []
        order = self.orders[source]
        if op_name(value) == PERMUTE:
            if order is None and not same_shape(self.views[source], self.shape):
                return False
            before = tuple(range(len(shape))) if order is None else order
            order = tuple(before[axis] for axis in permutation(value))
            order = None if order == tuple(range(len(shape))) else order
        elif order is not None:
            return False
        self.values[var], self.sizes[var] = self.values[source], self.sizes[source]
        self.views[var], self.orders[var] = shape, order
        return True

    def _add_comparison(self, var: relax.Var, value: relax.Call) -> bool:
        source = value.args[0]
        if source not in self.values or scalar_of(value.args[1]) != 0:
            return False
        self.negative[var] = self.values[source]
        return True

    def _add_leaky_relu(self, var: relax.Var, value: relax.Call) -> bool:
        """Add ``where(x < 0, x * alpha, x)``, the imported form of ONNX's LeakyRelu."""
        condition, scaled, source = value.args
        product, term = self.values.get(scaled), self.values.get(source)
        if product is None or term is None or self.negative.get(condition) != term or product.term.op != "multiply":
            return False
        factors = [arg for arg in product.term.args if arg != term.term]
        if len(factors) != 1 or factors[0].op != "number":
            return False
        self.values[var] = Expression(Term("leaky_relu", (term.term,), (float(factors[0].params[0]),)))
        self.sizes[var], self.views[var] = self.sizes[source] + 1, self.views[source]
        self.orders[var] = self.orders[source]
        return same_shape(shape_of(var) or [], self.views[source])

    def _term(self, tensor: relax.Expr, view: list[Any], order: tuple[int, ...] | None) -> Expression | None:
        if tensor in self.values:
            fits = same_shape(self.views[tensor], view) and self.orders[tensor] == order
            return self.values[tensor] if fits else None
        quantized = match_dequantize(tensor, self.block)
        if quantized is not None and quantized[1] not in self.values:
            inner = self._term(quantized[1], view, order)
            return None if inner is None else quantized[0].substitute([inner])
        source, dtype = self._before_cast(tensor)
        operand = self._operand(source, view, order)
        if operand is None:
            return None
        for index, existing in enumerate(self.operands):
            if existing.value.same_as(source):
                is_same = existing.shape == operand.shape and existing.axes == operand.axes
                return _cast(Expression.operand(index + 1), dtype) if is_same else None
        self.operands.append(operand)
        return _cast(Expression.operand(len(self.operands)), dtype)

    def _before_cast(self, tensor: relax.Expr) -> tuple[relax.Expr, str | None]:
        """The operand of a widening cast, and the type; the tensor itself and None for any other value."""
        call = self.block.definition(tensor)
        if op_name(call) != CAST or to_expression(call) is None:
            return tensor, None
        source = call.args[0]
        bits = [tvm.DataType(str(x.ty.dtype)).bits for x in (source, tensor)]
        return (source, str(tensor.ty.dtype)) if bits[0] < bits[1] else (tensor, None)

    def _operand(self, tensor: relax.Expr, view: list[Any], order: tuple[int, ...] | None) -> RegionOperand | None:
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
        """An operand after a permutation, if permuting it back costs nothing."""
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
    """Return whether a tensor is permuted in this way, or is an elementwise function of such tensors.

    Then its inverse permutation cancels that one, directly or after MovePermutes, and costs nothing. The result of a
    convolution counts as permuted, since it is stored channels-last.
    """
    value = block.definition(tensor)
    if op_name(value) == PERMUTE:
        return tuple(permutation(value)) == order
    if op_name(value) == op.UNSET:
        is_image = Encoding.parse(value.attrs.encoding).moves is not None
        return is_image and order == (0, len(order) - 1, *range(1, len(order) - 1))
    parsed = to_expression(value) if depth else None
    return parsed is not None and any(_is_permuted(block, operand, order, depth - 1) for operand in parsed[1])


def _terms(block: Block, value: relax.Expr) -> int:
    """Number of terms in the expressions that are applied to a product before `value`."""
    elementwise_calls: list[relax.Call] = []
    while op_name(value) in (op.UNSET, op.ELEMENTWISE):
        elementwise_calls.append(value)
        value = block.definition(value.args[0])
    size = 1
    for call in reversed(elementwise_calls):
        if op_name(call) == op.ELEMENTWISE:
            size = _written_size(Expression.parse(call.attrs.expression), [size] + [1] * (len(call.args) - 1))
    return size


def _written_size(expression: Expression, operands: list[int]) -> int:
    return expression.fold(operands, lambda _op, args, _params: 1 + sum(args))


Step = Callable[[Block], "list[relax.Binding] | None"]


def propagate_encodings(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; it returns the same module if nothing changes."""
    return rewrite_blocks(mod, _propagate)


PropagateEncodings = declare_pass("PropagateEncodings", propagate_encodings)


def _propagate(block: Block) -> list[relax.Binding] | None:
    if not any(encoded_op(binding.value) for binding in block.bindings):
        return None
    changed = False
    for step in _STEPS:
        bindings = step(block)
        if bindings is not None:
            bindings = without_unused(bindings, block, _is_droppable)
            block, changed = Block(bindings, block.is_dataflow, block.used_later), True
    return block.bindings if changed else None


def drop_unused(block: Block) -> list[relax.Binding] | None:
    """The block's bindings without unused ones, so that these do not count as readers; None if all are used."""
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
        transfer = emitter.emit(relax.Call(value.op, [encoded], value.attrs), ty, f"{var.name}_encoded")
        unset = relax.Call(source.op, [transfer], source.attrs, ret_ty=var.ty)
        emitter.bind(var, unset)
        definitions[var] = unset
        changed = True
    return emitter.bindings if changed else None


def _all_set(users: list[relax.Expr], source: relax.Call) -> bool:
    """Return whether there are users and all set the encoding that `source` unsets.

    For another encoding, the transferred tensor would be unpacked and packed again.
    """
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


# Permutations first, to expose elementwise ops after them; and again, for permutations after elementwise ops.
_STEPS: tuple[Step, ...] = (
    drop_unused,
    cancel_pairs,
    absorb_permutes,
    absorb_elementwise,
    absorb_permutes,
    unset_below_transfers,
    cancel_pairs,
)
