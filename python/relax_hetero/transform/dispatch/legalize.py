"""Legalization: ops become ``call_tir`` of kernels, and every variable keeps its device.

Variables get unique names first, so that their devices can be restored after TVM's LegalizeOps (`keep_devices`). An op
without a kernel is an error that names op, variable and operands; `is_kept` tells ops that need none.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from ...errors import BuildError
from ...op.traits import traits_of
from ...tir.core.walks import replaced
from ..ir.blocks import shape_of, tensor_type
from ..ir.kernels import OPAQUE
from ..ir.op_names import CONCAT, RESHAPE
from ..ir.reasons import reason
from ..ir.remarks import operand_text
from ..ir.rewriting import (
    copy_module,
    map_bindings,
    op_name,
    relax_functions,
    typed,
    walk_bindings,
    with_args,
    with_functions,
)
from . import formula_kernels, narrow_types, numpy_kernels, sort_kernels
from .keep_devices import keep_devices

_SORTS_AND_SCANS = frozenset(f"relax.{name}" for name in ("bucketize", "sort", "argsort", "topk", "cumsum", "cumprod"))
# Their stock kernels compute float16 in float32, and return float32.
_WIDER_RESULTS = ("relax.nn.batch_norm",)
MAX_OPERANDS = 32
"""Tensors that one concatenation takes. Its kernel nests a select for each of them, and TVM recurses into it."""
_KEPT_PREFIXES = ("relax.builtin.", "relax.memory.", "relax.vm.", "relax.inspect.", "relax.hetero.")


def legalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Lower every op of a placed module to kernels, keeping each on its device.

    Raises BuildError if an op has no kernel for its operands.
    """
    mod, variables = with_unique_names(_simplified(mod))
    _check_types(mod, variables)
    try:
        legal = _with_opaque_wide_kernels(_with_kernels(mod))
    except Exception:  # legalizations raise errors of any class, without the op's name
        _raise_for_failing_op(mod, variables)
        raise
    _check(legal, variables)
    return keep_devices(legal, variables)


def _with_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    kernels = sort_kernels.legalizations() | numpy_kernels.legalizations()
    kernels |= numpy_kernels.boolean_legalizations(kernels)
    kernels |= formula_kernels.legalizations(kernels)
    kernels |= narrow_types.legalizations(kernels)
    legalized = relax.transform.LegalizeOps(kernels | {name: _with_result_types(name) for name in _WIDER_RESULTS})
    mod = _without_convert_ssa(legalized, mod)
    if any(op_name(b.value) in _SORTS_AND_SCANS for _, func in relax_functions(mod) for b in walk_bindings(func)):
        # TVM has no legalization for sorts, but a kernel for each kind of target.
        mod = _without_convert_ssa(legalized, relax.backend.DispatchSortScan()(mod))
    return mod


@tvm.ir.instrument.pass_instrument
class _WithoutConvertSsa:
    """Skips ConvertSSA, which LegalizeOps runs where it copied a kernel for each target.

    The pass renames a copy's symbolic sizes in the buffers that a block allocates, but not where these are used.
    Equal copies are merged again (`forget_targets`).
    """

    def should_run(self, _: tvm.IRModule, info: tvm.transform.PassInfo) -> bool:
        return str(info.name) != "s_tir.ConvertSSA"


def _without_convert_ssa(work: tvm.transform.Pass, mod: tvm.IRModule) -> tvm.IRModule:
    """Run a pass without ConvertSSA, and without the caller's instruments, which a new context would restart."""
    context = tvm.transform.PassContext.current()
    lists = list(context.required_pass), list(context.disabled_pass)
    with tvm.transform.PassContext(int(context.opt_level), *lists, [_WithoutConvertSsa()], dict(context.config)):
        return work(mod)


def _with_result_types(name: str) -> sort_kernels.Legalize:
    """TVM's legalization of an op with several results, each cast to the element type of the op's result."""
    stock = tvm.ir.Op.get(name).get_attr("FLegalize")

    def legalize_op(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        result = builder.normalize(stock(builder, call))
        types = list(call.ty.fields)
        if [field.dtype for field in result.ty.fields] == [field.dtype for field in types]:
            return result
        results = builder.emit(result)
        cast = tvm.ir.Op.get("relax.astype").get_attr("FLegalize")
        fields = [builder.emit(relax.TupleGetItem(results, number)) for number in range(len(types))]
        return relax.Tuple(
            [
                field
                if field.ty.dtype == ty.dtype
                else builder.emit(cast(builder, builder.normalize(relax.op.astype(field, ty.dtype))))
                for field, ty in zip(fields, types, strict=True)
            ]
        )

    return legalize_op


def is_kept(name: str) -> bool:
    """Return whether an op stays as it is and needs no kernel."""
    traits = traits_of(name)
    return traits.needs_no_kernel or (name.startswith(_KEPT_PREFIXES) and not traits.is_elementwise)


def _simplified(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with ``a`` for ``(a, b)[0]``: FuseOps splits a tuple inside an expression and loses its fields.

    Shape operands that are variables of known values become those values, which legalizations need.
    """

    def change(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        value = binding.value
        if op_name(value) == CONCAT and isinstance(binding.var.ty, relax.TensorType):
            return _split_concat(binding)
        if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
            return relax.VarBinding(binding.var, value.tuple_value.fields[value.index], binding.span)
        name = op_name(value)
        if name is None or is_kept(name) and name != RESHAPE:
            return binding
        args = [_literal_shape(arg) for arg in value.args]
        if all(new is old for new, old in zip(args, value.args, strict=True)):
            return binding
        return relax.VarBinding(binding.var, typed(with_args(value, args), value.ty), binding.span)

    return relax.transform.CanonicalizeBindings()(
        with_functions(mod, {gv: map_bindings(func, change) for gv, func in relax_functions(mod)})
    )


def _split_concat(binding: relax.Binding) -> list[relax.Binding]:
    """A concatenation of many tensors as several of at most `MAX_OPERANDS` each."""
    parts: list[relax.Binding] = []
    value, ty = binding.value, binding.var.ty
    operands = list(value.args[0].fields) if isinstance(value.args[0], relax.Tuple) else []
    axis = int(value.attrs.axis) if value.attrs.axis is not None else 0
    if len(operands) <= MAX_OPERANDS or any(shape_of(operand) is None for operand in operands):
        return [binding]
    axis += int(ty.ndim) if axis < 0 else 0
    while len(operands) > MAX_OPERANDS:
        groups = [operands[start : start + MAX_OPERANDS] for start in range(0, len(operands), MAX_OPERANDS)]
        operands = []
        for group in groups:
            shape, *shapes = [shape_of(operand) or [] for operand in group]
            shape[axis] = sum((other[axis] for other in shapes), start=shape[axis])
            part = type(binding.var)(f"{binding.var.name}_part{len(parts)}", tensor_type(shape, str(ty.dtype), ty))
            parts.append(relax.VarBinding(part, typed(relax.op.concat(group, axis), part.ty)))
            operands.append(part)
    return [*parts, relax.VarBinding(binding.var, typed(relax.op.concat(operands, axis), ty), binding.span)]


def _with_opaque_wide_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    """Mark kernels of very many tensors as opaque: fusing would add even more."""
    wide = {
        gv: func.with_attr("op_pattern", OPAQUE)
        for gv, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and len(func.params) > MAX_OPERANDS and "op_pattern" not in func.attrs
    }
    return with_functions(mod, wide)


def _literal_shape(arg: relax.Expr) -> relax.Expr:
    is_shape = isinstance(arg, relax.Var) and isinstance(arg.ty, relax.ShapeType) and arg.ty.values is not None
    return relax.ShapeExpr(arg.ty.values) if is_shape else arg


def _check_types(mod: tvm.IRModule, variables: dict[str, dict[str, relax.Var]]) -> None:
    """Refuse arithmetic with types for which stock kernels compute wrong numbers, crash, or fail to compile."""
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            name = op_name(binding.value)
            if name is None or is_kept(name):
                continue
            dtype = narrow_types.refused_type(binding.value)
            if dtype is not None:
                var = variables.get(gv.name_hint, {}).get(binding.var.name, binding.var)
                raise BuildError(
                    f"op {name} of variable {var.name!r} in function {gv.name_hint!r} has no CPU kernel for "
                    f"elements of type {dtype}: expected a type that they compute with, such as int32 or float32"
                )


def _check(mod: tvm.IRModule, variables: dict[str, dict[str, relax.Var]]) -> None:
    """Refuse ops that would fail at run time: those that are neither kernels nor the VM's own."""
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            name = op_name(binding.value)
            if name is not None and not is_kept(name):
                raise _no_kernel(binding, gv.name_hint, variables)


def _raise_for_failing_op(mod: tvm.IRModule, variables: dict[str, dict[str, relax.Var]]) -> None:
    """Raise for the first op whose legalization fails by itself; return if each succeeds."""
    for gv, function in relax_functions(mod):
        for binding in walk_bindings(function):
            if op_name(binding.value) is None or isinstance(binding, relax.MatchCast):
                continue
            var = relax.Var(binding.var.name, binding.var.ty)  # a variable of a dataflow block cannot be returned
            block = relax.BindingBlock([relax.VarBinding(var, binding.value, binding.span)])
            body = typed(relax.SeqExpr([block], var), var.ty)
            func = relax.Function(relax.analysis.free_vars(binding.value), body, var.ty, is_pure=False)
            try:
                _with_kernels(copy_module(mod, {tvm.ir.GlobalVar("single_op"): func}))
            except Exception as error:  # of any class, see `legalize`
                raise _no_kernel(binding, gv.name_hint, variables, reason(error)) from error


def _no_kernel(
    binding: relax.Binding,
    function: str,
    variables: dict[str, dict[str, relax.Var]],
    why: str = "expected an op with a legalization and operand shapes that are known (or symbolic)",
) -> BuildError:
    var = variables.get(function, {}).get(binding.var.name, binding.var)
    operands = ", ".join(map(operand_text, binding.value.args))
    return BuildError(
        f"op {op_name(binding.value)} of variable {var.name!r} in function {function!r} has no kernel for operands "
        f"({operands}): {why}"
    )


def with_unique_names(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, dict[str, relax.Var]]]:
    """Number the parameters and bindings of every Relax function that share a name with an earlier one.

    Returns
    -------
    mod : tvm.IRModule
        Module with unique names.
    variables : dict
        Function name to new variable name to the former variable.
    """
    functions = dict(mod.functions.items())
    variables: dict[str, dict[str, relax.Var]] = {}
    for gv, func in relax_functions(mod):
        functions[gv], variables[gv.name_hint] = _rename(func)
    return copy_module(mod, functions), variables


def _rename(func: relax.Function) -> tuple[relax.Function, dict[str, relax.Var]]:
    old_vars: dict[str, relax.Var] = {}
    renamed: dict[relax.Var, relax.Var] = {}
    counts: dict[str, int] = {}
    for var in (*func.params, *(binding.var for binding in walk_bindings(func))):
        name = var.name
        while name in old_vars:
            counts[var.name] = counts.get(var.name, 0) + 1
            name = f"{var.name}_{counts[var.name]}"
        old_vars[name] = var
        if name != var.name:
            renamed[var] = type(var)(name, var.ty, var.span)
    return replaced(func, renamed), old_vars
