"""Compilation of kernels of llvm devices: TVM's pipeline, and passes between its stages.

The passes relax the alignment of parameters to numpy's, drop checks that the virtual machine has made, add a
device to temporaries of plain functions, and expand vector functions to arithmetic (`lower_vector_math`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map

from ...target.cpu_target import cpu_target_of
from ...tir.core.builder import lane_of
from ...tir.math import vector_math, vector_powers, vector_trigonometry
from ...tir.math.casts import BITS
from ...tir.math.llvm_text import llvm_function
from ...transform.ir.rewriting import relax_functions, walk_bindings
from ...transform.lower.settle_packed_results import is_foreign
from ...vm.file.export import SYMBOL_PREFIX

# LowerVectorMath: expansion of vector functions to arithmetic.
#
# TVM's code generator passes ``T.exp`` of a vector to LLVM, which calls the C library once per lane. Here such a call
# becomes a call of an imported, inlined function in LLVM IR, made from the formulas of `tir.math.vector_math`.
#
# Before::
#
#     B[i * 16 : i * 16 + 16] = T.exp(A[i * 16 : i * 16 + 16])
#
# After::
#
#     T.attr(0, "pragma_import_llvm", "define <16 x float> @relax_hetero.exp.16(<16 x float> %x0) { ... }")
#     B[i * 16 : i * 16 + 16] = T.call_pure_extern("relax_hetero.exp.16", A[i * 16 : i * 16 + 16], "float32x16")
#
# Rounding of vectors to bfloat16 (`tir.math.casts`) becomes an instruction if the CPU has one. Vectors of float16 and
# bfloat16 are computed in float32. Scalars are computed as vectors are: a remainder of a vectorized loop has the bits
# that its elements have elsewhere, and results do not depend on the system's C library. float64 uses the C library,
# vectors of it lane by lane where LLVM does not split them itself. The pass assumes vectorized loops and kernels of the
# kind llvm, before LowerIntrin.

_FUNCTION_NAMES: dict[Any, str] = {
    vector_math: "exp log tanh erf sigmoid",
    vector_powers: "exp2 exp10 log10 log1p sinh cosh asinh acosh atanh",
    vector_trigonometry: "sin cos tan asin acos atan",
}
_FUNCTIONS: dict[str, Callable[..., tirx.Expr]] = {
    f"tirx.{name}": getattr(module, name) for module, names in _FUNCTION_NAMES.items() for name in names.split()
} | {
    "prim.log2": vector_powers.log2,
    "tirx.pow": vector_powers.power,
    "square": vector_powers.square,
    "cube": vector_powers.cube,
}
_EXPANDED_TYPES = ("float32", "float16", "bfloat16")
# Functions without LLVM vector intrinsics, so TVM cannot generate code for vectors of float64.
_SCALAR_ONLY = frozenset(f"tirx.{name}" for name in "erf log1p sinh cosh asinh acosh asin acos atan".split())
_POWERS_AS_PRODUCTS = {2.0: "square", 3.0: "cube"}
_LANES_OF_SCALARS = 4  # lanes of the vector that a scalar is computed in, of which LLVM keeps one
_IMPORT_LLVM = "pragma_import_llvm"


def LowerVectorMath() -> tvm.transform.Pass:
    """Expand vector functions in the PrimFuncs of a module."""

    @tvm.transform.module_pass(opt_level=0, name="LowerVectorMath")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return tvm.IRModule({gv: lower_vector_math(func) for gv, func in mod.functions.items()}, attrs=mod.attrs)

    return run


def lower_vector_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Expand vector functions in a PrimFunc (LowerVectorMath)."""
    used: set[tuple[str, int]] = set()
    has_bfloat16_rounding = _has_bfloat16_rounding(func)

    def on_call(call: tvm.ir.Call) -> tvm.ir.Call:
        if not isinstance(call.op, tvm.ir.Op) or call.op.name not in (*_FUNCTIONS, BITS):
            return call
        element, _, lanes = str(call.ty.dtype).partition("x")
        if call.op.name == BITS:
            if not lanes or not has_bfloat16_rounding:
                return call
            used.add((BITS, int(lanes)))
            return T.call_pure_extern(str(call.ty.dtype), _symbol(BITS, int(lanes)), *call.args)
        if lanes and element == "float64" and call.op.name in _SCALAR_ONLY:
            return _lane_by_lane(call, int(lanes))
        if element not in _EXPANDED_TYPES:
            return call
        operands = list(call.args) if lanes else [tirx.Broadcast(operand, _LANES_OF_SCALARS) for operand in call.args]
        name, operands = _simplify_power(call.op.name, operands)
        count = int(lanes) if lanes else _LANES_OF_SCALARS
        used.add((name, count))
        float32s = f"float32x{count}"
        operands = [operand if element == "float32" else T.cast(operand, float32s) for operand in operands]
        result = T.call_pure_extern(float32s, _symbol(name, count), *operands)
        result = result if lanes else lane_of(result, 0)
        return result if element == "float32" else T.cast(result, str(call.ty.dtype))

    body = structural_map(func.body, (tvm.ir.Call, on_call))
    if not used:
        return func.with_body(body) if not body.same_as(func.body) else func
    for name, lanes in sorted(used, reverse=True):
        body = tirx.AttrStmt(tirx.IntImm("int32", 0), _IMPORT_LLVM, tvm.ir.StringImm(_definition(name, lanes)), body)
    return func.with_body(body)


def _lane_by_lane(call: tvm.ir.Call, lanes: int) -> tirx.Expr:
    operand = tirx.Var("operand", call.args[0].ty)
    scalar = tvm.ir.PrimType(str(call.ty.dtype).partition("x")[0])
    results = [tvm.ir.Call(call.op, [lane_of(operand, lane)], ret_ty=scalar) for lane in range(lanes)]
    return tirx.Let(operand, call.args[0], tirx.Shuffle(results, list(range(lanes))))


def _simplify_power(name: str, operands: list[tirx.Expr]) -> tuple[str, list[tirx.Expr]]:
    """Replace powers of 2 and 3 by products."""
    if name != "tirx.pow" or not isinstance(operands[1], tirx.Broadcast):
        return name, operands
    exponent = operands[1].value
    product = _POWERS_AS_PRODUCTS.get(float(exponent.value)) if isinstance(exponent, tirx.FloatImm) else None
    return (product, operands[:1]) if product else (name, operands)


def _symbol(name: str, lanes: int) -> str:
    return f"relax_hetero.{name.rpartition('.')[2]}.{lanes}"


def _has_bfloat16_rounding(func: tirx.PrimFunc) -> bool:
    """Return whether a kernel's CPU has an instruction for it; for others LLVM would call a library for each lane."""
    target = func.attrs.get("target")
    return target is not None and target.kind.name == "llvm" and "avx512bf16" in cpu_target_of(target).features


@cache
def _definition(name: str, lanes: int) -> str:
    """The LLVM IR of a vector function."""
    if name == BITS:
        return (
            f"define <{lanes} x i16> @{_symbol(BITS, lanes)}(<{lanes} x float> %x0) {{\n"
            f"  %y = fptrunc <{lanes} x float> %x0 to <{lanes} x bfloat>\n"
            f"  %z = bitcast <{lanes} x bfloat> %y to <{lanes} x i16>\n"
            f"  ret <{lanes} x i16> %z\n}}\n"
        )
    function = _FUNCTIONS[name]
    params = [tirx.Var(f"x{i}", f"float32x{lanes}") for i in range(function.__code__.co_argcount)]
    return llvm_function(_symbol(name, lanes), params, vector_math.as_expression(function, *params))


ARGUMENT_ALIGNMENT = 16  # bytes of alignment of malloc on 64-bit systems (max_align_t), and hence of numpy's arrays
TRUSTED = "relax_hetero.trusted"  # attribute of a PrimFunc whose callers have checked its arguments


def build_llvm(
    target: tvm.target.Target,  # target of the kind llvm
    group: tvm.IRModule,  # PrimFuncs of this target or without one
) -> tvm.runtime.Module:
    """Compile the PrimFuncs of a module.

    Returns a module of kind ``llvm``. Raises TVM's exceptions, which lack a common class, if code does not compile.
    """
    target = target if target.host is not None else target.with_host(target)
    pipeline, finalize, _ = tirx.get_default_tir_pipeline(target)
    functions = {gv: loosen_alignment(func) for gv, func in group.functions.items()}
    bound = tirx.transform.BindTarget(target)(tvm.IRModule(functions))
    packed = with_workspace_device(without_checks(pipeline(bound)))
    lowered = finalize()(LowerVectorMath()(packed))
    return tvm.get_global_func("target.build.llvm")(lowered, target.host)


def loosen_alignment(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Reduce the assumed alignment of a function's parameters to `ARGUMENT_ALIGNMENT` bytes.

    TVM's code assumes its own allocations' alignment of 64 bytes, for which numpy arrays would have to be copied. On
    x86 aligned moves are no faster than unaligned ones on aligned addresses. Only SSE gains from alignment, because it
    folds aligned loads into arithmetic, and it requires just 16 bytes.
    """
    params = {
        param: _loosen_param(param)
        for param in func.params
        if is_buffer_var(param) and int(param.ty.data_alignment) > ARGUMENT_ALIGNMENT
    }
    return structural_map(func, (tvm.ir.Var, lambda var: params.get(var, var))) if params else func


def _loosen_param(buffer: tvm.ir.Var) -> tvm.ir.Var:
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
    """Return whether all tensors in a module's Relax functions match their types, given checked arguments.

    The machine checks arguments; other tensors are allocated or constants. Only results of foreign packed functions may
    differ from their types.
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
    """Drop TVM's argument checks in functions marked `TRUSTED`; runs after MakePackedAPI.

    LLVM's compile time grows with the number of checked tensors, and a command buffer of a model has hundreds.
    """
    trusted = {
        gv: func for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc) and TRUSTED in func.attrs
    }
    if not trusted:
        return mod
    unchecked = tirx.transform.SkipAssert()(tvm.IRModule(trusted))
    functions = {gv: unchecked.functions.get(gv, func) for gv, func in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def with_workspace_device(mod: tvm.IRModule) -> tvm.IRModule:
    """Add the device of temporaries to functions that are not packed functions.

    TVM takes the device from the arguments of a packed function, and refuses temporaries in other functions. This runs
    between TVM's two pipelines, because StorageRewrite in the first moves temporaries to the beginning of the function.
    """
    functions = {gv: func if _is_packed(func) else _add_workspace_device(func) for gv, func in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _is_packed(func: tirx.PrimFunc) -> bool:
    return str(func.attrs.get("global_symbol", "")).startswith(SYMBOL_PREFIX)


def _add_workspace_device(func: tirx.PrimFunc) -> tirx.PrimFunc:
    body = func.body
    # The scope ends before a return, because its end frees the temporaries.
    if isinstance(body, tirx.SeqStmt) and isinstance(body.seq[-1], tirx.stmt.Return):
        return func.with_body(tirx.SeqStmt([_device_scope(tirx.SeqStmt(list(body.seq)[:-1])), body.seq[-1]]))
    return func.with_body(_device_scope(body))


def _device_scope(body: tirx.Stmt) -> tirx.Stmt:
    # All CPU devices share one workspace.
    return tirx.AttrStmt(tvm.ir.StringImm("default"), "device_id", tirx.const(0, "int32"), body)
