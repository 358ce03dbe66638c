"""Changes to a module that stock FuseOps and FuseTIR need: extents in one form and of 64 bits, among others.

FuseTIR compares the extents of a kernel's tensors with those of its arguments operand by operand, and takes ``3 + n``
for another size than ``n + 3``. TVM's kernels simplify the extents of their results; Relax does not simplify types.

Before::

    y: R.Tensor((3 + n,), "float32") = R.concat((head, x))

After::

    y: R.Tensor((n + 3,), "float32") = R.concat((head, x))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import tvm
from tvm import relax, sym, tirx
from tvm.tirx.buffer import BufferType, is_buffer_var
from tvm_ffi import structural_equal, structural_map

from ...tir.core.walks import nodes, replaced
from ..ir.blocks import split_block, with_shared_variables
from ..ir.rewriting import copy_module, map_bindings, map_nested, relax_functions, typed, with_body, with_functions


def canonical_extents(mod: tvm.IRModule) -> tvm.IRModule:
    """Simplify the extents in Relax types and in the tensors of kernels; the module itself where none changes."""
    analyzer = sym.Analyzer()

    def simplified(extents: Sequence[tvm.ir.PrimExpr]) -> list[tvm.ir.PrimExpr] | None:
        """The simplified extents, or None if they are simple already."""
        if all(isinstance(extent, (tirx.IntImm, tvm.ir.Var)) for extent in extents[:]):
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
        storage = {"scope": old.storage_scope, "data_alignment": old.data_alignment, "offset_factor": old.offset_factor}
        position = {"strides": list(old.strides), "elem_offset": old.elem_offset, "layout": old.layout}
        return tirx.decl_buffer(extents, str(old.dtype), **position, **storage).ty

    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function):
            functions[gv] = structural_map(func, (relax.ShapeExpr, shape))
        elif isinstance(func, tirx.PrimFunc) and any(simplified(p.shape) for p in func.params if is_buffer_var(p)):
            functions[gv] = structural_map(func, (BufferType, buffer))
    return with_functions(mod, functions)


# Extents of 32 bits in kernels become 64-bit ones, as in Relax and in all kernels that TVM makes.
#
# Authors of kernels write ``T.Buffer((4, 4), "float32")`` and ``n = T.int32()``. FuseTIR binds the tensors of two
# kernels only if their types are equal, so that such a kernel could not be fused with any other. Extents in the types
# become 64-bit; inside the kernel a symbolic one is cast back, so that its loops and arithmetic stay as written.

_WIDE = "int64"


def widen_extents(mod: tvm.IRModule) -> tvm.IRModule:
    """Widen the extents in the parameters of kernels to 64 bits; the module itself where none changes."""
    functions = {
        gv: _widened(func)
        for gv, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and any(map(_is_narrow, func.params))
    }
    return with_functions(mod, functions)


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
        shape, strides = ([_wide(extent, size) for extent in extents] for extents in (ty.shape, ty.strides))
        offset = _wide(ty.elem_offset, size)
        storage = {"scope": ty.storage_scope, "data_alignment": ty.data_alignment, "offset_factor": ty.offset_factor}
        buffers[param] = tirx.decl_buffer(
            shape, str(ty.dtype), param.name, strides=strides, elem_offset=offset, layout=ty.layout, **storage
        )

    def renamed(var: tvm.ir.Var) -> Any:
        return tirx.Cast(str(var.ty.dtype), sizes[var]) if var in sizes else buffers.get(var, var)

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
    variables = [var for var in nodes(expr, tvm.ir.Var) if str(var.ty.dtype) != _WIDE]
    return tirx.Cast(_WIDE, replaced(expr, {var: tirx.Cast(str(var.ty.dtype), size(var)) for var in variables}))


# Each ``match_cast`` of a branch moves to a block of its own: stock FuseOps fails at one in a branch's dataflow block.
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
# After, where ops are fused before and after it::
#
#     if c:
#         with R.dataflow():
#             lv = R.exp(x)
#             R.output(lv)
#         rows = R.match_cast(lv, R.Tensor((m,), "float32"))
#         with R.dataflow():
#             gv = R.add(rows, rows)
#             R.output(gv)


def isolate_match_casts(mod: tvm.IRModule) -> tvm.IRModule:
    """Move each ``match_cast`` of a branch out of its dataflow block; those of function bodies stay."""
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
        bindings = list(block.bindings) if is_dataflow else [_in_branches(binding) for binding in block.bindings]
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


def _in_branches(binding: relax.Binding) -> relax.Binding:
    is_if = isinstance(binding.value, relax.If)
    return map_nested(binding, partial(_sequence, is_branch=True)) if is_if else binding


# Fused functions take all symbolic sizes in their shape argument.
#
# FuseOps passes a size that an op reads as a number, ``shape_to_tensor(n)``, as a scalar, and sizes that only types
# mention in a shape after all arguments. Stock FuseTIR refuses functions that have both.


class _FormerScalars(NamedTuple):
    """A function with a new signature, and the indices of its former scalar arguments."""

    gv: tvm.ir.GlobalVar
    func: relax.Function
    scalars: list[int]


def scalars_as_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Move the scalars of such functions to the end of their shape, in the functions and in their calls."""
    changed = {gv: change for gv, func in relax_functions(mod) if (change := _without_scalars(gv, func)) is not None}
    if not changed:
        return mod

    def with_shape(binding: relax.Binding) -> relax.Binding:
        call = binding.value
        if not isinstance(call, relax.Call) or call.op not in changed:
            return binding
        gv, _, scalars = changed[call.op]
        tensors = [arg for index, arg in enumerate(call.args[:-1]) if index not in scalars]
        shape = relax.ShapeExpr([*call.args[-1].values, *(call.args[index] for index in scalars)])
        new = relax.Call(gv, [*tensors, shape], call.attrs, call.ty_args, call.span)
        return relax.VarBinding(binding.var, typed(new, call.ty))

    result = copy_module(mod)
    for gv, func in relax_functions(mod):
        if gv in changed:
            del result[gv]
            result[changed[gv].gv] = changed[gv].func
        else:
            result[gv] = map_bindings(func, with_shape)
    return result


def _without_scalars(gv: tvm.ir.GlobalVar, func: relax.Function) -> _FormerScalars | None:
    scalars = [index for index, param in enumerate(func.params) if isinstance(param.ty, tvm.ir.PrimType)]
    is_fused = func.attrs is not None and "Primitive" in func.attrs
    if not is_fused or not scalars:
        return None
    sizes = func.params[-1]
    if not isinstance(sizes.ty, relax.ShapeType) or sizes.ty.values is None:
        return None
    tensors = [param for index, param in enumerate(func.params[:-1]) if index not in scalars]
    shape = relax.Var(sizes.name, relax.ShapeType([*sizes.ty.values, *(func.params[index] for index in scalars)]))
    function = relax.Function([*tensors, shape], func.body, func.ret_ty, func.is_pure, func.attrs, func.span)
    return _FormerScalars(typed(tvm.ir.GlobalVar(gv.name_hint), function.ty), function, scalars)
