"""What a region of elementwise work behind a product takes in, and where it ends; see `elementwise_regions`.

A region reads through reshapes and permutations, as long as what it meets behind them can be brought to where the
product's result is: one dimension always can, a whole tensor behind a reshape too, and one behind a permutation where
that was permuted in the same way just before, so that the two cancel.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ...encoding.encoding import Encoding
from ...encoding.expression import Expression, Term
from ...op import encoded as op
from ...target.vdevice import same_object
from ..ir.axes import permutation
from ..ir.blocks import Block, broadcast, is_one, same_extent, same_shape, shape_of
from ..ir.op_names import CAST, PERMUTE, RESHAPE
from ..ir.relax_expressions import scalar_of, to_expression
from ..ir.rewriting import op_name
from ..quantize.quantized_operands import dequantized
from .encoded_products import ONE

# An expression is written out as text, each use of a value anew; what is one chain behind a product becomes one text.
_MAX_TERMS = 128

# A region that ended at one of these would gain nothing, or has no value there.
_NO_END = (RESHAPE, PERMUTE, "relax.less")


@dataclass
class Operand:
    """A plain operand of a region.

    Attributes
    ----------
    value : relax.Expr
    shape : list, optional
        What it is reshaped to first: where the region works behind a reshape.
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
    operands : list of Operand
        ``x1``, ``x2``, ...
    order : tuple of int, optional
        How the root's dimensions are permuted where it ends; None where they are not.
    """

    root: relax.Var
    end: int
    inside: list[int]
    expression: Expression
    operands: list[Operand]
    order: tuple[int, ...] | None = None


class Growth:
    """A region while it grows."""

    def __init__(self, block: Block, root: relax.Var, taken: set[int]) -> None:
        self.block, self.root, self.taken = block, root, taken
        self.shape = shape_of(root) or []
        self.values = {root: Expression.operand(0)}
        self.sizes = {root: _terms(block, block.definition(root))}
        self.views = {root: self.shape}
        self.orders: dict[relax.Var, tuple[int, ...] | None] = {root: None}  # of what stands behind a permutation
        self.negative: dict[relax.Var, Expression] = {}  # from where(x < 0, ...)'s condition to x
        self.operands: list[Operand] = []

    def region(self) -> Region | None:
        """The region up to its last end, None if not even one op is in it."""
        block = self.block
        best: Region | None = None
        inside: list[int] = []
        pending = list(block.users.get(self.root, [])) if block.stays(self.root) else []
        heapq.heapify(pending)
        while pending:
            index = heapq.heappop(pending)
            if inside and inside[-1] == index:
                continue
            binding = block.bindings[index]
            if index in self.taken or not self._take(binding):
                break
            if (
                set(pending) <= {index}
                and op_name(binding.value) not in _NO_END
                and not self._only_widens(best, binding)
            ):
                var = binding.var
                best = Region(self.root, index, list(inside), self.values[var], list(self.operands), self.orders[var])
            inside.append(index)
            if not block.stays(binding.var):
                break
            for user in block.users.get(binding.var, []):
                heapq.heappush(pending, user)
        return best

    def _only_widens(self, best: Region | None, binding: relax.Binding) -> bool:
        """Whether a value is but the bytes at which a region may end as floats: whoever reads them dequantizes them."""
        if best is None or str(binding.var.ty.dtype) in ("int8", "uint8"):
            return False
        found = dequantized(binding.var, self.block)
        return found is not None and found[1].same_as(self.block.bindings[best.end].var)

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
        """What a tensor is a cast of, and the type; itself where reading that would not save a kernel and memory."""
        call = self.block.definition(tensor)
        if op_name(call) != CAST or to_expression(call) is None:
            return tensor, None
        source = call.args[0]
        bits = [tvm.DataType(str(x.ty.dtype)).bits for x in (source, tensor)]
        return (source, str(tensor.ty.dtype)) if bits[0] < bits[1] else (tensor, None)

    def _operand(self, tensor: relax.Expr, view: list[Any], order: tuple[int, ...] | None) -> Operand | None:
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
            return Operand(tensor, None, is_full)
        if is_full:
            return Operand(tensor, self.shape, True)
        wide = [axis for axis, extent in enumerate(shape) if not is_one(extent)]
        if not wide:
            return Operand(tensor, [], False)
        if wide == [len(shape) - 1] and same_extent(view[-1], self.shape[-1]):
            return Operand(tensor, [shape[-1]], False)
        return None

    def _permuted_operand(
        self, tensor: relax.Expr, shape: list[Any], is_full: bool, order: tuple[int, ...]
    ) -> Operand | None:
        """Behind a permutation: what costs nothing to permute back."""
        back = tuple(order.index(axis) for axis in range(len(order)))
        if is_full:
            return Operand(tensor, None, True, back) if _is_permuted(self.block, tensor, order) else None
        if sum(not is_one(extent) for extent in shape) > 1:
            return None
        aligned = [ONE] * (len(order) - len(shape)) + shape
        return Operand(tensor, [aligned[axis] for axis in back], False)


def _cast(operand: Expression, dtype: str | None) -> Expression:
    return operand if dtype is None else Expression(Term("cast", (operand.term,), (dtype,)))


def _is_permuted(block: Block, tensor: relax.Expr, order: tuple[int, ...], depth: int = 3) -> bool:
    """Whether a tensor is, or is computed elementwise of, something that has just been permuted in this way.

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
    return expression.evaluate(operands, lambda _op, args, _params: 1 + sum(args))
