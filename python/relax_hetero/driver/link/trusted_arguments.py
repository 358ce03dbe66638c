"""Command buffers whose arguments are known to fit do without TVM's checks of them.

TVM checks every tensor that a packed function is given, in code that takes LLVM the longer the more tensors there are.
What a command buffer of a model is given is known: the machine has checked the arguments of
the call, and all else was allocated, or is a constant, as its type says. Only what other packed functions return may
be anything.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from ...transform.ir.rewriting import relax_functions, walk_bindings
from ...transform.lower.settle_packed_results import is_foreign

TRUSTED = "relax_hetero.trusted"
"""On a PrimFunc: its arguments have been checked."""


def types_are_true(mod: tvm.IRModule) -> bool:
    """Whether every tensor in a module's Relax functions is what its type says, if the arguments of calls are."""
    for _, func in relax_functions(mod):
        if any(not _is_checked(param.ty) for param in func.params):
            return False
        if any(is_foreign(binding.value) for binding in walk_bindings(func)):
            return False
    return True


def _is_checked(ty: tvm.ir.Type) -> bool:
    if isinstance(ty, tvm.ir.TupleType):
        return all(map(_is_checked, ty.fields))
    if isinstance(ty, relax.TensorType):
        return isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None
    return isinstance(ty, (relax.ShapeType, tvm.ir.PrimType))


def without_checks(mod: tvm.IRModule) -> tvm.IRModule:
    """Drop the checks of functions marked `TRUSTED`; assumes packed functions (MakePackedAPI)."""
    trusted = {
        gv: func for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc) and TRUSTED in func.attrs
    }
    if not trusted:
        return mod
    bare = tirx.transform.SkipAssert()(tvm.IRModule(trusted))
    functions = {gv: bare.functions.get(gv, func) for gv, func in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
