"""Checks of a module before its passes run, so that a wrong one is refused in terms of its own names.

TVM infers types while a module is built, but a module that was put together by hand, changed by other passes or read
from a file may hold anything: its passes would fail later, with messages about what they made of it. Each op is asked
once more for the type of its result, and calls of functions and kernels are compared with what they take.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax.analysis import BaseCheckResult, type_base_check

from ..artifact.messages import near_misses
from ..errors import BuildError
from ..transform.dispatch.legalize import is_kept
from ..transform.ir.module_attrs import is_lowered
from ..transform.ir.op_names import CALL_TIR_INPLACE, CALL_TIR_OPS
from ..transform.ir.operand_text import operand_text, type_text
from ..transform.ir.reasons import reason
from ..transform.ir.requirements import text_of
from ..transform.ir.rewriting import op_name, relax_functions, tensor_types, walk_bindings


def check_module(mod: tvm.IRModule) -> None:
    """Refuse a module that cannot be compiled.

    Raises
    ------
    BuildError
        Names the function, the op and the variable, what was found and what was expected.
    """
    functions = relax_functions(mod)
    if not any(func.attrs and "global_symbol" in func.attrs for func in mod.functions.values()):
        raise BuildError(_without_functions(mod))
    names = [str(gv.name_hint) for gv in mod.get_global_vars()]
    for gv, func in functions:
        for callee in relax.analysis.all_global_vars(func):
            if callee not in mod.functions:
                hint = near_misses(callee.name_hint, names)
                raise BuildError(
                    f"function {gv.name_hint!r} refers to {callee.name_hint!r}, which the module lacks{hint}"
                )
        if not is_lowered(mod):
            _Function(mod, gv.name_hint).check(func)


def _without_functions(mod: tvm.IRModule) -> str:
    found = sorted(f"{type(func).__name__} {gv.name_hint!r}" for gv, func in mod.functions.items())
    return (
        f"rh.compile: the module has no function that could be called (found {', '.join(found[:6]) or 'nothing'}); "
        "expected one with the attribute global_symbol, as func.with_attr('global_symbol', 'main') gives it"
    )


class _Function:
    """Checks one function."""

    def __init__(self, mod: tvm.IRModule, name: str) -> None:
        self._mod, self._name = mod, name
        self._builder = relax.BlockBuilder()

    def check(self, func: relax.Function) -> None:
        """Check symbolic sizes, bindings and the result; BuildError for the first that is wrong."""
        free = relax.analysis.free_symbolic_vars(func)
        if free:
            names = ", ".join(sorted({repr(str(var.name)) for var in free}))
            raise BuildError(
                f"function {self._name!r}: the symbolic size{'s' * (len(free) > 1)} {names} is given by no argument; "
                "expected each as an extent of a parameter, or defined by R.match_cast"
            )
        seen: set[relax.Var] = set()
        for binding in walk_bindings(func):
            if binding.var in seen:
                raise self._error(binding, "is bound a second time; expected one binding for each variable")
            seen.add(binding.var)
            if isinstance(binding, relax.VarBinding):
                self._check_binding(binding)
        result = func.body.body.ty
        if self._cannot_be(func.ret_ty, result):
            raise BuildError(
                f"function {self._name!r} is declared to return {type_text(func.ret_ty)}, and its body gives "
                f"{type_text(result)}"
            )

    def _check_binding(self, binding: relax.VarBinding) -> None:
        value, ty = binding.value, None
        if isinstance(value, relax.If):
            self._check_if(binding, value)
        elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            ty = self._check_call(binding, value)
        elif op_name(value) in CALL_TIR_OPS:
            self._check_kernel(binding, value)
            ty = value.ty_args[0]
        elif op_name(value) is not None:
            ty = self._inferred(binding, value)
        name = op_name(value)
        if isinstance(ty, relax.TensorType) and ty.dtype is None and name is not None and not is_kept(name):
            raise self._error(binding, "has no known element type; expected R.match_cast to one before")
        if ty is not None and self._cannot_be(binding.var.ty, ty):
            raise self._error(binding, f"is declared as {type_text(binding.var.ty)}, and its value is {type_text(ty)}")

    def _inferred(self, binding: relax.VarBinding, call: relax.Call) -> tvm.ir.Type | None:
        infer = call.op.get_attr("FInferType")
        if infer is None:
            return None
        try:
            return infer(call, self._builder)
        except Exception:  # each op raises its own; two devices that meet are placement's to explain
            args = [_without_devices(arg) for arg in call.args]
        try:
            return infer(relax.Call(call.op, args, call.attrs, call.ty_args, call.span), self._builder)
        except Exception as error:
            raise self._error(binding, f"cannot be computed: {reason(error)}") from error

    def _check_if(self, binding: relax.VarBinding, value: relax.If) -> None:
        ty = value.cond.ty
        is_scalar = isinstance(ty, relax.TensorType) and ty.ndim <= 0 and ty.dtype in (None, "bool")
        if not is_scalar and not (isinstance(ty, tvm.ir.PrimType) and str(ty.dtype) == "bool"):
            raise self._error(binding, f"branches on {operand_text(value.cond)}; expected bool[]")
        for name, branch in (("then", value.true_branch), ("else", value.false_branch)):
            result = branch.body.ty
            if self._cannot_be(binding.var.ty, result):
                raise self._error(
                    binding,
                    f"is declared as {type_text(binding.var.ty)}, and its {name} branch gives {type_text(result)}",
                )

    def _check_call(self, binding: relax.VarBinding, call: relax.Call) -> tvm.ir.Type | None:
        callee, name = self._mod[call.op], call.op.name_hint
        if isinstance(callee, tirx.PrimFunc) and type(call.op.ty) is tvm.ir.Type:
            what = f"calls the kernel {name!r}, whose variable has no type"
            raise self._error(binding, f"{what}; expected R.call_tir({name}, (...), out_ty=...)")
        if not isinstance(callee, relax.Function):
            return None
        if len(call.args) != len(callee.params):
            raise self._error(
                binding, f"gives function {name!r} {len(call.args)} arguments, and it takes {len(callee.params)}"
            )
        for arg, param in zip(call.args, callee.params, strict=True):
            if self._cannot_be(param.ty, arg.ty):
                raise self._error(
                    binding,
                    f"gives {operand_text(arg)} for parameter {param.name!r} of function {name!r}, which takes "
                    f"{type_text(param.ty)}",
                )
        return callee.ret_ty

    def _check_kernel(self, binding: relax.VarBinding, call: relax.Call) -> None:
        """Compare the operands and results of a call with the buffers of its kernel."""
        kernel = self._mod[call.args[0]] if isinstance(call.args[0], tvm.ir.GlobalVar) else None
        name = operand_text(call.args[0])
        if isinstance(kernel, relax.Function):
            raise self._error(binding, f"calls {name} by call_tir, which is a Relax function; expected a PrimFunc")
        if not isinstance(kernel, tirx.PrimFunc) or not isinstance(call.args[1], relax.Tuple):
            return
        fields = list(call.args[1].fields)
        results = list(tensor_types(call.ty_args[0]))
        if op_name(call) == CALL_TIR_INPLACE:
            results = [ty for ty, at in zip(results, call.attrs.inplace_indices, strict=False) if int(at) < 0]
        given = [(operand_text(arg), arg.ty) for arg in fields]
        given += [(f"result {number}: {type_text(ty)}", ty) for number, ty in enumerate(results)]
        scalars = len(call.args[2].values) if len(call.args) > 2 and isinstance(call.args[2], relax.ShapeExpr) else 0
        if len(given) + scalars != len(kernel.params):
            raise self._error(
                binding,
                f"gives kernel {name} {len(fields)} operands, {len(results)} results and {scalars} sizes, and it takes "
                f"{len(kernel.params)} parameters",
            )
        for (text, ty), buffer in zip(given, kernel.params, strict=False):
            if isinstance(buffer, tirx.Buffer) and isinstance(ty, relax.TensorType) and not _fits(ty, buffer):
                extents = ", ".join(map(text_of, buffer.shape))
                raise self._error(
                    binding, f"gives kernel {name} {text} for its buffer {buffer.name!r}, {buffer.dtype}[{extents}]"
                )

    @staticmethod
    def _cannot_be(declared: tvm.ir.Type, value: tvm.ir.Type) -> bool:
        """Return whether the types exclude each other: no value of type `value` is of type `declared`."""
        if tvm.ir.Type in (type(declared), type(value)):  # not inferred yet
            return False
        return bool(type_base_check(declared, value) == BaseCheckResult.FAIL_L0)

    def _error(self, binding: relax.Binding, what: str) -> BuildError:
        value = binding.value
        op = op_name(value) or ("call" if isinstance(value, relax.Call) else type(value).__name__)
        operands = ""
        if isinstance(value, relax.Call) and op not in CALL_TIR_OPS and not isinstance(value.op, tvm.ir.GlobalVar):
            operands = f" of {', '.join(map(operand_text, value.args))}" if value.args else ""
        return BuildError(f"function {self._name!r}: {op} {binding.var.name!r}{operands} {what}")


def _fits(ty: relax.TensorType, buffer: tirx.Buffer) -> bool:
    """Return whether a tensor has the element type, rank and known extents of a buffer."""
    if ty.dtype is not None and str(ty.dtype) != str(buffer.dtype):
        return False
    if ty.ndim >= 0 and ty.ndim != len(buffer.shape):
        return False
    if not isinstance(ty.shape, relax.ShapeExpr):
        return True
    pairs = zip(ty.shape.values, buffer.shape, strict=True)
    known = [(int(a), int(b)) for a, b in pairs if isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm)]
    return all(a == b for a, b in known)


def _without_devices(arg: relax.Expr) -> relax.Expr:
    """An operand as a variable whose type names no device."""
    if isinstance(arg, relax.Tuple):
        return relax.Tuple([_without_devices(field) for field in arg.fields])
    if isinstance(arg, (relax.Var, tvm.ir.GenericConst)) and isinstance(arg.ty, relax.TensorType):
        ndim = arg.ty.ndim if arg.ty.shape is None else -1
        ty = relax.TensorType(arg.ty.shape, arg.ty.dtype, None, ndim)
        return relax.Var(arg.name if isinstance(arg, relax.Var) else "constant", ty)
    return arg
