"""SinkDequantize: move dequantization to the ops that compute with the numbers.

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

Three rules: ops that only move elements (also to another device), or take their maximum, run on bytes. Dequantizing and
quantizing with the same numbers cancel. And every user dequantizes separately, because it can fuse that, while a tensor
of floats with several users would be stored.

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
"""Ops whose result only has elements of their first operand."""
_MAXIMUM_OPS = ops_where(lambda traits: traits.kind == "max_pool")
"""Ops that run on bytes if the maximum byte stands for the maximum number."""
_CONCAT = "relax.concat"
_MAX_QUANTIZE_OPS = 6
"""Maximum number of ops of a quantization."""


def sink_dequantize(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; it returns the same module if nothing changes."""
    return rewrite_blocks(mod, _sink)


SinkDequantize = declare_pass("SinkDequantize", sink_dequantize)


@dataclass
class _Bytes:
    """A float32 tensor that is dequantized from bytes.

    Attributes
    ----------
    data : relax.Expr
    expression : Expression
        Expression of the tensor, with the bytes as ``x0``.
    floats : relax.Var, optional
        Variable of the tensor, if it is computed and does not have a reader yet.
    """

    data: relax.Expr
    expression: Expression
    floats: relax.Var | None = None


def _sink(block: Block) -> list[relax.Binding] | None:
    sinker = _Sinker(block)
    for binding in block.bindings:
        sinker.write(binding)
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
    """Rewriter of the bindings of one block."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.emitter = Emitter(block.is_dataflow)
        self.bytes: dict[relax.Var, _Bytes] = {}
        self.names: dict[relax.Var, relax.Expr] = {}
        self.changed = False

    def write(self, binding: relax.Binding) -> None:
        """Write a binding, or record the bytes that it stands for."""
        var, value = binding.var, binding.value
        is_local = isinstance(binding, relax.VarBinding) and self.block.is_local(var) and shape_of(var) is not None
        if is_local and (self._moves(var, value) or self._requantizes(var)):
            self.changed = True
            return
        for operand in used_vars(value):
            if operand in self.bytes:
                self.names[operand] = self._floats(operand)
        self.emitter.bindings.append(renamed(binding, self.names))
        match = dequantized(var, self.block) if is_local and op_name(value) == "relax.multiply" else None
        if match is not None and isinstance(match[1], relax.Var):
            data = self.names.get(match[1], match[1])
            self.bytes[var] = _Bytes(data, match[0], var)

    def _floats(self, var: relax.Var) -> relax.Expr:
        """The float tensor for one more user."""
        source = self.bytes[var]
        if source.floats is not None:
            floats, source.floats = source.floats, None
            return floats
        self.changed = True

        def emit(call: relax.Expr, ty: relax.TensorType) -> relax.Var:
            return self.emitter.emit(call, ty, var.name)

        return from_expression(source.expression, [source.data], emit, var.ty.vdevice)

    def _moves(self, var: relax.Var, value: relax.Expr) -> bool:
        """Write a moving op on bytes, and return whether that was possible."""
        name = op_name(value)
        if name == _CONCAT and isinstance(value.args[0], relax.Tuple):
            fields = list(value.args[0].fields)
        elif name in _MOVING or name in _MAXIMUM_OPS:
            fields = [value.args[0]]
        else:
            return False
        sources = [self.bytes[field] for field in fields if isinstance(field, relax.Var) and field in self.bytes]
        if (
            len(sources) < len(fields)
            or len({(str(source.expression), str(source.data.ty.dtype)) for source in sources}) > 1
        ):
            return False
        if name in _MAXIMUM_OPS and not _is_increasing(sources[0].expression.term):
            return False
        first: relax.Expr = relax.Tuple([source.data for source in sources]) if name == _CONCAT else sources[0].data
        args = [self.names.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in value.args[1:]]
        ty = tensor_type(shape_of(var) or [], str(sources[0].data.ty.dtype), var.ty)
        result = self.emitter.emit(relax.Call(value.op, [first, *args], value.attrs), ty, var.name)
        self.bytes[var] = _Bytes(result, sources[0].expression)
        return True

    def _requantizes(self, var: relax.Var) -> bool:
        """Replace a variable that quantizes dequantized bytes by these, and return whether it does."""
        if op_name(self.block.definition(var)) != CAST:
            return False
        ops: list[Expression] = []
        value: relax.Expr = var
        while value not in self.bytes:
            parsed = to_expression(self.block.definition(value)) if isinstance(value, relax.Var) else None
            if parsed is None or len(parsed[1]) != 1 or len(ops) == _MAX_QUANTIZE_OPS:
                return False
            ops.append(parsed[0])
            value = parsed[1][0]
        source, expression = self.bytes[value], Expression.operand(0)
        for op in reversed(ops):
            expression = op.substitute([expression])
        dtype = str(var.ty.dtype)
        if str(source.data.ty.dtype) != dtype or not is_inverse(expression, source.expression, dtype):
            return False
        self.names[var] = source.data
        return True


def is_inverse(quantize: Expression, dequantize: Expression, dtype: str) -> bool:
    """Return whether quantizing to `dtype` restores the bytes that were dequantized.

    Parameters
    ----------
    quantize, dequantize : Expression
        Expressions of imported QuantizeLinear and DequantizeLinear: ``x0`` is the floats, and the bytes.
    dtype : str
    """
    scale, integer = _number(dequantize.term, "multiply"), _uncast(dequantize.term.args[0], "float32")
    if scale is None or integer is None:
        return False
    zero = _number(integer, "subtract")
    data = integer if zero is None else integer.args[0]
    if (_uncast(data, "int32") or data).op != "operand":
        return False
    rounded = f"add(round(divide(x0, {scale!r})), {zero!r})" if zero else f"round(divide(x0, {scale!r}))"
    limits = np.iinfo(dtype)
    expected = f"cast(clip({rounded}, {float(limits.min)!r}, {float(limits.max)!r}), {dtype!r})"
    return quantize.term == Expression.parse(expected).term


def _number(term: Term, op: str) -> float | None:
    """The number that is the right operand of an op; None for any other term."""
    is_known = term.op == op and term.args[1].op == "number"
    return float(term.args[1].params[0]) if is_known else None


def _uncast(term: Term, dtype: str) -> Term | None:
    """The operand of a cast to a type; None for any other term."""
    return term.args[0] if term.op == "cast" and term.params == (dtype,) else None


def _is_increasing(term: Term) -> bool:
    """Return whether the term certainly increases with the byte."""
    if term.op == "cast":
        return _is_increasing(term.args[0])
    if term.op in ("subtract", "multiply"):
        number = _number(term, term.op)
        return number is not None and (term.op == "subtract" or number > 0) and _is_increasing(term.args[0])
    return term.op == "operand"
