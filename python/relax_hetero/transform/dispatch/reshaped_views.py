"""Reshapes move no data: kernels that only reshape become views.

Before, where `reshape` copies the elements of its operand in order::

    lv = R.call_tir(cls.reshape, (x,), out_ty=R.Tensor((2, 64, 12, 64), "float16", "cuda:0"))

After::

    lv: R.Tensor((2, 64, 12, 64), "float16", "cuda:0") = R.reshape(x, (2, 64, 12, 64))

TVM's RewriteDataflowReshape does the same, but does not recognize scheduled kernels, so views come before. Results of a
dataflow block stay copies, as in that pass, unless they are the only use of a kernel's result.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import mul

import tvm
from tvm import relax, tirx

from ...op.traits import traits_of
from ..ir.blocks import Block, rewrite_function, same_extent
from ..ir.kernels import OPS, called_prim_func
from ..ir.op_names import CALL_TIR
from ..ir.rewriting import (
    is_on_gpu,
    map_bindings,
    op_name,
    relax_functions,
    typed,
    with_functions,
    without_unused_kernels,
)


def with_merged_reshapes(mod: tvm.IRModule) -> tvm.IRModule:
    """Merge chains of reshapes on GPUs before legalization, which would fuse them into one kernel."""
    return with_functions(mod, {gv: map_bindings(func, partial(_merged, {})) for gv, func in relax_functions(mod)})


def _merged(sources: dict[relax.Var, relax.Expr], binding: relax.Binding) -> relax.Binding:
    value, ty = binding.value, binding.var.ty
    if not traits_of(op_name(value)).keeps_order or not isinstance(binding, relax.VarBinding) or not is_on_gpu(ty):
        return binding
    source = sources.get(value.args[0], value.args[0])
    if isinstance(source, relax.DataflowVar) and not isinstance(value.args[0], relax.DataflowVar):
        source = value.args[0]  # its source is local to another block
    sources[binding.var] = source
    if source.same_as(value.args[0]) or not isinstance(ty.shape, relax.ShapeExpr):
        return binding
    return relax.VarBinding(binding.var, typed(relax.op.reshape(source, ty.shape), ty), binding.span)


def with_views(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace calls of kernels that only reshape by views, and remove the kernels that are unused then."""
    viewer = _ViewRewriter(mod)
    rewritten = {gv: rewrite_function(func, viewer.rewrite) for gv, func in relax_functions(mod)}
    return without_unused_kernels(with_functions(mod, rewritten), viewer.replaced) if viewer.replaced else mod


class _ViewRewriter:
    """Replaces calls of kernels that only reshape."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.replaced: set[tvm.ir.GlobalVar] = set()  # the kernels of replaced calls
        self._mod = mod
        self._is_reshape: dict[tvm.ir.GlobalVar, bool] = {}

    def rewrite(self, block: Block) -> list[relax.Binding] | None:
        """The new bindings of a block; None if none changes."""
        bindings = [self._change(block, binding) for binding in block.bindings]
        is_same = all(new.same_as(old) for new, old in zip(bindings, block.bindings, strict=True))
        return None if is_same else bindings

    def _change(self, block: Block, binding: relax.Binding) -> relax.Binding:
        gv, call = called_prim_func(self._mod, binding.value), binding.value
        if gv is None or op_name(call) != CALL_TIR or not isinstance(binding, relax.VarBinding):
            return binding
        operands = list(call.args[1].fields) if isinstance(call.args[1], relax.Tuple) else []
        if gv not in self._is_reshape:
            self._is_reshape[gv] = _only_reshapes(self._mod.functions[gv])
        # Symbols may follow the tensor.
        if not self._is_reshape[gv] or len(call.args) != 2 or not all(map(tvm.ir.is_prim_expr, operands[1:])):
            return binding
        if not isinstance(call.ty, relax.TensorType) or not operands:
            return binding
        if not (_is_reshape_op(self._mod.functions[gv]) or _same_size(operands[0].ty, call.ty)):
            return binding
        if not (isinstance(binding.var, relax.DataflowVar) or self._is_only_use(block, operands[0])):
            return binding
        self.replaced.add(gv)
        view = relax.op.reshape(operands[0], call.ty.shape)
        return relax.VarBinding(binding.var, typed(view, binding.var.ty), binding.span)

    def _is_only_use(self, block: Block, operand: relax.Expr) -> bool:
        """Return whether a tensor is a kernel's result in this block without another reader, so it may be aliased."""
        if not isinstance(operand, relax.DataflowVar) or block.sole_user(operand) is None:
            return False
        return called_prim_func(self._mod, block.definition(operand)) is not None


def _same_size(one: tvm.ir.Type, other: relax.TensorType) -> bool:
    """Return whether two tensors provably have the same number of elements, unlike a prefix and its tensor."""
    shapes = [ty.shape.values for ty in (one, other) if isinstance(getattr(ty, "shape", None), relax.ShapeExpr)]
    return len(shapes) == 2 and same_extent(*(reduce(mul, shape, tirx.const(1, "int64")) for shape in shapes))


def _only_reshapes(func: tirx.PrimFunc) -> bool:
    target = func.attrs.get("target")
    if target is None or "tirx.is_scheduled" in func.attrs:
        return False
    return _is_reshape_op(func) or (len(func.params) == 2 and relax.analysis.has_reshape_pattern(func))


def _is_reshape_op(func: tirx.PrimFunc) -> bool:
    """Return whether a kernel is one op that keeps all elements in order, whose sizes other passes have checked.

    Products of quotients, as in the shapes of strided convolutions, are beyond what can be proven.
    """
    ops = [str(name) for name in func.attrs.get(OPS, [])]
    return len(ops) == 1 and traits_of(f"relax.{ops[0]}").keeps_order
