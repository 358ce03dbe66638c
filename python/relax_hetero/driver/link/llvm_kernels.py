"""Kernels of llvm devices become LLVM modules: TVM's steps, and the changes that kernels of a model need between.

Parameters may begin at any address that numpy gives, checks of arguments that are known to fit are dropped, temporaries
of plain functions get a device, and functions of vectors become arithmetic (`lower_vector_math`).
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

# LowerVectorMath: functions of vectors become arithmetic.
#
# TVM's code generator hands ``T.exp`` of a vector to LLVM, which calls the C library once per lane. Here such a call
# becomes one of a function in LLVM's language, made of the formulas of `tir.math.vector_math`, that is imported and
# inlined.
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
# What rounds vectors to bfloat16 (`tir.math.casts`) becomes an instruction where the machine has one.
# Vectors of float16 and bfloat16 are computed in float32; float64 and scalars stay the C library's, vectors of float64
# lane by lane where LLVM does not do that itself. Assumes vectorized loops, kernels of the kind llvm, and that
# LowerIntrin is still to come.

_MODULES: dict[Any, str] = {
    vector_math: "exp log tanh erf sigmoid",
    vector_powers: "exp2 exp10 log10 log1p sinh cosh asinh acosh atanh",
    vector_trigonometry: "sin cos tan asin acos atan",
}
_FUNCTIONS: dict[str, Callable[..., tirx.Expr]] = {
    f"tirx.{name}": getattr(module, name) for module, names in _MODULES.items() for name in names.split()
} | {
    "prim.log2": vector_powers.log2,
    "tirx.pow": vector_powers.power,
    "square": vector_powers.square,
    "cube": vector_powers.cube,
}
_COMPUTED = ("float32", "float16", "bfloat16")
# Those that LLVM has no vectors of, and so TVM no code for vectors of float64.
_SCALAR = frozenset(f"tirx.{name}" for name in "erf log1p sinh cosh asinh acosh asin acos atan".split())
_KNOWN_POWERS = {2.0: "square", 3.0: "cube"}
_IMPORT = "pragma_import_llvm"


def LowerVectorMath() -> tvm.transform.Pass:
    """Replace functions of vectors in the PrimFuncs of a module."""

    @tvm.transform.module_pass(opt_level=0, name="LowerVectorMath")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return tvm.IRModule({gv: lower_vector_math(func) for gv, func in mod.functions.items()}, attrs=mod.attrs)

    return run


def lower_vector_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """See the module's docstring."""
    used: set[tuple[str, int]] = set()

    rounds = _rounds_to_bfloat16(func)

    def on_call(call: tvm.ir.Call) -> tvm.ir.Call:
        if not isinstance(call.op, tvm.ir.Op) or call.op.name not in (*_FUNCTIONS, BITS):
            return call
        element, _, lanes = str(call.ty.dtype).partition("x")
        if call.op.name == BITS:
            if not lanes or not rounds:
                return call
            used.add((BITS, int(lanes)))
            return T.call_pure_extern(str(call.ty.dtype), _symbol(BITS, int(lanes)), *call.args)
        if lanes and element == "float64" and call.op.name in _SCALAR:
            return _lane_by_lane(call, int(lanes))
        if not lanes or element not in _COMPUTED:
            return call
        name, operands = _of_known_power(call.op.name, list(call.args))
        used.add((name, int(lanes)))
        single = f"float32x{lanes}"
        operands = [operand if element == "float32" else T.cast(operand, single) for operand in operands]
        result = T.call_pure_extern(single, _symbol(name, int(lanes)), *operands)
        return result if element == "float32" else T.cast(result, str(call.ty.dtype))

    body = structural_map(func.body, (tvm.ir.Call, on_call))
    if not used:
        return func.with_body(body) if not body.same_as(func.body) else func
    for name, lanes in sorted(used, reverse=True):
        body = tirx.AttrStmt(tirx.IntImm("int32", 0), _IMPORT, tvm.ir.StringImm(_definition(name, lanes)), body)
    return func.with_body(body)


def _lane_by_lane(call: tvm.ir.Call, lanes: int) -> tirx.Expr:
    operand = tirx.Var("operand", call.args[0].ty)
    scalar = tvm.ir.PrimType(str(call.ty.dtype).partition("x")[0])
    parts = [tvm.ir.Call(call.op, [lane_of(operand, lane)], ret_ty=scalar) for lane in range(lanes)]
    return tirx.Let(operand, call.args[0], tirx.Shuffle(parts, list(range(lanes))))


def _of_known_power(name: str, operands: list[tirx.Expr]) -> tuple[str, list[tirx.Expr]]:
    """Squares and cubes are products."""
    if name != "tirx.pow" or not isinstance(operands[1], tirx.Broadcast):
        return name, operands
    exponent = operands[1].value
    known = _KNOWN_POWERS.get(float(exponent.value)) if isinstance(exponent, tirx.FloatImm) else None
    return (known, operands[:1]) if known else (name, operands)


def _symbol(name: str, lanes: int) -> str:
    return f"relax_hetero.{name.rpartition('.')[2]}.{lanes}"


def _rounds_to_bfloat16(func: tirx.PrimFunc) -> bool:
    """Return whether a kernel's machine has an instruction for it; for others LLVM calls a library, lane by lane."""
    target = func.attrs.get("target")
    return target is not None and target.kind.name == "llvm" and "avx512bf16" in cpu_target_of(target).features


@cache
def _definition(name: str, lanes: int) -> str:
    if name == BITS:
        return (
            f"define <{lanes} x i16> @{_symbol(BITS, lanes)}(<{lanes} x float> %x0) {{\n"
            f"  %y = fptrunc <{lanes} x float> %x0 to <{lanes} x bfloat>\n"
            f"  %z = bitcast <{lanes} x bfloat> %y to <{lanes} x i16>\n"
            f"  ret <{lanes} x i16> %z\n}}\n"
        )
    function = _FUNCTIONS[name]
    operands = function.__code__.co_argcount
    params = [tirx.Var(f"x{i}", f"float32x{lanes}") for i in range(operands)]
    return llvm_function(_symbol(name, lanes), params, vector_math.as_expression(function, *params))


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
