"""Kernels of llvm devices become LLVM modules: TVM's steps, and the changes that kernels of a model need between.

Parameters may begin at any address that numpy gives, checks of arguments that are known to fit are dropped, temporaries
of plain functions get a device, and functions of vectors become arithmetic (`lower_vector_math`).
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map

from ...transform.ir.rewriting import relax_functions, walk_bindings
from ...transform.lower.settle_packed_results import is_foreign
from ...vm.file.export import SYMBOL_PREFIX
from .lower_vector_math import LowerVectorMath

# Bytes at whose multiples malloc of 64-bit systems, and so numpy, puts arrays (max_align_t).
ARGUMENT_ALIGNMENT = 16

TRUSTED = "relax_hetero.trusted"
"""On a PrimFunc: its arguments have been checked."""


def build_llvm(target: tvm.target.Target, group: tvm.IRModule) -> tvm.runtime.Module:
    """Compile the PrimFuncs of a module.

    Parameters
    ----------
    target : tvm.target.Target
        Target of the kind llvm.
    group : tvm.IRModule
        PrimFuncs only, of this target or none.

    Returns
    -------
    tvm.runtime.Module
        Module of kind ``llvm``. Errors of TVM for code that does not compile have no common class.
    """
    full = target if target.host is not None else target.with_host(target)
    pipeline, finalize, _ = tirx.get_default_tir_pipeline(full)
    functions = {gv: loosen_alignment(func) for gv, func in group.functions.items()}
    bound = tirx.transform.BindTarget(full)(tvm.IRModule(functions))
    packed = with_workspace_device(without_checks(pipeline(bound)))
    lowered = finalize()(LowerVectorMath()(packed))
    return tvm.get_global_func("target.build.llvm")(lowered, full.host)


def loosen_alignment(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with parameters that may begin at any multiple of `ARGUMENT_ALIGNMENT` bytes.

    TVM's code relies on tensors that begin at multiples of 64 bytes, as its own allocations do; numpy's would have to
    be copied. The x86 instructions that fault on other addresses are no faster at these than the others. Only SSE,
    which folds loads of aligned memory into arithmetic, gains, and it asks for 16 bytes.
    """
    loosened = {
        param: _loosened(param)
        for param in func.params
        if is_buffer_var(param) and int(param.ty.data_alignment) > ARGUMENT_ALIGNMENT
    }
    return structural_map(func, (tvm.ir.Var, lambda var: loosened.get(var, var))) if loosened else func


def _loosened(buffer: tvm.ir.Var) -> tvm.ir.Var:
    ty = buffer.ty
    return tirx.decl_buffer(
        ty.shape,
        ty.dtype,
        buffer.name,
        strides=ty.strides,
        elem_offset=ty.elem_offset,
        scope=ty.storage_scope,
        data_alignment=ARGUMENT_ALIGNMENT,
        offset_factor=ty.offset_factor,
        layout=ty.layout,
        span=buffer.span,
    )


def types_are_true(mod: tvm.IRModule) -> bool:
    """Return whether every tensor in a module's Relax functions is what its type says, if the arguments of calls are.

    The machine has checked the arguments of a call; all else was allocated, or is a constant. Only the results of other
    packed functions may be anything.
    """
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
    """Drop TVM's checks of the arguments of functions marked `TRUSTED`; assumes packed functions (MakePackedAPI).

    TVM checks every tensor that a packed function is given, in code that takes LLVM the longer the more tensors there
    are: a command buffer of a model has hundreds.
    """
    trusted = {
        gv: func for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc) and TRUSTED in func.attrs
    }
    if not trusted:
        return mod
    bare = tirx.transform.SkipAssert()(tvm.IRModule(trusted))
    functions = {gv: bare.functions.get(gv, func) for gv, func in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def with_workspace_device(mod: tvm.IRModule) -> tvm.IRModule:
    """The functions of a CPU, of which those that are no packed functions name the device of their temporaries.

    TVM takes the device from the arguments of a packed function, and refuses temporaries in any other. It has to be
    said between TVM's two pipelines: an earlier pass, StorageRewrite, moves temporaries to the top of the function.
    """
    functions = {gv: func if _is_packed(func) else _with_device(func) for gv, func in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _is_packed(func: tirx.PrimFunc) -> bool:
    return str(func.attrs.get("global_symbol", "")).startswith(SYMBOL_PREFIX)


def _with_device(func: tirx.PrimFunc) -> tirx.PrimFunc:
    body = func.body
    # Temporaries are given back where the scope ends, which must be before a return.
    if isinstance(body, tirx.SeqStmt) and isinstance(body.seq[-1], tirx.stmt.Return):
        return func.with_body(tirx.SeqStmt([_scope(tirx.SeqStmt(list(body.seq)[:-1])), body.seq[-1]]))
    return func.with_body(_scope(body))


def _scope(body: tirx.Stmt) -> tirx.Stmt:
    # CPUs have one workspace, whatever their numbers.
    return tirx.AttrStmt(tvm.ir.StringImm("default"), "device_id", tirx.const(0, "int32"), body)
