"""PropagateEncodings: work around products and convolutions is done on their encoded operands and results.

Before::

    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    y = R.hetero.unset_encoding(out, "matmul[2]<...>")
    z = R.nn.relu(R.add(y, bias))

After::

    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    z_encoded = R.hetero.elementwise(out, bias, expression="relu(add(x0, x1))", encoding="matmul[2]<...>")
    z = R.hetero.unset_encoding(z_encoded, "matmul[2]<...>")

What moves, and where it stops:

- Permutations of operands and results of a matrix product become index maps (`absorb_permutes`).
- Elementwise work on the result of either becomes one expression (`elementwise_regions`), up to the last value through
  which all uses of it go: nothing is computed or stored twice for it.
- `unset_encoding` moves below a transfer if everything on the other side sets that encoding again; work never moves
  from one device to another.
- A pair of unset and set with one encoding cancels.

TVM's FuseTransposeMatmul makes a kernel of loops for a product with a transposed right operand; an index map lets the
device's own kernel read either operand, and write the result, in any order.

Assumes SetEncoding, and asks no device anything: SpecializeEncodings undoes all of it where a device has no layout.
Linear in the number of bindings; a second run changes nothing.
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
from ..quantize.quantized_operands import dequantized, is_part_of_quantized
from .absorb_permutes import absorb_permutes
from .encoded_products import ONE

# Elementwise work on the result of a product or convolution, as one expression on the encoded result.
#
# A region starts at an `unset_encoding` and takes in users that are elementwise, as long as they are. It ends at the
# last value through which every use of its start goes: in ``x * sigmoid(x)`` that is the product, not the sigmoid.
# Everything before the end is computed nowhere else, so nothing is computed or stored twice. Where two products meet
# the later one takes the work, and the result of the earlier one is an operand of it.
#
# A region reads through reshapes and permutations if the operand behind them can be brought to where the result of
# the product is. A tensor of one dimension always can; a whole tensor can behind a reshape, and behind a permutation
# where it was permuted in the same way just before, so that the two cancel.


def absorb_elementwise(block: Block) -> list[relax.Binding] | None:
    """The block's bindings with every region one `R.hetero.elementwise`; None where there is none."""
    regions: dict[int, Region] = {}
    taken: set[int] = set()
    for binding in reversed(block.bindings):
        region = Growth(block, binding.var, taken).region() if is_root(binding, block) else None
        if region is not None:
            regions[region.end] = region
            taken.update([*region.inside, region.end])
    return with_regions(block, regions, lambda emitter, region, var: _write(emitter, region, var, block))


def is_root(binding: relax.Binding, block: Block) -> bool:
    """Return whether a region may start here: at the plain form of what this block computed encoded."""
    value = binding.value
    if op_name(value) != op.UNSET or value.attrs.layout or shape_of(binding.var) is None:
        return False
    return op_name(block.definition(value.args[0])) in (*op.PRODUCTS, op.ELEMENTWISE)


def _write(emitter: Emitter, region: Region, var: relax.Var, block: Block) -> None:
    """The region's work, and its plain result as `var`."""
    unset = block.definitions[region.root]
    encoding = Encoding.parse(unset.attrs.encoding)
    expression, kept = _simplified(region)
    operands = [unset.args[0]]
    for number, operand in enumerate(kept, 1):
        value = _as_the_root(emitter, operand, f"{var.name}_x{number}")
        if operand.is_full:
            value = emitter.emit(op.set_encoding(value, encoding), value.ty, f"{var.name}_x{number}")
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
    """The region's expression with as few ops as requantizing takes, and the operands it still has after ``x0``."""
    values: list[relax.Expr] = [region.root, *(operand.value for operand in region.operands)]
    constants = {
        number: array for number, operand in enumerate(region.operands, 1) if (array := _constant(operand)) is not None
    }
    dtypes = [str(value.ty.dtype) for value in values]
    expression, made = simplify_requantization(region.expression, dtypes, constants)
    arrays = list(made.values())
    if expression != region.expression:
        expression, numbers = numbers_as_operands(expression, [*dtypes, *["float32"] * len(arrays)])
        arrays += numbers
    operands = [
        *region.operands,
        *(RegionOperand(constant_on_device_of(array, region.root), None, False) for array in arrays),
    ]
    used = [index for index in operands_of(expression) if index]
    places = [Expression.operand(used.index(i) + 1 if i in used else 0) for i in range(len(operands) + 1)]
    return expression.substitute(places), [operands[index - 1] for index in used]


def _constant(operand: RegionOperand) -> np.ndarray | None:
    """The elements of a constant operand of float32 as it is met at the root; None for others."""
    if not isinstance(operand.value, tvm.ir.GenericConst) or str(operand.value.ty.dtype) != "float32":
        return None
    if operand.is_full:
        return None
    array = operand.value.value.numpy()
    if operand.axes is not None:
        return array.transpose(operand.axes)
    return array if operand.shape is None else array.reshape([int(extent) for extent in operand.shape])


def _as_the_root(emitter: Emitter, operand: RegionOperand, name: str) -> relax.Expr:
    """An operand that was met behind a reshape or a permutation, as it has to be before that."""
    value, dtype = operand.value, str(operand.value.ty.dtype)
    if operand.axes is not None:
        shape = shape_of(value) or []
        ty = tensor_type([shape[axis] for axis in operand.axes], dtype, value.ty)
        return emitter.emit(relax.op.permute_dims(value, list(operand.axes)), ty, f"{name}_permuted")
    if operand.shape is not None and not same_shape(operand.shape, shape_of(value) or []):
        ty = tensor_type(operand.shape, dtype, value.ty)
        return emitter.emit(relax.op.reshape(value, list(operand.shape)), ty, f"{name}_reshaped")
    return value


# An expression is written out as text, each use of a value anew; what is one chain behind a product becomes one text.
_MAX_TERMS = 128

# A region that ended at one of these would gain nothing, or has no value there.
_NO_END = (RESHAPE, PERMUTE, "relax.less")


@dataclass
class RegionOperand:
    """A plain operand of a region.

    Attributes
    ----------
    value : relax.Expr
    shape : list, optional
        Shape that it is reshaped to first: where the region works behind a reshape.
    is_full : bool
        Whether it has the result's shape, and will be encoded alike; others broadcast and stay plain.
    axes : tuple of int, optional
        How it is permuted first: where the region works behind a permutation.
    """

    value: relax.Expr
    shape: list[Any] | None
    is_full: bool
    axes: tuple[int, ...] | None = None


@dataclass
class Region:
    """Work that one `elementwise` will do.

    Attributes
    ----------
    root : relax.Var
        The plain result of the `unset_encoding` it starts at.
    end : int
        Index of the binding it ends at.
    inside : list of int
        Bindings before the end, which vanish.
    expression : Expression
        ``x0`` is the root.
    operands : list of RegionOperand
        ``x1``, ``x2``, ...
    order : tuple of int, optional
        How the root's dimensions are permuted where it ends; None where they are not.
    """

    root: relax.Var
    end: int
    inside: list[int]
    expression: Expression
    operands: list[RegionOperand]
    order: tuple[int, ...] | None = None


class Growth:
    """A region while it grows."""

    def __init__(self, block: Block, root: relax.Var, claimed: set[int]) -> None:
        self.block, self.root, self.claimed = block, root, claimed
        self.shape = shape_of(root) or []
        self.values = {root: Expression.operand(0)}
        self.sizes = {root: _terms(block, block.definition(root))}
        self.views = {root: self.shape}
        self.orders: dict[relax.Var, tuple[int, ...] | None] = {root: None}  # of what stands behind a permutation
        self.negative: dict[relax.Var, Expression] = {}  # from where(x < 0, ...)'s condition to x
        self.operands: list[RegionOperand] = []

    def region(self) -> Region | None:
        """The region up to its last end, None if not even one op is in it."""
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
            if index in self.claimed or not self._take(binding):
                break
            if best is not None and self._is_stored_narrow(best, binding):
                if not self.block.bindings[best.end].var.same_as(binding.value.args[0]):  # permuted in between
                    best = replace(best, end=inside[-1], inside=inside[:-1], order=self.orders[binding.value.args[0]])
            elif (
                set(pending) <= {index}
                and op_name(binding.value) not in _NO_END
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
        """True if a value is but the bytes at which a region may end as floats: whoever reads them dequantizes them."""
        if best is None or str(binding.var.ty.dtype) in ("int8", "uint8"):
            return False
        found = dequantized(binding.var, self.block)
        return found is not None and found[1].same_as(self.block.bindings[best.end].var)

    def _is_stored_narrow(self, best: Region, binding: relax.Binding) -> bool:
        """True if a value is but the 16 bits at which a region may end, widened, and its reader takes the cast in.

        On GPUs, whose kernels wait for memory. TVM fuses nothing into the reading side of a pooling.
        """
        value, reader = binding.value, self._reader(binding.var)
        if op_name(value) != CAST or reader is None or not is_on_gpu(binding.var.ty):
            return False
        narrow = value.args[0]
        is_end = narrow in self.values and self.values[narrow] == best.expression
        is_wider = str(narrow.ty.dtype) in HALF_TYPES and str(binding.var.ty.dtype) == "float32"
        return is_end and is_wider and "pool" not in reader

    def _reader(self, var: relax.Var) -> str | None:
        """The op that alone reads a value, through views; None where several do."""
        while (user := self.block.sole_user(var)) is not None:
            var, name = self.block.bindings[user].var, op_name(self.block.bindings[user].value)
            if name not in (RESHAPE, PERMUTE):
                return name
        return None

    def _take(self, binding: relax.Binding) -> bool:
        var, value = binding.var, binding.value
        if not isinstance(binding, relax.VarBinding) or shape_of(var) is None:
            return False
        if op_name(value) in (RESHAPE, PERMUTE):
            return self._take_view(var, value)
        if op_name(value) == "relax.less":
            return self._take_comparison(var, value)
        if op_name(value) == "relax.where":
            return self._take_leaky_relu(var, value)
        found = to_expression(value)
        if found is None:
            return False
        expression, tensors = found
        inner = next(tensor for tensor in tensors if tensor in self.values)
        view, order = self.views[inner], self.orders[inner]
        if not same_shape(shape_of(var) or [], view):
            return False
        known = len(self.operands)
        terms = [self._term(tensor, view, order) for tensor in tensors]
        size = _written_size(expression, [self.sizes.get(tensor, 1) for tensor in tensors])
        if any(term is None for term in terms) or size > _MAX_TERMS:
            del self.operands[known:]
            return False
        self.values[var] = expression.substitute([term for term in terms if term is not None])
        self.sizes[var], self.views[var], self.orders[var] = size, view, order
        return True

    def _take_view(self, var: relax.Var, value: relax.Call) -> bool:
        """A reshape, or a permutation of what has the root's shape or is permuted already; not one after the other."""
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

    def _take_comparison(self, var: relax.Var, value: relax.Call) -> bool:
        source = value.args[0]
        if source not in self.values or scalar_of(value.args[1]) != 0:
            return False
        self.negative[var] = self.values[source]
        return True

    def _take_leaky_relu(self, var: relax.Var, value: relax.Call) -> bool:
        """``where(x < 0, x * alpha, x)``, as ONNX's LeakyRelu arrives."""
        condition, scaled, source = value.args
        below, term = self.values.get(scaled), self.values.get(source)
        if below is None or term is None or self.negative.get(condition) != term or below.term.op != "multiply":
            return False
        factors = [arg for arg in below.term.args if arg != term.term]
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
        bytes_ = dequantized(tensor, self.block)
        if bytes_ is not None and bytes_[1] not in self.values:
            inner = self._term(bytes_[1], view, order)
            return None if inner is None else bytes_[0].substitute([inner])
        source, dtype = self._before_cast(tensor)
        operand = self._operand(source, view, order)
        if operand is None:
            return None
        for index, known in enumerate(self.operands):
            if known.value.same_as(source):
                alike = known.shape == operand.shape and known.axes == operand.axes
                return _cast(Expression.operand(index + 1), dtype) if alike else None
        self.operands.append(operand)
        return _cast(Expression.operand(len(self.operands)), dtype)

    def _before_cast(self, tensor: relax.Expr) -> tuple[relax.Expr, str | None]:
        """Operand of a cast, and the type; the tensor itself where reading that would not save a kernel and memory."""
        call = self.block.definition(tensor)
        if op_name(call) != CAST or to_expression(call) is None:
            return tensor, None
        source = call.args[0]
        bits = [tvm.DataType(str(x.ty.dtype)).bits for x in (source, tensor)]
        return (source, str(tensor.ty.dtype)) if bits[0] < bits[1] else (tensor, None)

    def _operand(self, tensor: relax.Expr, view: list[Any], order: tuple[int, ...] | None) -> RegionOperand | None:
        shape = shape_of(tensor)
        own, device = tensor.ty.vdevice, self.root.ty.vdevice
        if own is not None and device is not None and not same_object(own, device):
            return None
        together = None if shape is None else broadcast(shape, view)
        if shape is None or together is None or not same_shape(together, view):
            return None
        is_full = same_shape(shape, view)
        if order is not None:
            return self._permuted_operand(tensor, shape, is_full, order)
        if same_shape(view, self.shape):
            return RegionOperand(tensor, None, is_full)
        if is_full:
            return RegionOperand(tensor, self.shape, True)
        wide = [axis for axis, extent in enumerate(shape) if not is_one(extent)]
        if not wide:
            return RegionOperand(tensor, [], False)
        if wide == [len(shape) - 1] and same_extent(view[-1], self.shape[-1]):
            return RegionOperand(tensor, [shape[-1]], False)
        return None

    def _permuted_operand(
        self, tensor: relax.Expr, shape: list[Any], is_full: bool, order: tuple[int, ...]
    ) -> RegionOperand | None:
        """Behind a permutation: what costs nothing to permute back."""
        back = tuple(order.index(axis) for axis in range(len(order)))
        if is_full:
            return RegionOperand(tensor, None, True, back) if _is_permuted(self.block, tensor, order) else None
        if sum(not is_one(extent) for extent in shape) > 1:
            return None
        aligned = [ONE] * (len(order) - len(shape)) + shape
        return RegionOperand(tensor, [aligned[axis] for axis in back], False)


def _cast(operand: Expression, dtype: str | None) -> Expression:
    return operand if dtype is None else Expression(Term("cast", (operand.term,), (dtype,)))


def _is_permuted(block: Block, tensor: relax.Expr, order: tuple[int, ...], depth: int = 3) -> bool:
    """Return whether a tensor is, or is computed elementwise of, something that has just been permuted in this way.

    Then its permutation back meets that one, or moves up to it (MovePermutes), and costs nothing. The result of a
    convolution is stored channels-last, as if it were so permuted.
    """
    value = block.definition(tensor)
    if op_name(value) == PERMUTE:
        return tuple(permutation(value)) == order
    if op_name(value) == op.UNSET:
        is_image = Encoding.parse(value.attrs.encoding).moves is not None
        return is_image and order == (0, len(order) - 1, *range(1, len(order) - 1))
    found = to_expression(value) if depth else None
    return found is not None and any(_is_permuted(block, operand, order, depth - 1) for operand in found[1])


def _terms(block: Block, value: relax.Expr) -> int:
    """Terms in the text of what is applied to a product already, behind which `value` stands."""
    above: list[relax.Call] = []
    while op_name(value) in (op.UNSET, op.ELEMENTWISE):
        above.append(value)
        value = block.definition(value.args[0])
    size = 1
    for call in reversed(above):
        if op_name(call) == op.ELEMENTWISE:
            size = _written_size(Expression.parse(call.attrs.expression), [size] + [1] * (len(call.args) - 1))
    return size


def _written_size(expression: Expression, operands: list[int]) -> int:
    return expression.fold(operands, lambda _op, args, _params: 1 + sum(args))


Step = Callable[[Block], "list[relax.Binding] | None"]


def propagate_encodings(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    return rewrite_blocks(mod, _propagate)


PropagateEncodings = declare_pass("PropagateEncodings", propagate_encodings)


def _propagate(block: Block) -> list[relax.Binding] | None:
    if not any(encoded_op(binding.value) for binding in block.bindings):
        return None
    changed = False
    for step in _STEPS:
        bindings = step(block)
        if bindings is not None:
            kept = without_unused(bindings, block, _is_droppable)
            block, changed = Block(kept, block.is_dataflow, block.used_later), True
    return block.bindings if changed else None


def drop_unused(block: Block) -> list[relax.Binding] | None:
    """Without what nobody reads, so that it does not count as a reader of what work moves away from."""
    kept = without_unused(block.bindings, block, _is_droppable)
    return kept if len(kept) < len(block.bindings) else None


def _is_droppable(value: relax.Expr) -> bool:
    return op_name(value) in (op.SET, op.UNSET) or is_part_of_quantized(value)


def unset_below_transfers(block: Block) -> list[relax.Binding] | None:
    """``to_vdevice(unset(x))`` becomes ``unset(to_vdevice(x))`` where only `set_encoding` of that encoding uses it."""
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
        moved = emitter.emit(relax.Call(value.op, [encoded], value.attrs), ty, f"{var.name}_encoded")
        unset = relax.Call(source.op, [moved], source.attrs, ret_ty=var.ty)
        emitter.bind(var, unset)
        definitions[var] = unset
        changed = True
    return emitter.bindings if changed else None


def _all_set(users: list[relax.Expr], source: relax.Call) -> bool:
    """Return whether there are users and all set the encoding that `source` unsets.

    For another one it would be laid out on one side, undone on the other, and laid out again.
    """
    return bool(users) and all(op_name(user) == op.SET and _same_attrs(user, source) for user in users)


def cancel_pairs(block: Block) -> list[relax.Binding] | None:
    """``set(unset(x))`` and ``unset(set(x))`` of one encoding and layout become ``x``."""
    kept: list[relax.Binding] = []
    same: dict[relax.Var, relax.Expr] = {}
    for binding in block.bindings:
        value = binding.value
        undone = {op.SET: op.UNSET, op.UNSET: op.SET}.get(op_name(value) or "")
        source = block.definition(value.args[0]) if undone else None
        if source is None or op_name(source) != undone or not _same_attrs(value, source):
            kept.append(binding)
            continue
        original = source.args[0]
        same[binding.var] = same.get(original, original) if isinstance(original, relax.Var) else original
        if not block.is_local(binding.var):
            kept.append(relax.VarBinding(binding.var, original))
    return [renamed(binding, same) for binding in kept] if same else None


def _same_attrs(first: relax.Call, second: relax.Call) -> bool:
    return (first.attrs.encoding, first.attrs.layout) == (second.attrs.encoding, second.attrs.layout)


# Permutations first, so that elementwise work behind them is seen; again, for those behind elementwise work.
_STEPS: tuple[Step, ...] = (
    drop_unused,
    cancel_pairs,
    absorb_permutes,
    absorb_elementwise,
    absorb_permutes,
    unset_below_transfers,
    cancel_pairs,
)
