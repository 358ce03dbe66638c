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

import tvm
from tvm import relax, sym, tirx
from tvm.tirx.buffer import BufferType, is_buffer_var
from tvm_ffi import structural_equal, structural_map

from ..ir.rewriting import with_functions


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
