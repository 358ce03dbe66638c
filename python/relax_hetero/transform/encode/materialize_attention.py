"""Attention becomes a call of its kernel, with its scratch as a second result that nobody reads.

Before::

    y = R.hetero.attention(qkv, qkv, qkv, mask, heads="(b, m, h*d) * ...", scores="add(multiply(x0, 0.125), x1)")

After::

    y_scratch = R.call_tir(cls.attention_1x12x128x128x64_llvm_0, (qkv, qkv, qkv, mask),
                           out_ty=[R.Tensor((1, 128, 768), ...), R.Tensor((2, 17408), ...)])
    y = y_scratch[0]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from ...encoding.expression import Expression
from ...encoding.heads import NAMES, Heads
from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import AttentionProblem, Epilogue, Operand
from ...op.attention import attention_sizes
from ..ir.blocks import is_one
from ..ir.extents import Symbols
from ..ir.rewriting import typed
from .stored_tensors import shape_of

Resolve = Callable[[relax.Expr], relax.Expr]


def attention_problem(call: relax.Call, result: relax.TensorType) -> AttentionProblem:
    """What a call of `R.hetero.attention` asks of a kernel."""
    heads, sizes = Heads.parse(call.attrs.heads), attention_sizes(call)
    symbols = Symbols()

    def operand(ty: relax.TensorType, index_map: tuple[str, ...]) -> Operand:
        shape = tuple(symbols.dim(extent) for extent in shape_of(ty))
        return Operand(shape, str(ty.dtype), index_map, PackedLayout.identity(len(shape)))

    types = [arg.ty for arg in call.args]
    query, key, value = (operand(ty, found.index_map) for ty, found in zip(types, heads.operands, strict=False))
    masks = tuple(operand(ty, _mask_map(ty, sizes)) for ty in types[3:])
    return AttentionProblem(
        query,
        key,
        value,
        operand(result, heads.result.index_map),
        (heads.query.starts, heads.key.starts, heads.value.starts),
        tuple((name, symbols.dim(sizes[name])) for name in NAMES),
        Epilogue(Expression.parse(call.attrs.scores), masks),
        str(call.attrs.causal),
        bool(call.attrs.nan_to_zero),
    )


def _mask_map(ty: relax.TensorType, sizes: dict[str, Any]) -> tuple[str, ...]:
    extents = shape_of(ty)
    names = "bhmn"[4 - len(extents) :]
    return tuple(
        "1" if is_one(extent) and not is_one(sizes[name]) else name for extent, name in zip(extents, names, strict=True)
    )


def attention_bindings(
    binding: relax.Binding, kernel: tvm.ir.GlobalVar, scratch: relax.TensorType, resolve: Resolve
) -> list[relax.Binding]:
    """The call of a kernel in the place of `R.hetero.attention`."""
    var, call = binding.var, binding.value
    types = [var.ty, scratch]
    operands = relax.Tuple([resolve(arg) for arg in call.args])
    value = typed(relax.call_tir(kernel, operands, types), tvm.ir.TupleType(types))
    both = type(var)(f"{var.name}_scratch", value.ty)
    first = relax.VarBinding(var, relax.TupleGetItem(both, 0), binding.span)
    return [relax.VarBinding(both, value, binding.span), first]
