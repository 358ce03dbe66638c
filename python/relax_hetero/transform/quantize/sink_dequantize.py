"""SinkDequantize: bytes stay bytes until somebody computes with the numbers they stand for.

Before, where ``dq(q)`` is ``(astype(q, "int32") - zero) * scale`` with one zero point and one scale::

    x = dq(q)
    m = R.nn.max_pool2d(x, [2, 2])
    p = quantize(m)                                  # round(m / scale) + zero, to bytes again
    y = R.nn.conv2d(x, w)
    z = R.add(x, y)

After::

    p = R.nn.max_pool2d(q, [2, 2])
    y = R.nn.conv2d(dq(q), w)
    z = R.add(dq(q), y)

Three rules. What only moves elements, to another device too, or takes the greatest of them, is done on bytes.
Quantizing what has just been dequantized, with the same numbers, is nothing. And every user dequantizes for itself: it
can take that in, where a tensor of floats for several users would be written to memory.

Assumes a placed module (RealizeVDevice). Linear in the number of bindings; a second run changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from ...encoding.expression import Expression, Term
from ...op.traits import MOVES, ops_where, relax_ops
from ..ir.blocks import Block, Emitter, renamed, rewrite_blocks, shape_of, tensor_type, used_vars, without_unused
from ..ir.declare import declare_pass
from ..ir.op_names import CAST
from ..ir.relax_expressions import from_expression, to_expression
from ..ir.rewriting import op_name
from .quantized_operands import dequantized, is_part_of_quantized

_MOVING = MOVES - {*relax_ops("concat split stack hint_on_device")}
"""Ops of their first operand whose result has no other elements than that."""
_MAXIMUM_OPS = ops_where(lambda traits: traits.kind == "max_pool")
"""Moving ops where the greatest byte stands for the greatest number."""
_CONCAT = "relax.concat"
_MAX_CHAIN = 6


def sink_dequantize(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    return rewrite_blocks(mod, _sink)


SinkDequantize = declare_pass("SinkDequantize", sink_dequantize)


@dataclass
class _Bytes:
    """A float32 tensor that bytes stand for.

    Attributes
    ----------
    data : relax.Expr
    expression : Expression
        Expression of the tensor, ``x0`` the bytes.
    floats : relax.Var, optional
        The tensor where it is computed already, and nobody reads it yet.
    """

    data: relax.Expr
    expression: Expression
    floats: relax.Var | None = None


def _sink(block: Block) -> list[relax.Binding] | None:
    sinker = _Sinker(block)
    for binding in block.bindings:
        sinker.take(binding)
    return without_unused(sinker.emitter.bindings, block, _is_droppable) if sinker.changed else None


def _is_droppable(value: relax.Expr) -> bool:
    return is_part_of_quantized(value) or op_name(value) in (
        "relax.round",
        "relax.clip",
        "relax.add",
        *_MOVING,
        *_MAXIMUM_OPS,
    )


class _Sinker:
    """The bindings of one block, written anew."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.emitter = Emitter(block.is_dataflow)
        self.bytes: dict[relax.Var, _Bytes] = {}
        self.names: dict[relax.Var, relax.Expr] = {}
        self.changed = False

    def take(self, binding: relax.Binding) -> None:
        """Write a binding, or remember what it stands for."""
        var, value = binding.var, binding.value
        is_local = isinstance(binding, relax.VarBinding) and self.block.is_local(var) and shape_of(var) is not None
        if is_local and (self._moves(var, value) or self._requantizes(var)):
            self.changed = True
            return
        for read in used_vars(value):
            if read in self.bytes:
                self.names[read] = self._floats(read)
        self.emitter.bindings.append(renamed(binding, self.names))
        found = dequantized(var, self.block) if is_local and op_name(value) == "relax.multiply" else None
        if found is not None and isinstance(found[1], relax.Var):
            data = self.names.get(found[1], found[1])
            self.bytes[var] = _Bytes(data, found[0], var)

    def _floats(self, var: relax.Var) -> relax.Expr:
        """The tensor for one more user."""
        source = self.bytes[var]
        if source.floats is not None:
            floats, source.floats = source.floats, None
            return floats
        self.changed = True

        def emit(call: relax.Expr, ty: relax.TensorType) -> relax.Var:
            return self.emitter.emit(call, ty, var.name)

        return from_expression(source.expression, [source.data], emit, var.ty.vdevice)

    def _moves(self, var: relax.Var, value: relax.Expr) -> bool:
        """Return whether a moving op could be done on bytes."""
        name = op_name(value)
        if name == _CONCAT and isinstance(value.args[0], relax.Tuple):
            fields = list(value.args[0].fields)
        elif name in _MOVING or name in _MAXIMUM_OPS:
            fields = [value.args[0]]
        else:
            return False
        known = [self.bytes[field] for field in fields if isinstance(field, relax.Var) and field in self.bytes]
        if len(known) < len(fields) or len({(str(part.expression), str(part.data.ty.dtype)) for part in known}) > 1:
            return False
        if name in _MAXIMUM_OPS and not _is_increasing(known[0].expression.term):
            return False
        first: relax.Expr = relax.Tuple([part.data for part in known]) if name == _CONCAT else known[0].data
        others = [self.names.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in value.args[1:]]
        ty = tensor_type(shape_of(var) or [], str(known[0].data.ty.dtype), var.ty)
        moved = self.emitter.emit(relax.Call(value.op, [first, *others], value.attrs), ty, var.name)
        self.bytes[var] = _Bytes(moved, known[0].expression)
        return True

    def _requantizes(self, var: relax.Var) -> bool:
        """Return whether a variable is the quantized form of dequantized bytes; those, then."""
        if op_name(self.block.definition(var)) != CAST:
            return False
        chain: list[Expression] = []
        value: relax.Expr = var
        while value not in self.bytes:
            found = to_expression(self.block.definition(value)) if isinstance(value, relax.Var) else None
            if found is None or len(found[1]) != 1 or len(chain) == _MAX_CHAIN:
                return False
            chain.append(found[0])
            value = found[1][0]
        source, whole = self.bytes[value], Expression.operand(0)
        for step in reversed(chain):
            whole = step.substitute([whole])
        dtype = str(var.ty.dtype)
        if str(source.data.ty.dtype) != dtype or not is_inverse(whole, source.expression, dtype):
            return False
        self.names[var] = source.data
        return True


def is_inverse(quantize: Expression, dequantize: Expression, dtype: str) -> bool:
    """Return whether quantizing to `dtype` gives back the very bytes that were dequantized.

    Parameters
    ----------
    quantize, dequantize : Expression
        As QuantizeLinear and DequantizeLinear are imported: ``x0`` the floats, and the bytes.
    dtype : str
    """
    scale, integer = _number(dequantize.term, "multiply"), _uncast(dequantize.term.args[0], "float32")
    if scale is None or integer is None:
        return False
    zero = _number(integer, "subtract")
    data = integer if zero is None else integer.args[0]
    if (_uncast(data, "int32") or data).op != "operand":
        return False
    moved = f"add(round(divide(x0, {scale!r})), {zero!r})" if zero else f"round(divide(x0, {scale!r}))"
    limits = np.iinfo(dtype)
    expected = f"cast(clip({moved}, {float(limits.min)!r}, {float(limits.max)!r}), {dtype!r})"
    return quantize.term == Expression.parse(expected).term


def _number(term: Term, op: str) -> float | None:
    """The number on the right of an op, None where there is none."""
    is_known = term.op == op and term.args[1].op == "number"
    return float(term.args[1].params[0]) if is_known else None


def _uncast(term: Term, dtype: str) -> Term | None:
    """Operand of a cast to a type, None where there is none."""
    return term.args[0] if term.op == "cast" and term.params == (dtype,) else None


def _is_increasing(term: Term) -> bool:
    """Return whether a greater byte certainly stands for a greater number."""
    if term.op == "cast":
        return _is_increasing(term.args[0])
    if term.op in ("subtract", "multiply"):
        number = _number(term, term.op)
        return number is not None and (term.op == "subtract" or number > 0) and _is_increasing(term.args[0])
    return term.op == "operand"
