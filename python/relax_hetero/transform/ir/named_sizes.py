"""Named sizes: symbols for expressions over sizes, which the host computes at run time.

A front end writes::

    value: R.Shape(ndim=1) = R.call_pure_packed("relax_hetero.size", R.shape([T.max(a, b) * ...]))
    _: R.Shape([a_or_b]) = R.match_cast(value, R.Shape([a_or_b]))

The call is opaque to passes: stock ones would otherwise substitute the value for the symbol in some places, and not
fuse a kernel over the symbol with one over its value. Once kernels are formed, `with_values` replaces the names of
values of few terms, which memory planning and signatures understand.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map

from ...tir.core.walks import replaced
from .requirements import DIVISIONS
from .rewriting import relax_functions, walk_bindings, with_functions

MAX_TERMS = 24  # symbols, numbers and operations of a size; a longer expression gets a name
SIZE = "relax_hetero.size"  # packed function that returns its argument, a shape (`vm.device.builtins`)
_OPERAND_FIELDS = ("a", "b", "condition", "true_value", "false_value", "value")


def name_size(builder: relax.BlockBuilder, symbol: tirx.Var, value: tvm.ir.Expr) -> None:
    """Bind a symbol to the value of an expression over sizes."""
    call = relax.op.call_pure_packed(SIZE, relax.ShapeExpr([value]), ty_args=[relax.ShapeType(ndim=1)])
    builder.match_cast(builder.emit(call), relax.ShapeType([symbol]))


def named_sizes(bindings: Iterable[relax.Binding]) -> tuple[set[relax.Var], dict[tirx.Var, tvm.ir.Expr]]:
    """The variables of bindings that name sizes, and the named values of few terms, fully expanded."""
    calls: dict[relax.Var, tvm.ir.Expr] = {}
    casts: set[relax.Var] = set()
    values: dict[tirx.Var, tvm.ir.Expr] = {}
    for binding in bindings:
        value = binding.value
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and len(value.args) == 2:
            callee, shape = value.args
            is_name = isinstance(callee, relax.ExternFunc) and str(callee.global_symbol) == SIZE
            if is_name and isinstance(shape, relax.ShapeExpr) and len(shape.values) == 1:
                calls[binding.var] = shape.values[0]
        elif isinstance(binding, relax.MatchCast) and value in calls:
            casts |= {value, binding.var}
            expansion = replaced(calls[value], values)
            if not is_long(expansion):
                values[binding.ty.values[0]] = expansion
    return casts, values


def with_values(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with the names of values of few terms replaced by these."""
    functions = {}
    for gv, func in relax_functions(mod):
        _, values = named_sizes(walk_bindings(func))
        if values:

            def without_names(block: relax.BindingBlock, named: dict[tirx.Var, Any] = values) -> relax.BindingBlock:
                bindings = [binding for binding in block.bindings if not _names_one_of(binding, named)]
                return type(block)(bindings, block.span)

            kinds = [(kind, without_names) for kind in (relax.BindingBlock, relax.DataflowBlock)]
            functions[gv] = replaced(structural_map(func, kinds), values)
    return with_functions(mod, functions) if functions else mod


def _names_one_of(binding: relax.Binding, symbols: Container[tirx.Var]) -> bool:
    is_shape = isinstance(binding, relax.MatchCast) and isinstance(binding.ty, relax.ShapeType)
    return is_shape and len(binding.ty.values or ()) == 1 and binding.ty.values[0] in symbols


def is_long(size: Any) -> bool:
    """Return whether an expression has more than `MAX_TERMS` terms; a quotient by a size counts as half of that."""
    count, pending = 0, [size]
    while pending and count <= MAX_TERMS:
        expr = pending.pop()
        is_guarded = isinstance(expr, DIVISIONS) and not isinstance(expr.b, tirx.IntImm)
        count += MAX_TERMS // 2 if is_guarded else 1
        pending += [part for name in _OPERAND_FIELDS if isinstance(part := getattr(expr, name, None), tvm.ir.Expr)]
    return count > MAX_TERMS
