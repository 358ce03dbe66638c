"""Elementwise work on the result of a product or convolution, as one expression on the encoded result.

A region starts at an `unset_encoding` and takes in users that are elementwise, as long as they are. It ends at the last
value through which every use of its start goes: in ``x * sigmoid(x)`` that is the product, not the sigmoid. What comes
before the end is computed nowhere else, so nothing is computed or stored twice. Where two products meet the later one
takes the work, and the earlier one's result is an operand of it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from tvm import relax

from ..encoding.encoding import Encoding
from ..encoding.expression import Expression, Term
from ..op import encoded as op
from ..vdevice import same_object
from .blocks import Block, Emitter, broadcast, is_one, same_extent, same_shape, shape_of, tensor_type
from .relax_expressions import scalar_of, to_expression
from .rewriting import op_name

# An expression is written out as text, each use of a value anew; what is one chain behind a product becomes one text.
_MAX_TERMS = 128


# A region that ended at one of these would gain nothing, or has no value there.
_NO_END = ("relax.reshape", "relax.less")


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
    """

    value: relax.Expr
    shape: list[Any] | None
    is_full: bool


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
    """

    root: relax.Var
    end: int
    inside: list[int]
    expression: Expression
    operands: list[Operand]


def absorb_elementwise(block: Block) -> list[relax.Binding] | None:
    """The block's bindings with every region one `R.hetero.elementwise`; None where there is none."""
    regions: dict[int, Region] = {}
    taken: set[int] = set()
    for binding in reversed(block.bindings):
        region = _Growth(block, binding.var, taken).region() if is_root(binding, block) else None
        if region is not None:
            regions[region.end] = region
            taken.update([*region.inside, region.end])
    if not regions:
        return None
    gone = {index for region in regions.values() for index in region.inside}
    emitter = Emitter(block.is_dataflow)
    for index, binding in enumerate(block.bindings):
        if index in regions:
            _write(emitter, regions[index], binding.var, block)
        elif index not in gone:
            emitter.bindings.append(binding)
    return emitter.bindings


def is_root(binding: relax.Binding, block: Block) -> bool:
    """Whether a region may start here: at the plain form of what this block computed encoded."""
    value = binding.value
    if op_name(value) != op.UNSET or value.attrs.layout or shape_of(binding.var) is None:
        return False
    return op_name(block.definition(value.args[0])) in (*op.PRODUCTS, op.ELEMENTWISE)


class _Growth:
    """A region while it grows."""

    def __init__(self, block: Block, root: relax.Var, taken: set[int]) -> None:
        self.block, self.root, self.taken = block, root, taken
        self.shape = shape_of(root) or []
        self.values = {root: Expression.operand(0)}
        self.sizes = {root: _terms(block, block.definition(root))}
        self.views = {root: self.shape}
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
            if set(pending) <= {index} and op_name(binding.value) not in _NO_END:
                best = Region(self.root, index, list(inside), self.values[binding.var], list(self.operands))
            inside.append(index)
            if not block.stays(binding.var):
                break
            for user in block.users.get(binding.var, []):
                heapq.heappush(pending, user)
        return best

    def _take(self, binding: relax.Binding) -> bool:
        var, value = binding.var, binding.value
        if not isinstance(binding, relax.VarBinding) or shape_of(var) is None:
            return False
        if op_name(value) == "relax.reshape":
            source = value.args[0]
            self.values[var], self.sizes[var] = self.values[source], self.sizes[source]
            self.views[var] = shape_of(var) or []
            return True
        if op_name(value) == "relax.less":
            return self._take_comparison(var, value)
        if op_name(value) == "relax.where":
            return self._take_leaky_relu(var, value)
        found = to_expression(value)
        if found is None:
            return False
        expression, tensors = found
        view = next(self.views[tensor] for tensor in tensors if tensor in self.values)
        if not same_shape(shape_of(var) or [], view):
            return False
        known = len(self.operands)
        terms = [self._term(tensor, view) for tensor in tensors]
        size = _written_size(expression, [self.sizes.get(tensor, 1) for tensor in tensors])
        if any(term is None for term in terms) or size > _MAX_TERMS:
            del self.operands[known:]
            return False
        self.values[var] = expression.substitute([term for term in terms if term is not None])
        self.sizes[var], self.views[var] = size, view
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
        return same_shape(shape_of(var) or [], self.views[source])

    def _term(self, tensor: relax.Expr, view: list[Any]) -> Expression | None:
        if tensor in self.values:
            return self.values[tensor] if same_shape(self.views[tensor], view) else None
        operand = self._operand(tensor, view)
        if operand is None:
            return None
        for index, known in enumerate(self.operands):
            if known.value.same_as(tensor):
                return Expression.operand(index + 1) if known.shape == operand.shape else None
        self.operands.append(operand)
        return Expression.operand(len(self.operands))

    def _operand(self, tensor: relax.Expr, view: list[Any]) -> Operand | None:
        shape = shape_of(tensor)
        own, device = tensor.ty.vdevice, self.root.ty.vdevice
        if own is not None and device is not None and not same_object(own, device):
            return None
        together = None if shape is None else broadcast(shape, view)
        if shape is None or together is None or not same_shape(together, view):
            return None
        is_full = same_shape(shape, view)
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


def _write(emitter: Emitter, region: Region, var: relax.Var, block: Block) -> None:
    """The region's work, and its plain result as `var`."""
    unset = block.definitions[region.root]
    encoding = Encoding.parse(unset.attrs.encoding)
    operands = [unset.args[0]]
    for number, operand in enumerate(region.operands, 1):
        value, name = operand.value, f"{var.name}_x{number}"
        dtype = str(value.ty.dtype)
        if operand.shape is not None and not same_shape(operand.shape, shape_of(value) or []):
            call = relax.op.reshape(value, list(operand.shape))
            value = emitter.emit(call, tensor_type(operand.shape, dtype, value.ty), f"{name}_reshaped")
        if operand.is_full:
            value = emitter.emit(op.set_encoding(value, encoding), value.ty, name)
        operands.append(value)
    shape = shape_of(region.root) or []
    ty = tensor_type(shape, str(var.ty.dtype), region.root.ty)
    call = op.elementwise(*operands, expression=region.expression, encoding=encoding)
    result = emitter.emit(call, ty, f"{var.name}_encoded")
    if same_shape(shape, shape_of(var) or []):
        emitter.bind(var, relax.Call(unset.op, [result], unset.attrs, ret_ty=var.ty))
        return
    plain = emitter.emit(op.unset_encoding(result, encoding), ty, f"{var.name}_plain")
    reshape = relax.op.reshape(plain, shape_of(var))
    emitter.bind(var, relax.Call(reshape.op, list(reshape.args), reshape.attrs, ret_ty=var.ty))
