"""SinkDequantize: move dequantization down to the ops that need float values.

Before, where ``dq(q)`` is ``(astype(q, "int32") - zero) * scale`` with one zero point and one scale::

    x = dq(q)
    m = R.nn.max_pool2d(x, [2, 2])
    p = quantize(m)                                  # cast(clip(round(m / scale) + zero))
    y = R.nn.conv2d(x, w)
    z = R.add(x, y)

After::

    p = R.nn.max_pool2d(q, [2, 2])
    y = R.nn.conv2d(dq(q), w)
    z = R.add(dq(q), y)

Three rules:

- Ops that only move elements (also to another device), and max pools, run on the quantized tensor.
- A quantization cancels a dequantization with the same scale and zero point.
- Each reader gets a dequantization of its own, which it can fuse. A float tensor with several readers would be stored.

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
from ..ir.rewriting import op_name, with_args
from .quantized_operands import is_absorbable, match_dequantize

_MOVE_OPS = MOVES - {*relax_ops("concat split stack hint_on_device")}
"""Ops that move elements of their first operand, and compute nothing."""
_MAX_POOL_OPS = ops_where(lambda traits: traits.kind == "max_pool")
"""Ops that run on the quantized tensor if its order is that of the float values."""
_CONCAT = "relax.concat"
_MAX_QUANTIZE_OPS = 6  # maximum number of consecutive ops that are searched for a quantization


def sink_dequantize(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the pass that the module's docstring describes; returns the same module if nothing changes."""
    return rewrite_blocks(mod, _sink)


SinkDequantize = declare_pass("SinkDequantize", sink_dequantize)


@dataclass
class _Dequantized:
    """A float32 tensor that is computed from an 8-bit tensor."""

    data: relax.Expr  # the 8-bit tensor
    expression: Expression  # expression of the float tensor, with `data` as ``x0``
    unread: relax.Var | None = None  # emitted variable of the float tensor, until its first reader takes it


def _sink(block: Block) -> list[relax.Binding] | None:
    sinker = _Sinker(block)
    for binding in block.bindings:
        sinker.rewrite(binding)
    return without_unused(sinker.emitter.bindings, block, _is_droppable) if sinker.changed else None


def _is_droppable(value: relax.Expr) -> bool:
    return is_absorbable(value) or op_name(value) in (
        "relax.round",
        "relax.clip",
        "relax.add",
        *_MOVE_OPS,
        *_MAX_POOL_OPS,
    )


class _Sinker:
    """Rewriter of the bindings of one block."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.emitter = Emitter(block.is_dataflow)
        self.dequantized: dict[relax.Var, _Dequantized] = {}
        self.replacements: dict[relax.Var, relax.Expr] = {}
        self.changed = False

    def rewrite(self, binding: relax.Binding) -> None:
        """Emit a binding, or record the quantized tensor that replaces its variable."""
        var, value = binding.var, binding.value
        is_local = isinstance(binding, relax.VarBinding) and self.block.is_local(var) and shape_of(var) is not None
        if is_local and (self._try_run_quantized(var, value) or self._try_cancel(var)):
            self.changed = True
            return
        for operand in used_vars(value):
            if operand in self.dequantized:
                self.replacements[operand] = self._float_tensor(operand)
        self.emitter.bindings.append(renamed(binding, self.replacements))
        match = match_dequantize(var, self.block) if is_local and op_name(value) == "relax.multiply" else None
        if match is not None:
            expression, data = match
            if isinstance(data, relax.Var):
                self.dequantized[var] = _Dequantized(self.replacements.get(data, data), expression, var)

    def _float_tensor(self, var: relax.Var) -> relax.Expr:
        """The float tensor for one more reader."""
        source = self.dequantized[var]
        if source.unread is not None:
            unread, source.unread = source.unread, None
            return unread
        self.changed = True

        def emit(call: relax.Expr, ty: relax.TensorType) -> relax.Var:
            return self.emitter.emit(call, ty, var.name)

        return from_expression(source.expression, [source.data], emit, var.ty.vdevice)

    def _try_run_quantized(self, var: relax.Var, value: relax.Expr) -> bool:
        """Run an op on quantized tensors if possible; returns whether it was."""
        name = op_name(value)
        if name == _CONCAT and isinstance(value.args[0], relax.Tuple):
            operands = list(value.args[0].fields)
        elif name in _MOVE_OPS or name in _MAX_POOL_OPS:
            operands = [value.args[0]]
        else:
            return False
        sources = [self.dequantized[x] for x in operands if isinstance(x, relax.Var) and x in self.dequantized]
        if (
            len(sources) < len(operands)
            or len({(str(source.expression), str(source.data.ty.dtype)) for source in sources}) > 1
        ):
            return False
        if name in _MAX_POOL_OPS and not _is_increasing(sources[0].expression.term):
            return False
        data: relax.Expr = relax.Tuple([source.data for source in sources]) if name == _CONCAT else sources[0].data
        args = [self.replacements.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in value.args[1:]]
        ty = tensor_type(shape_of(var) or [], str(sources[0].data.ty.dtype), var.ty)
        result = self.emitter.emit(with_args(value, [data, *args]), ty, var.name)
        self.dequantized[var] = _Dequantized(result, sources[0].expression)
        return True

    def _try_cancel(self, var: relax.Var) -> bool:
        """Replace a variable that restores a quantized tensor by that tensor if possible; returns whether it was."""
        if op_name(self.block.definition(var)) != CAST:
            return False
        chain: list[Expression] = []  # from the last op to the first
        value: relax.Expr = var
        while value not in self.dequantized:
            match = to_expression(self.block.definition(value)) if isinstance(value, relax.Var) else None
            if match is None or len(match[1]) != 1 or len(chain) == _MAX_QUANTIZE_OPS:
                return False
            expression, (value,) = match
            chain.append(expression)
        source, quantize = self.dequantized[value], Expression.operand(0)
        for expression in reversed(chain):
            quantize = expression.substitute([quantize])
        dtype = str(var.ty.dtype)
        if str(source.data.ty.dtype) != dtype or not is_inverse(quantize, source.expression, dtype):
            return False
        self.replacements[var] = source.data
        return True


def is_inverse(
    quantize: Expression,  # expression of an imported QuantizeLinear, with the float tensor as ``x0``
    dequantize: Expression,  # expression of an imported DequantizeLinear, with the quantized tensor as ``x0``
    dtype: str,  # 8-bit integer type
) -> bool:
    """Return whether quantization to `dtype` restores the tensor that was dequantized."""
    scale, difference = _right_number(dequantize.term, "multiply"), _cast_operand(dequantize.term.args[0], "float32")
    if scale is None or difference is None:
        return False
    zero = _right_number(difference, "subtract")
    data = difference if zero is None else difference.args[0]
    if (_cast_operand(data, "int32") or data).op != "operand":
        return False
    rounded = f"add(round(divide(x0, {scale!r})), {zero!r})" if zero else f"round(divide(x0, {scale!r}))"
    limits = np.iinfo(dtype)
    expected = f"cast(clip({rounded}, {float(limits.min)!r}, {float(limits.max)!r}), {dtype!r})"
    return quantize.term == Expression.parse(expected).term


def _right_number(term: Term, op: str) -> float | None:
    """The number that is the right operand of `op`; None for any other term."""
    is_match = term.op == op and term.args[1].op == "number"
    return float(term.args[1].params[0]) if is_match else None


def _cast_operand(term: Term, dtype: str) -> Term | None:
    """The operand of a cast to `dtype`; None for any other term."""
    return term.args[0] if term.op == "cast" and term.params == (dtype,) else None


def _is_increasing(term: Term) -> bool:
    """Return whether a term is known to increase with its operand ``x0``."""
    if term.op == "cast":
        return _is_increasing(term.args[0])
    if term.op in ("subtract", "multiply"):
        number = _right_number(term, term.op)
        return number is not None and (term.op == "subtract" or number > 0) and _is_increasing(term.args[0])
    return term.op == "operand"
