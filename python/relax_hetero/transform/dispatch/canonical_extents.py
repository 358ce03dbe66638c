"""Extents of one size written in one form, in types and in kernels.

FuseTIR compares the extents of a kernel's tensors with those of its arguments operand by operand, and takes ``3 + n``
for another size than ``n + 3``. TVM's kernels simplify the extents of their results, Relax does not those of its types.

Before::

    y: R.Tensor((3 + n,), "float32") = R.concat((head, x))

After::

    y: R.Tensor((n + 3,), "float32") = R.concat((head, x))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tvm
from tvm import relax, sym, tirx
from tvm.tirx.buffer import BufferType, is_buffer_var
from tvm_ffi import structural_equal, structural_map, structural_walk

from ..ir.blocks import split_block, with_shared_variables
from ..ir.rewriting import copy_module, map_bindings, relax_functions, typed, with_body, with_functions


def canonical_extents(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with simplified extents in its Relax types and in the tensors of its kernels; itself where all are."""
    analyzer = sym.Analyzer()

    def simplified(extents: Sequence[tvm.ir.PrimExpr]) -> list[tvm.ir.PrimExpr] | None:
        """The simplified extents, or None where they are simple."""
        if all(isinstance(extent, (tirx.IntImm, tvm.ir.Var)) for extent in extents):
            return None
        new = [analyzer.simplify(extent) for extent in extents]
        return None if all(map(structural_equal, extents, new)) else new

    def shape(old: relax.ShapeExpr) -> relax.ShapeExpr:
        extents = simplified(old.values)
        return old if extents is None else relax.ShapeExpr(extents, old.span)

    def buffer(old: BufferType) -> BufferType:
        extents = simplified(old.shape)
        if extents is None:
            return old
        form = {"scope": old.storage_scope, "data_alignment": old.data_alignment, "offset_factor": old.offset_factor}
        place = {"strides": list(old.strides), "elem_offset": old.elem_offset, "layout": old.layout}
        return tirx.decl_buffer(extents, str(old.dtype), **place, **form).ty

    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function):
            functions[gv] = structural_map(func, (relax.ShapeExpr, shape))
        elif isinstance(func, tirx.PrimFunc) and any(simplified(p.shape) for p in func.params if is_buffer_var(p)):
            functions[gv] = structural_map(func, (BufferType, buffer))
    return with_functions(mod, functions)


# Kernels whose tensors have 32-bit extents get 64-bit ones, as Relax and all kernels that TVM makes have.
#
# Authors of kernels write ``T.Buffer((4, 4), "float32")`` and ``n = T.int32()``. FuseTIR binds the tensors of two
# kernels only if their types are equal, so that such a kernel could not be fused with any other. Extents in the types
# become 64-bit; inside the kernel a symbolic one is cast back, so that its loops and arithmetic stay as written.

_WIDE = "int64"


def widen_extents(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with 64-bit extents in the parameters of its kernels; itself where all have them."""
    functions = {
        gv: _widened(func) if isinstance(func, tirx.PrimFunc) and any(map(_is_narrow, func.params)) else func
        for gv, func in mod.functions.items()
    }
    changed = any(not func.same_as(mod.functions[gv]) for gv, func in functions.items())
    return copy_module(mod, functions) if changed else mod


def _is_narrow(param: tvm.ir.Var) -> bool:
    return is_buffer_var(param) and any(str(extent.ty.dtype) != _WIDE for extent in (*param.shape, *param.strides))


def _widened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    sizes: dict[tvm.ir.Var, tvm.ir.Var] = {}

    def size(var: tvm.ir.Var) -> tvm.ir.Var:
        if str(var.ty.dtype) != _WIDE and var not in sizes:
            sizes[var] = tirx.Var(var.name, _WIDE)
        return sizes.get(var, var)

    buffers: dict[tvm.ir.Var, tvm.ir.Var] = {}
    for param in filter(_is_narrow, func.params):
        ty = param.ty
        wide = [[_wide(extent, size) for extent in extents] for extents in (ty.shape, ty.strides)]
        offset = _wide(ty.elem_offset, size)
        form = {"scope": ty.storage_scope, "data_alignment": ty.data_alignment, "offset_factor": ty.offset_factor}
        shape, strides = wide
        buffers[param] = tirx.decl_buffer(
            shape, str(ty.dtype), param.name, strides=strides, elem_offset=offset, layout=ty.layout, **form
        )

    def renamed(var: tvm.ir.Var) -> Any:
        if var in sizes:
            return tirx.Cast(str(var.ty.dtype), sizes[var])
        return buffers.get(var, var)

    params = [buffers.get(param, sizes.get(param, param)) for param in func.params]
    body = structural_map(func.body, (tvm.ir.Var, renamed))
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs, func.span)


def _wide(expr: Any, size: Any) -> Any:
    """An extent as a 64-bit number over 64-bit variables."""
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(_WIDE, int(expr))
    if isinstance(expr, tvm.ir.Var):
        return size(expr)
    if isinstance(expr, (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)):
        return type(expr)(_wide(expr.a, size), _wide(expr.b, size))
    variables: list[tvm.ir.Var] = []
    structural_walk(expr, (tvm.ir.Var, variables.append))
    narrow = {var: tirx.Cast(str(var.ty.dtype), size(var)) for var in variables if str(var.ty.dtype) != _WIDE}
    return tirx.Cast(_WIDE, structural_map(expr, (tvm.ir.Var, lambda var: narrow.get(var, var))))


# ``match_cast`` of branches in blocks of their own, because stock FuseOps fails at one in a branch's dataflow block.
#
# Before::
#
#     if c:
#         with R.dataflow():
#             lv = R.exp(x)
#             rows = R.match_cast(lv, R.Tensor((m,), "float32"))
#             gv = R.add(rows, rows)
#             R.output(gv)
#
# After, where ops are fused before and behind it::
#
#     if c:
#         with R.dataflow():
#             lv = R.exp(x)
#             R.output(lv)
#         rows = R.match_cast(lv, R.Tensor((m,), "float32"))
#         with R.dataflow():
#             gv = R.add(rows, rows)
#             R.output(gv)


def with_matches_apart(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with each ``match_cast`` of a branch outside of dataflow blocks; those of a function's own stay."""
    functions = {}
    for gv, func in relax_functions(mod):
        body = _sequence(func.body, is_branch=False)
        if not body.same_as(func.body):
            functions[gv] = with_body(func, body)
    return with_functions(mod, functions) if functions else mod


def _sequence(expr: relax.Expr, is_branch: bool) -> relax.Expr:
    if not isinstance(expr, relax.SeqExpr):
        return expr
    blocks: list[relax.BindingBlock] = []
    for block in expr.blocks:
        is_dataflow = isinstance(block, relax.DataflowBlock)
        bindings = list(block.bindings) if is_dataflow else [_nested(binding) for binding in block.bindings]
        matches = {binding.var for binding in bindings if isinstance(binding, relax.MatchCast)}
        if is_branch and is_dataflow and matches:
            blocks += split_block(bindings, matches, is_dataflow)
        elif all(new.same_as(old) for new, old in zip(bindings, block.bindings, strict=True)):
            blocks.append(block)
        else:
            blocks.append(type(block)(bindings, block.span))
    if len(blocks) == len(expr.blocks) and all(a.same_as(b) for a, b in zip(blocks, expr.blocks, strict=True)):
        return expr
    return typed(relax.SeqExpr(with_shared_variables(blocks), expr.body, expr.span), expr.ty)


def _nested(binding: relax.Binding) -> relax.Binding:
    value = binding.value
    if not isinstance(value, relax.If):
        return binding
    then, other = (_sequence(branch, is_branch=True) for branch in (value.true_branch, value.false_branch))
    if then.same_as(value.true_branch) and other.same_as(value.false_branch):
        return binding
    return relax.VarBinding(binding.var, typed(relax.If(value.cond, then, other, value.span), value.ty), binding.span)


# Fused functions that take a symbolic size both by itself and in a shape: all sizes come in the shape.
#
# FuseOps gives a size that an op reads as a number, ``shape_to_tensor(n)``, as a scalar, and sizes that only types
# mention in a shape behind all arguments. Stock FuseTIR refuses functions that have both.


class _Changed(NamedTuple):
    """A function with another signature, and which of the arguments it had are scalars."""

    gv: tvm.ir.GlobalVar
    func: relax.Function
    scalars: list[int]


def scalars_as_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with scalars of such functions at the end of the shape, and calls of them changed alike."""
    changed = {gv: found for gv, func in relax_functions(mod) if (found := _changed(gv, func)) is not None}
    if not changed:
        return mod

    def with_shape(binding: relax.Binding) -> relax.Binding:
        call = binding.value
        if not isinstance(call, relax.Call) or call.op not in changed:
            return binding
        gv, _, scalars = changed[call.op]
        left = [arg for i, arg in enumerate(call.args[:-1]) if i not in scalars]
        shape = relax.ShapeExpr([*call.args[-1].values, *(call.args[i] for i in scalars)])
        new = relax.Call(gv, [*left, shape], call.attrs, call.ty_args, call.span)
        return relax.VarBinding(binding.var, typed(new, call.ty))

    result = copy_module(mod)
    for gv, func in relax_functions(mod):
        if gv in changed:
            del result[gv]
            result[changed[gv].gv] = changed[gv].func
        else:
            result[gv] = map_bindings(func, with_shape)
    return result


def _changed(gv: tvm.ir.GlobalVar, func: relax.Function) -> _Changed | None:
    scalars = [i for i, param in enumerate(func.params) if isinstance(param.ty, tvm.ir.PrimType)]
    is_fused = func.attrs is not None and "Primitive" in func.attrs
    if not is_fused or not scalars:
        return None
    last = func.params[-1]
    if not isinstance(last.ty, relax.ShapeType) or last.ty.values is None:
        return None
    left = [param for i, param in enumerate(func.params[:-1]) if i not in scalars]
    shape = relax.Var(last.name, relax.ShapeType([*last.ty.values, *(func.params[i] for i in scalars)]))
    made = relax.Function([*left, shape], func.body, func.ret_ty, func.is_pure, func.attrs, func.span)
    return _Changed(typed(tvm.ir.GlobalVar(gv.name_hint), made.ty), made, scalars)
