"""LowerVectorMath: functions of vectors become arithmetic.

TVM's code generator hands ``T.exp`` of a vector to LLVM, which calls the C library once per lane. Here such a call
becomes one of a function in LLVM's language, made of the formulas of `tir.math.vector_math`, that is imported and
inlined.

Before::

    B[i * 16 : i * 16 + 16] = T.exp(A[i * 16 : i * 16 + 16])

After::

    T.attr(0, "pragma_import_llvm", "define <16 x float> @relax_hetero.exp.16(<16 x float> %x0) { ... }")
    B[i * 16 : i * 16 + 16] = T.call_pure_extern("relax_hetero.exp.16", A[i * 16 : i * 16 + 16], "float32x16")

What rounds vectors to bfloat16 (`tir.math.casts`) becomes an instruction where the machine has one.
Vectors of float16 and bfloat16 are computed in float32; float64 and scalars stay the C library's, vectors of float64
lane by lane where LLVM does not do that itself. Assumes vectorized loops, kernels of the kind llvm, and that
LowerIntrin is still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_map

from ...target.cpu_target import cpu_target_of
from ...tir.core.builder import lane_of
from ...tir.math import vector_math, vector_powers, vector_trigonometry
from ...tir.math.casts import BITS
from ...tir.math.llvm_text import llvm_function

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
